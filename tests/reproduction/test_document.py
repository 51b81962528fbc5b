"""docs/reproduction.md, its appendices and the README say what the results say, and the verdicts follow from them."""

from __future__ import annotations

import importlib.util
import io
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from document_tables import study_table
from matplotlib.image import imread, imsave

from builders import labelled
from engram.config.paper import PAPER_RESULTS
from engram.config.presets import STEADY, preset
from engram.report.pairs import pairs, why_not_paired
from engram.reproduction import ladder, verdicts
from engram.reproduction.claims import claims, rung_claims_table
from engram.reproduction.folder import read_reproduction
from engram.reproduction.plan import plan
from engram.reproduction.rungs import OPPONENTS, RUNGS, draw_ladder, ladder_table, rung_pairs, verdicts_table
from engram.runs import metrics
from engram.runs.format import write_results
from engram.runs.metrics import Estimate
from engram.runs.result import Divergence, Result
from engram.runs.run import Run, read_run

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"


def writer():  # type: ignore[no-untyped-def]
    spec = importlib.util.spec_from_file_location("write_results", ROOT / "tools" / "write_results.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_document_is_written_from_the_results() -> None:
    for path, text in writer().documents().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python tools/write_results.py"


def test_a_figure_in_the_dark_is_light_on_dark_in_the_same_hues() -> None:
    """White, black, blue and orange."""
    colours = np.array([[[1, 1, 1], [0, 0, 0], [0, 0.45, 0.7], [0.84, 0.37, 0]]])
    image = io.BytesIO()
    imsave(image, colours, format="png")
    ((white, black, blue, orange),) = imread(io.BytesIO(writer().in_the_dark(image.getvalue())))[..., :3]
    assert white.max() < 0.1
    assert black.min() > 0.99
    assert blue[0] < blue[1] < blue[2]
    assert orange[0] > orange[1] > orange[2]
    assert min(blue.mean(), orange.mean()) > 0.5


@pytest.mark.parametrize(
    ("part", "label", "documents"),
    [
        ("table", "si", {"table-one", "steady"}),
        ("rung-2", "dhp+si", {"reproduction", "README"}),
        ("grid-1", "dhp+si: strength 1", {"settings"}),
    ],
)
def test_a_changed_result_changes_its_documents(part: str, label: str, documents: set[str], tmp_path: Path) -> None:
    shutil.copytree(RESULTS, tmp_path / "results")
    path = tmp_path / "results" / "split-mnist" / part
    run = read_run(path)
    run.results[label].accuracy[:, -1, :] -= 0.1
    write_results(path, run.results)
    made = writer().documents(results=tmp_path / "results").items()
    assert {path.stem for path, text in made if path.read_text(encoding="utf-8") != text} == documents


def test_every_gap_of_a_document_is_known() -> None:
    with pytest.raises(KeyError, match="surprise"):
        writer().fill("before <!-- surprise -->7<!-- end --> after", {})
    filled = writer().fill(
        "a <!-- n -->7<!-- end --> b <!-- table: t --><!-- end -->", {"n": "8", "table: t": "| x |\n"}
    )
    assert filled == "a <!-- n -->8<!-- end --> b <!-- table: t -->\n| x |\n<!-- end -->"


def test_the_table_holds_what_the_results_hold() -> None:
    text = (ROOT / "docs" / "reproduction" / "table-one.md").read_text(encoding="utf-8")
    result = read_reproduction(RESULTS).runs["permuted-mnist", "table"].results["dhp+mas"]
    final = 100 * result.accuracy[:, -1].mean(axis=-1)
    assert len(final) == 10
    sem = final.std(ddof=1) / np.sqrt(10)
    assert f"| dhp+mas | {final.mean():.2f} ± {sem:.2f} / {PAPER_RESULTS['permuted-mnist']['dhp+mas'][0]:.2f} |" in text


def test_published_results_are_of_the_settings_that_would_be_run_today() -> None:
    for (benchmark, part), run in read_reproduction(RESULTS).runs.items():
        for method, result in run.results.items():
            if part == "table":
                assert result.config == preset(benchmark, method, trials=result.config.trials, head_init="linear")
            if part == "variant":
                assert result.config == preset(benchmark, method).replace(**STEADY)
        if part in ("map", "sensitivity", "study", "relu", "divergence", "leak"):
            assert run.configs == plan([benchmark], [part])[0].configs


def test_published_rounds_and_rungs_follow_from_the_rounds_before_them() -> None:
    runs = read_reproduction(RESULTS).runs
    steps = list(ladder.STEPS)
    for (benchmark, part), run in runs.items():
        if part in steps:
            before = {key: each for key, each in runs.items() if key[1] in steps[: steps.index(part)]}
            assert ladder.STEPS[part].configs(benchmark, before) == run.configs, f"{part} of {benchmark}"


@pytest.mark.parametrize("opponent", OPPONENTS)
@pytest.mark.parametrize("rung", RUNGS)
def test_differences_on_a_rung_are_of_the_same_tasks_in_the_same_order(rung: int, opponent: str) -> None:
    """Whichever of several runs, on whichever device, a result is from."""
    runs = read_reproduction(RESULTS).runs
    for benchmark in PAPER_RESULTS:
        for pair in rung_pairs(runs, benchmark, rung, opponent):
            assert why_not_paired(pair.result, pair.baseline) is None, pair.label


WITH_SETTINGS = ("README.md", "docs/form.md", "docs/reproduction/map.md")  # whose prose names settings in numbers
PAGES = [name for name in writer().DOCUMENTS if name not in WITH_SETTINGS]


@pytest.mark.parametrize("name", PAGES)
def test_no_number_of_ours_stands_outside_the_gaps(name: str) -> None:
    prose = writer().GAP.sub("", (ROOT / name).read_text(encoding="utf-8"))
    assert "<!--" not in prose
    prose = re.sub(r"[Rr]ungs? \d( and \d)?", "", prose)  # names, not numbers
    prose = re.sub(r"η = 1\b", "", prose)  # a setting
    # printed by benchmarks/label_leak.py, trace_size.py, mas_of_features.py, bounded_eta.py
    for head in ("epoch", "benchmark", "strength", "what is changed"):
        prose = re.sub(rf"(?s)\| {head} \| .*?\n\n", "", prose)
    statistics, of_the_paper = {"95", "0.05", "0.003"}, {"0.1", "100", "400", "4.7", "7.80"}  # and of its author's post
    assert set(re.findall(r"(?<![\w.])\d+(?:\.\d+)?", prose)) <= statistics | of_the_paper


@pytest.mark.parametrize("name", PAGES)
def test_no_line_of_prose_starts_with_a_gap(name: str) -> None:
    """A comment at the start of a line ends the paragraph before it, in Markdown."""
    for line in (ROOT / name).read_text(encoding="utf-8").splitlines():
        assert not re.match("<!-- (?!end|tables?: |missing)", line), line


def estimate(low: float, high: float, num_trials: int = 10) -> Estimate:
    return Estimate((low + high) / 2, (high - low) / 4.5, low, high, num_trials)


@pytest.mark.parametrize(
    ("low", "high", "claimed", "verdict"),
    [
        (0.1, 0.3, +1, "reproduced"),
        (-0.3, -0.1, +1, "contradicted"),
        (-0.1, 0.3, +1, "not reproduced"),
        (-0.3, -0.1, -1, "reproduced"),
        (0.1, 0.3, -1, "contradicted"),
    ],
)
def test_a_verdict_is_by_sign_and_interval(low: float, high: float, claimed: float, verdict: str) -> None:
    assert verdicts.judge(estimate(low, high), claimed) == verdict
    assert verdicts.judge(estimate(low, high, num_trials=2), claimed) == "not tested"


def test_chance_is_students() -> None:
    from scipy.stats import ttest_rel

    a, b = np.array([1.0, 2, 4, 3, 5]), np.array([0.5, 2.5, 3, 1, 4])
    assert verdicts.chance(metrics.paired_difference(a, b)) == pytest.approx(ttest_rel(a, b).pvalue)


def test_points_are_signed_and_say_nothing_of_what_is_not_known() -> None:
    assert verdicts.points(estimate(0.001, 0.003)) == "+0.20 [+0.10, +0.30]"
    assert verdicts.points(metrics.estimate([])) == "–"


def result(method: str, final: list[float], diverged: bool = False, **changes: object) -> Result:
    config = preset("split-mnist", method, num_tasks=2, trials=len(final), **changes)
    accuracy = np.zeros((len(final), 2, 2)) + np.array(final)[:, None, None]
    lost = [Divergence(k, 1, 5) for k in range(len(final))] if diverged else []
    if diverged:
        accuracy[:, 1] = np.nan
    return Result(config, tuple(range(len(final))), accuracy, np.zeros((len(final), 2)), [], lost, [])


def run_of(part: str, results: Mapping[str, Result]) -> Run:
    configs = {label: result.config for label, result in results.items()}
    return Run(Path(part), configs, dict(results), {"part": part, "finished": "now", "data": []})


def run(part: str, *results: Result) -> Run:
    return run_of(part, labelled(results))


def test_the_steady_trace_is_compared_with_the_tables_baselines() -> None:
    table = run("table", result("si", [0.5, 0.6, 0.7]), result("dhp+si", [0.1, 0.1, 0.1]))
    variant = run("variant", result("dhp+si", [0.6, 0.7, 0.8]))
    (pair,) = verdicts.steady_pairs({("split-mnist", "table"): table, ("split-mnist", "variant"): variant})
    assert pair.accuracy.mean == pytest.approx(0.1)
    assert verdicts.steady_pairs({("split-mnist", "variant"): variant}) == []


def rung_1(ours: list[float], theirs: list[float], diverged: bool = False) -> dict[tuple[str, str], Run]:
    """Rung 1 on Split MNIST, where each method with DHP ends with the first accuracies, and others with the second."""
    heads = {"dhp": ours, "linear": theirs, "matched": theirs}
    results = [
        result(head + ending, final, diverged and head == "dhp")
        for head, final in heads.items()
        for ending in ladder.ENDINGS
    ]
    return {("split-mnist", "rung-1"): run("rung-1", *results)}


def claims_on_rung_1(runs: dict[tuple[str, str], Run]) -> dict[str, str]:
    made = rung_claims_table(runs)
    assert made.columns == ("the paper says", "1: as published")
    return {claim.split(":")[0].split()[0].strip("“"): verdict for claim, verdict in made.rows}


def test_claims_about_what_dhp_adds_follow_from_their_comparisons() -> None:
    better, same, worse = [0.6, 0.61, 0.62], [0.49, 0.512, 0.521], [0.4, 0.41, 0.42]
    above = claims_on_rung_1(rung_1(better, same))
    assert above["The"] == above["It"] == "reproduced: better in 4 of 4, worse in 0"
    assert above["Split"].startswith("reproduced: +10.23 [")
    assert above["Plasticity"] == "not tested"
    assert above["Permuted"] == above["Imbalanced"] == above["Vision"] == "not run"
    assert claims_on_rung_1(rung_1(worse, same))["The"] == "contradicted: better in 0 of 4, worse in 4 (4 firm)"
    assert claims_on_rung_1(rung_1([0.5, 0.5, 0.5], same))["The"] == "not reproduced: better in 0 of 4, worse in 0"


def test_one_case_below_zero_is_enough_against_all_cases() -> None:
    better, same, worse = [0.6, 0.61, 0.62], [0.49, 0.512, 0.521], [0.4, 0.41, 0.42]
    runs = rung_1(better, same)
    runs["split-mnist", "rung-1"].results["dhp+mas"] = result("dhp+mas", worse)
    assert claims_on_rung_1(runs)["The"] == "contradicted: better in 3 of 4, worse in 1 (1 firm)"


def test_a_case_below_zero_that_is_not_firm_contradicts_nothing() -> None:
    """One of four intervals excludes zero, but by chance one in thirteen of four would."""
    better, same, hardly = [0.6, 0.61, 0.62], [0.49, 0.512, 0.521], [0.48, 0.505, 0.508]
    runs = rung_1(better, same)
    runs["split-mnist", "rung-1"].results["dhp+mas"] = result("dhp+mas", hardly)
    (pair,) = (pair for pair in rung_pairs(runs, "split-mnist", 1, "linear") if pair.label == "dhp+mas")
    assert 0.05 / 4 < verdicts.chance(pair.accuracy) < 0.05
    assert claims_on_rung_1(runs)["The"] == "not reproduced: better in 3 of 4, worse in 1 (0 firm)"
    assert verdicts_table(runs).rows[0][4:7] == ("1", "0", "3 above, 0 below")


def test_a_benchmark_on_which_dhp_diverged_is_not_tested() -> None:
    made = claims_on_rung_1(rung_1([0.5, 0.6, 0.7], [0.5, 0.6, 0.7], diverged=True))
    assert made["Split"] == "not tested: 3 of 3 diverged"
    assert made["The"] == "not tested: better in 0 of 4, worse in 0, diverged in 4"
    assert [row[1:7] for row in verdicts_table(rung_1([0.5] * 3, [0.5] * 3, diverged=True)).rows] == [
        ("4", "0", "0", "0", "4", "0 above, 0 below")
    ] * 2
    assert rung_claims_table({}).rows == []


def test_a_claim_about_all_cases_is_not_reproduced_where_one_of_them_diverged() -> None:
    better, same = [0.6, 0.61, 0.62], [0.49, 0.512, 0.521]
    runs = rung_1(better, same)
    runs["split-mnist", "rung-1"].results["dhp+mas"] = result("dhp+mas", better, diverged=True)
    assert claims_on_rung_1(runs)["The"] == "not tested: better in 3 of 4, worse in 0, diverged in 1"


@pytest.mark.parametrize("loser", ["dhp+si", "linear+si"])
@pytest.mark.parametrize(("lost", "no_verdict"), [(2, False), (3, True)])
def test_a_comparison_has_a_verdict_while_three_pairs_are_left(loser: str, lost: int, no_verdict: bool) -> None:
    runs = rung_1([0.6, 0.61, 0.62, 0.61, 0.6], [0.5, 0.51, 0.5, 0.52, 0.5])
    results = runs["split-mnist", "rung-1"].results
    accuracy = results[loser].accuracy.copy()
    accuracy[:lost, 1] = np.nan
    diverged = [Divergence(trial, 1, 5) for trial in range(lost)]
    results[loser] = replace(results[loser], accuracy=accuracy, diverged=diverged)
    pair = rung_pairs(runs, "split-mnist", 1, "linear")[1]
    assert pair.label == "dhp+si"
    assert verdicts.cannot_be_compared(pair) == no_verdict
    assert verdicts_table(runs).rows[0][5] == str(int(no_verdict))
    assert dict(row[:2] for row in draw_ladder(runs, "linear").numbers.rows)["Split MNIST: si"].endswith("*")


def test_the_ladder_says_where_trials_diverged_and_how_many_pairs_are_left() -> None:
    """Without a penalty all trials of DHP diverge, with SI one of five; with Online EWC two of the matched head do."""
    better, same = [0.6, 0.61, 0.62, 0.61, 0.6], [0.5, 0.51, 0.5, 0.52, 0.5]
    runs = rung_1(better, same)
    results = runs["split-mnist", "rung-1"].results
    results["dhp"] = result("dhp", better, diverged=True)
    for label, lost in (("dhp+si", [0]), ("matched+online-ewc", [3, 4])):
        whole = results[label]
        accuracy = whole.accuracy.copy()
        accuracy[lost, 1] = np.nan
        results[label] = replace(whole, accuracy=accuracy, diverged=[Divergence(trial, 1, 5) for trial in lost])

    plain, matched = ({row[0]: row[2] for row in ladder_table(runs, other).rows} for other in ("linear", "matched"))
    assert plain["Split MNIST: dhp"] == "5 of 5 diverged"
    gains = 100 * (np.array(better) - np.array(same))
    si, ewc = (f"Split MNIST: dhp{penalty}" for penalty in ("+si", "+online-ewc"))
    assert plain[si].startswith(f"{gains[1:].mean():+.2f} [")
    assert plain[si].endswith("; 1 of 5 diverged")
    assert matched[ewc].startswith(f"{gains[:3].mean():+.2f} [")
    assert matched[ewc].endswith("; matched+online-ewc: 2 of 5 diverged")
    assert "diverged" not in plain[ewc]

    rows = {row[0]: row[1:7] for row in verdicts_table(runs).rows}
    assert rows["1: as published, minus linear"] == ("4", "3", "0", "0", "1", "3 above, 0 below")
    shown = dict(row[:2] for row in draw_ladder(runs, "linear").numbers.rows)
    assert shown["Split MNIST: alone"] == "diverged"
    assert shown["Split MNIST: si"].endswith("]*")
    assert shown["Split MNIST: mas"].endswith("]")


def test_a_head_alone_stands_on_rung_2_everywhere_and_means_leave_the_mixture_out() -> None:
    better, same, worse = [0.6, 0.61, 0.62], [0.49, 0.512, 0.521], [0.4, 0.41, 0.42]
    runs = rung_1(better, same)
    mixed = [
        replace(each, config=preset("vision-mixture", label, num_tasks=2, trials=3))
        for label, each in rung_1(worse, same)["split-mnist", "rung-1"].results.items()
    ]
    runs["vision-mixture", "rung-1"] = run("rung-1", *mixed)
    assert rung_pairs(runs, "vision-mixture", 2, "linear") == [], "rung 2 was not run at all"
    runs["split-mnist", "rung-2"] = run("rung-2", result("dhp+si", better), result("linear+si", same))
    assert [pair.label for pair in rung_pairs(runs, "vision-mixture", 2, "linear")] == ["dhp"]
    rows = {row[0]: row for row in verdicts_table(runs).rows}
    assert rows["1: as published, minus linear"][1:6] == ("8", "4", "0", "4", "0")
    assert rows["2: each its own strength, minus linear"][1:6] == ("3", "2", "0", "1", "0")
    assert {row[-1] for row in rows.values() if "linear" in row[0]} == {verdicts.points(accuracy_of(better, same))}
    assert claims_of(runs)[2] == "contradicted: better in 2 of 3, worse in 1 (1 firm)"


def accuracy_of(ours: list[float], theirs: list[float]) -> Estimate:
    return metrics.paired_difference(np.array(ours), np.array(theirs))


def claims_of(runs: dict[tuple[str, str], Run]) -> tuple[str, ...]:
    return rung_claims_table(runs).rows[0]


def test_differences_without_a_pair_are_left_out() -> None:
    assert pairs({"dhp": result("dhp", [0.5])}) == []


def test_a_change_of_one_side_is_set_beside_the_right_other() -> None:
    runs = read_reproduction(RESULTS).runs
    entries = runs["split-mnist", "study"].results
    rows = {row[0]: row for row in study_table(runs, "split-mnist").rows}
    standardised = entries["inputs standardised: finetune"].average_accuracy[:, -1]
    unbounded = entries["η unbounded, inputs standardised: dhp"].average_accuracy[:, -1]
    gain = 100 * (unbounded - standardised).mean()
    row = rows["η unbounded, inputs standardised"]
    assert row[1] == f"{100 * standardised.mean():.2f}"
    assert row[2].startswith(f"{gain:+.2f} [")


def test_claims_about_what_was_not_run_are_not_made() -> None:
    assert claims({("split-mnist", "table"): run("table", result("finetune", [0.5, 0.6, 0.7]))}) == []
    assert claims({}) == []


def trace(values: dict[str, list[list[float]]]) -> list[dict[str, float]]:
    """Dynamics of four tasks, two records each."""
    names = ("eta", "hebb_norm", "alpha_norm")
    return [
        {"trial": 0, "task": task, "epoch": 0, "step": k, "loss": 0.1, **{n: values[n][task][k] for n in names}}
        for task in range(4)
        for k in range(2)
    ]


def verdicts_on_dynamics(**values: list[list[float]]) -> dict[str, str]:
    config = preset("permuted-mnist", "dhp", num_tasks=4, trials=1)
    made = Result(config, (0,), np.zeros((1, 4, 4)), np.zeros((1, 4)), trace(values))
    found = claims({("permuted-mnist", "table"): run_of("table", {"dhp": made})})
    return {" ".join(made.claim.split()[:2]): made.verdict for made in found if "means" in made.certainty}


def test_what_the_trace_does_is_judged_by_what_the_paper_says_of_it() -> None:
    eta = [[0.02, 0.03], [0.03, 0.03], [0.03, 0.02], [0.01, 0.001]]
    grows = [[1.0, 2.0], [2.0, 3.0], [3.0, 4.0], [4.0, 5.0]]
    as_in_the_paper = verdicts_on_dynamics(eta=eta, hebb_norm=grows, alpha_norm=grows)
    assert as_in_the_paper == dict.fromkeys(as_in_the_paper, "reproduced")
    assert len(as_in_the_paper) == 4
    early = [[0.03, 0.0001], *[[0.0001, 0.0001]] * 3]
    shrinks = [[5.0, 4.0], [4.0, 3.0], [3.0, 2.0], [2.0, 1.0]]
    otherwise = verdicts_on_dynamics(eta=early, hebb_norm=shrinks, alpha_norm=shrinks)
    assert list(otherwise.values()) == ["reproduced", "not reproduced", "not reproduced", "not reproduced"]


def test_initial_values_of_eta_are_compared_in_pairs() -> None:
    noise = np.array([0.0, 0.1, 0.2, 0.3])  # between trials, and the same for all values
    results = {
        f"{eta}": result("dhp", list(0.5 + noise + gain + 1e-4 * np.arange(4) * (eta == 0.1)), eta=eta)
        for eta, gain in ((0.1, -0.004), (0.001, 0.0), (0.0001, 0.0))
    }
    found = {made.claim: made for made in claims({("split-mnist", "sensitivity"): run_of("sensitivity", results)})}
    assert found["η's initial value needs little tuning"].verdict == "reproduced"
    assert found["Low initial values of η are best"].verdict == "reproduced", "trials differ by far more, but in pairs"
