"""Data parallel training: each process has a part of every batch, and all take the steps of one process with all of it.

torchrun --nproc-per-node 2 examples/loop_torchrun.py
"""

import os

import torch
import torch.distributed as dist
from digits import show
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

STRENGTH = 10.0

parallel = {}


def optimizer(model):
    parallel[model] = DistributedDataParallel(model) if dist.is_initialized() else model
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def own_part(batch):
    """All processes draw the same batches here, and each takes its part; a DistributedSampler draws only the part."""
    return batch[dist.get_rank() :: dist.get_world_size()] if dist.is_initialized() else batch


def learn(model, penalty, optimizer, batches):
    for inputs, targets in batches:
        inputs, targets = own_part(inputs), own_part(targets)
        loss = cross_entropy(parallel[model](inputs, targets), targets) + penalty.loss()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        penalty.after_step()


if __name__ == "__main__":
    if "RANK" in os.environ:  # torchrun started this
        dist.init_process_group()
    try:
        show("data parallel", learn, optimizer, STRENGTH, quiet=os.environ.get("RANK", "0") != "0")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
