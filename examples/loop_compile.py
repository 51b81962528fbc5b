"""torch.compile: model and head as one graph, with the same results."""

import os

import torch
from digits import show
from torch.nn.functional import cross_entropy

STRENGTH = 10.0
BACKEND = os.environ.get("BACKEND", "inductor")  # which needs a C++ compiler; aot_eager does not

compiled = {}


def optimizer(model):
    compiled[model] = torch.compile(model, backend=BACKEND, fullgraph=True)
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def learn(model, penalty, optimizer, batches):
    for inputs, targets in batches:
        loss = cross_entropy(compiled[model](inputs, targets), targets) + penalty.loss()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        penalty.after_step()


if __name__ == "__main__":
    show("compiled", learn, optimizer, STRENGTH)
