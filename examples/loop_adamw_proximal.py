"""AdamW with the proximal step, not the penalty in the loss: stable for importances of any size."""

import torch
from digits import show
from torch.nn.functional import cross_entropy

STRENGTH = 1000.0


def optimizer(model):
    # weight decay pulls weights to zero, consolidation to their anchors: the plastic head has no decay
    slow = [theta for name, theta in model.named_parameters() if not name.startswith("head.")]
    head = list(model.head.parameters())
    return torch.optim.AdamW([{"params": slow}, {"params": head, "weight_decay": 0.0}], lr=0.001)


def learn(model, penalty, optimizer, batches):
    for inputs, targets in batches:
        loss = cross_entropy(model(inputs, targets), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        penalty.proximal_step(optimizer)
        penalty.after_step()


if __name__ == "__main__":
    show("AdamW with the proximal step", learn, optimizer, STRENGTH)
