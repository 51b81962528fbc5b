"""Settings of all tests."""

from __future__ import annotations

import os

from hypothesis import settings

# On a server the examples are the same each time: a change is not to fail for what an earlier one did.
settings.register_profile("server", derandomize=True, deadline=None)
if os.environ.get("CI"):
    settings.load_profile("server")
