"""What the deferred norm is compared with: every norm-then-linear that is installed, and the linear alone.

Each baseline is a function of (x, weight, gain, eps, out) that writes into `out`; those that are not installed are
left out and named.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

Baseline = Callable[[Tensor, Tensor, Tensor, float, Tensor], object]
BARE = "linear alone"


def baselines(*, compiled: bool) -> dict[str, Baseline]:
    """Name to baseline. `compiled` adds `torch.compile`, which tunes for many seconds per shape."""
    found: dict[str, Baseline] = {BARE: _bare, "torch": _torch}
    if find_spec("flashinfer") is not None:
        found["flashinfer"] = _flashinfer()
    if find_spec("liger_kernel") is not None:
        found["liger"] = _liger()
    if compiled:
        found["torch.compile"] = _compiled()
    return found


def _bare(x: Tensor, weight: Tensor, gain: Tensor, eps: float, out: Tensor) -> object:
    return torch.mm(x, weight.t(), out=out)


def _torch(x: Tensor, weight: Tensor, gain: Tensor, eps: float, out: Tensor) -> object:
    return torch.mm(F.rms_norm(x, (x.shape[1],), gain, eps), weight.t(), out=out)


def _flashinfer() -> Baseline:
    from flashinfer.norm import rmsnorm

    def baseline(x: Tensor, weight: Tensor, gain: Tensor, eps: float, out: Tensor) -> object:
        return torch.mm(rmsnorm(x, gain, eps), weight.t(), out=out)

    return baseline


def _liger() -> Baseline:
    from liger_kernel.ops.rms_norm import rms_norm_forward

    def baseline(x: Tensor, weight: Tensor, gain: Tensor, eps: float, out: Tensor) -> object:
        return torch.mm(rms_norm_forward(x, gain, eps, 0.0, "llama", None)[0], weight.t(), out=out)

    return baseline


def _compiled() -> Baseline:
    def norm_then_linear(x: Tensor, weight: Tensor, gain: Tensor, eps: float) -> Tensor:
        return F.linear(F.rms_norm(x, (x.shape[1],), gain, eps), weight)

    torch._dynamo.config.cache_size_limit = 256  # one entry per shape
    compiled = torch.compile(norm_then_linear, mode="max-autotune-no-cudagraphs", dynamic=False)
    return lambda x, weight, gain, eps, out: compiled(x, weight, gain, eps)
