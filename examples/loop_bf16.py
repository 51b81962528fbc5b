"""bfloat16 by autocast: features are rounded, the trace and the penalty stay in float32."""

import torch
from digits import show
from torch.nn.functional import cross_entropy

STRENGTH = 2.0
DEVICE = "cpu"  # or "cuda"


def optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=0.001)


def learn(model, penalty, optimizer, batches):
    for inputs, targets in batches:
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            logits = model(inputs, targets)
        loss = cross_entropy(logits, targets) + penalty.loss()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        penalty.after_step()


if __name__ == "__main__":
    show("bfloat16", learn, optimizer, STRENGTH)
