"""Shared by all tests: quiet libraries."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
