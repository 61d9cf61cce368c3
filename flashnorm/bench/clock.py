"""The mean time of steps that follow each other, by the host's clock: what a user waits, launches included."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def timed(step: Callable[[], object], count: int, device: torch.device, *, lead: int = 0) -> float:
    """Microseconds of a step: the mean of `count`, after `lead` untimed ones, the device idle before and after."""
    for _ in range(lead):
        step()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        step()
    synchronize(device)
    return 1e6 * (time.perf_counter() - start) / count


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
