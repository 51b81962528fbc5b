"""`benchmarks/trace_size.py`: what a network loses without its trace."""

from __future__ import annotations

import torch
import trace_size

from builders import custom_stream
from engram import preset
from engram.engine.build import build_learner
from engram.engine.cpu.program import OneByOne
from engram.engine.program import Batches


def test_a_network_whose_trace_does_the_work_loses_it_and_one_without_a_trace_loses_nothing() -> None:
    stream = custom_stream(num_tasks=1)
    config = preset("custom", "dhp", num_tasks=1, hidden=[16])
    cpu, single = torch.device("cpu"), torch.float32
    learners = [build_learner(config, trial, stream.input_shape, 3, cpu, single) for trial in (0, 1)]
    by_trace, by_weights = (trace_size.head_of(learner) for learner in learners)
    for head, learner in ((by_trace, learners[0]), (by_weights, learners[1])):
        features = learner.model.features(stream[0].train.inputs)
        means = torch.stack([features[stream[0].train.targets == c].mean(dim=0) for c in range(3)]).detach()
        centred = means - means.mean(dim=0)
        torch.nn.init.ones_(head.alpha)
        (head.hebb if head is by_trace else head.weight.data).copy_(centred)
    with torch.no_grad():
        by_trace.weight.fill_(1e-3)
    program = OneByOne(learners, Batches([0, 1], [stream] * 2, 0, single))
    (large, before, after), (none, kept, same) = trace_size.without_trace(program, 1)
    assert large > 10
    assert before > after + 30
    assert none == 0
    assert kept == same > 80
