"""Inputs in files: arrays of NumPy (.npy, .npz), and tables (.csv, .parquet).

As in `formats`, nothing in a file is trusted: sizes are bounded, nothing is unpickled, and a fault is one sentence.
"""

from __future__ import annotations

import csv
import io
import math
import zipfile
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from engram.common.errors import InputError, nearest, reason, shortened
from engram.data.formats import MAX_BYTES, read_file

NAMES: list[str] = ["inputs", "x", "X"]  # of the array in a .npz file that is read


def read_array(path: Path) -> np.ndarray:
    """The array in a .npy file, or the only one in a .npz file, or its one named inputs, x or X."""
    content = read_file(path)
    if path.suffix.lower() == ".npy":
        return _parse_npy(content, str(path))
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            names = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            chosen = [name for name in NAMES if name in names] or (list(names) if len(names) == 1 else [])
            if not chosen:
                found = ", ".join(map(shortened, names)) or "none"
                raise InputError(f"{path} must hold one array, or one named inputs, x or X, and holds {found}")
            info = names[chosen[0]]
            if info.file_size > MAX_BYTES:
                raise InputError(f"{path} decompresses to more than {MAX_BYTES} bytes")
            return _parse_npy(archive.read(info), f"{path}, {shortened(info.filename)},")
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, NotImplementedError, RuntimeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} is not a file of NumPy, or is damaged ({reason(error)})") from error


def _parse_npy(content: bytes, what: str) -> np.ndarray:
    """An array from NumPy's format. Its declared size is compared with the bytes; no object is read."""
    stream = io.BytesIO(content)
    try:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, by_column, kind = read(stream)
    except ValueError as error:
        raise InputError(f"{what} is not an array of NumPy, or is damaged ({reason(error)})") from error
    if kind.kind not in "biuf":
        raise InputError(f"{what} must hold numbers, not {kind}")
    if math.prod(shape) * kind.itemsize != len(content) - stream.tell():
        raise InputError(f"{what} is damaged: it declares the shape {shape} and has {len(content)} bytes")
    return np.frombuffer(content, kind, offset=stream.tell()).reshape(shape, order="F" if by_column else "C")


def read_table(path: Path, wanted: Sequence[str] | None = None) -> np.ndarray:
    """Numeric columns (N, columns) of a .csv or .parquet file.

    Args:
        path: the file. The first line of a CSV file may name the columns.
        wanted: the names of the columns, in their order; None for all.
    """
    if path.suffix.lower() == ".parquet":
        return _read_parquet(path, wanted)
    try:
        lines = list(csv.reader(io.StringIO(read_file(path).decode("utf-8-sig")), strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} is not a CSV file in UTF-8 ({reason(error)})") from error
    numbered = [(n, cells) for n, cells in enumerate(lines, start=1) if cells]
    named = bool(numbered) and any(_number(cell) is None for cell in numbered[0][1])
    names = numbered.pop(0)[1] if named else [str(n + 1) for n in range(len(numbered[0][1]))] if numbered else []
    if not numbered:
        raise InputError(f"{path} has no rows")
    places = _places(names, wanted, path)
    values = array("d")
    for line, cells in numbered:
        if len(cells) != len(names):
            raise InputError(f"{path}, line {line}: there are {len(cells)} values for {len(names)} columns")
        for place in places:
            value = _number(cells[place])
            if value is None:
                what = shortened(cells[place]) if cells[place].strip() else "nothing"
                raise InputError(f"{path}, line {line}: the column {shortened(names[place])} has {what}, not a number")
            values.append(value)
    return np.frombuffer(values, dtype=np.float64).reshape(len(numbered), len(places))


def _read_parquet(path: Path, wanted: Sequence[str] | None) -> np.ndarray:
    try:
        from pyarrow import ArrowException, BufferReader, parquet  # late: it is an extra
    except ModuleNotFoundError:
        raise InputError("pyarrow is not installed: pip install 'engram-cl[parquet]'") from None
    try:
        table = parquet.read_table(BufferReader(read_file(path)))
    except (ArrowException, OSError) as error:
        raise InputError(f"{path} is not a Parquet file, or is damaged ({reason(error)})") from error
    if not len(table):
        raise InputError(f"{path} has no rows")
    arrays = []
    for place in _places(table.column_names, wanted, path):
        name, column = shortened(table.column_names[place]), table.column(place)
        if column.null_count:
            raise InputError(f"{path}: the column {name} has {column.null_count} missing values")
        values = column.to_numpy()
        if values.dtype.kind not in "biuf":
            raise InputError(f"{path}: the column {name} holds {column.type}, not numbers")
        arrays.append(values.astype(np.float64))
    return np.stack(arrays, axis=1)


def _places(names: Sequence[str], wanted: Sequence[str] | None, path: Path) -> list[int]:
    for name in wanted or ():
        if names.count(name) != 1:
            many = f"{names.count(name)} columns" if name in names else "no column"
            raise InputError(f"{path} has {many} named {shortened(name)}{nearest(name, names)}")
    return list(range(len(names))) if wanted is None else [names.index(name) for name in wanted]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
