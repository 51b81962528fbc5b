"""float16 with a GradScaler, and clipping: SI gets the factor by which the loss was scaled."""

import torch
from digits import show
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

STRENGTH = 2.0
DEVICE = "cpu"  # or "cuda"

scaler = torch.amp.GradScaler(DEVICE)


def optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=0.001)


def learn(model, penalty, optimizer, batches):
    for inputs, targets in batches:
        with torch.autocast(DEVICE, dtype=torch.float16):
            logits = model(inputs, targets)
        loss = cross_entropy(logits, targets) + penalty.loss()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        penalty.after_backward(scale=scaler.get_scale())  # before the gradients are unscaled and clipped
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), max_norm=1.0)
        scaler.step(optimizer)  # skips the step if there are infinities
        scaler.update()
        penalty.after_step()


if __name__ == "__main__":
    show("float16 with a scaler", learn, optimizer, STRENGTH)
