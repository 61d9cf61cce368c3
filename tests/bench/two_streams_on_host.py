"""Operations of two streams for a machine without a GPU: played by the recorder as they are, computed on the host.

What a device may or may not do is chosen here: `sound` computes what is right, `late` gives for a single row what the
call before computed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashnorm.kernels import reference
from tests.faults.two_streams import TwoStreams


def sound(kind: type[TwoStreams]) -> type[TwoStreams]:
    """`kind`, whose every read on the host comes in time."""

    class Sound(kind):
        def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
            if x.device.type == "cuda":  # a fake one: the recorder plays
                return super().__call__(x, weight, eps)
            return reference.rms_linear(x, weight, eps)

    return Sound


def late(kind: type[TwoStreams]) -> type[TwoStreams]:
    """`kind`, which on the host reads the buffer of its result, kept from call to call, before it is written."""

    class Late(sound(kind)):
        _buffer: Tensor | None = None

        def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
            result = super().__call__(x, weight, eps)
            if result.device.type == "cuda" or len(x) > 1:
                return result
            if self._buffer is None:
                self._buffer = torch.zeros_like(result)
            stale = self._buffer.clone()
            self._buffer.copy_(result)
            return stale

    return Late
