"""The surroundings in which a program works, whatever its caller's are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor


@contextmanager
def running_on(device: torch.device) -> Iterator[None]:
    """No gradients; kernels go to `device`; tensors that are made can be written to at any later time.

    That last is not so of tensors made inside the caller's `torch.inference_mode()`.
    """
    on_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with torch.inference_mode(False), torch.no_grad(), on_device:
        yield


def queued(values: Tensor, device: torch.device) -> Tensor:
    """`values` on the device, copied there without waiting for what it still has to do."""
    if device.type != "cuda" or values.device.type != "cpu":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)  # the allocator keeps the pinned copy until it is read
