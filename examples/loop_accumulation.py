"""Gradient accumulation: four small batches per step, each of which writes the trace."""

import torch
from digits import show
from torch.nn.functional import cross_entropy

STRENGTH = 10.0
PARTS = 4


def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def learn(model, penalty, optimizer, batches):
    optimizer.zero_grad()
    for i, (inputs, targets) in enumerate(batches, start=1):
        loss = cross_entropy(model(inputs, targets), targets) + penalty.loss()
        (loss / PARTS).backward()
        if i % PARTS == 0:
            optimizer.step()
            penalty.after_step()
            optimizer.zero_grad()


if __name__ == "__main__":
    show("four batches per step", learn, optimizer, STRENGTH)
