"""Inputs in the forms in which people keep them: images in folders, datasets of PyTorch, columns of data frames."""

from __future__ import annotations

import numbers
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from engram.common.errors import InputError, nearest, reason, shortened
from engram.data.samples import Samples, as_samples

IMAGES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")  # endings of image files
DEEP = ("I", "F")  # how Pillow's names of modes begin whose pixels have more than 8 bits
Size = int | tuple[int, int] | None  # (height, width), one number for both, or that of the images


# --- images


def image_files(folder: Path) -> list[Path]:
    """The images in a folder, sorted by name; other files and hidden ones are left out."""
    try:
        files = [path for path in folder.iterdir() if path.suffix.lower() in IMAGES and not path.name.startswith(".")]
    except OSError as error:
        raise InputError(f"{folder} cannot be read: {reason(error)}") from error
    return sorted(path for path in files if path.is_file())


def image_folders(folder: Path) -> dict[str, list[Path]]:
    """The images of each class in FOLDER/CLASS/IMAGE, by the names of the classes, sorted."""
    try:
        folders = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError as error:
        raise InputError(f"{folder} cannot be read: {reason(error)}") from error
    if not folders:
        raise InputError(f"{folder} holds no folders, and needs one of images for each class")
    found = {path.name: image_files(path) for path in folders}
    for path in folders:
        if not found[path.name]:
            inside = next((each.name for each in sorted(path.iterdir()) if each.is_dir()), None)
            hint = f": for its folders as classes, give {path}" if inside else f" ({', '.join(IMAGES)})"
            raise InputError(f"the folder {path} holds no images{hint}")
    return found


def read_images(files: Sequence[Path], size: Size = None, colour: bool = True) -> Tensor:
    """Images as uint8 pixels (N, 3 or 1, H, W).

    Args:
        files: at least one.
        size: (height, width), or one number for both: images are resized to it. By default all must have one size.
        colour: three channels; False for one, grey.
    """
    try:
        from PIL import Image, ImageOps  # late: only who has images needs it
    except ModuleNotFoundError:
        raise InputError("Pillow is not installed: pip install 'engram-cl[images]'") from None
    shape = (size, size) if isinstance(size, int) else size
    if shape is not None and (len(shape) != 2 or min(shape) < 1):
        raise InputError(f"size must be (height, width) or one number, from 1, not {shortened(size)}")
    images: list[Tensor] = []
    for file in files:
        try:
            with Image.open(file) as opened:
                image = ImageOps.exif_transpose(opened)  # a photo may be stored lying on its side
                if image.mode.startswith(DEEP):
                    raise InputError(f"{file} has pixels of more than 8 bits ({image.mode}): convert it first")
                image = image.convert("RGB" if colour else "L")
        except InputError:
            raise
        except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
            raise InputError(f"{file} cannot be read as an image: {reason(error)}") from error
        if shape is not None and (image.height, image.width) != tuple(shape):
            image = image.resize((shape[1], shape[0]), Image.Resampling.BILINEAR)
        pixels = torch.from_numpy(np.array(image))  # (H, W) or (H, W, 3)
        images.append(pixels.movedim(-1, 0) if colour else pixels[None])
        if images[-1].shape != images[0].shape:
            one, first = (f"{each.shape[1]} by {each.shape[2]} pixels" for each in (images[-1], images[0]))
            raise InputError(f"{file} has {one}, and {files[0]} {first}: set a size to which all are resized")
    return torch.stack(images)


# --- datasets of PyTorch


def read_dataset(dataset: Any, what: str) -> Samples:
    """All samples of a dataset, by number, or in its own order if it has no numbers."""
    if not isinstance(dataset, IterableDataset) and not (
        hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    ):
        raise InputError(f"{what} must be a dataset of PyTorch, not a {type(dataset).__name__}")
    found: Iterable[Any] = dataset
    if not isinstance(dataset, IterableDataset):
        found = (dataset[n] for n in range(len(dataset)))
    inputs: list[Tensor] = []
    labels: list[int] = []
    for n, sample in enumerate(found):
        if not isinstance(sample, tuple | list) or len(sample) != 2:
            raise InputError(f"sample {n} of {what} must be (input, label), not a {_described(sample)}")
        inputs.append(_as_input(sample[0], n, what))
        labels.append(_as_label(sample[1], n, what))
        if inputs[-1].shape != inputs[0].shape or inputs[-1].dtype != inputs[0].dtype:
            here, first = (f"{each.dtype} of shape {tuple(each.shape)}" for each in (inputs[-1], inputs[0]))
            raise InputError(f"the samples of {what} differ: sample {n} is {here}, sample 0 {first}")
    if not inputs:
        raise InputError(f"{what} is empty")
    return as_samples(torch.stack(inputs), torch.tensor(labels))


def _described(sample: Any) -> str:
    return f"{type(sample).__name__} of {len(sample)}" if isinstance(sample, tuple | list) else type(sample).__name__


def _as_input(value: Any, n: int, what: str) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    array = np.array(value)  # a copy, since an image may share its memory with others
    if array.dtype.kind not in "biuf":
        raise InputError(f"the input of sample {n} of {what} must hold numbers, not {type(value).__name__}")
    tensor = torch.from_numpy(array)
    # images of Pillow are (height, width) or (height, width, channels)
    return (tensor[None] if tensor.ndim == 2 else tensor.movedim(-1, 0)) if hasattr(value, "getbands") else tensor


def _as_label(value: Any, n: int, what: str) -> int:
    number = value.item() if isinstance(value, Tensor | np.generic) and not value.shape else value
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise InputError(f"the label of sample {n} of {what} must be a whole number from 0, not {shortened(value)}")
    return number


# --- data frames


def column_of(frame: Any, name: Hashable, what: str) -> list[Any]:
    """The values of a column of labels or tasks, none of which may be missing."""
    column = _column(frame, name)
    if missing := int(column.isna().sum()):
        raise InputError(
            f"the {what} column {shortened(name)} has {missing} missing values: fill them, or drop the rows"
        )
    return list(column.tolist())


def read_columns(frame: Any, columns: Sequence[Hashable]) -> Tensor:
    """Numeric columns of a data frame as floats (N, columns)."""
    if not len(columns):
        raise InputError("the frame has no columns of inputs")
    arrays = []
    for name in columns:
        column = _column(frame, name)
        if getattr(column.dtype, "kind", "O") not in "biuf":
            example = next((value for value in column.tolist() if isinstance(value, str)), None)
            held = f"text, such as {shortened(example)}" if example else f"{column.dtype}"
            raise InputError(
                f"the column {shortened(name)} holds {held}: turn it into numbers (pandas.get_dummies) or leave it out"
            )
        if missing := int(column.isna().sum()):
            raise InputError(f"the column {shortened(name)} has {missing} missing values: fill them, or drop the rows")
        arrays.append(column.to_numpy(dtype="float32"))
    return torch.from_numpy(np.stack(arrays, axis=1))


def sorted_labels(labels: Sequence[Any], what: str) -> list[Any]:
    """The different labels in order: words, or whole numbers."""
    different = list(dict.fromkeys(labels))
    for label in different:
        if isinstance(label, numbers.Real) and not float(label).is_integer():
            raise InputError(f"{what} holds {shortened(label)}, but labels are words or whole numbers")
    try:
        return sorted(different)
    except TypeError:
        raise InputError(f"{what} mixes words and numbers, which have no order: make all labels words") from None


def _column(frame: Any, name: Hashable) -> Any:
    if not (hasattr(frame, "columns") and hasattr(frame, "isna")):
        raise InputError(f"from_dataframe takes a DataFrame of pandas, not a {type(frame).__name__}")
    names = list(frame.columns)
    if (count := names.count(name)) != 1:
        many = f"{count} columns" if count else "no column"
        raise InputError(f"the frame has {many} named {shortened(name)}{nearest(name, map(str, names))}")
    return frame[name]
