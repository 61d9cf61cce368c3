"""The user's cache folder: compiled kernels and configurations found on this machine."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """FLASHNORM_CACHE, else `flashnorm` in the folder that XDG_CACHE_HOME names, else in ~/.cache."""
    own = os.environ.get("FLASHNORM_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flashnorm"
