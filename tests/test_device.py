"""A GPU computes what the CPU does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engram import preset
from engram.config import METHODS
from engram.data.samples import Dataset
from engram.data.sources import load
from engram.experiment import Setting, run_on

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_gpu
@pytest.mark.parametrize("penalty_step", ["gradient", "proximal"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_alike_on_the_gpu(method: str, penalty_step: str) -> None:
    digits = load("mnist-small")
    few = Dataset(digits.name, digits.train[slice(2000)], digits.test[slice(400)], digits.origin)
    config = preset("split-mnist", method, dataset="mnist-small", num_tasks=3, epochs=2, hidden=[32], trials=1)
    config = config.replace(penalty_step=penalty_step)
    on_cpu, on_gpu = (run_on([config], [few], Setting(device, "float32"))[0] for device in ("cpu", "cuda"))
    losses = [[row["loss"] for row in result.dynamics] for result in (on_cpu, on_gpu)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-3)
    np.testing.assert_allclose(on_cpu.accuracy, on_gpu.accuracy, atol=0.02)


@needs_gpu
def test_the_cnn_trains_on_the_gpu() -> None:
    digits = load("mnist-small")
    few = Dataset(digits.name, digits.train[slice(640)], digits.test[slice(200)], digits.origin)
    config = preset("vision-mixture", "dhp+mas", num_tasks=2, epochs=1, trials=1)
    on_cpu, on_gpu = (run_on([config], [few, few], Setting(device, "float32"))[0] for device in ("cpu", "cuda"))
    losses = [[row["loss"] for row in result.dynamics] for result in (on_cpu, on_gpu)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-2)
