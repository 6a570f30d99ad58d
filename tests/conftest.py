"""Shared by all tests: no hub, and a home of their own, so that no cache of the user's is read or written."""

import os
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
_home = tempfile.TemporaryDirectory(prefix="scalelong-tests-", ignore_cleanup_errors=True)
os.environ["HOME"] = _home.name


def pytest_unconfigure():
    """Not left to the end of the process: pytest-xdist's workers do not come to it."""
    _home.cleanup()
