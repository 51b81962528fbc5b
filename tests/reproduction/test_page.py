"""The page and the figures of a reproduction: what they say, and what they say is missing."""

from __future__ import annotations

import html
import math
import re
from pathlib import Path

import pytest
from pages import EVIL, PARTS, check_page, make_part, make_reproduction, make_result, part_of

from builders import current, write_run
from engram.common.errors import InputError
from engram.reproduction.folder import read_reproduction
from engram.reproduction.page import (
    QUICK,
    reproduction_page,
    reproduction_tables,
    study_table,
    write_figures,
    write_report,
)
from engram.reproduction.verdicts import variant_results


def write_reproduction(folder: Path) -> Path:
    for part in PARTS:
        run = make_part(part)
        write_run(folder / "split-mnist" / part, run.results, **run.about)
    (folder / "reproduction.json").write_text(current())
    return folder


def test_a_reproduction_has_an_overview_and_a_section_for_each_benchmark() -> None:
    runs = {("split-mnist", part): make_part(part) for part in PARTS}
    page = reproduction_page(make_reproduction(runs, ["vision-mixture was not run"]))
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
    assert page.count("<svg") == 2 + 6 + 3 + 1  # overview, table, variant, sensitivity
    assert EVIL in text  # the label of a study, as text
    verdict = "A method with DHP is better than without in 1 of 2 comparisons, worse in 0, unclear in 1."
    assert text.index(verdict) < text.index("Average accuracy in %")
    assert re.findall('<section id="(.*?)">', page)[-3:] == ["methods", "settings", "missing"]


def test_a_variant_is_set_beside_the_baselines_of_the_table() -> None:
    runs = {("split-mnist", part): make_part(part) for part in ("table", "variant")}
    found = variant_results(runs, "split-mnist")
    assert list(found) == ["finetune", "dhp", "si", "dhp+si"]
    assert [result.config.eta for result in found.values() if result.config.plastic] == [0.1, 0.1]
    alone = {("split-mnist", "variant"): make_part("variant")}
    assert list(variant_results(alone, "split-mnist")) == ["dhp", "dhp+si"]
    check_page(reproduction_page(make_reproduction(alone)))


def test_a_study_has_a_row_for_each_change_and_a_column_for_each_method() -> None:
    made = study_table(make_part("study").results)
    assert made.columns == ("change", "dhp", "si")
    assert [row[0] for row in made.rows] == ["as in the table", EVIL]
    assert all(re.fullmatch(r"\d\d\.\d\d ± \d\.\d\d", cell) for row in made.rows for cell in row[1:])


def test_a_reproduction_is_read_from_its_folder(tmp_path: Path) -> None:
    text = check_page(write_report(write_reproduction(tmp_path)).read_text(encoding="utf-8"))
    assert "report of a reproduction" in text
    assert "vision-mixture: Table I: the paper's eight methods was not run." in text
    assert "other files of the same form" in text


def test_the_figures_of_a_reproduction_have_a_folder_a_benchmark(tmp_path: Path) -> None:
    paths = write_figures(write_reproduction(tmp_path), tmp_path / "figures", ["csv"])
    places = {str(path.relative_to(tmp_path / "figures")) for path in paths}
    assert {"overview/differences.csv", "overview/variant-differences.csv", "split-mnist/paper.csv"} <= places
    assert {"split-mnist/sensitivity.csv", "split-mnist/variant-accuracy.csv"} <= places
    assert len(places) == len(paths)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        *(pytest.param(text, marks=pytest.mark.slow) for text in ("[]", '{"format": 1}', current(), '{"format": 99}')),
    ],
)
def test_a_damaged_run_is_named_and_the_others_are_shown(tmp_path: Path, content: str) -> None:
    path = write_reproduction(tmp_path) / "split-mnist" / "study"
    (path / "run.json").write_text(content)
    for_page, for_figures = dict[str, str](), dict[str, str]()
    page = html.unescape(write_report(tmp_path, unreadable=for_page).read_text(encoding="utf-8"))
    write_figures(tmp_path, tmp_path / "figures", ["csv"], for_figures)
    assert for_page == for_figures
    assert list(for_page) == ["split-mnist/study"]
    assert for_page["split-mnist/study"] in page


def test_a_damaged_result_is_missing_and_the_others_are_shown(tmp_path: Path) -> None:
    path = write_reproduction(tmp_path) / "split-mnist" / "table" / "results.json"
    path.write_text(path.read_text().replace('"label": "si", "trials": [0, 1, 2]', '"label": "si", "trials": [0, 1]'))
    found = read_reproduction(tmp_path)
    assert "si" not in found.runs["split-mnist", "table"].results
    assert any(sentence.startswith("split-mnist, table: si: its entry in") for sentence in found.missing)
    check_page(reproduction_page(found))


def test_a_reproduction_of_which_nothing_is_drawn_says_so(tmp_path: Path) -> None:
    run = make_part("study")
    write_run(tmp_path / "split-mnist" / "study", run.results, **run.about)
    (tmp_path / "reproduction.json").write_text(current())
    with pytest.raises(InputError, match=r"no part of the reproduction in .* has figures"):
        write_figures(tmp_path, tmp_path / "figures")


def test_a_run_in_the_wrong_folder_is_refused(tmp_path: Path) -> None:
    write_reproduction(tmp_path)
    (tmp_path / "permuted-mnist").mkdir()
    (tmp_path / "split-mnist" / "table").rename(tmp_path / "permuted-mnist" / "table")
    with pytest.raises(InputError, match="it is table of split-mnist"):
        read_reproduction(tmp_path)


def test_the_tables_of_a_reproduction_are_table_i_and_the_claims() -> None:
    whole = make_reproduction({("split-mnist", part): make_part(part) for part in PARTS})
    assert [made.columns[0] for made in reproduction_tables(whole)] == ["method", "method", "claim"]
    without = make_reproduction({("split-mnist", "table"): make_part()})
    assert [made.columns[0] for made in reproduction_tables(without)] == ["method", "method"]
    quick = make_reproduction({("split-mnist", "table"): make_part(quick=True)})
    assert [made.columns[0] for made in reproduction_tables(quick)] == ["method", "method"]
    assert reproduction_tables(make_reproduction({("split-mnist", "study"): make_part("study")})) == []


def test_a_quick_reproduction_is_marked_on_top() -> None:
    text = check_page(reproduction_page(make_reproduction({("split-mnist", "table"): make_part(quick=True)})))
    assert text.index(QUICK) < text.index("Average accuracy")


def test_a_benchmark_without_a_table_says_so() -> None:
    runs = {("split-mnist", "sensitivity"): make_part("sensitivity")}
    text = check_page(reproduction_page(make_reproduction(runs)))
    assert "so there is no table" in text


def test_a_method_that_only_some_benchmarks_have_is_not_a_hole() -> None:
    permuted = part_of("table", "permuted-mnist", {"si": make_result("si", benchmark="permuted-mnist")})
    runs = {("split-mnist", "table"): make_part(), ("permuted-mnist", "table"): permuted}
    assert "not run" in check_page(reproduction_page(make_reproduction(runs)))


def test_a_reproduction_without_results_says_so(tmp_path: Path) -> None:
    (tmp_path / "reproduction.json").write_text(current())
    with pytest.raises(InputError, match=r"the reproduction in .* has no results yet"):
        write_report(tmp_path)


def test_any_other_folder_has_the_page_of_its_runs(tmp_path: Path) -> None:
    write_run(tmp_path, {"si": make_result("si")})
    assert "report of a run" in check_page(write_report(tmp_path).read_text(encoding="utf-8"))
