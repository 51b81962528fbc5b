"""Data parallel training is the same function: two ranks with shares of each batch equal one process with the whole."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_ranks import CASES, HEADS, NUM_RANKS, NUM_SAMPLES, Case, example, learn, own_rows
from torch import Tensor, nn

from engram.nn.distributed import bare, ranks_of, ranks_of_call

here = torch.distributed.is_available() and torch.distributed.is_gloo_available()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not here, reason="needs torch.distributed")]

SCRIPT = Path(__file__).parent / "parallel_ranks.py"
CLOSE = {"rtol": 1e-12, "atol": 1e-12}
SECONDS = 240  # after which ranks that wait for each other are an error


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two ranks found, each in its process; started once, also where several workers run the tests."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "ranks"
    try:
        folder.mkdir()
    except FileExistsError:
        wait_for(folder / "ended")
    else:
        start_ranks(folder)
    assert not (said := (folder / "ended").read_text()), said
    return [torch.load(folder / f"rank {rank}.pt") for rank in range(NUM_RANKS)]


def start_ranks(folder: Path) -> None:
    """Leaves a file that is empty when all went well."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    commands = [[sys.executable, str(SCRIPT), str(rank), str(folder)] for rank in range(NUM_RANKS)]
    outputs = [folder / f"rank {rank}.txt" for rank in range(NUM_RANKS)]
    processes = []
    for command, path in zip(commands, outputs, strict=True):
        with path.open("w") as output:
            processes.append(subprocess.Popen(command, stdout=output, stderr=output, env=environment))
    try:
        codes = [process.wait(timeout=SECONDS) for process in processes]
    except subprocess.TimeoutExpired:
        codes = [1]
    finally:
        for process in processes:
            process.kill()
    said = "\n".join(path.read_text() for path in outputs) if any(codes) else ""
    (folder / "ended.part").write_text(said)
    (folder / "ended.part").replace(folder / "ended")


def wait_for(path: Path) -> None:
    until = time.monotonic() + SECONDS + 10
    while not path.exists():
        assert time.monotonic() < until, "the ranks did not end"
        time.sleep(0.2)


def tensors_of(seen: dict[str, Any], kinds: tuple[str, ...] = ("model ", "penalty ")) -> dict[str, Tensor]:
    return {name: value for name, value in seen.items() if name.startswith(kinds)}


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_equal_one_process(name: str, ranks: list[dict[str, Any]]) -> None:
    case = CASES[name]
    whole = learn(replace(case, compiled=""), None)
    for rank, seen in enumerate(found[name] for found in ranks):
        torch.testing.assert_close(tensors_of(seen), tensors_of(whole), **CLOSE)
        for task in range(2):
            for i in range(4):
                rows = whole[f"logits {task} {i} None"][own_rows(case, i, rank)]
                torch.testing.assert_close(seen[f"logits {task} {i} {rank}"], rows, **CLOSE)
            if rank == 0:
                torch.testing.assert_close(seen[f"evaluated {task}"], whole[f"evaluated {task}"], **CLOSE)


@pytest.mark.parametrize("name", CASES)
def test_ranks_agree_bit_for_bit(name: str, ranks: list[dict[str, Any]]) -> None:
    first, second = (tensors_of(found[name]) for found in ranks)
    assert first.keys() == second.keys()
    assert [key for key in first if not torch.equal(first[key], second[key])] == []


def test_the_cases_are_what_they_are_called() -> None:
    assert {case.head for case in CASES.values()} == set(HEADS)
    etas = learn(CASES["head at the edge"], None)["etas"]
    assert max(etas) > 1  # before it is projected back
    assert own_rows(CASES["uneven"], 1, 1) == slice(NUM_SAMPLES, None)  # no samples at all
    assert (
        learn(CASES["clipped"], None)["model head.weight"]
        .ne(learn(Case(penalty="SI"), None)["model head.weight"])
        .any()
    )


# --- these comparisons can fail ------------------------------------------------------------------------------------


def test_traces_of_one_rank_alone_would_be_others(ranks: list[dict[str, Any]]) -> None:
    whole = learn(Case(), None)
    for found in ranks:
        assert not torch.allclose(found["traces of one rank"]["model head.hebb"], whole["model head.hebb"], rtol=1e-3)
        weight = "model features.0.weight"
        assert not torch.allclose(found["traces of one rank"][weight], whole[weight], rtol=1e-6)


def test_importances_of_one_rank_alone_would_be_others(ranks: list[dict[str, Any]]) -> None:
    first, second = (found["importances of one rank"]["model head.weight"] for found in ranks)
    assert not torch.allclose(first, second, rtol=1e-6)  # and the weights would go apart


# --- the example ---------------------------------------------------------------------------------------------------


def test_the_example_learns_the_same_on_two_ranks(ranks: list[dict[str, Any]]) -> None:
    first, second = (found["example"] for found in ranks)
    assert first == second
    for row, whole in zip(first, example(), strict=True):
        assert row == pytest.approx(whole, abs=0.02)  # in float32, of 200 digits


# --- what is refused, and what is left alone -----------------------------------------------------------------------


def test_a_call_past_the_wrapper_is_refused(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        for way in ("past the wrapper", "past the wrapper later"):
            assert "called past the DistributedDataParallel around it" in found[way]


def test_an_eta_without_gradient_is_refused(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert "learn_eta=False" in found["eta without gradient"]


def test_averaging_is_allowed_but_clipping_needs_after_backward(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert "after_backward" in found["clipping not announced"]


def test_no_samples_on_any_rank_are_refused_on_all(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert "batches is empty" in found["no samples"]


def test_a_compiled_model_that_one_rank_trains_alone_is_not_shared(ranks: list[dict[str, Any]]) -> None:
    whole = learn(Case(penalty="OnlineEWC"), None)
    torch.testing.assert_close(tensors_of(ranks[1]["alone"]), tensors_of(whole), **CLOSE)


def test_drawn_labels_give_the_same_importances_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    first, second = (tensors_of(found["sampled"]) for found in ranks)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    importance = first["penalty terms.1.importance.head.weight"]
    assert importance.gt(0).all()
    assert not torch.allclose(importance, ranks[0]["exact EWC"]["penalty terms.1.importance.head.weight"])


def test_files_and_folding_see_the_model_itself(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        slow = ["features.0.weight", "features.0.bias", "features.2.weight", "features.2.bias", "head.weight"]
        assert found["wrapped"] == {"folded": slow, "names": slow}


def test_one_process_has_no_ranks() -> None:
    model = nn.Linear(2, 2)
    assert ranks_of(model) is None
    assert ranks_of_call(model) is None
    assert bare(model) is model
