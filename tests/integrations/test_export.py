"""A model that is shipped answers as the one that learned."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import engram
from engram import DHPSoftmax, InputError, LinearSoftmax, MatchedSoftmax
from engram.integrations.export import export_onnx, export_program, fold
from engram.nn.networks import Network, cnn_features, mlp_features

STEADY = {"trace_scale": 2.0, "trace_centred": True, "trace_gradient": False, "learn_eta": False, "alpha_init": 0.1}
FEATURES = {
    "mlp": (lambda: mlp_features(784, [40, 30], 0.01), (1, 28, 28)),
    "cnn": (lambda: cnn_features(3, 32, [30], 0.01), (3, 32, 32)),
}


def learned(features: nn.Module, shape: tuple[int, ...], **options: object) -> Network:
    """A network with a plastic head that has seen a few batches, still in training mode."""
    torch.manual_seed(0)
    model = Network(features, DHPSoftmax(30, 10, eta=0.3, **options))
    with torch.no_grad():
        model.head.alpha.add_(0.2)
        for _ in range(3):
            model(torch.rand(20, *shape), torch.randint(10, (20,)))
    return model


def layers(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


# --- fold


@pytest.mark.parametrize("options", [{}, STEADY], ids=["literal", "steady"])
def test_a_folded_model_computes_the_same_without_a_trace(options: dict) -> None:
    model = learned(FEATURES["mlp"][0](), (1, 28, 28), **options)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    drawn = torch.get_rng_state()
    folded = fold(model)
    assert torch.equal(torch.get_rng_state(), drawn), "an export does not change the random numbers of later training"
    inputs = torch.rand(7, 1, 28, 28)
    torch.testing.assert_close(folded(inputs), model.eval()(inputs))
    assert not any(module.training for module in folded.modules())
    assert not [name for name, _ in folded.named_buffers()]
    assert isinstance(folded.head, nn.Linear)
    model.train()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert isinstance(model.head, DHPSoftmax)
    folded.head.weight.data.zero_()
    assert torch.equal(model.head.weight, state["head.weight"])


def test_the_model_itself_may_be_the_head() -> None:
    hidden = torch.rand(4, 3)
    for head in (DHPSoftmax(3, 2), MatchedSoftmax(3, 2)):
        torch.testing.assert_close(fold(head)(hidden), head.eval()(hidden))
        assert layers(fold(head)) == [LinearSoftmax]


def test_a_head_that_is_registered_twice_stays_one() -> None:
    head = DHPSoftmax(3, 3)
    folded = fold(nn.Sequential(head, nn.ReLU(), nn.ModuleDict({"again": head})))
    assert folded[0] is folded[2]["again"]
    assert isinstance(folded[0], nn.Linear)


def test_every_head_is_folded_and_all_else_stays() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(), MatchedSoftmax(3, 4), nn.Linear(4, 3), DHPSoftmax(3, 2))
    model.nothing = None
    assert layers(fold(model)) == [nn.Sequential, nn.BatchNorm1d, nn.Dropout, LinearSoftmax, nn.Linear, LinearSoftmax]
    inputs = torch.rand(5, 3)
    torch.testing.assert_close(fold(model)(inputs), model.eval()(inputs))
    assert layers(fold(fold(model))) == layers(fold(model))


def test_custom_head_is_folded_by_its_own_method() -> None:
    class Mine(nn.Module):
        plastic_parameters = ()

        def __init__(self, folded: object):
            super().__init__()
            self.folded = folded

        def fold(self) -> object:
            return self.folded

    assert isinstance(fold(nn.Sequential(Mine(nn.Tanh())))[0], nn.Tanh)
    biased = nn.Linear(2, 3)
    torch.testing.assert_close(fold(Mine(biased))(torch.ones(1, 2), torch.zeros(1)), biased(torch.ones(1, 2)))
    with pytest.raises(InputError, match=r"Mine.fold\(\) must return a module, not a int"):
        fold(Mine(3))


def test_fold_methods_of_other_modules_are_ignored(tmp_path: Path) -> None:
    class Patches(nn.Module):
        def fold(self, inputs: Tensor) -> Tensor:
            return inputs.flatten(1)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.fold(inputs)

    model = nn.Sequential(Patches(), DHPSoftmax(4, 2))
    assert layers(fold(model)) == [nn.Sequential, Patches, LinearSoftmax]
    export_program(model, tmp_path / "model", torch.rand(3, 2, 2))


def test_folding_keeps_type_and_device() -> None:
    folded = fold(DHPSoftmax(3, 2, dtype=torch.float64))
    assert folded.weight.dtype == torch.float64
    assert not folded.weight.is_meta


def test_compiled_model_is_folded() -> None:
    model = nn.Sequential(torch.compile(nn.Linear(3, 3)), DHPSoftmax(3, 2))
    assert layers(fold(torch.compile(model))) == [nn.Sequential, nn.Linear, LinearSoftmax]


# --- exported


def answer_of(path: Path, inputs: Tensor) -> np.ndarray:
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, {"inputs": inputs.numpy()})[0]


@pytest.mark.parametrize("options", [pytest.param({}, marks=pytest.mark.slow), STEADY], ids=["literal", "steady"])
@pytest.mark.parametrize("network", FEATURES)
def test_onnxruntime_predicts_as_the_model_does(tmp_path: Path, network: str, options: dict) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    make, shape = FEATURES[network]
    model = learned(make(), shape, **options)
    export_onnx(model, tmp_path / "model.onnx", torch.rand(1 if network == "mlp" else 4, *shape))
    assert os.listdir(tmp_path) == ["model.onnx"]
    assert model.training, "the model can go on learning"
    for size in (1, 2, 37):
        inputs = torch.rand(size, *shape)
        with torch.no_grad():
            expected = model.eval()(inputs)
        answer = answer_of(tmp_path / "model.onnx", inputs)
        np.testing.assert_allclose(answer, expected.numpy(), atol=1e-5)
        assert (answer.argmax(axis=1) == expected.argmax(dim=1).numpy()).all()


@pytest.mark.parametrize("network", FEATURES)
def test_a_program_predicts_as_the_model_does(tmp_path: Path, network: str) -> None:
    make, shape = FEATURES[network]
    model = learned(make(), shape)
    export_program(model, tmp_path / "model.pt2", torch.rand(1, *shape))
    program = torch.export.load(tmp_path / "model.pt2").module()
    for size in (1, 2, 37):
        inputs = torch.rand(size, *shape)
        torch.testing.assert_close(program(inputs), model.eval()(inputs))


class Wrong(nn.Module):
    """A head whose `fold` is another function: what is written from it must not be shipped."""

    plastic_parameters = ()

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs

    def fold(self) -> nn.Module:
        return nn.ReLU()


@pytest.mark.parametrize("export", [export_onnx, export_program])
def test_file_with_other_outputs_is_not_written(tmp_path: Path, export) -> None:
    if export is export_onnx:
        pytest.importorskip("onnxruntime")
    (tmp_path / "model").write_text("what was there")
    with pytest.raises(InputError, match="does not compute the same: its outputs differ by 1"):
        export(Wrong(), tmp_path / "model", torch.tensor([[1.0, -1.0]]))
    assert (tmp_path / "model").read_text() == "what was there"
    assert os.listdir(tmp_path) == ["model"]


def test_file_with_other_outputs_for_a_single_sample_is_refused(tmp_path: Path) -> None:
    class Alone(Wrong):
        def forward(self, inputs: Tensor) -> Tensor:
            return inputs + 1 if len(inputs) == 1 else inputs

    with pytest.raises(InputError, match="its outputs differ by 1"):
        export_program(Alone(), tmp_path / "model", torch.zeros(3, 2))
    assert not list(tmp_path.iterdir())


def test_masked_outputs_agree_only_with_masked_outputs(tmp_path: Path) -> None:
    class Masked(Wrong):
        def __init__(self, folded: Tensor):
            super().__init__()
            self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
            self.register_buffer("folded", folded)

        def forward(self, inputs: Tensor) -> Tensor:
            return inputs + self.mask

        def fold(self) -> nn.Module:
            other = Masked(self.folded)
            other.mask = self.folded
            return other

    export_program(Masked(torch.tensor([0.0, -torch.inf])), tmp_path / "model", torch.ones(3, 2))
    for other in ([0.0, torch.inf], [0.0, 0.0], [1.0, -torch.inf], [0.0, torch.nan]):
        with pytest.raises(InputError, match="does not compute the same"):
            export_program(Masked(torch.tensor(other)), tmp_path / "other", torch.ones(3, 2))


def test_model_with_several_inputs_is_exported(tmp_path: Path) -> None:
    class Sum(nn.Module):
        def forward(self, first: Tensor, second: Tensor) -> Tensor:
            return first + 2 * second

    export_program(Sum(), tmp_path / "model", [torch.rand(3, 2), torch.rand(3, 2)])
    assert (torch.export.load(tmp_path / "model").module()(torch.ones(5, 2), torch.ones(5, 2)) == 3).all()


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ([], "inputs must be an example batch"),
        (torch.tensor(1.0), "inputs must be an example batch"),
        (["x"], "inputs must be an example batch"),
        (torch.rand(0, 3), "samples, at least one, not 0"),
        ([torch.rand(2, 3), torch.rand(4, 3)], "the same number of samples, at least one, not 2 and 4"),
    ],
)
def test_inputs_that_are_not_a_batch_are_refused(tmp_path: Path, inputs, said: str) -> None:
    with pytest.raises(InputError, match=said):
        export_program(nn.Linear(3, 2), tmp_path / "model", inputs)


def test_failed_export_is_one_sentence(tmp_path: Path) -> None:
    class Unsure(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return inputs if float(inputs.sum()) > 0 else -inputs

    class Pair(nn.Module):
        def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
            return inputs, inputs + 1

    with pytest.raises(InputError, match=r"Unsure cannot be exported: .+") as error:
        export_program(Unsure(), tmp_path / "model", torch.rand(3, 2))
    assert "\n" not in str(error.value)
    with pytest.raises(InputError, match="must return one tensor, not a tuple"):
        export_program(Pair(), tmp_path / "model", torch.rand(3, 2))
    with pytest.raises(InputError, match="cannot be written: No such"):
        export_program(nn.ReLU(), tmp_path / "no" / "model", torch.rand(3, 2))
    with pytest.raises(InputError, match=r"^\. cannot be written: Is a directory$"):
        export_program(nn.ReLU(), ".", torch.rand(3, 2))
    assert not list(tmp_path.iterdir())


def test_model_that_stores_an_activation_is_refused(tmp_path: Path) -> None:
    class Keeping(nn.Linear):
        kept: Tensor | list[Tensor]

        def forward(self, inputs: Tensor) -> Tensor:
            self.kept = super().forward(inputs)
            return self.kept

    model = nn.Sequential(Keeping(2, 2))
    model(torch.rand(3, 2))
    said = r"^Sequential cannot be copied: its '0.kept' is the result of a computation; store its detach\(\)"
    with pytest.raises(InputError, match=said):
        fold(model)
    with pytest.raises(InputError, match=said):
        export_program(model, tmp_path / "model", torch.rand(3, 2))
    model[0].kept = [model[0].kept]
    with pytest.raises(InputError, match=r"Sequential cannot be copied: .+"):
        fold(model)


def test_model_that_onnxruntime_cannot_run_is_refused_in_one_sentence(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = nn.Linear(2, 2).bfloat16()
    with pytest.raises(InputError, match="Linear cannot be exported: ") as error:
        export_onnx(model, tmp_path / "model", torch.rand(3, 2).bfloat16())
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_without_onnx_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(InputError, match=r"onnx is not installed: pip install 'engram-cl\[onnx\]'"):
        export_onnx(nn.ReLU(), tmp_path / "model", torch.rand(2, 2))


def test_the_public_names_are_these() -> None:
    assert (engram.fold, engram.export_onnx, engram.export_program) == (fold, export_onnx, export_program)
