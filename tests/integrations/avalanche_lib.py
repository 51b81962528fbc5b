"""avalanche-lib for tests, also beside a torchvision that was built for another PyTorch than the one at hand."""

from __future__ import annotations

import importlib.util
import sys
import warnings

import torch

REASON = "needs avalanche-lib: make test-avalanche"
IS_INSTALLED = importlib.util.find_spec("avalanche") is not None
KEPT: list[torch.library.Library] = []  # a declaration lives as long as its library


def import_avalanche() -> None:
    """Import it once, whatever it warns of; nothing of torchvision's own operators is used by Engram's tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import torchvision
        except RuntimeError as reason:
            if "torchvision::nms" not in str(reason):
                raise
            for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
                del sys.modules[name]
            declare_operators()
            import torchvision  # noqa: F401
        import avalanche.training.supervised  # noqa: F401


def declare_operators() -> None:
    """The operators that torchvision describes when it is imported, and that its compiled part would have declared."""
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    KEPT.append(library)
