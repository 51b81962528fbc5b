"""`engram predict`: the labels that a saved model gives to samples in a file, or to images in a folder."""

from __future__ import annotations

import csv
import io
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engram.common.errors import InputError, printable, reason, shortened

if TYPE_CHECKING:
    import numpy as np

AT_ONCE = 1000  # samples that are given to a network together
FILES = ".npy, .npz, .csv or .parquet file, or a folder of images"


def predict(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="A saved classifier or regressor, an .onnx file, or a saved model.",
            show_default=False,
        ),
    ],
    inputs: Annotated[Path, typer.Argument(metavar="INPUT", help=f"A {FILES}.", show_default=False)],
    probabilities: Annotated[
        bool, typer.Option("--probabilities", help="Also write the probability of each class.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write the CSV.", show_default="standard output")
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Columns of a table, comma-separated.", show_default="the model's, or all"),
    ] = None,
    classes: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES", help="Names of the outputs, comma-separated.", show_default="the model's, or 0, 1, …"
        ),
    ] = None,
    size: Annotated[
        int | None, typer.Option(metavar="N", help="Resize images to N×N pixels.", show_default="the model's")
    ] = None,
    grey: Annotated[bool, typer.Option("--grey", help="Read images with one channel instead of three.")] = False,
    make: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION", help="What makes the model of a file of engram.save_model.", show_default=False
        ),
    ] = None,
) -> None:
    """Write the labels that a model gives to samples, as CSV.

    Example: engram predict classifier.safetensors samples.csv --probabilities
    """
    if not inputs.exists():
        raise InputError(f"there is no file or folder {inputs}")
    names = _words("columns", columns)
    predictor = _read_model(model, make, _words("classes", classes))
    if predictor.numeric and probabilities:
        raise InputError(f"{model} predicts numbers, which have no probabilities")
    what, (found, values) = "file" if inputs.is_dir() else "row", _read_inputs(inputs, predictor, names, size, grey)
    text = _as_csv(predictor, found, predictor.fitted(values, inputs), what, probabilities)
    if out is None:
        sys.stdout.write("".join(printable(line) + "\n" for line in text.splitlines()))
        return
    from engram.common.files import write_or_refuse

    write_or_refuse(out, text.encode())


@dataclass(frozen=True)
class Prediction:
    """Labels (N,), and the probability of each class (N, classes); or the numbers of a regressor, without classes."""

    labels: np.ndarray
    shares: np.ndarray
    classes: Sequence[Any] = ()


@dataclass(frozen=True)
class Predictor:
    """A model that was read: what it takes, and what it says."""

    path: Path
    predict: Callable[[np.ndarray], Prediction]
    shape: tuple[int, ...] | None  # of a sample; None if it takes any
    columns: list[str] | None = None  # the names of the features that it learned
    scaled: bool = True  # uint8 pixels are scaled to [0, 1]
    numeric: bool = False  # it predicts numbers, not classes

    def fitted(self, values: np.ndarray, inputs: Path) -> np.ndarray:
        """The samples in the shape that the model takes; a table may be rows of pixels."""
        import numpy as np

        if values.ndim < 2 or not len(values):
            raise InputError(f"{inputs} must hold samples as rows, and has the shape {values.shape}")
        own = values.shape[1:]
        if self.shape is not None and own != self.shape:
            if len(own) > 1 < len(self.shape) or np.prod(own) != np.prod(self.shape):
                raise InputError(f"{inputs} holds samples of shape {own}, and {self.path} takes {self.shape}")
            values = values.reshape(len(values), *self.shape)
        bad = ~np.isfinite(values.reshape(len(values), -1)).all(axis=1)
        if bad.any():
            raise InputError(f"sample {int(bad.argmax())} of {inputs} has NaN or infinity")
        return values


def _words(option: str, text: str | None) -> list[str] | None:
    words = None if text is None else [word.strip() for word in text.split(",")]
    if words is not None and ("" in words or len(set(words)) < len(words)):
        raise InputError(f"--{option} must be different names, separated by commas, not {shortened(text)}")
    return words


def _as_csv(predictor: Predictor, names: Sequence[str], values: np.ndarray, what: str, probabilities: bool) -> str:
    """A line for each sample: its row or file, its label or numbers, and its probabilities."""
    found = predictor.predict(values)
    if predictor.numeric:
        numbers = found.labels.reshape(len(values), -1)
        heads = [f"value_{n + 1}" for n in range(numbers.shape[1])] if numbers.shape[1] > 1 else ["value"]
        rows = numbers.tolist()
    else:
        heads = ["label", *(found.classes if probabilities else ())]
        shares = found.shares.tolist() if probabilities else [()] * len(values)
        rows = [[label, *own] for label, own in zip(found.labels.tolist(), shares, strict=True)]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([what, *heads])
    writer.writerows([name, *row] for name, row in zip(names, rows, strict=True))
    return text.getvalue()


# --- inputs


def _read_inputs(
    path: Path, predictor: Predictor, columns: list[str] | None, size: int | None, grey: bool
) -> tuple[list[str], np.ndarray]:
    """The names of the samples (rows, or files) and the samples."""
    import numpy as np

    from engram.data import inputs, tables

    in_folder, ending, shape = path.is_dir(), path.suffix.lower(), predictor.shape
    if (size is not None or grey) and not in_folder:
        raise InputError(f"--size and --grey are for folders of images, and {path} is none")
    if columns is not None and (in_folder or ending not in (".csv", ".parquet")):
        raise InputError(f"--columns is for tables, and {path} is none")
    if in_folder:
        files = inputs.image_files(path)
        if not files:
            raise InputError(f"the folder {path} holds no images")
        of_images = shape if shape is not None and len(shape) == 3 else None
        sides = size if size is not None or of_images is None else of_images[1:]
        pixels = inputs.read_images(files, sides, colour=not (grey or (of_images is not None and of_images[0] == 1)))
        return [file.name for file in files], pixels.numpy().astype(np.float32) / np.float32(255)
    if ending in (".npy", ".npz"):
        values = tables.read_array(path)
        if values.dtype == np.uint8 and predictor.scaled:
            values = values.astype(np.float32) / np.float32(255)
    elif ending in (".csv", ".parquet"):
        values = tables.read_table(path, columns or predictor.columns)
    else:
        raise InputError(f"INPUT must be a {FILES}, not {path}")
    return [str(row) for row in range(len(values) if values.ndim else 0)], values


# --- models


def _read_model(path: Path, make: str | None, classes: list[str] | None) -> Predictor:
    """What the file holds, by its ending and by what it says of itself."""
    if path.suffix.lower() == ".pt2":
        raise InputError(f"{path} could run code when it is read: write the model with engram.export_onnx instead")
    if path.suffix.lower() == ".onnx":
        _refuse("make", make, path)
        return _onnx(path, classes)
    from engram.common.tensor_file import kind_of

    kind = kind_of(path)
    if kind == "model":
        return _network(path, make, classes)
    _refuse("make", make, path)
    _refuse("classes", classes, path)
    if kind not in ("classifier", "regressor"):
        raise InputError(f"{path} holds a {printable(kind[:80])}, and no model that predicts")
    try:
        from engram import sklearn
    except ModuleNotFoundError:
        raise InputError("scikit-learn is not installed: pip install 'engram-cl[sklearn]'") from None
    numeric = kind == "regressor"
    estimator: Any = sklearn.ContinualRegressor.load(path) if numeric else sklearn.ContinualClassifier.load(path, "cpu")
    names = estimator.feature_names_in_.tolist() if hasattr(estimator, "feature_names_in_") else None

    def run(values: np.ndarray) -> Prediction:
        with warnings.catch_warnings():  # the columns have been chosen by name, but arrays carry no names
            warnings.filterwarnings("ignore", "X does not have valid feature names")
            labels = estimator.predict(values)
            if numeric:
                return Prediction(labels, labels)
            return Prediction(labels, estimator.predict_proba(values), estimator.classes_.tolist())

    return Predictor(path, run, (estimator.n_features_in_,), names, scaled=False, numeric=numeric)


def _refuse(option: str, given: object, path: Path) -> None:
    if given is not None:
        raise InputError(f"--{option} has no effect on {path}: leave it out")


def _onnx(path: Path, classes: list[str] | None) -> Predictor:
    from engram.data.formats import read_file
    from engram.integrations.export import installed

    runtime = installed("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 4  # what is wrong is said here
    content = read_file(path)
    try:
        session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has its own errors
        raise InputError(f"{path} is not an ONNX file that onnxruntime can run ({reason(error)})") from error
    if len(session.get_inputs()) != 1:
        raise InputError(f"{path} takes {len(session.get_inputs())} inputs, and can be given only one")
    (taken,) = session.get_inputs()
    shape = tuple(taken.shape[1:]) if all(isinstance(side, int) for side in taken.shape[1:]) else None
    return _of_logits(path, lambda batch: session.run(None, {taken.name: batch})[0], shape, classes)


def _network(path: Path, make: str | None, classes: list[str] | None) -> Predictor:
    """A file of `engram.save_model` holds tensors and no code: the user's own function makes the model."""
    if make is None:
        hint = "name what makes its model, --make MODULE:FUNCTION, or write it with engram.export_onnx"
        raise InputError(f"{path} holds tensors and no code: {hint}")
    from importlib import import_module

    import torch

    from engram.integrations.model_file import load_model

    module, _, function = make.partition(":")
    if not (module and function):
        raise InputError(f"--make must be MODULE:FUNCTION, as in animals:make_model, not {shortened(make)}")
    sys.path.insert(0, str(Path.cwd()))
    try:
        model = getattr(import_module(module), function)()
    except Exception as error:  # it is the user's code
        raise InputError(f"{make} cannot be called: {reason(error)}") from error
    finally:
        sys.path.remove(str(Path.cwd()))
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"{make} must return a module of PyTorch, not a {type(model).__name__}")
    saved = load_model(path, model.eval()).get("classes")

    @torch.no_grad()
    def run(batch: np.ndarray) -> np.ndarray:
        outputs = model(torch.from_numpy(batch))
        return outputs.float().numpy() if isinstance(outputs, torch.Tensor) else outputs

    return _of_logits(path, run, None, classes or (saved if isinstance(saved, list) else None))


def _of_logits(
    path: Path, run: Callable[[np.ndarray], Any], shape: tuple[int, ...] | None, classes: list[str] | None
) -> Predictor:
    """A network that returns logits (samples, classes)."""
    import numpy as np

    def predict(values: np.ndarray) -> Prediction:
        batches = []
        for first in range(0, len(values), AT_ONCE):
            batch = np.ascontiguousarray(values[first : first + AT_ONCE], dtype=np.float32)
            try:
                batches.append(np.asarray(run(batch)))
            except Exception as error:  # of the user's model, or of onnxruntime
                raise InputError(f"{path} cannot take samples of shape {values.shape[1:]}: {reason(error)}") from error
            if batches[-1].ndim != 2 or len(batches[-1]) != len(batch):
                raise InputError(
                    f"{path} must give a row of outputs for each sample, not the shape {batches[-1].shape}"
                )
        logits = np.concatenate(batches).astype(np.float64)
        names = list(range(logits.shape[1])) if classes is None else classes
        if len(names) != logits.shape[1]:
            raise InputError(f"{path} has {logits.shape[1]} outputs, and there are {len(names)} names of classes")
        odds = np.exp(logits - logits.max(axis=1, keepdims=True))
        labels = np.array([names[place] for place in logits.argmax(axis=1)], dtype=object)
        return Prediction(labels, odds / odds.sum(axis=1, keepdims=True), names)

    return Predictor(path, predict, shape)
