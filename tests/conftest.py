"""Shared by all tests: no hub, and a home of their own, so that no cache of the user's is read or written."""

import os
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["HOME"] = tempfile.mkdtemp(prefix="scalelong-tests-")
