"""`benchmarks/bounded_eta.py`: the paper's layer with η below a bound."""

from __future__ import annotations

import bounded_eta

import engram


def test_eta_stays_below_its_bound_and_a_bound_that_is_never_reached_changes_nothing() -> None:
    small = {"dataset": "mnist-small", "trials": 1, "epochs": 2, "num_tasks": 2, "max_samples": 300, "batch_size": 20}
    config = engram.preset(
        "permuted-mnist", "dhp+online-ewc", eta=0.125, head_init="linear", learning_rate=0.1, **small
    )
    results = bounded_eta.with_bounds(config, [0.125, 1])
    usual = engram.run(config, device="cpu", precision="float32", progress=False)
    bounded, free = ([row["eta"] for row in results[f"η at most {bound}"].dynamics] for bound in (0.125, 1))
    assert free == [row["eta"] for row in usual.dynamics]
    assert max(free) > 0.125
    assert max(bounded) <= 0.125
    assert results["η at most 1"].dynamics[-1]["loss"] == usual.dynamics[-1]["loss"]
