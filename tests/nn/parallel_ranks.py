"""Training of small models on one process with the whole of each batch, or on one of two ranks that share it.

Run as a script, python parallel_ranks.py RANK FOLDER, it is a rank that goes through all cases and keeps what it found.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import engram
import engram.nn.dhp
import engram.penalties.importance

NUM_RANKS = 2
NUM_SAMPLES = 12
NUM_CLASSES = 4
NUM_TASKS = 2
SECONDS = 60  # after which a rank that waits for the other gives up

HEADS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: engram.LinearSoftmax(8, NUM_CLASSES),
    "matched": lambda: engram.MatchedSoftmax(8, NUM_CLASSES),
    "literal": lambda: plastic(),
    "uniform": lambda: plastic(alpha="uniform"),
    "fixed eta": lambda: plastic(learn_eta=False),
    "unbounded": lambda: plastic(eta_range="unbounded"),
    "at the edge": lambda: plastic(eta=1.0, alpha_init=5),  # whence the optimizer steps over it
    "scaled": lambda: plastic(trace_scale=2),
    "centred": lambda: plastic(trace_centred=True),
    "constant": lambda: plastic(trace_gradient=False, learn_eta=False),
    "steady": lambda: plastic(trace_scale=2, trace_centred=True, trace_gradient=False, learn_eta=False),
    "written after": lambda: plastic(trace_write="after", learn_eta=False),
    "hebbian-softmax": lambda: engram.heads.create("hebbian-softmax", 8, NUM_CLASSES, rare_until=20),
    "fast-weights": lambda: engram.heads.create("fast-weights", 8, NUM_CLASSES),
    "neuromodulated": lambda: engram.heads.create("neuromodulated", 8, NUM_CLASSES, alpha_init=1.0),
    "retroactive": lambda: engram.heads.create("retroactive", 8, NUM_CLASSES, alpha_init=1.0, eta=0.3),
    "balanced": lambda: engram.heads.create("balanced", 8, NUM_CLASSES),
    "balanced-trace": lambda: engram.heads.create("balanced-trace", 8, NUM_CLASSES, alpha_init=1.0),
    "cope": lambda: engram.heads.create("cope", 8, NUM_CLASSES, rate=0.2),
    "ncm": lambda: engram.heads.create("ncm", 8, NUM_CLASSES, learn_features=True),
    "slda": lambda: engram.heads.create("slda", 8, NUM_CLASSES, learn_features=True),
    "ridge": lambda: engram.heads.create("ridge", 8, NUM_CLASSES, learn_features=True),
}
RELATIVES = ("hebbian-softmax", "fast-weights", "neuromodulated", "retroactive", "balanced-trace", "cope", "slda")

PENALTIES: dict[str, Callable[..., engram.Penalty]] = {
    "none": lambda model, **options: engram.NoPenalty(model),
    "EWC": lambda model, **options: engram.EWC(model, strength=3, **options),
    "exact EWC": lambda model, **options: engram.EWC(model, strength=3, labels="exact", **options),
    "OnlineEWC": lambda model, **options: engram.OnlineEWC(model, strength=3, gamma=0.7, **options),
    "SI": lambda model, **options: engram.SI(model, strength=3, xi=0.05, **options),
    "MAS": lambda model, **options: engram.MAS(model, strength=0.3, **options),
}


def plastic(**options: Any) -> engram.DHPSoftmax:
    return engram.DHPSoftmax(8, NUM_CLASSES, **{"eta": 0.3, "alpha_init": 1.0, **options})


@dataclass(frozen=True)
class Case:
    """One way to train, which a test compares."""

    head: str = "literal"
    penalty: str = "none"
    step: str = "loss"  # or "proximal"
    options: dict[str, Any] = field(default_factory=dict)  # of the penalty
    share: str = "halves"  # "classes": each rank has some of its own; "uneven": also none at all
    clip: bool = False
    parts: int = 1  # batches to a step
    wrapper: dict[str, Any] = field(default_factory=dict)  # options of DistributedDataParallel
    of: str = "wrapper"  # whether the penalty is made of it, or of the "module" before it is wrapped
    grows: bool = False  # whether the head takes up more classes between the tasks
    compiled: str = ""  # what is compiled: the model "within" the wrapper, or all "around" it


CASES = {
    **{f"head {head}": Case(head) for head in HEADS},
    **{
        f"{penalty}, {step}, {head}": Case(head, penalty, step)
        for penalty in ("EWC", "OnlineEWC", "SI", "MAS")
        for step in ("loss", "proximal")
        for head in ("linear", "literal")
    },
    **{
        f"in force {penalty}, {step}": Case("steady", penalty, step, {"protect": "in-force"})
        for penalty, step in (("OnlineEWC", "proximal"), ("EWC", "loss"), ("SI", "loss"))
    },
    **{f"uneven, {head}": Case(head, "OnlineEWC", "proximal", share="uneven") for head in RELATIVES},
    **{f"grown, {head}": Case(head, "MAS", grows=True) for head in RELATIVES},
    "exact EWC": Case(penalty="exact EWC"),
    "alpha protected": Case(penalty="OnlineEWC", options={"regularize_alpha": True}),
    "clipped": Case(penalty="SI", clip=True),
    "accumulated": Case(penalty="SI", parts=2),
    "classes of one rank": Case(penalty="OnlineEWC", share="classes"),
    "uneven": Case(penalty="MAS", share="uneven", step="proximal"),
    "uneven, centred": Case("centred", share="uneven"),
    "bucket views": Case(penalty="SI", wrapper={"gradient_as_bucket_view": True}),
    "bucket views, clipped": Case(penalty="SI", clip=True, wrapper={"gradient_as_bucket_view": True}),
    "no broadcast": Case(penalty="SI", wrapper={"broadcast_buffers": False}),
    "small buckets": Case(penalty="SI", wrapper={"bucket_cap_mb": 1e-4}),
    "unused parameters": Case(penalty="SI", wrapper={"find_unused_parameters": True}),
    "static graph": Case(penalty="SI", wrapper={"static_graph": True}),
    "EWC of the module": Case("linear", "EWC", "proximal", of="module"),
    "SI of the module": Case(penalty="SI", of="module"),
    "grown, SI": Case(penalty="SI", grows=True),
    "grown, EWC": Case(penalty="EWC", step="proximal", grows=True),
    "compiled within": Case(penalty="SI", compiled="within"),
    "compiled around": Case(penalty="OnlineEWC", compiled="around"),
}


class Classifier(nn.Module):
    def __init__(self, head: str) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.head = HEADS[head]()

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        return self.head(self.features(inputs), targets)


def batches(task: int, share: str) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(task)
    made = []
    for _ in range(4):
        inputs = torch.randn(NUM_SAMPLES, 6, generator=random, dtype=torch.float64)
        targets = torch.randint(NUM_CLASSES, (NUM_SAMPLES,), generator=random)
        made.append((inputs, targets.sort().values if share == "classes" else targets))
    return made


def own_rows(case: Case, step: int, rank: int | None) -> slice:
    """Which samples of a batch a rank has; all of them without ranks."""
    border = (9, 12, 0, 5)[step % 4] if case.share == "uneven" else NUM_SAMPLES // 2
    return {None: slice(None), 0: slice(border), 1: slice(border, None)}[rank]


def task_loss(case: Case, logits: Tensor, targets: Tensor, rank: int | None) -> Tensor:
    """The mean; where ranks have unequal shares, what has the whole batch's mean as the mean over ranks."""
    if case.share == "uneven" and rank is not None:
        return F.cross_entropy(logits, targets, reduction="sum") * NUM_RANKS / NUM_SAMPLES
    return F.cross_entropy(logits, targets)


def build(case: Case, rank: int | None) -> tuple[Classifier, nn.Module, engram.Penalty]:
    torch.manual_seed(rank or 0)  # DistributedDataParallel gives all ranks the weights of the first
    model = Classifier(case.head).double()
    call: nn.Module = model
    if case.compiled == "within":
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    penalty = PENALTIES[case.penalty](model, **case.options) if case.of == "module" else None
    if rank is not None:
        call = DistributedDataParallel(call, **case.wrapper)
    if case.compiled == "around":
        call = torch.compile(call, backend="aot_eager")
    return model, call, penalty or PENALTIES[case.penalty](call, **case.options)


def descent(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)


def grown(model: Classifier, case: Case, rank: int | None) -> nn.Module:
    torch.manual_seed(rank or 0)
    model.head.grow(NUM_CLASSES + 2)
    return model if rank is None else DistributedDataParallel(model, **case.wrapper)


def learn(case: Case, rank: int | None) -> dict[str, Any]:
    """What there is after two tasks, and what was seen on the way."""
    model, call, penalty = build(case, rank)
    optimizer = descent(model)
    seen: dict[str, Any] = {"etas": []}
    for task in range(NUM_TASKS):
        call.train()
        for i, (inputs, targets) in enumerate(batches(task, case.share)):
            rows = own_rows(case, i, rank)
            inputs, targets = inputs[rows], targets[rows]
            last = (i + 1) % case.parts == 0
            waits = contextlib.nullcontext() if last or rank is None else call.no_sync()
            with waits:
                logits = call(inputs, targets)
                loss = task_loss(case, logits, targets, rank)
                if case.step == "loss":
                    loss = loss + penalty.loss()
                (loss / case.parts).backward()
            seen[f"logits {task} {i} {rank}"] = logits.detach()
            if not last:
                continue
            if case.clip:
                penalty.after_backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            if case.step == "proximal":
                penalty.proximal_step(optimizer)
            penalty.after_step()
            optimizer.zero_grad()
            if isinstance(model.head, engram.DHPSoftmax):
                seen["etas"].append(model.head.eta.item())
        getattr(model.head, "settle", lambda: None)()
        consolidate(penalty, case, task, rank)
        if case.grows and task == 0:
            call = grown(model, case, rank)
            penalty.grow()
            optimizer = descent(model)
        if rank in (None, 0):  # nothing is communicated: the other rank is on its way
            seen[f"evaluated {task}"] = model.eval()(batches(9, case.share)[0][0]).detach()
    seen |= {f"model {name}": tensor.clone() for name, tensor in model.state_dict().items()}
    return seen | {f"penalty {name}": tensor for name, tensor in penalty.state_dict().items()}


def consolidate(penalty: engram.Penalty, case: Case, task: int, rank: int | None) -> None:
    """With more batches on one rank than on the other, or with none there."""
    whole = batches(task, case.share)
    firsts = len(whole) if case.share == "uneven" else 1 + 2 * task
    penalty.consolidate({None: whole, 0: whole[:firsts], 1: whole[firsts:]}[rank])


# --- what is not compared case by case -----------------------------------------------------------------------------


@contextlib.contextmanager
def without(module: Any, name: str) -> Iterator[None]:
    """As if a search for ranks had found none."""
    found = getattr(module, name)
    setattr(module, name, lambda model: None)
    try:
        yield
    finally:
        setattr(module, name, found)


def refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except engram.InputError as reason:
        return str(reason)
    return ""


def past_the_wrapper() -> None:
    _, call, _ = build(Case(), 0)
    call.module(*batches(0, "halves")[0])


def past_the_wrapper_later() -> None:
    """By a model that was trained alone before."""
    model = Classifier("literal").double()
    batch = batches(0, "halves")[0]
    model(*batch)
    call = DistributedDataParallel(model)
    call(*batch)
    model(*batch)


def eta_without_gradient() -> None:
    model = Classifier("literal").double()
    model.head.trace_gradient = False
    inputs, targets = batches(0, "halves")[0]
    DistributedDataParallel(model)(inputs, targets)


def clipping_not_announced(rank: int) -> None:
    model, call, penalty = build(Case(penalty="SI"), rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in batches(0, "halves"):
        optimizer.zero_grad()
        (F.cross_entropy(call(inputs, targets), targets) + penalty.loss()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        penalty.after_step()


def names_of_wrapped(folder: Path, rank: int) -> dict[str, Any]:
    """What else is done with models: folding, a file."""
    _, call, penalty = build(Case(penalty="EWC"), rank)
    path = folder / f"model {rank}"
    engram.save_model(path, call, penalty)
    engram.load_model(path, Classifier("literal").double())
    return {"folded": [name for name, _ in engram.fold(call).named_parameters()], "names": list(penalty.parameters)}


def example() -> list[list[float]]:
    """The accuracies of the script for torchrun."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    digits, loop = (importlib.import_module(name) for name in ("digits", "loop_torchrun"))
    return digits.learn_digits(loop.learn, loop.optimizer, loop.STRENGTH, quick=True, quiet=True)


def everything(rank: int, folder: Path) -> dict[str, Any]:
    done: dict[str, Any] = {name: learn(case, rank) for name, case in CASES.items()}
    with without(engram.nn.dhp, "ranks_of_call"):
        done["traces of one rank"] = learn(Case(), rank)
    with without(engram.penalties.importance, "ranks_of"):
        done["importances of one rank"] = learn(Case("linear", "MAS", "proximal"), rank)
    done["sampled"] = learn(Case(penalty="EWC", options={"labels": "sampled"}), rank)
    done["past the wrapper"] = refusal(past_the_wrapper)
    done["past the wrapper later"] = refusal(past_the_wrapper_later)
    done["eta without gradient"] = refusal(eta_without_gradient)
    done["clipping not announced"] = refusal(lambda: clipping_not_announced(rank))
    empty = build(Case(penalty="MAS"), rank)
    done["no samples"] = refusal(lambda: empty[2].consolidate([]))
    done["example"] = example()
    done["wrapped"] = names_of_wrapped(folder, rank)
    if rank == 1:  # a model of its own, of which the other rank knows nothing
        done["alone"] = learn(Case(penalty="OnlineEWC", compiled="within"), None)
    return done


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", store, timedelta(seconds=SECONDS), world_size=NUM_RANKS, rank=rank)
    torch.save(everything(rank, folder), folder / f"rank {rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
