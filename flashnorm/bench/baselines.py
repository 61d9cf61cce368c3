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

from flashnorm.kernels.two_stream import overlapped_rms_linear

Baseline = Callable[[Tensor, Tensor, Tensor, float, Tensor], object]
Norm = Callable[[Tensor, Tensor, float], Tensor]
Gate = Callable[[Tensor], Tensor]
BARE = "linear alone"


def baselines(activation: str | None = None, *, compiled: bool) -> dict[str, Baseline]:
    """Name to baseline. `compiled` adds `torch.compile`, which tunes for many seconds per shape.

    With an `activation` ("silu") each goes on to act(gate) ⊙ up, in its own best way; the linear alone does not.
    """
    gate: Gate = _torch_gate if activation else _no_gate
    found: dict[str, Baseline] = {BARE: _bare, "torch": _then(_torch_norm, gate)}
    if find_spec("flashinfer") is not None:
        found["flashinfer"] = _flashinfer(gated=activation is not None)
    if find_spec("liger_kernel") is not None:
        found["liger"] = _liger(gated=activation is not None)
    if not activation:
        found["two streams"] = _two_streams
    if compiled:
        found["torch.compile"] = _compiled(gate)
    return found


def _then(norm: Norm, gate: Gate) -> Baseline:
    """Norm, matmul into the given buffer, gate."""

    def baseline(x: Tensor, weight: Tensor, gain: Tensor, eps: float, out: Tensor) -> object:
        return gate(torch.mm(norm(x, gain, eps), weight.t(), out=out))

    return baseline


def _bare(x: Tensor, weight: Tensor, gain: Tensor, eps: float, out: Tensor) -> object:
    return torch.mm(x, weight.t(), out=out)


def _two_streams(x: Tensor, weight: Tensor, gain: Tensor, eps: float, out: Tensor) -> object:
    """The deferred norm as first proposed; its gain is folded."""
    return overlapped_rms_linear(x, weight, eps)


def _torch_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[1],), gain, eps)


def _no_gate(products: Tensor) -> Tensor:
    return products


def _torch_gate(products: Tensor) -> Tensor:
    gate, up = products.chunk(2, dim=-1)
    return F.silu(gate) * up


def _flashinfer(*, gated: bool) -> Baseline:
    from flashinfer.activation import silu_and_mul
    from flashinfer.norm import rmsnorm

    return _then(rmsnorm, silu_and_mul if gated else _no_gate)


def _liger(*, gated: bool) -> Baseline:
    """Its own norm; its SwiGLU takes gate and up as two whole tensors, which one fused projection does not give."""
    from liger_kernel.ops.rms_norm import rms_norm_forward

    def norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
        normed: Tensor = rms_norm_forward(x, gain, eps, 0.0, "llama", None)[0]
        return normed

    return _then(norm, _gate_kernel if gated else _no_gate)


def _gate_kernel(products: Tensor) -> Tensor:
    """This project's SwiGLU kernel, one read and one write, for baselines that bring none for a fused projection."""
    from flashnorm.kernels.elementwise import gate

    out = products.new_empty((products.shape[0], products.shape[1] // 2))
    gate(products, out, "silu")
    return out


def _compiled(gate: Gate) -> Baseline:
    def norm_then_linear(x: Tensor, weight: Tensor, gain: Tensor, eps: float) -> Tensor:
        return gate(F.linear(_torch_norm(x, gain, eps), weight))

    torch._dynamo.config.cache_size_limit = 256  # one entry per shape
    compiled = torch.compile(norm_then_linear, mode="max-autotune-no-cudagraphs", dynamic=False)
    return lambda x, weight, gain, eps, out: compiled(x, weight, gain, eps)
