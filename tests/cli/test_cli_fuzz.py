"""Whatever is typed after `engram`: it runs, or it is refused with exit code 2 and one sentence; never a traceback."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pooch
import pytest
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engram.cli.main import app, main
from engram.data import download
from engram.reproduction import run as reproductions
from engram.runs import start as runs
from engram.runs.sweep import run as sweeps

NASTY = (
    *("", " ", "-", "--", "0", "1", "-1", "2", "1.5", "nan", "inf", "-inf", "1e400", "9" * 30, "9" * 5000, "0x10"),
    *(
        "é",
        "\u202e",
        "\x1b[31m",
        "\n",
        "\udcff",
        "x" * 5000,
        "[bold]",
        "{}",
        "%s",
        "$HOME",
        "*",
        "a,b",
        ",",
        "=",
        "a=b",
    ),
    *(".", "..", "/dev", "~", "missing", "missing/deep", "file", "file/below", "empty", "/dev/null", "config.toml"),
    *("split-mnist", "permuted-mnist", "vision-mixture", "mnist-small", "mnist", "all", "dhp", "si,dhp+si", "si,si"),
    *("auto", "cpu", "cuda:99", "meta", "cpu:x", "float32", "tf32", "table", "study", "markdown", "csv", "png,,csv"),
    *("mlp", "cnn", "none", "1,8", "tensorboard", "x.json", "epochs=1", "epochs=1.5", "epochs=[", "hidden=[1]"),
    *("hidden=[]", "hidden=[1000000000]", "hidden=[-1]", "seed=-1", "seed=1e30", "batch_size=0", "mlflow"),
    *("method=si", "wandb"),
    *("strength=NaN", "eta=2", "num_tasks=9999", "trials=999999", "trials=10000000", "max_samples=" + "9" * 30),
    *("batch_size=" + "9" * 30, "epochs=" + "9" * 30, "first_trial=" + "9" * 30, "imbalance_seed=" + "9" * 30),
)


class Reached(Exception):
    """All was checked, and the long work would begin."""


def commands() -> dict[str, Any]:
    """Every command that the app has, by its words."""
    found = {}
    whole = typer.main.get_command(app)
    for name, command in whole.commands.items():
        for inner, deeper in getattr(command, "commands", {"": command}).items():
            found[f"{name} {inner}".strip()] = deeper
    return found


COMMANDS = commands()


@st.composite
def arguments(draw: st.DrawFn, command: Any) -> list[str]:
    """The command's own options and arguments, in any order and number, with values that may be anything."""
    value = st.one_of(
        st.sampled_from(NASTY), st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)
    )
    pieces: list[list[str]] = []
    for parameter in draw(st.lists(st.sampled_from(command.params), max_size=5)):
        if parameter.param_type_name == "argument":
            pieces.append([draw(value)])
        elif getattr(parameter, "is_flag", False):
            pieces.append([parameter.opts[0]])
        else:
            name, given_value = parameter.opts[0], draw(value)
            pieces.append(draw(st.sampled_from([[name, given_value], [f"{name}={given_value}"], [name]])))
    if draw(st.booleans()):
        pieces.append([draw(st.one_of(value, st.sampled_from(["--help", "--unknown", "-x", "--", "--set="])))])
    return [word for piece in draw(st.permutations(pieces)) for word in piece]


@pytest.fixture(scope="module", autouse=True)
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A folder to work in, no network, and long work that says only that it was reached."""

    def reached(*given: object, **named: object) -> None:
        raise Reached

    def offline(*given: object, **named: object) -> None:
        raise OSError("there is no network")

    folder = tmp_path_factory.mktemp("work")
    (folder / "empty").mkdir()
    (folder / "file").write_text("mine")
    (folder / "config.toml").write_text('benchmark = "split-mnist"\nmethod = "dhp"\ndataset = "mnist-small"\n')
    (folder / "x.json").write_text('{"benchmark": 3}')
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delenv("ENGRAM_DATA", raising=False)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setattr(runs, "start_run", reached)
        patch.setattr(reproductions, "run_reproduction", reached)
        patch.setattr(sweeps, "run_sweep", reached)
        patch.setattr(pooch, "retrieve", offline)
        patch.setattr(download.time, "sleep", lambda seconds: None)
        yield


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_command_line_ends_in_one_sentence(name: str, data: st.DataObject) -> None:
    given_words = [*name.split(), *data.draw(arguments(COMMANDS[name]))]
    out, err = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as stopped:
            main(given_words)
    except Reached:
        return
    said = err.getvalue()
    assert "Traceback" not in said + out.getvalue()
    if stopped.value.code in (0, None):
        assert said == ""
        return
    assert stopped.value.code == 2
    assert said.startswith("engram: ")
    assert said.count("\n") == 1
    assert said.rstrip("\n").isprintable(), said
    assert len(said) < 2000


def test_every_command_is_typed() -> None:
    assert set(COMMANDS) == {
        *("run", "sweep", "reproduce", "table", "figures", "report", "predict"),
        *("data list", "data fetch", "data check"),
        *("runs list", "runs show", "runs compare", "runs export"),
    }


def test_valid_arguments_are_accepted() -> None:
    words = ["run", "split-mnist", "--dataset", "mnist-small", "--trials", "1", "--out", str(Path("new") / "run")]
    with pytest.raises(Reached):
        main(words)
    with pytest.raises(Reached):
        main(["reproduce", "--quick", "--benchmark", "split-mnist"])
