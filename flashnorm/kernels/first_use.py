"""Tune a shape when it is first used, on GPUs that no table is shipped for.

A short search: a few configurations of each family, each compared with fp64 before it is timed. What it finds goes to
the table of this machine, so that it happens once for a shape, not once for a process. FLASHNORM_AUTOTUNE=0 turns it
off; FLASHNORM_AUTOTUNE=1 has it done on every GPU, for shapes that its table does not list.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from itertools import groupby

import torch

from flashnorm.errors import CheckFailed
from flashnorm.kernels.configs import Config, family_name, to_dict

ROWS = (1, 16, 64, 256, 1024, 4096)  # numbers of rows that are tuned for; those between take the next larger one's
_OF_EACH_FAMILY = 6
_log = logging.getLogger("flashnorm")
_lock = threading.Lock()
_tried: set[tuple[torch.device, int, int, int, bool]] = set()


def wanted(*, shipped: bool) -> bool:
    """Whether shapes that no table lists are tuned at first use; `shipped`: there is a table for this kind of GPU.

    Never while a graph is captured: the kernels of the search would become part of it.
    """
    answer = os.environ.get("FLASHNORM_AUTOTUNE", "")
    return (answer == "1" or (answer != "0" and not shipped)) and not torch.cuda.is_current_stream_capturing()


def tuned_rows(m: int) -> int:
    """The number of rows that stands for `m`."""
    return next((rows for rows in ROWS if rows >= m), ROWS[-1])


def tune(m: int, k: int, n: int, gated: bool, device: torch.device) -> bool:
    """Tune (m, k) x and (m, n) output once in this process. Returns whether the machine's table has become longer."""
    key = device, tuned_rows(m), k, n, gated
    with _lock:
        if key in _tried:
            return False
        _tried.add(key)
        return _tune(*key)


def _tune(device: torch.device, m: int, k: int, n: int, gated: bool) -> bool:
    from flashnorm.kernels.learned import table_path, write
    from flashnorm.kernels.tuning import Shape, best_of, candidates_of

    shape = Shape(m, k, n, "silu" if gated else None)
    _log.info("tuning %s for %s, once", shape, torch.cuda.get_device_name(device))
    try:
        with torch.cuda.device(device):
            best = best_of(shape, few_of_each(candidates_of(shape)), device)
        entry = {"m": m, "k": k, "n": n, "gated": gated, "config": to_dict(best.config)}
        write(table_path(device), [{**entry, "microseconds": best.microseconds}], {})
    except (CheckFailed, OSError, torch.OutOfMemoryError) as error:
        _log.warning("%s was not tuned (%s); the general rules decide", shape, error)
        return False
    return True


def few_of_each(configs: Sequence[Config]) -> list[Config]:
    """A few of each family, evenly spaced."""
    chosen: list[Config] = []
    for _, group in groupby(sorted(configs, key=family_name), key=family_name):
        family = list(group)
        count = min(len(family), _OF_EACH_FAMILY)
        chosen += [family[index * len(family) // count] for index in range(count)]
    return chosen
