"""How much memory this process may still take."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """What the system says is available, and no more than the control group (container) still allows.

    Where the system does not say (not Linux), half of its physical memory.
    """
    free = _from_meminfo(meminfo)
    allowed = _from_cgroup(cgroup)
    known = [value for value in (free, allowed) if value is not None]
    return min(known) if known else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _from_meminfo(path: Path) -> int | None:
    if not path.is_file():
        return None
    for line in path.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _from_cgroup(folder: Path) -> int | None:
    """Version 2: `memory.max` less `memory.current`, without the file cache, which is given up at need.

    Not `file`, which counts shared memory and tmpfs as well: those can only be swapped.
    """
    try:
        limit = (folder / "memory.max").read_text().strip()
        current = int((folder / "memory.current").read_text())
        known = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except FileNotFoundError:
        return None
    cache = sum(int(known.get(name, 0)) for name in ("inactive_file", "active_file"))
    return None if limit == "max" else int(limit) - current + cache
