"""The simplest loop: SGD with momentum, with the penalty in the loss."""

import torch
from digits import show
from torch.nn.functional import cross_entropy

STRENGTH = 10.0


def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def learn(model, penalty, optimizer, batches):
    for inputs, targets in batches:
        loss = cross_entropy(model(inputs, targets), targets) + penalty.loss()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        penalty.after_step()


if __name__ == "__main__":
    show("SGD with momentum", learn, optimizer, STRENGTH)
