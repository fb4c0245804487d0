"""Folders: where Kiln keeps files of this user."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def folder() -> Path:
    """Where the cache is: KILN_CACHE_DIR, or the folder for caches of this user."""
    chosen = os.environ.get("KILN_CACHE_DIR")
    return Path(chosen).expanduser() if chosen else Path(platformdirs.user_cache_dir("kiln"))
