"""How far the resident memory of a process of its own grows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# `VmHWM`, for `ru_maxrss` starts from what the parent held when it made the child, which hides all that the child does.
_MARKS = """
def peak():
    return 1024 * int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
before = peak()
def mark():
    print(peak() - before)
"""


def marks(imports: str, code: str, *arguments: object) -> list[int]:
    """Run `code` behind `imports`, with `sys.argv[1:]` the arguments; the growth in bytes at each of its `mark()`."""
    command = [sys.executable, "-c", f"import sys\n{imports}{_MARKS}{code}", *map(str, arguments)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    return [int(line) for line in done.stdout.splitlines()]
