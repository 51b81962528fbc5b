"""`engram predict`: labels of saved models for files and folders."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
import pytest
import torch
from command import Command
from torch import nn

import engram as package
from engram.sklearn import ContinualClassifier, ContinualRegressor

RANDOM = np.random.default_rng(0)
CENTRES = 3 * RANDOM.normal(size=(3, 4))
LABELS = np.array(["bat", "cat", "owl"])[np.arange(30) % 3]
SAMPLES = CENTRES[np.arange(30) % 3] + RANDOM.normal(size=(30, 4))


def make_model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 6), nn.ReLU(), package.DHPSoftmax(6, 3))


@pytest.fixture
def classifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ContinualClassifier:
    """A classifier in classifier.safetensors, and samples in every kind of file."""
    monkeypatch.chdir(tmp_path)
    made = ContinualClassifier(random_state=0).fit(SAMPLES, LABELS)
    made.save("classifier.safetensors")
    np.save("x.npy", SAMPLES)
    np.savez("x.npz", inputs=SAMPLES, targets=LABELS == "cat")
    np.savez_compressed("only.npz", SAMPLES)
    np.save("columns.npy", np.asfortranarray(SAMPLES))
    rows = [",".join(map(repr, row.tolist())) for row in SAMPLES]
    Path("plain.csv").write_text("\n".join(rows) + "\n")
    Path("x.csv").write_text("\ufeffkind,a,b,c,d\n" + "".join(f'"a, b",{row}\n' for row in rows))
    return made


@pytest.fixture
def network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A network in model.safetensors, made by animals.py, and images in a folder."""
    image = pytest.importorskip("PIL.Image")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = make_model().eval()
    package.save_model("model.safetensors", model, about={"classes": ["bat", "cat", "owl"]})
    Path("animals.py").write_text("from test_cli_predict import make_model\nnumber = lambda: 3\n")
    Path("photos").mkdir()
    for n in range(4):
        pixels = RANDOM.integers(0, 256, size=(2, 2, 3), dtype=np.uint8)
        image.fromarray(pixels).save(f"photos/{n}.png")
        np.save(f"{n}.npy", pixels.transpose(2, 0, 1)[None])
    return model


def table(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text)))


@pytest.mark.parametrize("name", ["x.npy", "x.npz", "only.npz", "columns.npy", "plain.csv"])
def test_labels_are_those_of_the_classifier(name: str, classifier: ContinualClassifier, engram: Command) -> None:
    outcome = engram("predict", "classifier.safetensors", name)
    assert (outcome.code, outcome.err) == (0, "")
    expected = classifier.predict(SAMPLES)
    assert table(outcome.out) == [["row", "label"], *([str(n), label] for n, label in enumerate(expected))]


def test_probabilities_and_chosen_columns_in_a_file(classifier: ContinualClassifier, engram: Command) -> None:
    words = ("predict", "classifier.safetensors", "x.csv", "--columns", "a,b,c,d", "--probabilities", "--out", "y.csv")
    assert engram(*words).out == ""
    found = table(Path("y.csv").read_text())
    assert found[0] == ["row", "label", "bat", "cat", "owl"]
    shares = np.array([[float(cell) for cell in row[2:]] for row in found[1:]])
    np.testing.assert_array_equal(shares, classifier.predict_proba(SAMPLES))


def test_columns_are_found_by_the_names_that_were_learned(classifier: ContinualClassifier, engram: Command) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    frame = pandas.DataFrame(SAMPLES, columns=list("dcba"))
    named = ContinualClassifier(random_state=0).fit(frame, LABELS)
    named.save("named.safetensors")
    shuffled = frame.assign(kind="?")[["kind", "a", "d", "b", "c"]]
    shuffled.to_csv("shuffled.csv", index=False)
    shuffled.to_parquet("shuffled.parquet")
    for name in ("shuffled.csv", "shuffled.parquet"):
        outcome = engram("predict", "named.safetensors", name)
        assert [row[1] for row in table(outcome.out)[1:]] == named.predict(frame).tolist(), outcome
    frame.drop(columns="b").to_csv("short.csv", index=False)
    assert "has no column named 'b'" in engram.refusal("predict", "named.safetensors", "short.csv")


def test_a_regressor_writes_numbers(classifier: ContinualClassifier, engram: Command) -> None:
    regressor = ContinualRegressor().fit(SAMPLES, SAMPLES[:, 0] * 2)
    regressor.save("regressor.safetensors")
    found = table(engram("predict", "regressor.safetensors", "x.npy").out)
    assert found[0] == ["row", "value"]
    np.testing.assert_array_equal([float(row[1]) for row in found[1:]], regressor.predict(SAMPLES))
    assert "no probabilities" in engram.refusal("predict", "regressor.safetensors", "x.npy", "--probabilities")


def test_a_network_predicts_images_and_pixels(network: nn.Module, engram: Command) -> None:
    pixels = np.concatenate([np.load(f"{n}.npy") for n in range(4)])
    with torch.no_grad():
        logits = network(torch.from_numpy(pixels) / 255)
    labels = [["bat", "cat", "owl"][n] for n in logits.argmax(dim=1)]
    made = ("--make", "animals:make_model")
    found = table(engram("predict", "model.safetensors", "photos", *made, "--probabilities").out)
    assert [row[:2] for row in found[1:]] == [[f"{n}.png", label] for n, label in enumerate(labels)]
    shares = torch.tensor([[float(cell) for cell in row[2:]] for row in found[1:]])
    torch.testing.assert_close(shares, logits.softmax(dim=1))
    np.save("pixels.npy", pixels)
    found = table(engram("predict", "model.safetensors", "pixels.npy", *made, "--classes", "x,y,z").out)
    assert [row[1] for row in found[1:]] == ["xyz"[n] for n in logits.argmax(dim=1)]


def test_an_onnx_file_predicts(network: nn.Module, engram: Command) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    package.export_onnx(network, "model.onnx", torch.rand(2, 3, 2, 2))
    rows = np.concatenate([np.load(f"{n}.npy").reshape(1, -1) for n in range(4)]) / 255
    np.savetxt("rows.csv", rows, delimiter=",")
    found = table(engram("predict", "model.onnx", "rows.csv").out)
    with torch.no_grad():
        expected = network(torch.from_numpy(rows).float()).argmax(dim=1).tolist()
    assert [row[1] for row in found[1:]] == [str(n) for n in expected]
    assert table(engram("predict", "model.onnx", "photos").out)[1:] == [
        [f"{n}.png", str(e)] for n, e in enumerate(expected)
    ]
    np.save("wide.npy", np.zeros((2, 13)))
    assert "samples of shape (13,), and model.onnx takes (3, 2, 2)" in engram.refusal(
        "predict", "model.onnx", "wide.npy"
    )
    Path("bad.onnx").write_bytes(b"nothing")
    assert "bad.onnx is not an ONNX file" in engram.refusal("predict", "bad.onnx", "photos")


def test_bad_models_are_refused(network: nn.Module, engram: Command) -> None:
    def refused(*words: str) -> str:
        return engram.refusal("predict", words[0], "photos", *words[1:])

    model = "model.safetensors"
    assert "cannot be read: No such file" in refused("missing.safetensors")
    assert "could run code" in refused("model.pt2")
    assert "is not a file of Engram" in refused("photos/0.png")
    assert "tensors and no code" in refused(model)
    assert "must be MODULE:FUNCTION" in refused(model, "--make", "animals")
    assert "nowhere:f cannot be called: No module" in refused(model, "--make", "nowhere:f")
    assert "must return a module of PyTorch, not a int" in refused(model, "--make", "animals:number")
    assert "has 3 outputs, and there are 2 names" in refused(model, "--make", "animals:make_model", "--classes", "a,b")
    assert "must be different names" in refused(model, "--make", "animals:make_model", "--classes", "a,a,b")
    assert "cannot take samples of shape (3, 9, 9)" in refused(model, "--make", "animals:make_model", "--size", "9")


def test_bad_inputs_are_refused(classifier: ContinualClassifier, engram: Command) -> None:
    def refused(name: str, *words: str) -> str:
        return engram.refusal("predict", "classifier.safetensors", name, *words)

    def written(name: str, content: bytes | str) -> str:
        Path(name).write_bytes(content.encode() if isinstance(content, str) else content)
        return name

    whole = Path("x.npy").read_bytes()
    assert "no file or folder missing.npy" in refused("missing.npy")
    assert "INPUT must be a .npy" in refused(written("x.txt", "1"))
    assert "is damaged: it declares the shape (30, 4)" in refused(written("short.npy", whole[:-8]))
    assert "is not an array of NumPy" in refused(written("none.npy", b"nothing"))
    np.save("objects.npy", np.array([{}]), allow_pickle=True)
    assert "must hold numbers, not object" in refused("objects.npy")
    assert "is not a file of NumPy" in refused(written("none.npz", Path("x.npz").read_bytes()[:100]))
    np.savez("two.npz", a=SAMPLES, b=SAMPLES)
    assert "must hold one array, or one named inputs, x or X, and holds 'a', 'b'" in refused("two.npz")
    np.save("flat.npy", SAMPLES[0])
    assert "must hold samples as rows" in refused("flat.npy")
    np.save("wide.npy", np.zeros((2, 5)))
    assert "samples of shape (5,), and classifier.safetensors takes (4,)" in refused("wide.npy")
    np.save("nan.npy", np.where(SAMPLES[7, 1] == SAMPLES, np.nan, SAMPLES))
    assert "sample 7 of nan.npy has NaN" in refused("nan.npy")
    assert "line 2: the column 'kind' has 'a, b', not a number" in refused("x.csv")
    assert "line 3: there are 1 values for 4 columns" in refused(written("ragged.csv", "a,b,c,d\n1,2,3,4\n5\n"))
    assert "line 2: the column 'b' has nothing" in refused(written("gap.csv", "a,b,c,d\n1,,3,4\n"))
    assert "has no rows" in refused(written("empty.csv", "a,b\n"))
    assert "not a CSV file in UTF-8" in refused(written("latin.csv", b"\xff\xfe1"))
    assert "no column named 'aa' (did you mean a?)" in refused("x.csv", "--columns", "aa,b")
    assert "--columns is for tables" in refused("x.npy", "--columns", "a")
    assert "--size and --grey are for folders" in refused("x.npy", "--size", "3")
    assert "--make has no effect" in refused("x.npy", "--make", "a:b")
    assert "--classes has no effect" in refused("x.npy", "--classes", "a,b")
    Path("photos").mkdir()
    assert "holds no images" in refused("photos")
    pytest.importorskip("pyarrow")
    assert "is not a Parquet file" in refused(written("none.parquet", b"nothing"))


def test_labels_cannot_control_a_terminal(classifier: ContinualClassifier, engram: Command) -> None:
    ContinualClassifier(random_state=0).fit(SAMPLES, np.char.add("\x1b[31m", LABELS)).save("red.safetensors")
    out = engram("predict", "red.safetensors", "x.npy").out
    assert "\\x1b[31mcat" in out
    assert "\x1b" not in out
