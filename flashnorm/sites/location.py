"""Which line of model code is running."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import TracebackType

import torch


def model_line(failed: TracebackType | None) -> str:
    """The innermost line that is neither ours nor torch's, of the running code or of a traceback."""
    lines = reversed([*walk_tb(failed)]) if failed is not None else walk_stack(sys._getframe(1))
    others = (f"{Path(__file__).parents[1]}{os.sep}", f"{Path(torch.__file__).parent}{os.sep}", "<")
    for frame, line in lines:
        if not frame.f_code.co_filename.startswith(others):
            return f"{Path(frame.f_code.co_filename).name}:{line}"
    return ""
