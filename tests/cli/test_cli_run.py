"""`engram run`: what it prints and saves, and how it refuses bad input."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import signal
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from command import QUICK, Command, Finished, assert_is_refusal, environment, run_process
from rich.console import Console

from builders import assert_results_equal, files_in
from engram import Progress, preset
from engram.common.errors import Divergence
from engram.config.presets import STEADY, best_settings
from engram.engine.learner import Outcome
from engram.runs.display import RunDisplay
from engram.runs.run import read_run


def test_run_succeeds_and_prints_nothing_on_stderr(finished: Finished) -> None:
    folder, outcome = finished
    assert (outcome.code, outcome.err) == (0, "")
    assert "split-mnist on mnist-small, 2 tasks, 2 trials" in outcome.out
    assert f"engram figures {folder}" in " ".join(outcome.out.split())


def test_run_without_terminal_prints_one_line_per_method_and_task(finished: Finished) -> None:
    lines = [line for line in finished[1].out.splitlines() if ", task " in line]
    patterns = [
        rf"{re.escape(m)}, task {n}/2: (\d+\.\d ){{{n}}}\(mean of 2 trials\)"
        for n in (1, 2)
        for m in ("finetune", "dhp+si")
    ]
    assert len(lines) == 4
    for line, pattern in zip(lines, patterns, strict=True):
        assert re.fullmatch(pattern, line)


def test_run_folder_holds_exactly_these_files(finished: Finished) -> None:
    assert sorted(files_in(finished[0])) == ["dynamics.csv", "log.txt", "results.json", "run.json"]


def test_run_json_describes_the_run(finished: Finished) -> None:
    description = json.loads((finished[0] / "run.json").read_text())
    assert description["format"] == 2
    assert description["common"]["benchmark"] == "split-mnist"
    assert list(description["configs"]) == ["finetune", "dhp+si"]
    assert description["command"].startswith("engram run split-mnist --dataset mnist-small")
    runtime = {"device": "cuda" if torch.cuda.is_available() else "cpu", "precision": "tf32"}
    assert description["runtime"] == {**runtime, "max_stack": None, "engine": "in-process"}
    assert description["versions"]["torch"] == torch.__version__
    assert set(description["versions"]) >= {"python", "platform", "engram", "torch", "numpy", "scipy"}
    assert description["data"] == [{"name": "mnist-small", "origin": "published", "train": 10000, "test": 2000}]
    assert description["started"] <= description["finished"]


def test_run_json_has_the_version_of_engram(finished: Finished) -> None:
    from engram import __version__

    assert json.loads((finished[0] / "run.json").read_text())["versions"]["engram"] == __version__


def test_log_has_a_line_per_method_and_task(finished: Finished) -> None:
    lines = (finished[0] / "log.txt").read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  \S", line) for line in lines)
    messages = [line.split("  ", 1)[1] for line in lines]
    assert messages[0].startswith("engram run split-mnist")
    assert re.fullmatch(r"finetune, task 1/2: \d+\.\d \(mean of 2 trials\)", messages[1])
    assert re.fullmatch(r"dhp\+si, task 1/2: \d+\.\d \(mean of 2 trials\)", messages[2])
    assert re.fullmatch(r"finetune, task 2/2: \d+\.\d \d+\.\d \(mean of 2 trials\)", messages[3])
    assert re.fullmatch(r"finished after \d+\.\d s", messages[5])
    assert len(messages) == 6


def test_saved_settings_are_those_given(finished: Finished) -> None:
    config = read_run(finished[0]).configs["dhp+si"]
    assert (config.method, config.trials, config.epochs, config.num_tasks) == ("dhp+si", 2, 1, 2)
    assert (config.dataset, config.strength, config.hidden) == ("mnist-small", 1.0, (256, 256))


def saved_results(folder: Path) -> dict[str, dict[str, Any]]:
    """The entries of results.json by label."""
    return {entry["label"]: entry for entry in json.loads((folder / "results.json").read_text())["results"]}


def test_saved_accuracies_equal_those_in_the_log(finished: Finished) -> None:
    folder, _ = finished
    assert list(saved_results(folder)) == ["finetune", "dhp+si"]
    for label, entry in saved_results(folder).items():
        assert (entry["trials"], entry["diverged"]) == ([0, 1], [])
        rows = [
            [float(v) for v in line.rsplit(": ", 1)[1].split(" (")[0].split()]
            for line in (folder / "log.txt").read_text().splitlines()
            if f"  {label}, task" in line
        ]
        trials = entry["accuracy"]
        saved = [[statistics.mean(trial[task][j] for trial in trials) for j in range(task + 1)] for task in range(2)]
        assert [[round(100 * v, 1) for v in row] for row in saved] == rows
        assert all(0.3 < v <= 1 for row in saved for v in row)
        assert len(entry["untrained"]) == 2


def test_dynamics_of_the_trace_are_finite_only_for_dhp(finished: Finished) -> None:
    with (finished[0] / "dynamics.csv").open(newline="") as file:
        every_row = list(csv.DictReader(file))
    assert list(every_row[0]) == ["label", "trial", "task", "epoch", "step", "loss", "eta", "hebb_norm", "alpha_norm"]
    for method, plastic in (("finetune", False), ("dhp+si", True)):
        rows = [row for row in every_row if row["label"] == method]
        assert {(row["trial"], row["task"]) for row in rows} == {(k, n) for k in "01" for n in "01"}
        for row in rows:
            assert math.isfinite(float(row["loss"]))
            for name in ("eta", "hebb_norm", "alpha_norm"):
                assert math.isfinite(float(row[name])) is plastic
        if plastic:
            assert 0 < float(rows[0]["eta"]) < 0.1
            assert float(rows[-1]["hebb_norm"]) > float(rows[0]["hebb_norm"]) > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["permuted-mnst"], ["no benchmark 'permuted-mnst'", "permuted-mnist"]),
        (["mnist"], ["no benchmark 'mnist'"]),
        ([""], ["no benchmark ''"]),
        (["split-mnist", "--methods", "ewcc"], ["no method 'ewcc'", "ewc"]),
        (["split-mnist", "--methods", "si,,mas"], ["no method ''"]),
        (["split-mnist", "--methods", ""], ["no method ''"]),
        (["split-mnist", "--methods", "si,mas,si"], ["twice"]),
        (["split-mnist", "--trials", "1", "--set", "trials=2"], ["the setting trials is given twice"]),
        (["split-mnist", "--tasks", "1", "--set", "num_tasks=2"], ["the setting num_tasks is given twice"]),
        (["split-mnist", "--set", "xi=1", "--set", "xi=2"], ["the setting xi is given twice"]),
        (["split-mnist", "--methods", "finetune", "--strength", "3"], ["strength has no effect on finetune"]),
        (["split-mnist", "--methods", "si,mas", "--eta", "0.1"], ["eta has no effect on si, mas"]),
        (["split-mnist", "--methods", "mas,dhp", "--set", "xi=1"], ["xi has no effect on mas, dhp"]),
        (["split-mnist", "--set", "beta1=0.8"], ["beta1 has no effect on sgd as it is set here"]),
        (["split-mnist", "--set", "reset_optimizer=false"], ["reset_optimizer has no effect on sgd"]),
        (["split-mnist", "--set", "optimizer=adam", "--set", "momentum=0.9"], ["momentum has no effect on adam"]),
        (
            ["split-mnist", "--methods", "slda,ncm", "--set", "learning_rate=0.1"],
            ["learning_rate has no effect on slda, ncm, where nothing is trained: leave it out"],
        ),
        (
            ["split-mnist", "--methods", "ridge", "--set", "optimizer=adam", "--set", "beta1=0.8"],
            ["optimizer has no effect on ridge, where nothing is trained: leave it out"],
        ),
        (
            ["split-mnist", "--methods", "slda", "--set", "random_features=0", "--set", "random_window=9"],
            ["random_window has no effect on slda without random_features: leave it out"],
        ),
        (["split-mnist", "--methods", "si", "--set", "random_window=9"], ["random_window has no effect on si: leave"]),
        (["split-mnist", "--set", "optimizer=adamm"], ["optimizer must be sgd, adam or adamw, not 'adamm'"]),
        (["split-mnist", "--set", "momentum=1"], ["momentum must be at least 0 and below 1, not 1.0"]),
        (["split-mnist", "--set", "weight_decay=-1"], ["weight_decay must be at least 0, not -1.0"]),
        (["split-mnist", "--device", "gpu"], ["no device 'gpu'", "auto"]),
        (["split-mnist", "--device", "cuda:99"], ["no device 'cuda:99'"]),
        (["split-mnist", "--device", "meta"], ["no device 'meta'"]),
        (["split-mnist", "--dataset", "mnist-smal"], ["no dataset 'mnist-smal'", "mnist-small"]),
        (["split-mnist", "--dataset", "five-datasets"], ["split-mnist", "five-datasets"]),
        (["vision-mixture", "--dataset", "mnist-small"], ["vision-mixture", "mnist-small"]),
        (["split-mnist", "--set", "epoch=3"], ["no setting 'epoch'", "epochs"]),
        (["split-mnist", "--set", "epochs"], ["name=value", "'epochs'"]),
        (["split-mnist", "--set", "epochs=many"], ["epochs", "'many'"]),
        (["split-mnist", "--set", "hidden=[]"], ["hidden"]),
        (["split-mnist", "--set", "hidden=12"], ["hidden", "12"]),
        (["split-mnist", "--set", "alpha=none"], ["alpha must be synapse or uniform, not 'none'"]),
        (["split-mnist", "--set", "method=dhp"], ["method"]),
        (["split-mnist", "--set", "benchmark=permuted-mnist"], ["benchmark"]),
        (["split-mnist", "--trials", "0"], ["trials must be at least 1, not 0"]),
        (["split-mnist", "--trials", "-3"], ["trials must be at least 1, not -3"]),
        (["split-mnist", "--trials", "two"], ["--trials"]),
        (["split-mnist", "--trials", "1.5"], ["--trials"]),
        (["split-mnist", "--epochs", "0"], ["epochs must be at least 1, not 0"]),
        (["split-mnist", "--epochs", "-1"], ["epochs must be at least 1, not -1"]),
        (["split-mnist", "--tasks", "0"], ["num_tasks must be at least 1, not 0"]),
        (["split-mnist", "--tasks", "6"], ["1 to 5 tasks", "6"]),
        (["split-mnist", "--seed", "-1"], ["seed must be at least 0, not -1"]),
        (["split-mnist", "--strength", "0"], ["strength must be above 0, not 0.0"]),
        (["split-mnist", "--strength", "-1"], ["strength must be above 0, not -1.0"]),
        (["split-mnist", "--strength", "nan"], ["strength must be a number, not nan"]),
        (["split-mnist", "--strength", "-1", "--methods", "finetune"], ["strength must be above 0, not -1.0"]),
        (["split-mnist", "--eta", "1.5"], ["eta must be in [0, 1], not 1.5"]),
        (["split-mnist", "--eta", "-0.1"], ["eta must be in [0, 1], not -0.1"]),
        (["split-mnist", "--eta", "nan"], ["eta must be"]),
        (["split-mnist", "--eta", "inf", "--set", "eta_range=unbounded"], ["eta must be"]),
        (["split-mnist", "--eta", "1e39", "--set", "eta_range=unbounded"], ["eta"]),
        (["split-mnist", "--set", "learning_rate=0"], ["learning_rate must be above 0, not 0.0"]),
        (["split-mnist", "--set", "learning_rate=1e39"], ["learning_rate"]),
        (["split-mnist", "--set", "learning_rate=" + "9" * 400], ["learning_rate"]),
        (["split-mnist", "--set", "gamma=2"], ["gamma must be in [0, 1], not 2.0"]),
        (["split-mnist", "--set", "batch_size=0"], ["batch_size must be at least 1, not 0"]),
        (["split-mnist", "--bogus"], ["--bogus"]),
        (["split-mnist", "extra"], ["extra"]),
        (["split-mnist", "--precision", "bfloat16"], ["no precision 'bfloat16'", "float32"]),
        (["split-mnist", "--stack", "0"], ["at least one model, not 0"]),
        (["split-mnist", "--stack", "-2"], ["at least one model, not -2"]),
        (["split-mnist", "--set", "network=custom"], ["network='custom'", "engram.run"]),
        ([], ["BENCHMARK"]),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else None,
)
def test_run_refuses_bad_arguments(engram: Command, out: Path, arguments: list[str], words: list[str]) -> None:
    quick = ["--methods", "si", "--epochs", "1", "--trials", "1", "--tasks", "2", "--out", str(out)]
    if arguments[:1] != ["vision-mixture"]:
        quick += ["--dataset", "mnist-small"]
    line = engram.refusal("run", *quick, *arguments)
    for word in words:
        assert word in line
    assert not out.exists()
    assert list(Path().iterdir()) == []


def test_run_never_overwrites_another_run(copy: Path, engram: Command) -> None:
    before = files_in(copy)
    line = engram.refusal("run", "split-mnist", *QUICK, "--methods", "dhp", "--out", copy)
    assert "already holds a run" in line
    assert files_in(copy) == before


def test_a_setting_that_fails_before_anything_is_learned_leaves_nothing(engram: Command, out: Path) -> None:
    few = ["--dataset", "mnist-small", "--trials", "1", "--set", "max_samples=100", "--tasks", "2", "--out", str(out)]
    line = engram.refusal("run", "split-mnist", "--methods", "slda", "--set", "shrinkage=0", *few)
    assert "the second moment of the 2000 features is singular" in line
    assert not out.exists()


def test_run_refuses_a_folder_with_other_files(out: Path, engram: Command) -> None:
    out.mkdir()
    (out / "thesis.tex").write_text("mine")
    assert "thesis.tex" in engram.refusal("run", "split-mnist", *QUICK, "--methods", "dhp", "--out", out)
    assert files_in(out) == {"thesis.tex": b"mine"}


@pytest.mark.parametrize("below", ["", "below", "far/below"])
def test_run_refuses_a_file_as_its_folder(tmp_path: Path, engram: Command, below: str) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    line = engram.refusal("run", "split-mnist", *QUICK, "--methods", "dhp", "--out", file / below)
    assert "cannot write to" in line
    assert str(file) in line
    assert file.read_text() == "mine"


def test_diverged_run_says_where(diverged: Finished) -> None:
    _, outcome = diverged
    assert_is_refusal(outcome)
    assert "trial 1" in outcome.err
    assert "task 1" in outcome.err
    assert "step 2" in outcome.err  # the first step is from a sound network, the second is not


def test_diverged_run_saves_every_method(diverged: Finished) -> None:
    folder, outcome = diverged
    for method in ("finetune", "dhp"):
        content = saved_results(folder)[method]
        assert content["diverged"] == [{"trial": 0, "task": 0, "step": 1}]
        assert content["accuracy"] == [[[None, None], [None, None]]]
        assert all(0 <= value <= 1 for value in content["untrained"][0])
        assert f"{method}, trial 1 diverged in task 1, step 2" in (folder / "log.txt").read_text()
        assert (folder / "log.txt").read_text().count(f"{method}, trial 1 diverged") == 1
        assert outcome.out.count(f"{method}, trial 1 diverged") == 1
        assert f"{method}: trial 1 diverged" in outcome.out, "in the notes of the table"
    assert "finished" in json.loads((folder / "run.json").read_text())


def test_methods_after_a_diverged_one_complete(engram: Command, out: Path) -> None:
    # At this strength the plain gradient step on the penalty overflows in task 2; finetune has no penalty.
    unstable = ("--strength", "1e12", "--set", "penalty_step=gradient")
    outcome = engram("run", "split-mnist", *QUICK, "--methods", "mas,finetune", *unstable, "--out", out)
    assert_is_refusal(outcome)
    assert re.match(r"engram: mas, trial 1 diverged in task 2, step \d+", outcome.err)
    mas, finetune = saved_results(out)["mas"], saved_results(out)["finetune"]
    assert mas["diverged"][0]["task"] == 1
    assert mas["accuracy"][0][0][0] > 0.5  # what was learned before is saved
    assert mas["accuracy"][0][1] == [None, None]
    assert finetune["diverged"] == []
    assert all(value > 0.5 for value in finetune["accuracy"][0][1])


@pytest.mark.slow
def test_refusal_of_a_real_process_is_one_line(tmp_path: Path) -> None:
    outcome = run_process("run", "split-mnist", "--trials", "0", "--out", str(tmp_path / "out"))
    assert_is_refusal(outcome)
    assert outcome.out == ""
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_interrupted_run_saves_its_state_and_says_how_to_resume(out: Path, engram: Command) -> None:
    arguments = ["run", "split-mnist", *QUICK, "--epochs", "1000", "--methods", "finetune", "--out", str(out)]
    command = [sys.executable, "-m", "engram", *arguments]
    pipe = subprocess.PIPE
    # Tests that run in the background of a shell ignore the signal, and what they start would ignore it too.
    listen = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(
        command, stdout=pipe, stderr=pipe, encoding="utf-8", env=environment(), preexec_fn=listen
    ) as process:
        for _ in range(600):
            if ((out / "log.txt").exists() and (out / "log.txt").read_text()) or process.poll() is not None:
                break
            time.sleep(0.05)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        _, err = process.communicate(timeout=30)
    assert time.monotonic() - began < 5, "it ends promptly"
    assert process.returncode == 130
    first, last = err.splitlines()
    assert first.startswith("engram: stopping: finishing and saving the current steps")
    assert last == f"engram: stopped; `engram run --resume {out}` resumes it"
    assert len(list((out / "checkpoints").rglob("*.safetensors"))) == 1
    assert "finished" not in json.loads((out / "run.json").read_text())
    assert engram.refusal("table", out) == f"engram: there are no results in {out} yet"


def test_table_and_figures_of_a_run_interrupted_after_a_task(
    out: Path, engram: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop_after_a_task(display: RunDisplay, progress: Progress) -> None:
        if progress.task_ended:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunDisplay, "show", stop_after_a_task)
        outcome = engram("run", "split-mnist", *QUICK, "--methods", "finetune,dhp", "--out", out)
    assert outcome.code == 130
    assert outcome.err == f"engram: stopped; `engram run --resume {out}` resumes it\n"
    table = engram("table", out)
    assert table.code == 0
    assert f"`engram run --resume {out}` resumes it" in table.out.replace("\n", " ")
    assert engram("figures", out).code == 0


def test_terminal_shows_one_bar_and_one_line_per_method() -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=90, _environ={"TERM": "xterm"})
    config = preset("split-mnist", "dhp+si", num_tasks=3, trials=2)
    configs = {"dhp+si": config, "si": config.replace(method="si")}
    outcomes = {("dhp+si", 0): Outcome(rows=[[0.9, 0.5]])}
    outcomes["dhp+si", 1] = Outcome(rows=[[1.0, 0.6]], diverged=Divergence(1, 1, 7))
    ended = Progress(0.4, 0, configs, outcomes, task_ended=True)
    with RunDisplay(configs, console) as display:
        display.show(Progress(0.1, 0, note="a note"))
        display.show(ended)
        display.show(ended)
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.getvalue())
    assert "task 1/3" in last
    assert " 40%" in last
    assert "95.0 (mean of 2 trials)" in last
    assert last.count("a note") == 1
    assert last.count("dhp+si, trial 2 diverged in task 2, step 8") == 1
    assert "dhp+si, task 1/3" not in last


def test_settings_file_can_be_run_again(finished: Finished, engram: Command, tmp_path: Path, out: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(read_run(finished[0]).configs["dhp+si"].to_toml())
    outcome = engram("run", file, "--out", out)
    assert (outcome.code, outcome.err) == (0, "")
    assert_results_equal(read_run(out).results["dhp+si"], read_run(finished[0]).results["dhp+si"])


def test_settings_file_has_its_own_method_and_benchmark(engram: Command, tmp_path: Path, out: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('benchmark = "split-mnist"\nmethod = "dhp"\n')
    assert "names its own method" in engram.refusal("run", file, "--methods", "dhp", "--out", out)
    file.write_text('benchmark = "custom"\nmethod = "dhp"\ndataset = "custom"\n')
    assert "only runs from Python" in engram.refusal("run", file, "--out", out)
    assert "no benchmark 'custom'" in engram.refusal("run", "custom", "--out", out)
    file.write_text('benchmark = "split-mnist"\nmethod = "finetune"\nstrength = 3.0\n')
    assert "strength has no effect on finetune: leave it out" in engram.refusal("run", file, "--out", out)
    assert not out.exists()


def test_folder_name_is_not_markup(engram: Command, tmp_path: Path) -> None:
    out = tmp_path / "a[/b]c"
    outcome = engram("run", "split-mnist", *QUICK, "--methods", "finetune", "--out", out)
    assert (outcome.code, outcome.err) == (0, "")
    assert f"Results are in {out}" in outcome.out


def test_steady_changes_only_dhp_methods(engram: Command, out: Path) -> None:
    quick = ["--dataset", "mnist-small", "--trials", "1", "--epochs", "1", "--tasks", "1", "--set", "max_samples=20"]
    engram("run", "split-mnist", "--methods", "si,dhp+si", "--steady", "--set", "eta=0.5", *quick, "--out", str(out))
    kept = {method: config.to_dict() for method, config in read_run(out).configs.items()}
    assert {name: kept["dhp+si"][name] for name in STEADY} == {**STEADY, "eta": 0.5}, "--set wins"
    usual = preset("split-mnist", "si").to_dict()
    assert {name: kept["si"][name] for name in STEADY if name != "eta"} == {n: usual[n] for n in STEADY if n != "eta"}


def test_steady_without_a_dhp_method_is_refused(engram: Command, out: Path) -> None:
    line = engram.refusal("run", "split-mnist", "--methods", "finetune,si", "--steady", "--out", out)
    assert "--steady applies only to DHP methods" in line
    assert not out.exists()


def test_best_takes_the_best_settings_of_each_method(engram: Command, out: Path) -> None:
    quick = ["--dataset", "mnist-small", "--trials", "1", "--epochs", "1", "--tasks", "1", "--set", "max_samples=20"]
    methods = ["si", "linear+si", "dhp+mas"]
    engram("run", "split-mnist", "--best", "--methods", ",".join(methods), "--strength", "7", *quick, "--out", out)
    for method, config in read_run(out).configs.items():
        best = {**best_settings("split-mnist", method), "strength": 7.0}  # what is given wins
        assert {name: getattr(config, name) for name in best} == best
        assert config.learning_rate != preset("split-mnist", method).learning_rate


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("split-mnist", "--methods", "replay"),
            "no best settings of replay on split-mnist are known: only of the heads linear, matched, dhp,",
        ),
        (("settings.toml",), "settings.toml has its own settings, so --best cannot be given with it"),
    ],
)
def test_best_without_best_settings_is_refused(
    arguments: tuple[str, ...], words: str, engram: Command, out: Path
) -> None:
    assert words in engram.refusal("run", *arguments, "--best", "--out", out)
    assert not out.exists()


# --- resume


def test_resume_allows_no_other_settings(copy: Path, engram: Command) -> None:
    line = engram.refusal("run", "--resume", copy, "--epochs", "3")
    assert line == "engram: --resume keeps the settings of the run, so --epochs cannot be given with it"
    assert "BENCHMARK cannot be given" in engram.refusal("run", "split-mnist", "--resume", copy)


def test_resume_of_a_finished_run_prints_it_again(copy: Path, engram: Command) -> None:
    before = files_in(copy)
    outcome = engram("run", "--resume", copy)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith(f"The run in {copy} was finished already.")
    assert f"Results are in {copy}" in outcome.out
    assert files_in(copy) == before


@pytest.mark.parametrize("content", ["{}", "[]", '{"arguments": ["run", "split-mnist"]}', '{"arguments": "sweep"}'])
@pytest.mark.parametrize("name", ["sweep.json", "reproduction.json"])
def test_resume_of_a_damaged_sweep_or_reproduction_is_refused(
    engram: Command, out: Path, name: str, content: str
) -> None:
    out.mkdir()
    (out / name).write_text(content)
    assert str(out) in engram.refusal("run", "--resume", out)
    assert files_in(out) == {name: content.encode()}


def test_scenario_is_an_option_and_stands_in_the_title(engram: Command, tmp_path: Path) -> None:
    folder = tmp_path / "class"
    options = ("--methods", "finetune", "--scenario", "class", "--set", "max_samples=200", "--out", folder)
    outcome = engram("run", "split-mnist", *QUICK, *options)
    assert outcome.code == 0
    assert "split-mnist, class-incremental on mnist-small, 2 tasks, 1 trial" in " ".join(outcome.out.split())
    assert read_run(folder).configs["finetune"].scenario == "class"
    refused = engram.refusal("run", "split-mnist", *QUICK, "--scenario", "clas", "--out", tmp_path / "none")
    assert refused == "engram: scenario must be task, domain or class, not 'clas' (did you mean class?)"
    assert not (tmp_path / "none").exists()
