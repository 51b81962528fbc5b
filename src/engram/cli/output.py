"""Standard output and standard error, which may fail before the command ends: nobody reads them, or a disk is full."""

from __future__ import annotations

import errno
import io
import os
import sys

# Of a pipe whose reader has ended, as in `engram runs list | head -3`, and of a terminal that was closed.
NOBODY_READS = (errno.EPIPE, errno.EIO)


class Output(io.TextIOWrapper):
    """A stream that drops what cannot be written, so that training continues, or saves its steps and stops.

    A terminal whose encoding has no Greek letters gets question marks.

    Args:
        stream: standard output or standard error, which stays open.
    """

    def __init__(self, stream: io.TextIOWrapper):
        same = open(stream.fileno(), "wb", closefd=False)  # noqa: SIM115  # it lives as long as the command
        by_line = stream.line_buffering or stream.write_through  # the latter by `python -u`
        super().__init__(same, stream.encoding, "replace", line_buffering=by_line)
        self.error: OSError | None = None  # the first

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            self._drop(error)
        return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self._drop(error)

    def _drop(self, error: OSError) -> None:
        """Write to nowhere from now on, what is still in the buffers included."""
        self.error = self.error or error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)


def prepare_output() -> None:
    """Make standard output and standard error streams of this kind. Others, such as a test's, stay."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is io.TextIOWrapper:
            stream.flush()
            setattr(sys, name, Output(stream))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def lost_output() -> OSError | None:
    """Why something that somebody wanted to read was not written; None if all was, or if nobody reads it any more."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, Output):
            stream.flush()
            if stream.error is not None and stream.error.errno not in NOBODY_READS:
                return stream.error
    return None
