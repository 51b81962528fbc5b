"""Gradients clipped by their norm: SI reads the task's gradient before they are clipped."""

import torch
from digits import show
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

STRENGTH = 20.0


def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.05)


def learn(model, penalty, optimizer, batches):
    for inputs, targets in batches:
        loss = cross_entropy(model(inputs, targets), targets) + penalty.loss()
        optimizer.zero_grad()
        loss.backward()
        penalty.after_backward()  # before the gradients are changed
        clip_grad_norm_(model.parameters(), max_norm=0.5)
        optimizer.step()
        penalty.after_step()


if __name__ == "__main__":
    show("clipped gradients", learn, optimizer, STRENGTH)
