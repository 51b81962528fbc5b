"""Adam: the optimizer chooses the size of its steps, and SI follows the path that the weights really take."""

import torch
from digits import show
from torch.nn.functional import cross_entropy

STRENGTH = 2.0


def optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=0.001)


def learn(model, penalty, optimizer, batches):
    for inputs, targets in batches:
        loss = cross_entropy(model(inputs, targets), targets) + penalty.loss()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        penalty.after_step()


if __name__ == "__main__":
    show("Adam", learn, optimizer, STRENGTH)
