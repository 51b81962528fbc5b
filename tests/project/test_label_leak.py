"""`benchmarks/label_leak.py`: a layer that reads the labels of its own batch is told from one that does not."""

from __future__ import annotations

import label_leak
import torch
from torch import nn

from engram import DHPSoftmax


def test_labels_leak_where_the_trace_is_the_batch_and_large_and_not_where_nothing_is_written() -> None:
    torch.manual_seed(0)
    inputs, labels = torch.randn(200, 64), torch.randint(10, (200,))
    leaking, sound = DHPSoftmax(64, 10, eta=1.0), DHPSoftmax(64, 10, eta=0.0)
    for head in (leaking, sound):
        nn.init.constant_(head.alpha, 1.0)
    before = leaking.hebb.clone()
    assert label_leak.agreement(nn.Identity(), leaking, inputs, labels) > 0.9
    assert label_leak.agreement(nn.Identity(), sound, inputs, labels) < 0.25
    assert torch.equal(leaking.hebb, before), "a copy is written to"
