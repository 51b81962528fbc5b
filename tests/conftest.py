"""Settings of all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

# On a server the examples are the same each time: a change is not to fail for what an earlier one did.
settings.register_profile("server", derandomize=True, deadline=None)
settings.register_profile("long", max_examples=10_000, deadline=None)  # pytest --hypothesis-profile=long
if os.environ.get("CI"):
    settings.load_profile("server")


@pytest.fixture(scope="session", autouse=True)
def no_power_cuts() -> Iterator[None]:
    """Files are not forced onto the disk: these tests kill processes, but cut no power, and disks are slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield
