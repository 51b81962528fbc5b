"""Class labels, and the row that each has in the head."""

from __future__ import annotations

import numpy as np

from engram.common.errors import InputError


class Labels:
    """Rows are in the order in which labels came, since old ones must keep theirs; columns are in sorted order.

    `values` are the labels by row, `classes` by column, and `row_of_column` leads from one to the other.
    """

    def __init__(self, values: np.ndarray):
        self.values = values
        self.row_of_column = np.argsort(values, kind="stable")
        self.classes = values[self.row_of_column]

    def rows_of(self, labels: np.ndarray) -> np.ndarray:
        """The row of each label, all of which must be known."""
        return self.row_of_column[np.searchsorted(self.classes, labels)]

    def unknown(self, labels: np.ndarray) -> np.ndarray:
        """Those that are not known yet, sorted."""
        check_same_kind(labels, self.values)
        labels = np.unique(labels)
        return labels[~np.isin(labels, self.values)]

    def extended(self, labels: np.ndarray) -> Labels:
        """With further ones, which come last."""
        return Labels(np.concatenate([self.values, labels])) if len(labels) else self


def check_same_kind(labels: np.ndarray, known: np.ndarray) -> None:
    """Refuse labels that NumPy would compare with the known ones only after making others of them."""
    if kind_of(labels) != kind_of(known):
        raise InputError(
            f"labels must be of one kind: {known[0]!s} is among the {kind_of(known)}, "
            f"and {labels[0]!s} among the {kind_of(labels)}"
        )
    common = np.result_type(labels, known)
    for given in (labels, known):
        distinct = np.unique(given)
        # Python compares whole numbers with others exactly; NumPy would first make one type of them
        for label, made in zip(distinct.tolist(), distinct.astype(common).tolist(), strict=True):
            if label != made:
                raise InputError(
                    f"labels of the types {known.dtype} and {labels.dtype} cannot be told apart exactly: "
                    f"{label!r} would become {made!r}"
                )


def kind_of(labels: np.ndarray) -> str:
    """In a word. Numbers of all types are one kind, and so is text, whether NumPy's or Python's."""
    if labels.dtype.kind == "O" and all(isinstance(label, str) for label in labels):
        return "text"
    return {"b": "truth values", "i": "numbers", "u": "numbers", "f": "numbers", "U": "text"}.get(
        labels.dtype.kind, f"values of {labels.dtype}"
    )
