"""RMSNorm, gate and up projection and their activation as one operation, registered with `torch.library`."""

from typing import Optional

from torch import Tensor
from torch.library import custom_op

from flashnorm.errors import ShapeError
from flashnorm.kernels.arguments import check_linear, check_separate
from flashnorm.kernels.dispatch import choose, problem_of
from flashnorm.kernels.eager import plain
from flashnorm.kernels.layout import on_device_of, row_contiguous
from flashnorm.kernels.ops import written_in_place
from flashnorm.kernels.reference import ACTIVATIONS
from flashnorm.kernels.run import run


def rms_swiglu_linear(
    x: Tensor,
    gate_up_weight: Tensor,
    eps: float,
    *,
    gain: Optional[Tensor] = None,  # noqa: UP045
    activation: str = "silu",
    static_weight: bool = False,
    out: Optional[Tensor] = None,  # noqa: UP045
) -> Tensor:
    """act(gate) ⊙ up, where [gate; up] = ((x ⊙ gain) Wᵀ) / sqrt(mean(x²) + eps): the norm and the first half of an MLP.

    `x`: (..., K); `gate_up_weight`: (2N, K), gate's rows first; `gain`: (K,), omitted where it was folded into the
    weight; `activation`: "silu", "gelu_tanh" or "relu". All of one dtype and on one device. Returns (..., N) in
    `x.dtype`; with `out`, writes there and returns it. Arithmetic is in fp32 (fp64 for fp64) and rounded once, except
    where the fastest way is the plain sequence, which rounds the normed x, gate and up too. `static_weight` as in
    `rms_linear`. There is no backward.

    Raises `ShapeError`, `DtypeError`, `DeviceError` or `GradientError`, naming the argument.
    """
    if activation not in ACTIVATIONS:
        raise ShapeError(f"activation must be one of {', '.join(ACTIVATIONS)}, not {activation!r}")
    if gate_up_weight.dim() == 2 and gate_up_weight.shape[0] % 2:
        raise ShapeError(f"gate_up_weight must hold as many rows for gate as for up, not {len(gate_up_weight)} in all")
    outputs = gate_up_weight.shape[0] // 2 if gate_up_weight.dim() == 2 else None  # no matrix is refused just below
    check_linear(x, gate_up_weight, rows=outputs, gain=gain, out=out)
    if out is None:
        call = _made if plain(x, gate_up_weight, gain) else _rms_swiglu_linear
        return call(x, gate_up_weight, eps, gain, activation, static_weight)
    check_separate(out, x=x, gate_up_weight=gate_up_weight, gain=gain)
    _rms_swiglu_linear_out(x, gate_up_weight, eps, gain, activation, static_weight, out)
    return out


def _made(
    x: Tensor,
    gate_up_weight: Tensor,
    eps: float,
    gain: Optional[Tensor],  # noqa: UP045
    activation: str,
    static_weight: bool = False,
) -> Tensor:
    out = x.new_empty((*x.shape[:-1], gate_up_weight.shape[0] // 2))
    _write(x, gate_up_weight, eps, gain, activation, static_weight, out)
    return out


_rms_swiglu_linear = custom_op("flashnorm::rms_swiglu_linear", _made, mutates_args=())


@_rms_swiglu_linear.register_fake
def _(
    x: Tensor,
    gate_up_weight: Tensor,
    eps: float,
    gain: Optional[Tensor],  # noqa: UP045
    activation: str,
    static_weight: bool = False,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], gate_up_weight.shape[0] // 2))


@custom_op("flashnorm::rms_swiglu_linear_out", mutates_args=("out",))
def _rms_swiglu_linear_out(
    x: Tensor,
    gate_up_weight: Tensor,
    eps: float,
    gain: Optional[Tensor],  # noqa: UP045
    activation: str,
    static_weight: bool,
    out: Tensor,
) -> None:
    _write(x, gate_up_weight, eps, gain, activation, static_weight, out)


@_rms_swiglu_linear_out.register_fake
def _(
    x: Tensor,
    gate_up_weight: Tensor,
    eps: float,
    gain: Optional[Tensor],  # noqa: UP045
    activation: str,
    static_weight: bool,
    out: Tensor,
) -> None:
    pass


def _write(
    x: Tensor, weight: Tensor, eps: float, gain: Tensor | None, activation: str, static_weight: bool, out: Tensor
) -> None:
    if out.numel() == 0:
        return
    rows, matrix = row_contiguous(x.reshape(-1, x.shape[-1])), row_contiguous(weight)
    static_weight = static_weight and matrix is weight  # a copy has just been written
    gain = gain if gain is None else gain.contiguous()
    with on_device_of(x), written_in_place(out) as target:
        config = choose(problem_of(rows, matrix, gain, target, activation=activation), x.device)
        run(config, rows, matrix, eps, gain, None, target, activation, static_weight=static_weight)
