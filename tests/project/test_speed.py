"""`benchmarks/speed.py`: what is measured, how times become ratios, and the record that it leaves."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import contestants as others
import pytest
import timing
import torch
from record import Findings, Plan, Speed, memory_table, speed_table, to_markdown
from speed import COMPILED, FLOOR, MIX, PLAIN, Bench, main, measure_speed
from timing import FEWEST_ROUNDS, ROUNDS, Contestant, Timing, busy_notes, measure
from workloads import HEADS, PENALTIES, WORKLOADS, memory_of

from engram.common.errors import InputError
from engram.config.paper import PAPER_METHODS

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def found() -> Findings:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "ROUNDS", 3)
        plan = {"networks": ("mlp",), "sizes": (1, 2), "penalties": ("none", "si")}
        return measure_speed(Plan(device="cpu", seconds=0.01, compiled=False, **plan))


# --- what is measured


def test_every_head_and_penalty_is_measured_with_floor_and_plain_loop(found: Findings) -> None:
    alone = {speed.name for speed in found.speeds if speed.size == 1}
    assert {FLOOR, PLAIN} < alone
    assert {f"engram {head}, {penalty}" for head in HEADS for penalty in ("none", "si")} < alone
    assert [speed.name for speed in found.speeds if speed.size == 2] == [MIX]


def test_ratios_follow_from_the_times(found: Findings) -> None:
    floor_ms, plain_ms = found.speed("mlp", FLOOR).ms, found.speed("mlp", PLAIN).ms
    for speed in found.speeds:
        if speed.size == 1:
            assert speed.to_floor == pytest.approx(speed.ms / floor_ms)
            assert speed.to_plain == pytest.approx(speed.ms / plain_ms)
    several = Speed("mlp", MIX, 8, Timing((0.016,) * 3), floor_ms=12.8, plain_ms=2.5)
    assert (several.ms, several.us_per_model, several.to_floor, several.to_plain) == pytest.approx(
        (16, 2000, 1.25, 0.8)
    )


def test_floor_counts_products_of_forward_and_backward_passes() -> None:
    weights = (784 * 400, 400 * 400, 400 * 10)
    assert others.flops_of(WORKLOADS["mlp"]) == 64 * 2 * (3 * sum(weights) - weights[0])
    convolutions = (28 * 28 * 20 * 75, 10 * 10 * 50 * 500)
    linear = (1250 * 500, 500 * 50)
    assert others.flops_of(WORKLOADS["cnn"]) == 32 * 2 * (3 * sum(convolutions + linear) - convolutions[0])


def test_floor_of_a_stack_counts_the_memory_traffic() -> None:
    mlp = WORKLOADS["mlp"]
    weights = (784 * 400, 400 * 400, 400 * 10)
    plain = 4 * (4 * sum(weights) - weights[0])
    assert others.traffic_of(mlp, [mlp.config("linear", "none")], 4) == plain
    assert others.traffic_of(mlp, [mlp.config("linear", "mas")], 4) == plain + 4 * 2 * sum(weights)
    assert others.traffic_of(mlp, [mlp.config("dhp", "si")] * 3, 4) == 3 * (plain + 4 * 4 * sum(weights))
    wide = WORKLOADS["mlp-adam"]
    weights = (1024 * 1000, 1000 * 1000, 1000 * 10)
    with_m_and_v = 4 * ((4 + 4) * sum(weights) - weights[0])
    assert others.traffic_of(wide, [wide.config("linear", "none")] * 2, 4) == 2 * with_m_and_v


@pytest.mark.parametrize("name", WORKLOADS)
def test_floor_and_plain_loop_have_the_same_products(name: str) -> None:
    """By the operations that PyTorch itself counts."""
    from torch.utils.flop_counter import FlopCounterMode

    workload = WORKLOADS[name]
    counted = {}
    for kind, make in (("floor", others.floor_of_one), ("plain", others.plain_loop)):
        take = make(workload, CPU, torch.float32)
        with FlopCounterMode(display=False) as counter:
            take(1)
        counted[kind] = counter.get_total_flops()
    assert counted["floor"] == counted["plain"] == others.flops_of(workload)


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize(("name", "head"), [*(("mlp", head) for head in HEADS), ("cnn", "dhp"), ("mlp-adam", "linear")])
def test_penalties_act(name: str, head: str, penalty: str) -> None:
    workload = WORKLOADS[name]
    config = workload.config(head, penalty)
    assert config.plastic == (head == "dhp")
    learner = workload.learner(config, 0, CPU, torch.float32)
    assert (learner.penalty.pull(0.01) is not None) == (penalty != "none")


def test_mixed_stack_holds_the_papers_methods_trial_after_trial() -> None:
    models = WORKLOADS["mlp"].mixed(80, PENALTIES)
    assert [config.method for config, _ in models[:8]] == list(PAPER_METHODS)
    assert [trial for _, trial in models] == [k // 8 for k in range(80)]
    wide = WORKLOADS["mlp-adam"].mixed(80, PENALTIES)
    assert [config.method for config, _ in wide[:4]] == [method for method in PAPER_METHODS if "dhp" not in method]


@pytest.mark.parametrize(
    ("penalties", "mixed"), [(("none", "si", "mas", "online-ewc"), True), (("none", "si", "mas"), False)]
)
def test_mixed_stack_has_whole_trials(penalties: tuple[str, ...], mixed: bool) -> None:
    bench = Bench(Plan("cpu", sizes=(80,), penalties=penalties), CPU, torch.float32)
    assert (MIX in bench._stacks(WORKLOADS["mlp"], 80)) == mixed


def test_memory_counts_each_tensor_once() -> None:
    mlp = WORKLOADS["mlp"]
    si = mlp.learner(mlp.config("dhp", "si"), 0, CPU, torch.float32)
    weights = 4 * sum(theta.numel() for theta in si.penalty.parameters.values())
    held = memory_of([si])
    assert held.parameters == weights + 4 * (4000 + 1)  # α and η
    assert held.traces == 4 * 4000
    assert (held.importances, held.anchors, held.pulls) == (weights, weights, 2 * weights)
    assert held.paths == 2 * weights  # the path and its start; before the first step the weights before it are the same
    assert held.total == held.parameters + held.traces + 6 * weights


# --- times


def test_contestants_take_turns_and_slow_ones_take_fewer() -> None:
    turns: list[str] = []

    def contestant(name: str, seconds: float) -> Contestant:
        def take(num_steps: int) -> float:
            turns.append(name)
            return seconds * num_steps

        return Contestant(name, 1, take)

    quick, slow = measure([contestant("quick", 1e-6), contestant("slow", 1.0)], 0.5)
    assert (len(quick.rounds), len(slow.rounds)) == (ROUNDS, FEWEST_ROUNDS)
    assert turns[4:8] == ["quick", "slow", "quick", "slow"]  # after warming up
    assert (quick.seconds, slow.seconds) == pytest.approx((1e-6, 1.0))


def test_a_few_slow_rounds_do_not_count() -> None:
    disturbed = Timing((1.0,) * 10 + (9.0,) * 5)
    assert disturbed.seconds == 1.0
    assert disturbed.spread == 0.0


# --- torch.compile


def test_compiled_loop_takes_the_same_steps_as_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    monkeypatch.setattr(torch, "compile", lambda function: given.append(function) or function)
    assert others.plain_loop(WORKLOADS["mlp-adam"], CPU, torch.float32, compiled=True)(1) > 0
    assert len(given) == 2  # the loss, and the optimizer's step


def test_loop_that_cannot_be_compiled_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*batch: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no compiler\nbecause of this")

    monkeypatch.setattr(torch, "compile", lambda function: fail)
    plan = Plan("cpu", networks=("mlp",), sizes=(1,), penalties=("none",), seconds=0.001)
    bench = Bench(plan, CPU, torch.float32)
    assert bench._compiled(WORKLOADS["mlp"]) == []
    assert bench.found.notes[-1] == f"{COMPILED}, mlp: cannot compile here: no compiler"


# --- Avalanche


def test_missing_avalanche_is_noted(found: Findings) -> None:
    assert ("Avalanche: avalanche-lib is not installed" in found.notes) == (not others.avalanche_is_installed())


def test_broken_avalanche_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(others, "avalanche_is_installed", lambda: True)
    monkeypatch.setitem(sys.modules, "avalanche", None)
    monkeypatch.setitem(sys.modules, "avalanche.benchmarks", None)
    broken = measure_speed(
        Plan("cpu", networks=("mlp",), sizes=(1,), penalties=("none",), seconds=0.001, compiled=False)
    )
    assert broken.notes[-1].startswith("Avalanche: avalanche-lib is installed, but cannot be imported")


def test_busy_machine_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("os.getloadavg", lambda: (0.9, 9.0, 9.0), raising=False)
    assert busy_notes() == []
    monkeypatch.setattr("os.getloadavg", lambda: (3.25, 0.0, 0.0), raising=False)
    assert "a load of 3.2 on 2 cores" in busy_notes()[0]


# --- tables and records


def test_tables_show_every_row_and_what_the_dhp_head_costs(found: Findings) -> None:
    table = speed_table(found, "mlp")
    assert [row[0] for row in table.rows] == [speed.name for speed in found.speeds]
    assert re.search(
        r"over the plain head, stack of 1: [+-]\d+\.\d% \(none\), [+-]\d+\.\d% \(si\)\.", table.to_markdown()
    )
    assert len(memory_table(found).rows) == 7


def test_record_has_all_that_is_needed_to_repeat_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "records" / "today"
    command = ["--device", "cpu", "--networks", "mlp", "--sizes", "1", "--penalties", "none"]
    command += ["--no-compile", "--seconds", "0.001", "--out", str(out)]
    main(command)
    assert "mlp: time of a training step" in capsys.readouterr().out
    record = json.loads((out / "record.json").read_text())
    assert record["command"] == " ".join(["python benchmarks/speed.py", *command])
    assert record["hardware"]
    assert {"torch", "python", "engram"} <= set(record["versions"])
    rows = {row["name"]: row for row in record["speeds"]}
    assert rows[PLAIN]["to_floor"] == pytest.approx(rows[PLAIN]["ms"] / rows[FLOOR]["ms"])
    text = (out / "README.md").read_text()
    assert record["command"] in text
    assert "| engram dhp, none | 1 |" in text
    with pytest.raises(SystemExit):
        main(command)
    assert "holds a record already" in capsys.readouterr().err


def test_markdown_names_command_hardware_and_versions() -> None:
    about = {
        "date": "2025-01-31",
        "hardware": "a GPU",
        "command": "python benchmarks/speed.py",
        "threads": 1,
        "versions": {"torch": "2"},
    }
    assert to_markdown(about, []).startswith(
        "# 2025-01-31: a GPU\n\n```\npython benchmarks/speed.py\n```\n\n1 CPU thread(s); torch 2.\n"
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"networks": ("mpl",)}, "there is no network 'mpl' (did you mean mlp?)"),
        ({"penalties": ("l2",)}, "there is no penalty 'l2'"),
        ({"sizes": (1, 0)}, "at least 1, not 0"),
        ({"sizes": (8, 8)}, "each once"),
        ({"sizes": ()}, "give at least one of the sizes"),
        ({"seconds": 0}, "above 0"),
        ({"seconds": float("nan")}, "above 0"),
    ],
)
def test_bad_plan_is_refused(changes: dict, says: str) -> None:
    with pytest.raises(InputError, match=re.escape(says)):
        Plan(**changes)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--networks", "rnn"),
        ("--sizes", "0"),
        ("--sizes", "one"),
        ("--penalties", ""),
        ("--seconds", "-1"),
        ("--device", "tpu"),
        ("--precision", "half"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_measured(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert ended.value.code == 2
    assert "speed.py: error: " in capsys.readouterr().err.splitlines()[-1]
