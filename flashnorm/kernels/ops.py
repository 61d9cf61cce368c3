"""The operations, registered with `torch.library`: opaque to `torch.compile`, capturable in graphs, no host sync."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from flashnorm.kernels.arguments import check_linear, check_separate
from flashnorm.kernels.backward import gradients, keep
from flashnorm.kernels.dispatch import choose, problem_of
from flashnorm.kernels.eager import plain
from flashnorm.kernels.layout import on_device_of, row_contiguous
from flashnorm.kernels.run import run

# Annotations are evaluated by `torch.library`, which reads `Optional` in every torch that the project allows.


def rms_linear(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    gain: Optional[Tensor] = None,  # noqa: UP045
    bias: Optional[Tensor] = None,  # noqa: UP045
    static_weight: bool = False,
    out: Optional[Tensor] = None,  # noqa: UP045
) -> Tensor:
    """RMSNorm, then linear, with the norm deferred: y = ((x ⊙ gain) Wᵀ) / sqrt(mean(x²) + eps) + bias.

    `x`: (..., K); `weight`: (N, K); `gain`: (K,), omitted where it was folded into the weight; `bias`: (N,). All of
    one dtype (bf16, fp16, fp32, fp64) and on one device. Returns (..., N) in `x.dtype`; with `out`, writes there and
    returns it. Arithmetic is in fp32 (fp64 for fp64) and rounded once, except where the fastest way is the plain
    sequence, which rounds the normed x too. Last axes that are not contiguous are copied. Gradients are those of the
    plain sequence, norm and sums in fp32 (`kernels.backward`); there are none with `out`.

    A weight that brings its own matmul, such as torchao's quantised tensors, is multiplied by it: the normed x, with
    the gain and rounded, goes through `torch.nn.functional.linear`. A gain that was not folded before the weight was
    quantised is passed as `gain`.

    `static_weight` promises that no work that may still run writes the weight, as in inference, where it never changes:
    kernels for one row or a few then read it while the kernel before them ends. Without it a weight that was just
    written by a kernel, of any library, is read right.

    Raises `ShapeError`, `DtypeError`, `DeviceError` or `GradientError`, naming the argument.
    """
    check_linear(x, weight, backward=True, gain=gain, bias=bias, out=out)
    if is_traceable_wrapper_subclass(weight):
        return _own_linear(x, weight, eps, gain, bias, out)
    if out is None:
        call = _made if plain(x, weight, gain, bias) else torch.ops.flashnorm.rms_linear
        return call(x, weight, eps, gain, bias, static_weight)
    check_separate(out, x=x, weight=weight, gain=gain, bias=bias)
    torch.ops.flashnorm.rms_linear_out(x, weight, eps, gain, bias, static_weight, out)
    return out


def _own_linear(
    x: Tensor, weight: Tensor, eps: float, gain: Tensor | None, bias: Tensor | None, out: Tensor | None
) -> Tensor:
    """The plain sequence, by the weight's own matmul."""
    product = F.linear(F.rms_norm(x, x.shape[-1:], gain, eps), weight, bias)
    return product if out is None else out.copy_(product)


def _made(
    x: Tensor,
    weight: Tensor,
    eps: float,
    gain: Optional[Tensor],  # noqa: UP045
    bias: Optional[Tensor],  # noqa: UP045
    static_weight: bool = False,
) -> Tensor:
    out = x.new_empty((*x.shape[:-1], weight.shape[0]))
    _write(x, weight, eps, gain, bias, static_weight, out)
    return out


_rms_linear = torch.library.custom_op("flashnorm::rms_linear", _made, mutates_args=())


@_rms_linear.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    eps: float,
    gain: Optional[Tensor],  # noqa: UP045
    bias: Optional[Tensor],  # noqa: UP045
    static_weight: bool = False,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


_rms_linear.register_autograd(gradients, setup_context=keep)


@torch.library.custom_op("flashnorm::rms_linear_out", mutates_args=("out",))
def _rms_linear_out(
    x: Tensor,
    weight: Tensor,
    eps: float,
    gain: Optional[Tensor],  # noqa: UP045
    bias: Optional[Tensor],  # noqa: UP045
    static_weight: bool,
    out: Tensor,
) -> None:
    _write(x, weight, eps, gain, bias, static_weight, out)


@_rms_linear_out.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    eps: float,
    gain: Optional[Tensor],  # noqa: UP045
    bias: Optional[Tensor],  # noqa: UP045
    static_weight: bool,
    out: Tensor,
) -> None:
    pass


@contextmanager
def written_in_place(out: Tensor) -> Iterator[Tensor]:
    """`out` as a matrix with contiguous rows; where it lies otherwise in memory, a buffer that is copied in the end."""
    target = out.reshape(-1, out.shape[-1])
    if target.data_ptr() == out.data_ptr() and target.stride(-1) == 1:
        yield target
        return
    target = torch.empty_like(target, memory_format=torch.contiguous_format)
    yield target
    out.copy_(target.view(out.shape))


def _write(
    x: Tensor, weight: Tensor, eps: float, gain: Tensor | None, bias: Tensor | None, static_weight: bool, out: Tensor
) -> None:
    """Flatten the leading axes, choose a way and run it."""
    if out.numel() == 0:
        return
    rows, matrix = row_contiguous(x.reshape(-1, x.shape[-1])), row_contiguous(weight)
    static_weight = static_weight and matrix is weight  # a copy has just been written
    gain = gain if gain is None else gain.contiguous()
    bias = bias if bias is None else bias.contiguous()
    with on_device_of(x), written_in_place(out) as target:
        config = choose(problem_of(rows, matrix, gain, target), x.device)
        run(config, rows, matrix, eps, gain, bias, target, static_weight=static_weight)
