"""A regressor in one file, from which it continues to learn as if it had never been saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from engram.common.errors import InputError, reason
from engram.common.tensor_file import read_tensors, write_tensors
from engram.sklearn.features import FORMS, SecondMoment, num_direct
from engram.sklearn.labels import as_python
from engram.sklearn.ridge import RidgeSums
from engram.sklearn.sums_file import numbers_of

KIND, FORMAT = "regressor", 2
PARAMETERS = {"alpha": (int, float), "random_features": (int,), "random_state": (int, type(None))}


def save(regressor: Any, path: Path) -> None:
    """Write a regressor. Parameters that a file cannot hold are refused before anything is written."""
    params = {name: as_python(value) for name, value in regressor.get_params().items()}
    for name, value in params.items():
        if type(value) not in PARAMETERS[name]:
            raise InputError(f"the parameter {name} {value!r} cannot be saved: it must be a number")
    named = hasattr(regressor, "feature_names_in_")
    sums = regressor.sums_
    header = {
        "params": params,
        "seed": sums.seed,
        "features": sums.features.num_inputs,
        "num_random": sums.features.num_random,
        "psi": sums.features.form,
        "outputs": list(sums.shape),
        "count": sums.count,
        "feature_names": regressor.feature_names_in_.tolist() if named else None,
    }
    arrays = {name: getattr(sums, name) for name in ("total", "goals", "products", "zero")}
    arrays |= {"moment": sums.moment.upper(), "origin": sums.features.origin}
    tensors = {n: torch.from_numpy(np.ascontiguousarray(a)) for n, a in arrays.items()}
    write_tensors(path, KIND, FORMAT, header, tensors)


def load(kind: type, path: Path) -> Any:
    """Read a regressor.

    Args:
        kind: the class of what is made.
        path: the file.
    """
    header, tensors = read_tensors(path, KIND, FORMAT)
    try:
        for name, types in PARAMETERS.items():
            if type(header["params"][name]) not in types:
                raise TypeError(f"its {name} is {header['params'][name]!r}")
        numbers = [header[name] for name in ("seed", "features", "num_random")]
        if any(type(number) is not int or number < 0 for number in [*numbers, *header["outputs"]]):
            raise TypeError("its sizes are not whole numbers")
        if type(header["count"]) is not float or not 0 < header["count"] < np.inf or len(header["outputs"]) > 1:
            raise ValueError("it has no samples, or outputs of no known shape")
        seed, num_inputs, num_random = numbers
        shape = tuple(header["outputs"])
        width, outputs = num_direct(num_inputs, num_random) + num_random, int(np.prod(shape))
        shapes = {"total": (width,), "moment": (width, width), "goals": (outputs,), "products": (width, outputs)}
        arrays = {n: numbers_of(tensors, n, s) for n, s in {**shapes, "zero": (outputs,)}.items()}
        origin = numbers_of(tensors, "origin", (num_inputs,))
        regressor, form = kind(**header["params"]), FORMS[header.get("psi", 1)]
        names = header["feature_names"]
        if names is not None and (
            type(names) is not list or len(names) != num_inputs or any(type(name) is not str for name in names)
        ):
            raise ValueError("its features have other names")
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise InputError(f"{path} does not hold a regressor of this version of Engram ({reason(error)})") from error
    sums = RidgeSums(num_inputs, num_random, seed, np.zeros((1, *shape)))
    for name, array in arrays.items():
        setattr(sums, name, SecondMoment(array) if name == "moment" else array)
    sums.features = form(num_inputs, num_random, seed)
    sums.count, sums.features.origin, regressor.sums_ = header["count"], origin, sums
    regressor.n_features_in_ = num_inputs
    if names is not None:
        regressor.feature_names_in_ = np.array(names, dtype=object)
    return regressor
