"""The reference methods once more, each as a plain loop over samples, to compare the engine with."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.config.settings import Config
from engram.data.batches import epoch_order
from engram.data.samples import Stream
from engram.engine.rehearsal import draw


class Plain:
    """One model on a stream, with lists and loops; `step` of a method gets (x, y, numbers)."""

    def __init__(self, config: Config, model: nn.Module, stream: Stream):
        self.config, self.model, self.stream = config, model, stream
        self.optimizer = torch.optim.SGD(model.parameters(), lr=config.learning_rate)
        self.memory: list[tuple[Tensor, int, int, Tensor]] = []  # input, label, task, logits
        self.offered = 0
        self.teacher: nn.Module | None = None
        self.n = 0

    def allowed(self, k: int, n: int) -> list[int]:
        """The outputs of a sample of task k while task n is learned."""
        own, now = self.stream[k].taught, self.stream[n].taught
        return list(now if set(own) <= set(now) else own)

    def cross_entropy(self, logits: Tensor, label: int, k: int) -> Tensor:
        outputs = self.allowed(k, self.n)
        return F.cross_entropy(logits[outputs][None], torch.tensor([outputs.index(label)]))

    def mean(self, logits: Tensor, targets: Tensor) -> Tensor:
        rows = [self.cross_entropy(z, int(y), self.n) for z, y in zip(logits, targets, strict=True)]
        return torch.stack(rows).mean()

    def distillation(self, logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        parts = []
        for now, then in dict.fromkeys(
            (tuple(self.allowed(k, self.n)), tuple(self.allowed(k, self.n - 1))) for k in range(self.n)
        ):
            total = torch.zeros(())
            for z, t in zip(logits, teacher, strict=True):
                log_p = (z[list(now)] / temperature).log_softmax(0)
                q = (t[list(then)] / temperature).softmax(0)
                total = total - temperature**2 * sum(q[i] * log_p[now.index(c)] for i, c in enumerate(then))
            parts.append(total / len(logits))
        return torch.stack(parts).mean()

    def offer(self, x: Tensor, y: Tensor, logits: Tensor, uniform: Tensor) -> None:
        """Algorithm R."""
        for one, label, z, u in zip(x, y.tolist(), logits.detach(), uniform.tolist(), strict=True):
            self.offered += 1
            entry = (one, label, self.n, z)
            if len(self.memory) < self.config.memory_size:
                self.memory.append(entry)
            elif (place := math.floor(u * self.offered)) < self.config.memory_size:
                self.memory[place] = entry

    def batches(self) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        config, task = self.config, self.stream[self.n]
        for epoch in range(config.epochs):
            order = epoch_order(task.train, config.seed, 0, self.n, epoch)
            for step, rows in enumerate(order.split(config.batch_size)):
                yield epoch, step, task.train.inputs[rows].double(), task.train.targets[rows]

    def descend(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


Step = Callable[[Plain, int, int, Tensor, Tensor, dict[str, Tensor]], None]


def replay(plain: Plain, epoch: int, step: int, x: Tensor, y: Tensor, random: dict[str, Tensor]) -> None:
    logits = plain.model(x, y)
    loss = plain.mean(logits, y)
    if plain.memory:
        chosen = [plain.memory[math.floor(u * len(plain.memory))] for u in random["read"].tolist()]
        old = [plain.cross_entropy(plain.model(x[None], None)[0], label, k) for x, label, k, _ in chosen]
        loss = loss / 2 + torch.stack(old).mean() / 2
    plain.descend(loss)
    if epoch == 0:
        plain.offer(x, y, logits, random["write"])


def der(plain: Plain, epoch: int, step: int, x: Tensor, y: Tensor, random: dict[str, Tensor]) -> None:
    logits = plain.model(x, y)
    loss = plain.mean(logits, y)
    if plain.memory:
        squares, labels = [], []
        for u in random["read"].tolist():
            one, _, k, then = plain.memory[math.floor(u * len(plain.memory))]
            outputs = plain.allowed(k, plain.n)
            squares.append(F.mse_loss(plain.model(one[None], None)[0][outputs], then[outputs]))
        for u in random["read labels"].tolist():
            one, label, k, _ = plain.memory[math.floor(u * len(plain.memory))]
            labels.append(plain.cross_entropy(plain.model(one[None], None)[0], label, k))
        loss = loss + plain.config.der_alpha * torch.stack(squares).mean()
        loss = loss + plain.config.der_beta * torch.stack(labels).mean()
    plain.descend(loss)
    plain.offer(x, y, logits, random["write"])


def agem(plain: Plain, epoch: int, step: int, x: Tensor, y: Tensor, random: dict[str, Tensor]) -> None:
    parameters = list(plain.model.parameters())
    logits = plain.model(x, y)
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(plain.mean(logits, y), parameters)])
    earlier = [entry for entry in plain.memory if entry[2] < plain.n]
    if earlier:
        chosen = [earlier[math.floor(u * len(earlier))] for u in random["read"].tolist()]
        old = [plain.cross_entropy(plain.model(x[None], None)[0], label, k) for x, label, k, _ in chosen]
        reference = torch.cat([g.flatten() for g in torch.autograd.grad(torch.stack(old).mean(), parameters)])
        if gradient @ reference < 0:
            gradient = gradient - (gradient @ reference) / (reference @ reference) * reference
    for theta, part in zip(parameters, gradient.split([p.numel() for p in parameters]), strict=True):
        theta.grad = part.view_as(theta)
    plain.optimizer.step()
    if epoch == 0:
        plain.offer(x, y, logits, random["write"])


def lwf(plain: Plain, epoch: int, step: int, x: Tensor, y: Tensor, random: dict[str, Tensor]) -> None:
    logits = plain.model(x, y)
    loss = plain.mean(logits, y)
    if plain.teacher is not None:
        with torch.no_grad():
            teacher = plain.teacher(x, None)
        n = plain.n + 1
        loss = loss / n + (1 - 1 / n) * plain.distillation(logits, teacher, plain.config.distillation_temperature)
    plain.descend(loss)


def pseudo(plain: Plain, epoch: int, step: int, x: Tensor, y: Tensor, random: dict[str, Tensor]) -> None:
    config = plain.config
    loss = plain.mean(plain.model(x, y), y)
    if plain.teacher is not None:
        shape = (config.memory_size, *plain.stream.input_shape)
        made = draw({"inputs": shape}, config.seed, 0, plain.n - 1, -1, -1)["inputs"]
        inputs = made[(random["read"] * config.memory_size).long()]
        with torch.no_grad():
            teacher = plain.teacher(inputs, None)
        repeated = plain.distillation(plain.model(inputs, None), teacher, config.distillation_temperature)
        n = plain.n + 1
        loss = loss / n + (1 - 1 / n) * repeated
    plain.descend(loss)


def generative(plain: Plain, epoch: int, step: int, x: Tensor, y: Tensor, random: dict[str, Tensor]) -> None:
    def normal(name: str) -> Tensor:
        return torch.distributions.Normal(0.0, 1.0).icdf(random[name])

    def cost(inputs: Tensor, noise: Tensor) -> Tensor:
        own: Any = plain.model.get_submodule("generator")
        flat = inputs.flatten(1)
        hidden = own.encoder(flat)
        posterior = torch.distributions.Normal(own.mean(hidden), (own.log_variance(hidden) / 2).exp())
        means = own.decoder(posterior.mean + posterior.stddev * noise).sigmoid()
        likelihood = (flat * means.log() + (1 - flat) * (1 - means).log()).sum(dim=1)
        divergence = torch.distributions.kl_divergence(posterior, torch.distributions.Normal(0.0, 1.0)).sum(dim=1)
        return ((divergence - likelihood) / flat.shape[1]).mean()

    loss = plain.mean(plain.model(x, y), y) + cost(x, normal("encode"))
    if plain.teacher is not None:
        with torch.no_grad():
            inputs = plain.teacher.get_submodule("generator")(normal("decode"))
            teacher = plain.teacher(inputs, None)
        logits = plain.model(inputs, None)
        if plain.config.generator_labels == "soft":
            repeated = plain.distillation(logits, teacher, plain.config.distillation_temperature)
        else:
            parts = []
            for now, then in dict.fromkeys(
                (tuple(plain.allowed(k, plain.n)), tuple(plain.allowed(k, plain.n - 1))) for k in range(plain.n)
            ):
                labels = [now.index(then[int(t[list(then)].argmax())]) for t in teacher]
                parts.append(F.cross_entropy(logits[:, list(now)], torch.tensor(labels)))
            repeated = torch.stack(parts).mean()
        n = plain.n + 1
        loss = loss / n + (1 - 1 / n) * (repeated + cost(inputs, normal("again")))
    plain.descend(loss)


STEPS: dict[str, Step] = {
    "replay": replay,
    "der++": der,
    "a-gem": agem,
    "lwf": lwf,
    "pseudo-rehearsal": pseudo,
    "generative-replay": generative,
}


def shapes_of(config: Config, batch_size: int) -> dict[str, tuple[int, ...]]:
    """What each method draws, in this order."""
    read = config.rehearsal_batch or batch_size
    return {
        "replay": {"read": (read,), "write": (batch_size,)},
        "a-gem": {"read": (read,), "write": (batch_size,)},
        "der++": {"read": (read,), "write": (batch_size,), "read labels": (read,)},
        "lwf": {},
        "pseudo-rehearsal": {"read": (read,)},
        "generative-replay": {
            "encode": (batch_size, config.generator_latent),
            "decode": (read, config.generator_latent),
            "again": (read, config.generator_latent),
        },
    }[str(config.rehearsal)]


def learn(config: Config, model: nn.Module, stream: Stream) -> None:
    """Train a model on a stream by the method of its config."""
    plain = Plain(config, model, stream)
    for n in range(len(stream)):
        plain.n = n
        for epoch, step, x, y in plain.batches():
            random = draw(shapes_of(config, len(y)), config.seed, 0, n, epoch, step)
            STEPS[str(config.rehearsal)](plain, epoch, step, x, y, random)
        plain.teacher = copy.deepcopy(model)


def learn_jointly(config: Config, model: nn.Module, stream: Stream) -> None:
    """Train a model on all tasks so far, with the batches in the order that the engine documents."""
    from engram.common.seeding import generator

    initial = copy.deepcopy(model.state_dict())
    for n in range(len(stream)):
        if config.joint_start == "anew":
            model.load_state_dict(initial)
        plain = Plain(config, model, stream)
        plain.n = n
        samples = [(x.double(), int(y), k) for k in range(n + 1) for x, y in zip(*_arrays(stream, k), strict=True)]
        num_steps = -(-len(_arrays(stream, n)[0]) // config.batch_size)
        for epoch in range(config.epochs):
            order = torch.randperm(len(samples), generator=generator(config.seed, "order", 0, n, epoch)).tolist()
            if config.joint_steps == "task":
                order = order[: len(_arrays(stream, n)[0])]
            batches = [order[i : i + config.batch_size] for i in range(0, len(order), config.batch_size)]
            assert config.joint_steps == "epochs" or len(batches) == num_steps
            for batch in batches:
                x = torch.stack([samples[i][0] for i in batch])
                logits = model(x, None)
                rows = [plain.cross_entropy(z, *samples[i][1:]) for z, i in zip(logits, batch, strict=True)]
                plain.descend(torch.stack(rows).mean())


def _arrays(stream: Stream, k: int) -> tuple[Tensor, Tensor]:
    return stream[k].train.inputs, stream[k].train.targets
