"""Reports are read as text here: what they say, what they say is missing, and that nothing in them can run."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engram.common.errors import InputError
from engram.config.presets import preset
from engram.report.html.blocks import facts, notice, paragraph, table
from engram.report.html.missing import missing_from
from engram.report.html.run_report import run_page
from engram.report.html.settings import in_words
from engram.report.layout import Table
from engram.reproduction.page import QUICK, reproduction_page, study_table
from engram.reproduction.verdicts import variant_results
from engram.reproduction.write import write_figures, write_report
from engram.runs.result import FORMAT, Divergence, Result, write_result
from engram.runs.sheets import Reproduction, Sheet, sheet_path, write_sheet

NAN = math.nan
PARTS = ("table", "variant", "sensitivity", "strengths", "study")
EVIL = '<script>alert("x")</script>'


def make_result(
    method: str = "dhp", *, benchmark: str = "split-mnist", trials: int = 3, dynamics: bool = True, **changes: Any
) -> Result:
    config = preset(benchmark, method, trials=trials, **changes)
    generator = np.random.default_rng(len(method))
    shape = (trials, config.num_tasks, config.num_tasks)
    accuracy = np.where(np.tri(config.num_tasks) > 0, 0.9 + 0.08 * generator.random(shape), NAN)
    rows: list[dict[str, float]] = [
        {"trial": 0, "task": n, "epoch": 0, "step": s, "loss": 0.1, "eta": 0.01, "hebb_norm": 2.0, "alpha_norm": 3.0}
        for n in range(config.num_tasks)
        for s in (1, 2)
    ]
    untrained = np.full(shape[:2], 0.5)
    data = [{"name": "mnist", "origin": "published", "train": 60000, "test": 10000}]
    return Result(config, tuple(range(trials)), accuracy, untrained, rows if dynamics else [], [], data)


def save_run(folder: Path, results: list[Result], **about: Any) -> Path:
    """A run's folder, as `engram run` leaves it."""
    description = {
        "format": FORMAT,
        "benchmark": "split-mnist",
        "methods": [result.config.method for result in results],
        "command": "engram run split-mnist",
        "started": "2026-01-31T12:00:00+00:00",
        "device": "cpu",
        "precision": "tf32",
        "versions": {"python": "3.12.3", "torch": "2.11.0"},
        "surroundings": {"threads": 2},
        "finished": "2026-01-31T12:05:00+00:00",
    } | about
    for result in results:
        write_result(result, folder / result.config.method)
    (folder / "run.json").write_text(json.dumps({k: v for k, v in description.items() if v is not None}))
    return folder


class Reader(HTMLParser):
    """Checks that tags close, and keeps what a test asks about."""

    VOID = frozenset(("meta", "link", "br"))

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.text: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.addresses += [value for name, value in attrs if name in ("href", "src") and value]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


def check_page(page: str) -> str:
    """The text of a page that is whole: all tags closed, ids unique, links inside found, nothing outside needed."""
    reader = read(page)
    assert len(reader.ids) == len(set(reader.ids))
    assert "script" not in reader.tags
    for address in reader.addresses:
        if address.startswith("#"):
            assert address[1:] in reader.ids, address
        else:
            assert address.startswith(("data:", "https://arxiv.org/")), address
    assert "@import" not in page
    assert "url(http" not in page
    return " ".join(" ".join(reader.text).split())


ALL = ["finetune", "dhp", "si", "dhp+si"]


def test_a_whole_run_lacks_nothing(tmp_path: Path) -> None:
    path = write_report(save_run(tmp_path, [make_result(method) for method in ALL]))
    assert path == tmp_path / "report.html"
    page = path.read_text(encoding="utf-8")
    text = check_page(page)
    assert "What is missing" not in text
    assert page.count("<svg") == 6
    assert page.count("<details>") == 6
    for part in ("Split MNIST", "5 min", "engram run split-mnist", "2.11.0", "learning_rate", "the published files"):
        assert part in text
    for result in (make_result(method) for method in ALL):
        assert f"{100 * result.average_accuracy[:, -1].mean():.2f}" in text


def test_the_same_run_gives_the_same_bytes(tmp_path: Path) -> None:
    save_run(tmp_path, [make_result(method) for method in ALL])
    first = write_report(tmp_path, tmp_path / "one.html").read_bytes()
    assert write_report(tmp_path, tmp_path / "two.html").read_bytes() == first


def test_a_single_result_saved_from_python_has_a_page(tmp_path: Path) -> None:
    make_result("dhp").save(tmp_path / "mine")
    text = check_page(write_report(tmp_path / "mine").read_text(encoding="utf-8"))
    assert "finetune was not run, so dhp has no pair." in text


def test_a_run_that_is_not_finished_says_how_to_go_on(tmp_path: Path) -> None:
    results = [make_result("finetune")]
    save_run(tmp_path, results, finished=None, methods=["finetune", "dhp"])
    text = check_page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert f"The run is not finished: engram run --resume {tmp_path} goes on." in text
    assert f"<code>engram run --resume {tmp_path}</code>" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "dhp: no trials so far." in text


def missing(*results: Result) -> str:
    """What a page says is missing, after a look at the page itself."""
    check_page(run_page(Path("a"), {"finished": None}, results))
    return " ".join(missing_from(results))


def test_trials_to_come_are_counted() -> None:
    result = make_result("dhp+mas", trials=3)
    some = replace(result, config=result.config.replace(trials=10), diverged=[], data=[])
    assert "dhp+mas: 3 of 10 trials so far." in missing(some, make_result("mas"))


def test_what_is_said_to_be_missing_is_not_said_again_below_the_table(tmp_path: Path) -> None:
    result = make_result("dhp")
    some = replace(result, config=result.config.replace(trials=10), diverged=[], data=[])
    save_run(tmp_path, [some, make_result("finetune")])
    text = check_page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert text.count("dhp: 3 of 10 trials so far.") == 1


def test_tasks_to_come_are_counted() -> None:
    result = make_result("mas")
    result.accuracy[:, 2:] = NAN
    assert "mas: 2 of 5 tasks learned so far." in missing(result)


def test_a_diverged_trial_is_named_and_is_not_a_task_to_come() -> None:
    result = make_result("mas")
    result.accuracy[1, 2:] = NAN
    result.diverged.append(Divergence(1, 2, 7))
    said = missing(result)
    assert "mas: trial 2 diverged in task 3, step 8" in said
    assert "tasks learned so far" not in said


def test_a_method_of_which_every_trial_diverged_has_a_page() -> None:
    result = make_result("dhp", dynamics=False)
    result.accuracy[:] = NAN
    result.diverged.extend(Divergence(k, 0, 1) for k in range(3))
    said = missing(result)
    assert said.count("diverged in task 1") == 3
    assert "dhp: no dynamics were kept." in said


def test_one_trial_has_no_standard_error() -> None:
    assert "no standard errors" in missing(make_result("finetune", trials=1), make_result("dhp", trials=1))
    assert "no standard errors" not in missing(make_result("finetune"), make_result("dhp"))


def test_one_task_has_no_forgetting() -> None:
    assert "BWT is empty" in missing(make_result("finetune", num_tasks=1), make_result("dhp", num_tasks=1))


def test_other_data_have_no_numbers_of_the_papers() -> None:
    assert "The paper has no numbers for split-mnist with 5 tasks of mnist-small" in missing(
        make_result("si", dataset="mnist-small")
    )


def test_a_stream_of_ones_own_is_not_compared_with_the_paper() -> None:
    own = make_result("dhp", benchmark="custom", num_tasks=2)
    page = run_page(Path("a"), {"finished": None}, [own, make_result("finetune", benchmark="custom", num_tasks=2)])
    assert "What is missing" not in check_page(page)


def test_a_run_without_dhp_says_so() -> None:
    assert "No method with DHP was run" in missing(make_result("si"))


def test_changed_settings_stand_beside_the_presets() -> None:
    page = run_page(Path("a"), {"finished": None}, [make_result("si", epochs=3), make_result("mas", epochs=3)])
    assert re.search(r"epochs</th><td>3</td><td>10</td>", page)
    assert "1.0 (si); 1.5 (mas)" in check_page(page)


# --- nothing that a folder holds can run


@pytest.mark.parametrize(
    "block",
    [
        paragraph(EVIL),
        facts({EVIL: EVIL}),
        notice(EVIL, [EVIL, f"`{EVIL}`"]),
        table(Table(EVIL, (EVIL, EVIL), [(EVIL, EVIL)], (EVIL,))),
        paragraph("x", '"><script>'),
    ],
)
def test_text_is_escaped_in_every_block(block: str) -> None:
    assert "<script" not in block
    assert "script" not in read(block).tags


def test_the_page_says_that_nothing_may_run(tmp_path: Path) -> None:
    save_run(tmp_path, [make_result("si")])
    page = write_report(tmp_path).read_text(encoding="utf-8")
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    first, *_ = [line for line in page.splitlines() if line.startswith("<meta http-equiv")]
    assert first == f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    assert page.index(first) < page.index("<title>")


def test_what_a_run_says_of_itself_is_only_text(tmp_path: Path) -> None:
    folder = tmp_path / "<script>alert(1)<"
    folder.mkdir()
    about = {"command": EVIL, "device": EVIL, "versions": {EVIL: EVIL}, "surroundings": {"gpu": EVIL}, "started": EVIL}
    result = make_result("si")
    result.data[0]["name"] = EVIL
    save_run(folder, [result], finished=None, **about)
    page = write_report(folder).read_text(encoding="utf-8")
    assert EVIL in check_page(page)


def test_what_a_terminal_would_obey_is_written_as_an_escape(tmp_path: Path) -> None:
    bad = "red \x1b[31m\x9b\x00, half \ud800, kept\n"
    save_run(tmp_path, [make_result("si")], command=bad, versions={bad: bad}, device=bad)
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert not {"\x1b", "\x9b", "\x00"} & set(page)
    assert "red \\x1b[31m\\x9b\\x00, half \\ud800, kept\n" in page


@pytest.mark.parametrize("about", [{"versions": 3}, {"surroundings": [1]}, {"finished": 7}, {"versions": {"a": None}}])
def test_a_strange_description_does_no_harm(tmp_path: Path, about: dict[str, Any]) -> None:
    save_run(tmp_path, [make_result("si")], **about)
    check_page(write_report(tmp_path).read_text(encoding="utf-8"))


def test_a_folder_in_the_place_of_the_page_is_refused(tmp_path: Path) -> None:
    save_run(tmp_path, [make_result("si")])
    with pytest.raises(InputError, match="it is a folder"):
        write_report(tmp_path, tmp_path)


@pytest.mark.parametrize(
    ("seconds", "words"), [(17.2, "17 s"), (300, "5 min"), (7200, "2 h 0 min"), (119.9, "120 s"), (5000, "83 min")]
)
def test_times_are_in_words(seconds: float, words: str) -> None:
    assert in_words(seconds) == words


# --- a reproduction


ABOUT = {
    "command": "engram reproduce",
    "quick": False,
    "device": "cuda",
    "gpu": "NVIDIA H200",
    "precision": "tf32",
    "versions": {"python": "3.12.3", "torch": "2.11.0"},
    "seconds": 312.5,
    "data": [{"name": "mnist", "origin": "structure", "train": 60000, "test": 10000}],
}


def make_reproduction(
    sheets: dict[tuple[str, str], Sheet], missing: list[str] | None = None, quick: bool = False
) -> Reproduction:
    for sheet in sheets.values():
        sheet.about["quick"] = quick
    return Reproduction(Path("reproduction"), sheets, missing or [])


def make_sheet(part: str = "table", benchmark: str = "split-mnist") -> Sheet:
    changes: dict[str, dict[str, Any]]
    if part == "sensitivity":
        entries = {f"eta {eta:g}": make_result("dhp", eta=eta) for eta in (1e-4, 1e-3, 1e-2)}
    elif part == "strengths":
        entries = {f"{m} {s:g}": make_result(m, strength=s) for m in ("si", "dhp+si") for s in (0.1, 1.0)}
    elif part == "table":
        entries = {method: make_result(method, benchmark=benchmark) for method in ALL}
    elif part == "variant":
        entries = {method: make_result(method, benchmark=benchmark, eta=0.1) for method in ("dhp", "dhp+si")}
    else:
        changes = {"as in the table": {}, EVIL: {"alpha": "uniform"}}
        entries = {f"{name}: {m}": make_result(m, **change) for name, change in changes.items() for m in ("dhp", "si")}
    return Sheet(part, benchmark, entries, dict(ABOUT))


def test_a_reproduction_has_an_overview_and_a_section_for_each_benchmark() -> None:
    sheets = {("split-mnist", part): make_sheet(part) for part in PARTS}
    page = reproduction_page(make_reproduction(sheets, ["vision-mixture was not run"]))
    text = check_page(page)
    for part in (
        "Overview",
        "Split MNIST",
        "vision-mixture was not run.",
        "How much depends on η",
        "5 min",
        "NVIDIA H200",
    ):
        assert part in text
    assert QUICK not in text
    ours = make_result("dhp").average_accuracy[:, -1]
    sem = 100 * ours.std(ddof=1) / math.sqrt(3)
    assert f"{100 * ours.mean():.2f} ± {sem:.2f} / 98.23" in text
    assert page.count("<svg") == 2 + 6 + 3 + 2  # overview, table, variant, settings
    assert EVIL in text  # the label of a study, as text


def test_a_variant_is_set_beside_the_baselines_of_the_table() -> None:
    sheets = {("split-mnist", part): make_sheet(part) for part in ("table", "variant")}
    methods = [result.config.method for result in variant_results(sheets, "split-mnist")]
    assert methods == ["finetune", "dhp", "si", "dhp+si"]
    assert [r.config.eta for r in variant_results(sheets, "split-mnist") if r.config.plastic] == [0.1, 0.1]
    alone = {("split-mnist", "variant"): make_sheet("variant")}
    assert [r.config.method for r in variant_results(alone, "split-mnist")] == ["dhp", "dhp+si"]
    check_page(reproduction_page(make_reproduction(alone)))


def test_a_study_has_a_row_for_each_change_and_a_column_for_each_method() -> None:
    made = study_table(make_sheet("study").entries)
    assert made.columns == ("change", "dhp", "si")
    assert [row[0] for row in made.rows] == ["as in the table", EVIL]
    assert all(re.fullmatch(r"\d\d\.\d\d ± \d\.\d\d", cell) for row in made.rows for cell in row[1:])


def save_reproduction(folder: Path) -> Path:
    for part in PARTS:
        write_sheet(make_sheet(part), sheet_path(folder, "split-mnist", part))
    return folder


def test_a_folder_of_sheets_has_the_page_of_a_reproduction(tmp_path: Path) -> None:
    text = check_page(write_report(save_reproduction(tmp_path)).read_text(encoding="utf-8"))
    assert "report of a reproduction" in text
    assert "vision-mixture: Table I: the paper's eight methods was not run." in text
    assert "other files of the published form" in text


def test_the_figures_of_a_reproduction_have_a_folder_a_benchmark(tmp_path: Path) -> None:
    paths = write_figures(save_reproduction(tmp_path), tmp_path / "figures", ["csv"])
    places = {str(path.relative_to(tmp_path / "figures")) for path in paths}
    assert {"overview/differences.csv", "overview/variant-differences.csv", "split-mnist/paper.csv"} <= places
    assert {"split-mnist/sensitivity.csv", "split-mnist/strengths.csv", "split-mnist/variant-accuracy.csv"} <= places
    assert len(places) == len(paths)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 1}', '{"format": 99}'])
def test_a_damaged_sheet_ends_in_one_sentence(tmp_path: Path, content: str) -> None:
    path = sheet_path(save_reproduction(tmp_path), "split-mnist", "study")
    path.write_text(content)
    for make in (write_report, lambda folder: write_figures(folder, folder / "figures")):
        with pytest.raises(InputError, match=r"study\.json"):
            make(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_a_quick_reproduction_is_marked_on_top() -> None:
    text = check_page(reproduction_page(make_reproduction({("split-mnist", "table"): make_sheet()}, quick=True)))
    assert text.index(QUICK) < text.index("Average accuracy")


def test_a_benchmark_without_a_table_says_so() -> None:
    sheets = {("split-mnist", "sensitivity"): make_sheet("sensitivity")}
    text = check_page(reproduction_page(make_reproduction(sheets)))
    assert "so there is no table" in text


def test_a_method_that_only_some_benchmarks_have_is_not_a_hole() -> None:
    permuted = Sheet("table", "permuted-mnist", {"si": make_result("si", benchmark="permuted-mnist")}, dict(ABOUT))
    sheets = {("split-mnist", "table"): make_sheet(), ("permuted-mnist", "table"): permuted}
    assert "not run" in check_page(reproduction_page(make_reproduction(sheets)))


def test_an_empty_reproduction_has_a_page_too() -> None:
    assert "Nothing was run yet." in check_page(reproduction_page(make_reproduction({}, ["everything"])))


def test_a_reproduction_without_a_finished_part_says_so(tmp_path: Path) -> None:
    (tmp_path / "split-mnist" / ".table").mkdir(parents=True)
    with pytest.raises(InputError, match=r"has no finished part yet; begun: split-mnist/table"):
        write_report(tmp_path)


def test_a_folder_of_something_else_says_what_it_could_have_been(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing")
    with pytest.raises(InputError, match=r"holds neither a run \(run\.json\) nor a reproduction"):
        write_report(tmp_path)
