"""Reports are read as text here: what they say, what they say is missing, and that nothing in them can run."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pages import ALL, EVIL, NAN, check_page, make_result, read, run_of

from builders import labelled, write_run
from engram.common.errors import Divergence, InputError
from engram.config.methods import in_words as in_sentence
from engram.config.methods import known_methods
from engram.config.presets import STEADY
from engram.report.html import run_page
from engram.report.html.page import facts, notice, paragraph, table
from engram.report.html.run_page import missing_from_run
from engram.report.layout import Table, in_words
from engram.report.tables import run_verdict
from engram.reproduction.page import write_report
from engram.runs.result import Result


@pytest.fixture
def words_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are drawn, but not made into SVG, which takes most of the time of a page."""
    monkeypatch.setattr("engram.report.html.page.to_svg", lambda drawing, prefix: "<svg></svg>")


def test_a_whole_run_lacks_nothing(tmp_path: Path) -> None:
    path = write_report(write_run(tmp_path, labelled(make_result(method) for method in ALL)))
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
    write_run(tmp_path, labelled(make_result(method) for method in ALL))
    first = write_report(tmp_path, tmp_path / "one.html").read_bytes()
    assert write_report(tmp_path, tmp_path / "two.html").read_bytes() == first


def test_a_single_result_saved_from_python_has_a_page(tmp_path: Path) -> None:
    make_result("dhp").save(tmp_path / "mine")
    text = check_page(write_report(tmp_path / "mine").read_text(encoding="utf-8"))
    assert "finetune was not run, so dhp has no pair." in text


def test_an_unfinished_run_says_how_to_resume_it(tmp_path: Path) -> None:
    configs = {method: make_result(method).config for method in ("finetune", "dhp")}
    write_run(tmp_path, {"finetune": make_result("finetune")}, finished=None, configs=configs)
    text = check_page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert f"The run is not finished: resume it with engram run --resume {tmp_path}" in text
    assert f"<code>engram run --resume {tmp_path}</code>" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "dhp: no trials so far." in text


def missing(*results: Result) -> str:
    """What a page says is missing, after a look at the page itself."""
    run = run_of(*results)
    check_page(run_page(run))
    return " ".join(missing_from_run(run))


@pytest.mark.usefixtures("words_only")
def test_trials_to_come_are_counted() -> None:
    result = make_result("dhp+mas", trials=3)
    some = replace(result, config=result.config.replace(trials=10), diverged=[], data=[])
    assert "dhp+mas: 3 of 10 trials finished so far." in missing(some, make_result("mas"))


@pytest.mark.usefixtures("words_only")
def test_missing_results_are_named_only_once(tmp_path: Path) -> None:
    result = make_result("dhp")
    some = replace(result, config=result.config.replace(trials=10), diverged=[], data=[])
    write_run(tmp_path, labelled([some, make_result("finetune")]))
    text = check_page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert text.count("dhp: 3 of 10 trials finished so far.") == 1


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
    assert "dhp: no dynamics were saved." in said


def test_one_trial_has_no_standard_error() -> None:
    assert "no standard errors" in missing(make_result("finetune", trials=1), make_result("dhp", trials=1))
    assert "no standard errors" not in missing(make_result("finetune"), make_result("dhp"))


def test_one_task_has_no_forgetting() -> None:
    assert "BWT is empty" in missing(make_result("finetune", num_tasks=1), make_result("dhp", num_tasks=1))


@pytest.mark.usefixtures("words_only")
def test_other_data_have_no_numbers_of_the_papers() -> None:
    assert "The paper has no numbers for split-mnist with 5 tasks of mnist-small" in missing(
        make_result("si", dataset="mnist-small")
    )


@pytest.mark.usefixtures("words_only")
def test_a_custom_stream_is_not_compared_with_the_paper() -> None:
    own = make_result("dhp", benchmark="custom", num_tasks=2)
    page = run_page(run_of(own, make_result("finetune", benchmark="custom", num_tasks=2)))
    assert "What is missing" not in check_page(page)


@pytest.mark.usefixtures("words_only")
def test_a_run_without_dhp_says_so() -> None:
    assert "No method with DHP was run" in missing(make_result("si"))


@pytest.mark.usefixtures("words_only")
def test_changed_settings_stand_beside_the_presets() -> None:
    page = run_page(run_of(make_result("si", epochs=3), make_result("mas", epochs=3)))
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
        table(Table("x", ("a", "b"), [("c", "d")]), '"><script>'),
        paragraph("x", '"><script>'),
    ],
)
def test_text_is_escaped_in_every_block(block: str) -> None:
    assert "<script" not in block
    assert "script" not in read(block).tags


@pytest.mark.parametrize(
    ("cell", "shown"),
    [
        ("-6.31 [-9.49, -3.13]; 3 of 10 diverged", "−6.31 [−9.49,_−3.13]; 3_of_10_diverged"),
        ("+0.50 [+0.32, +0.68]", "+0.50 [+0.32,_+0.68]"),
        ("97.31 ± 0.12", "97.31_±_0.12"),
        ("strength -0.5", "strength −0.5"),
        ("dhp+online-ewc", "dhp+online-ewc"),
        ("2026-11-19", "2026-11-19"),
        ("1e-05", "1e-05"),
        ("hidden [256, 256]", "hidden [256,_256]"),
    ],
)
def test_a_number_and_an_interval_are_never_broken_and_a_minus_is_a_minus(cell: str, shown: str) -> None:
    assert f"<td>{shown.replace('_', chr(0xA0))}</td>" in table(Table("x", ("a", "b"), [("c", cell)]))


@pytest.mark.usefixtures("words_only")
def test_the_page_says_that_nothing_may_run(tmp_path: Path) -> None:
    write_run(tmp_path, {"si": make_result("si")})
    page = write_report(tmp_path).read_text(encoding="utf-8")
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    first, *_ = [line for line in page.splitlines() if line.startswith("<meta http-equiv")]
    assert first == f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    assert page.index(first) < page.index("<title>")


def test_descriptions_of_runs_are_escaped_in_the_page(tmp_path: Path) -> None:
    folder = tmp_path / "<script>alert(1)<"
    folder.mkdir()
    about = {"command": EVIL, "runtime": {EVIL: EVIL}, "versions": {EVIL: EVIL}, "environment": {"gpu": EVIL}}
    result = make_result("si")
    result.data[0]["name"] = EVIL
    write_run(folder, {EVIL: result}, finished=None, started=EVIL, **about)
    page = write_report(folder).read_text(encoding="utf-8")
    assert EVIL in check_page(page)


@pytest.mark.usefixtures("words_only")
def test_control_characters_are_escaped(tmp_path: Path) -> None:
    bad = "red \x1b[31m\x9b\x00, half \ud800, kept\n"
    write_run(tmp_path, {"si": make_result("si")}, command=bad, versions={bad: bad}, environment={"device": bad})
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert not {"\x1b", "\x9b", "\x00"} & set(page)
    assert "red \\x1b[31m\\x9b\\x00, half \\ud800, kept\n" in page


@pytest.mark.usefixtures("words_only")
@pytest.mark.parametrize(
    "about",
    [
        {"versions": 3},
        {"environment": [1]},
        {"runtime": "x"},
        {"finished": 7},
        {"versions": {"a": None}},
    ],
)
def test_a_strange_description_does_no_harm(tmp_path: Path, about: dict[str, Any]) -> None:
    write_run(tmp_path, {"si": make_result("si")}, **about)
    check_page(write_report(tmp_path).read_text(encoding="utf-8"))


def test_a_folder_in_the_place_of_the_page_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path, {"si": make_result("si")})
    with pytest.raises(InputError, match="it is a folder"):
        write_report(tmp_path, tmp_path)


@pytest.mark.parametrize(
    ("seconds", "words"), [(17.2, "17 s"), (300, "5 min"), (7200, "2 h 0 min"), (119.9, "120 s"), (5000, "83 min")]
)
def test_times_are_in_words(seconds: float, words: str) -> None:
    assert in_words(seconds) == words


# --- whatever a folder holds


@pytest.mark.usefixtures("words_only")
def test_a_damaged_entry_is_named_and_the_others_are_shown(tmp_path: Path) -> None:
    write_run(tmp_path, labelled(make_result(method) for method in ALL))
    path = tmp_path / "results.json"
    path.write_text(path.read_text().replace('"label": "si", "trials": [0, 1, 2]', '"label": "si", "trials": [0, 1]'))
    text = check_page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "si: its entry in" in text
    assert "si was not run, so dhp+si has no pair." in text


def test_a_folder_of_runs_has_one_page_with_a_section_for_each(tmp_path: Path) -> None:
    for name in ("first", "second"):
        write_run(tmp_path / name, labelled(make_result(method) for method in ALL))
    write_run(tmp_path / "empty", {"si": make_result("si")}, finished=None)
    (tmp_path / "empty" / "results.json").unlink()
    page = write_report(tmp_path).read_text(encoding="utf-8")
    text = check_page(page)
    assert page.count("<svg") == 12
    assert "report of several runs" in text
    assert "empty has no results yet." in text


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing")
    with pytest.raises(InputError, match="there is no run in"):
        write_report(tmp_path)
    with pytest.raises(InputError, match="there is no folder"):
        write_report(tmp_path / "nowhere")


def shifted(method: str, accuracies: list[float], **changes: Any) -> Result:
    """A Result whose trials have these average accuracies after the last task."""
    result = make_result(method, trials=len(accuracies), **changes)
    shape = np.array(accuracies)[:, None, None]
    return replace(result, accuracy=np.where(np.isnan(result.accuracy), NAN, shape))


@pytest.mark.usefixtures("words_only")
def test_a_page_opens_with_a_verdict_and_ends_with_what_is_missing() -> None:
    page = run_page(run_of(shifted("si", [0.6, 0.7, 0.8]), shifted("dhp+si", [0.72, 0.81, 0.93])))
    text = check_page(page)
    verdict = text.index("dhp+si has the highest of 2 mean accuracies: 82.00% over all tasks after the last")
    assert verdict < text.index("trials 3")
    assert "Trial by trial, all others are clearly worse. The DHP Softmax improves si," in text
    sections = re.findall('<section id="(.*?)">', run_page(run_of(make_result("si"))))
    assert sections == ["results", "figures", "methods", "settings", "missing"]


def test_a_verdict_names_what_cannot_be_told_apart() -> None:
    close = run_verdict(labelled([shifted("si", [0.6, 0.7, 0.8]), shifted("dhp+si", [0.7, 0.6, 0.9])]))
    assert close[0].startswith("dhp+si has the highest of 2 mean accuracies: 73.33%")
    assert close[1:] == [
        "Trial by trial, si cannot be told apart from it.",
        "The DHP Softmax makes no clear difference to si, by the accuracy after the last task.",
    ]
    harmed = run_verdict(labelled([shifted("si", [0.6, 0.7, 0.8]), shifted("dhp+si", [0.5, 0.61, 0.69])]))
    assert harmed[-1] == "The DHP Softmax harms si, by the accuracy after the last task."


def test_a_verdict_and_its_figure_name_each_head() -> None:
    run = run_of(
        shifted("si", [0.6, 0.7, 0.8]), shifted("dhp+si", [0.5, 0.61, 0.69]), shifted("scaled+si", [0.7, 0.81, 0.89])
    )
    assert run_verdict(run.results)[-2:] == [
        "The DHP Softmax harms si, by the accuracy after the last task.",
        "The head scaled improves si, by the accuracy after the last task.",
    ]
    text = check_page(run_page(run))
    assert "What the head adds, in pairs" in text
    assert "as nn.Linear's (linear) in si; as the paper's author published them (published) in dhp+si; " in text
    assert "as large as suits the features (scaled) in scaled+si." in text
    alone = check_page(run_page(run_of(run.results["si"], run.results["scaled+si"])))
    assert "What the head scaled adds, in pairs" in alone
    assert "the same initial features, tasks and order of samples" in alone


def test_two_trials_are_too_few_to_call_methods_alike() -> None:
    said = run_verdict(labelled([shifted("si", [0.8, 0.9]), shifted("finetune", [0.5, 0.7])]))
    assert said[1] == "Two trials are too few to tell finetune apart from it."


def test_the_interval_of_a_verdict_ends_where_accuracies_do() -> None:
    (said, *_) = run_verdict(labelled([shifted("si", [0.9, 1.0])]))
    assert "(95% interval 31.47 to 100.00, 2 trials)" in said
    several = run_verdict(
        labelled([shifted(name, [0.6, 0.7, 0.8]) for name in ("si", "mas", "online-ewc", "finetune")])
    )
    assert several[1] == "Trial by trial, mas, online-ewc and finetune cannot be told apart from it."


def test_a_verdict_sets_rehearsal_apart_and_says_what_it_does_not_know() -> None:
    said = run_verdict(
        labelled([shifted("si", [0.6, 0.7]), shifted("finetune", [0.5, 0.5]), shifted("joint", [0.9, 0.9])])
    )
    assert said[0].startswith("si has the highest of 2 mean accuracies without rehearsal: 65.00%")
    assert "With rehearsal, for scale: joint 90.00%." in said
    assert run_verdict(labelled([shifted("si", [0.6])])) == [
        "si has a mean accuracy of 60.00% over all tasks after the last (1 trial)."
    ]
    assert run_verdict(labelled([shifted("si", [NAN])]), finished=False) == [
        "The run is not finished; this is what it has so far.",
        "No trial has learned all tasks.",
    ]


@pytest.mark.usefixtures("words_only")
def test_a_page_explains_its_methods() -> None:
    text = check_page(run_page(run_of(make_result("finetune"), make_result("dhp+mas"))))
    assert "dhp+mas The paper's output layer, slow weights with a Hebbian trace of each class; and a penalty" in text
    assert "A method that names no head has the head matched. An output layer with two sets of slow weights" in text
    assert "The trace of dhp is the steady form" not in text
    assert "The trace of dhp is the steady form" in check_page(run_page(run_of(make_result("dhp", **STEADY))))


def test_every_method_has_words() -> None:
    said = {method: in_sentence(method) for method in known_methods()}
    assert [method for method, words in said.items() if not re.fullmatch(r"[A-Z][^`]+[a-z]\.", words)] == []
    assert [method for method, words in said.items() if "another package" in words] == []
    assert len(said) > 100


@pytest.mark.usefixtures("words_only")
def test_all_settings_are_folded_and_those_that_changed_are_not() -> None:
    page = run_page(run_of(make_result("dhp", learning_rate=0.5)))
    before, folded = page.split('<details class="folded"><summary>All settings')
    assert "momentum" not in before
    assert "learning_rate" in before
    assert "momentum" in folded
