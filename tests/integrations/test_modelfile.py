"""A custom model, saved and loaded: it resumes as if it had not stopped, and is never half loaded."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor, nn

import engram
from builders import refusal
from engram import EWC, MAS, SI, DHPSoftmax, InputError, NoPenalty, OnlineEWC, Penalty, load_model, save_model
from engram.common.tensor_file import read_tensors, write_tensors
from engram.integrations.model_file import FORMAT
from engram.nn.networks import Network

KEPT = Path(__file__).parents[1] / "integrations" / "files" / "model-1.safetensors"
PENALTIES = {
    "ewc": lambda model: EWC(model, strength=3.0),
    "online-ewc": lambda model: OnlineEWC(model, strength=3.0, gamma=0.7),
    "online-ewc in force": lambda model: OnlineEWC(model, strength=3.0, protect="in-force"),
    "si": lambda model: SI(model, strength=3.0, xi=0.2),
    "mas": lambda model: MAS(model, strength=3.0, regularize_alpha=True),
    "none": NoPenalty,
}


def make_model(seed: int = 0) -> Network:
    torch.manual_seed(seed)
    return Network(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU()), DHPSoftmax(5, 3, eta=0.2))


def task(seed: int) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(seed)
    return [(torch.randn(8, 6, generator=random), torch.randint(3, (8,), generator=random)) for _ in range(4)]


def learn(model: Network, penalty: Penalty, batches: list[tuple[Tensor, Tensor]]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model.train()
    for inputs, targets in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs, targets), targets).backward()
        optimizer.step()
        penalty.proximal_step(optimizer)
        penalty.after_step()


def everything(model: nn.Module, penalty: Penalty) -> dict[str, Tensor]:
    return copy.deepcopy({**model.state_dict(), **{f"penalty {n}": t for n, t in penalty.state_dict().items()}})


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("make_penalty", PENALTIES.values(), ids=PENALTIES.keys())
def test_loaded_model_learns_like_one_never_saved(tmp_path: Path, make_penalty) -> None:
    model = make_model()
    penalty = make_penalty(model)
    learn(model, penalty, task(0))
    penalty.consolidate(task(0))
    learn(model, penalty, task(1)[:2])  # in the middle of a task
    save_model(tmp_path / "model", model, penalty, about={"classes": ["a", "b", "c"], "tasks": 2})

    other = make_model(seed=1)
    other_penalty = make_penalty(other)
    learn(other, other_penalty, task(5))
    assert load_model(str(tmp_path / "model"), other, other_penalty) == {"classes": ["a", "b", "c"], "tasks": 2}
    assert_equal(everything(other, other_penalty), everything(model, penalty))
    for each, its_penalty in ((model, penalty), (other, other_penalty)):
        learn(each, its_penalty, task(1)[2:])
        its_penalty.consolidate(task(1))
        learn(each, its_penalty, task(2))
    assert_equal(everything(other, other_penalty), everything(model, penalty))


def test_a_model_alone_is_enough_to_predict(tmp_path: Path) -> None:
    model = make_model()
    penalty = OnlineEWC(model, strength=1)
    learn(model, penalty, task(0))
    save_model(tmp_path / "model", model, penalty)
    other = make_model(seed=1)
    assert load_model(tmp_path / "model", other) == {}
    inputs = task(3)[0][0]
    assert torch.equal(other.eval()(inputs), model.eval()(inputs))


def test_the_header_can_be_read_by_anybody(tmp_path: Path) -> None:
    model = make_model()
    save_model(tmp_path / "model", model, OnlineEWC(model, strength=2, gamma=0.5), about={"by": "me"})
    with safe_open(tmp_path / "model", framework="np") as file:
        header = json.loads(file.metadata()["engram"])
        assert "model.head.hebb" in file.keys()  # noqa: SIM118 - it is no dictionary
    assert header["engram"] == engram.__version__
    assert (header["kind"], header["format"], header["about"]) == ("model", FORMAT, {"by": "me"})
    settings = {"strength": 2, "gamma": 0.5, "labels": "true", "seed": 0, "protect": "slow"}
    settings |= {"regularize_alpha": False, "temperature": 1.0}
    assert header["penalty"] == {"kind": "OnlineEWC", "settings": settings}


class Tied(nn.Module):
    def __init__(self, tie: bool = True):
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)
        if tie:
            self.second.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(self.first(inputs))


def test_tied_weights_stay_tied_and_are_kept_once(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    save_model(tmp_path / "model", model, MAS(model, strength=1))
    load_model(tmp_path / "model", other, MAS(other, strength=1))
    assert torch.equal(other.first.weight, model.first.weight)
    assert other.first.weight is other.second.weight
    with safe_open(tmp_path / "model", framework="np") as file:
        assert list(file.keys()) == ["model.first.weight"]
    with pytest.raises(InputError, match=r"'second.weight' shares its memory with 'first.weight', unlike here"):
        load_model(tmp_path / "model", Tied(tie=False))
    save_model(tmp_path / "model", Tied(tie=False))
    with pytest.raises(InputError, match=r"'second.weight' does not share its memory with 'first.weight', unlike here"):
        load_model(tmp_path / "model", Tied())


def test_a_compiled_model_is_the_same_model(tmp_path: Path) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    save_model(tmp_path / "model", torch.compile(model))
    load_model(tmp_path / "model", other)
    assert torch.equal(other.weight, model.weight)
    load_model(tmp_path / "model", torch.compile(nn.Linear(2, 2)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_model_moves_between_devices(tmp_path: Path) -> None:
    model = make_model().cuda()
    save_model(tmp_path / "model", model, SI(model, strength=1))
    other = make_model(seed=1)
    load_model(tmp_path / "model", other, SI(other, strength=1))
    assert torch.equal(other.head.weight, model.head.weight.cpu())


# --- refused, and nothing touched


def load_refusal(path: Path, model: nn.Module, penalty: Penalty | None = None) -> str:
    """The one sentence with which a file is refused; model and penalty stay as they were."""
    before = everything(model, penalty or NoPenalty(model))
    sentence = refusal(load_model, path, model, penalty)
    assert_equal(everything(model, penalty or NoPenalty(model)), before)
    assert str(path) in sentence
    return sentence


@pytest.fixture
def path(tmp_path: Path) -> Path:
    model = make_model()
    penalty = OnlineEWC(model, strength=3, gamma=0.7)
    learn(model, penalty, task(0))
    penalty.consolidate(task(0))
    save_model(tmp_path / "model", model, penalty)
    return tmp_path / "model"


def test_another_model_is_refused_by_its_first_tensor(path: Path) -> None:
    deeper = make_model(1)
    deeper.features.append(nn.Linear(5, 5))
    assert load_refusal(path, deeper).endswith("is of another model: its tensor 'features.3.weight' is missing")
    shallow = make_model(1)
    shallow.features = shallow.features[:1]
    assert "its tensor 'features.1.bias' is not in this one" in load_refusal(path, shallow)
    wide = make_model(1)
    wide.head = DHPSoftmax(5, 4)
    assert "its tensor 'head.weight' has the shape (3, 5), not (4, 5)" in load_refusal(path, wide)
    assert "'features.0.weight' is of torch.float32, not torch.float64" in load_refusal(path, make_model().double())


def test_another_penalty_is_refused(path: Path) -> None:
    model = make_model(1)
    assert "holds the state of OnlineEWC, not of EWC" in load_refusal(path, model, EWC(model, strength=3))
    cases = {
        "strength=3, not 4": OnlineEWC(model, strength=4, gamma=0.7),
        "gamma=0.7, not 1.0": OnlineEWC(model, strength=3),
        "labels='true', not 'exact'": OnlineEWC(model, strength=3, gamma=0.7, labels="exact"),
        "protect='slow', not 'in-force'": OnlineEWC(model, strength=3, gamma=0.7, protect="in-force"),
    }
    for said, penalty in cases.items():
        assert said in load_refusal(path, model, penalty)
    with_alpha = OnlineEWC(model, strength=3, gamma=0.7, regularize_alpha=True)
    assert "regularize_alpha=False, not True" in load_refusal(path, model, with_alpha)
    save_model(path, model)
    assert "holds no state of a penalty" in load_refusal(path, model, SI(model, strength=1))


def test_a_penalty_of_other_weights_leaves_the_model_alone(path: Path) -> None:
    model = make_model(1)
    model.features.requires_grad_(False)
    message = load_refusal(path, model, OnlineEWC(model, strength=3, gamma=0.7))
    assert "does not fit this penalty" in message
    assert "features.0.bias' is unknown" in message


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"trace_scale": 2.0}, "trace_scale=None there, not 2.0"),
        ({"trace_centred": True}, "trace_centred=False there, not True"),
        ({"trace_gradient": False}, "trace_gradient=True there, not False"),
        ({"eta_range": "unbounded"}, "eta_range='unit' there, not 'unbounded'"),
    ],
)
def test_a_head_with_other_settings_is_refused(path: Path, setting: dict[str, object], said: str) -> None:
    model = make_model(1)
    model.head = DHPSoftmax(5, 3, **setting)
    assert f"the module 'head' has {said}" in load_refusal(path, model)
    save_model(path, model.head)
    assert "the model has" in load_refusal(path, DHPSoftmax(5, 3))
    load_model(path, DHPSoftmax(5, 3, **setting))


def test_settings_of_custom_modules_are_saved(tmp_path: Path) -> None:
    class Scaled(nn.Linear):
        plastic_settings: object = {"sizes": (2, 3)}

    save_model(tmp_path / "model", Scaled(2, 2))
    load_model(tmp_path / "model", Scaled(2, 2))
    assert "has sizes=[2, 3] there, and none here" in load_refusal(tmp_path / "model", nn.Linear(2, 2))
    odd = Scaled(2, 2)
    odd.plastic_settings = {"sizes": {2}}
    with pytest.raises(InputError, match="must be a dictionary that JSON can hold"):
        save_model(tmp_path / "model", odd)


def test_a_penalty_of_another_instance_is_refused(path: Path) -> None:
    model, other = make_model(1), make_model(1)
    penalty = OnlineEWC(other, strength=3, gamma=0.7)
    said = "this OnlineEWC belongs to another model: the weight 'features.0.weight' that it protects is not in this one"
    before = everything(other, penalty), everything(model, penalty)
    for use in (load_model, save_model):
        with pytest.raises(InputError, match=said):
            use(path, model, penalty)
    assert_equal(everything(other, penalty), before[0])
    assert_equal(everything(model, penalty), before[1])
    of_compiled = OnlineEWC(torch.compile(model), strength=3, gamma=0.7)
    of_compiled_names = {name.removeprefix("_orig_mod.") for name in of_compiled.parameters}
    assert of_compiled_names == set(penalty.parameters)
    save_model(path, model, of_compiled)


class GivesCopies(nn.Linear):
    """Its `state_dict` has copies of its weights, which nothing is written through."""

    def __init__(self, factor: float = 1.0):
        super().__init__(2, 2)
        self.factor = factor

    def state_dict(self, *args: object, **options: object) -> dict[str, Tensor]:
        return {name: self.factor * tensor.detach() for name, tensor in super().state_dict(*args, **options).items()}


def test_model_whose_state_dict_returns_copies_is_loaded(tmp_path: Path) -> None:
    model, other = GivesCopies(), GivesCopies()
    save_model(tmp_path / "model", model)
    load_model(tmp_path / "model", other)
    assert torch.equal(other.weight, model.weight)
    doubled = GivesCopies(factor=2.0)
    assert "'weight' of this GivesCopies does not have the loaded value" in load_refusal(tmp_path / "model", doubled)


def test_a_model_that_fails_while_it_loads_is_as_it_was(tmp_path: Path) -> None:
    class Particular(nn.Linear):
        def _load_from_state_dict(self, *args: object) -> None:
            super()._load_from_state_dict(*args)
            raise RuntimeError("not this one")

    save_model(tmp_path / "model", nn.Linear(2, 2))
    assert load_refusal(tmp_path / "model", Particular(2, 2)).endswith("into this Particular: not this one")


def test_a_tensor_that_cannot_be_written_leaves_all_as_it_was(tmp_path: Path) -> None:
    def make(seed: int) -> tuple[nn.Module, Penalty]:
        torch.manual_seed(seed)
        model = nn.Linear(2, 2)
        model.register_buffer("scale", torch.full((1,), float(seed)).expand(3))
        penalty = MAS(model, strength=1)
        penalty.consolidate([(torch.ones(1, 2), torch.zeros(1, dtype=torch.long))])
        return model, penalty

    save_model(tmp_path / "model", *make(0))
    assert "elements of 'scale' share their memory" in load_refusal(tmp_path / "model", *make(1))


def test_model_on_the_meta_device_is_refused(path: Path) -> None:
    with pytest.raises(InputError, match=r"'features.0.weight' of this model has no memory"):
        load_model(path, make_model().to("meta"))
    with pytest.raises(InputError, match="cannot be saved in a file"):
        save_model(path, nn.LazyLinear(3))
    save_model(path, nn.Linear(2, 3))
    with pytest.raises(InputError, match="'weight' of this model has no memory"):
        load_model(path, nn.LazyLinear(3))


def test_state_that_is_not_a_tensor_is_refused(path: Path) -> None:
    class Odd(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"steps": 1}

    with pytest.raises(InputError, match="'_extra_state' of this model is a dict"):
        save_model(path, Odd(2, 2))


@pytest.mark.parametrize("about", [{0: "cat"}, {"size": (2, 3)}, {"x": torch.ones(1)}, {"x": float("nan")}, ["cat"]])
def test_about_must_survive_json(tmp_path: Path, about) -> None:
    with pytest.raises(InputError, match="about must be"):
        save_model(tmp_path / "model", nn.Linear(2, 2), about=about)
    assert not list(tmp_path.iterdir())


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_changes_nothing(path: Path, tmp_path: Path, data: st.DataObject) -> None:
    content = path.read_bytes()
    damaged = bytearray(content[: data.draw(st.integers(0, len(content)), label="length")])
    for place in data.draw(st.lists(st.integers(0, max(0, len(damaged) - 1)), max_size=3), label="flipped"):
        if damaged:
            damaged[place] ^= 1 << data.draw(st.integers(0, 7))
    if damaged == content:
        return
    model = make_model(1)
    penalty = OnlineEWC(model, strength=3, gamma=0.7)
    before = everything(model, penalty)
    (tmp_path / "damaged").write_bytes(damaged)
    try:
        load_model(tmp_path / "damaged", model, penalty)
    except InputError:
        assert_equal(everything(model, penalty), before)
    else:  # a blank of the header that became another one
        load_model(path, other := make_model(2), other_penalty := OnlineEWC(other, strength=3, gamma=0.7))
        assert_equal(everything(model, penalty), everything(other, other_penalty))


# --- years later


def kept_model() -> tuple[Network, Penalty]:
    """The model of the kept file, as it was made before it learned."""
    model = make_model(7)
    return model, OnlineEWC(model, strength=2.0, gamma=0.5)


KEPT_INPUTS = torch.linspace(-1, 1, 12).reshape(2, 6)
KEPT_LOGITS = torch.tensor([[-0.188213, -0.261868, 0.011142], [-0.044147, -0.308206, -0.007287]])


def test_model_file_of_format_1_still_loads() -> None:
    model, penalty = kept_model()
    about = load_model(KEPT, model, penalty)
    assert about == {"classes": ["sparrow", "owl", "magpie"], "tasks": 2}
    torch.testing.assert_close(model.eval()(KEPT_INPUTS), KEPT_LOGITS, rtol=0, atol=1e-5)
    assert penalty.loss().item() == 0
    assert float(penalty.terms[0].importance["head.weight"].sum()) > 0
    assert float(model.head.hebb.abs().sum()) > 0


@pytest.mark.parametrize("penalty", [OnlineEWC, SI])
@pytest.mark.parametrize("where", ["", "1"])
def test_matched_head_of_format_1_still_loads(tmp_path: Path, penalty: type[Penalty], where: str) -> None:
    """It was saved as a plastic layer: θ′ as alpha, a constant trace and a learning rate of 0."""
    torch.manual_seed(0)

    def make() -> tuple[nn.Module, Penalty]:
        head = engram.MatchedSoftmax(4, 3, trace=0.5)
        model = nn.Sequential(nn.Identity(), head) if where else head
        return model, penalty(model, strength=1.0)

    (model, memory), (other, other_memory) = make(), make()
    memory.consolidate([(torch.randn(6, 4), torch.arange(6) % 3)])
    save_model(tmp_path / "model", model, memory)
    header, tensors = read_tensors(tmp_path / "model", "model", FORMAT)
    old = {name.replace("extra", "alpha"): value for name, value in tensors.items()}
    prefix = f"model.{where}.".replace("..", ".")
    old |= {f"{prefix}hebb": torch.full((3, 4), 0.5), f"{prefix}eta": torch.zeros(())}
    header["modules"] = {where: {"trace_gradient": True, "trace_scale": None}}
    write_tensors(tmp_path / "old", "model", 1, header, old)
    load_model(tmp_path / "old", other, other_memory)
    assert_equal(everything(other, other_memory), everything(model, memory))
    write_tensors(tmp_path / "old", "model", 1, header, old | {f"{prefix}hebb": torch.ones(3, 4)})
    assert "trace=1.0 there, not 0.5" in load_refusal(tmp_path / "old", other, other_memory)
