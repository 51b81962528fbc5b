"""A small library in C for what a step on a CPU computes between its products, if the machine has a compiler.

It is optional: its results are PyTorch's to the last digit, so nothing but time depends on whether there is a compiler.

It is plain C that is called with pointers, and not an extension of PyTorch. So it compiles in a fraction of a second
without PyTorch's headers, one library serves all versions of PyTorch and Python, and there is nothing to build at
installation. `torch.compile` would make similar loops, but takes seconds in each process and needs a compiler too.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from engram.common.errors import reason
from engram.common.files import replacement

SOURCE = Path(__file__).with_name("kernels.c")
FLAGS = ["-std=c11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC"]
LONGEST_BUILD_S = 60
TYPES = {torch.float32: "float32", torch.float64: "float64"}
Function = Callable[..., None]


class Unavailable(Exception):
    """Why nothing is compiled, as the end of a sentence."""


def compiled(name: str, dtype: torch.dtype, num_integers: int, num_reals: int, num_tensors: int) -> Function:
    """A function of the library, which is compiled where that has not been done before; or `Unavailable`.

    Args:
        name: as in kernels.c, without its type.
        dtype: float32 or float64.
        num_integers: how many integers it takes, first.
        num_reals: how many numbers of type double follow them.
        num_tensors: how many pointers follow those.

    Example:
        >>> step = compiled("step", torch.float32, 2, 1, 5)
    """
    found = _library()
    if isinstance(found, Unavailable):
        raise found
    function = getattr(found, f"{name}_{TYPES[dtype]}")
    integers, reals = [ctypes.c_int64] * num_integers, [ctypes.c_double] * num_reals
    function.argtypes = [*integers, *reals, *[ctypes.c_void_p] * num_tensors]
    function.restype = None
    return function


def is_plain(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether the values are of this type and lie in the main memory one after another, as C needs them.

    Args:
        tensor: any.
        dtype: of the values.

    Example:
        >>> is_plain(torch.ones(2, 3).t(), torch.float32)
        False
    """
    return tensor.dtype == dtype and tensor.device.type == "cpu" and tensor.is_contiguous()


@functools.cache
def _library() -> ctypes.CDLL | Unavailable:
    """The library, or why there is none: a process tries once."""
    try:
        return ctypes.CDLL(str(_library_file()))
    except Unavailable as why:
        return why
    except (OSError, subprocess.SubprocessError) as error:
        return Unavailable(reason(error))


def _library_file() -> Path:
    """The compiled library in the user's cache folder; its name changes with whatever its content depends on."""
    flags = [*FLAGS, *_processor_flags()]
    content = repr((SOURCE.read_text(encoding="utf-8"), flags, sys.platform, platform.machine()))
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "engram" / "compiled"
    library = folder / f"kernels-{hashlib.sha256(content.encode()).hexdigest()[:16]}.so"
    if not folder.is_absolute():
        raise Unavailable("the user has no cache folder")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not library.exists():
        _compile(library, flags)
    for path in (folder, library):  # a library is code: nobody else may have put it there
        status = path.stat()
        if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o002):
            raise Unavailable(f"others can write to {path}")
    return library


def _processor_flags() -> list[str]:
    """Vectors, and fma() as an instruction. A step is bound by memory, so the widest vectors would not be faster."""
    if platform.machine().lower() in ("x86_64", "amd64"):
        if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
            raise Unavailable("the processor has no AVX2")
        return ["-mavx2", "-mfma"]
    if platform.machine().lower() in ("aarch64", "arm64"):
        return []
    raise Unavailable(f"{platform.machine()} is not a known kind of processor")


def _compile(library: Path, flags: list[str]) -> None:
    named = [os.environ.get("CC", ""), "cc", "gcc", "clang"]
    compiler = next((found for name in named if name and (found := shutil.which(name))), None)
    if compiler is None:
        raise Unavailable("there is no C compiler")
    with replacement(library) as new:  # two processes may compile it at the same time
        command = [compiler, *flags, str(SOURCE), "-o", str(new), "-lm"]
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=LONGEST_BUILD_S)
        if done.returncode:
            raise Unavailable(f"{compiler} cannot compile {SOURCE.name}")
        new.chmod(0o700)
