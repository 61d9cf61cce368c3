"""RMSNorm, then a linear in eight bits, weights and activations: the norm rides in the activations' scale.

Why that is exact: `flashnorm.kernels.codes`. For few rows there are kernels of our own; beyond, the matmul is the
library's, `torch._scaled_mm` for e4m3 and `torch._int_mm` for int8.
"""

from typing import Optional

from torch import Tensor
from torch.library import custom_op

from flashnorm.kernels.arguments import check_quantized_linear, check_separate
from flashnorm.kernels.layout import on_device_of, row_contiguous
from flashnorm.kernels.ops import written_in_place
from flashnorm.kernels.w8a8_dispatch import choose, problem_of
from flashnorm.kernels.w8a8_run import run


def rms_linear_w8a8(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    eps: float,
    *,
    bias: Optional[Tensor] = None,  # noqa: UP045
    static_weight: bool = False,
    out: Optional[Tensor] = None,  # noqa: UP045
) -> Tensor:
    """RMSNorm, then linear, in eight bits: y = (c(x) Wᵀ) ⊙ s(x)/sqrt(mean(x²) + eps) ⊙ weight_scale + bias.

    c(x) and s(x) are the codes and the scale of each row of x, taken dynamically: s = max|x|/L, c = round(x/s), with
    L = 448 for e4m3 and 127 for int8. They are the codes of the normed row too, so 1/RMS costs one factor of a scale.

    `x`: (..., K), bf16, fp16 or fp32; `weight`: codes (N, K), float8_e4m3fn or int8, with the norm's gain folded, and
    `weight_scale`: (N,) fp32, both from `quantize_weight`; `bias`: (N,) in `x.dtype`. All on one device. Returns
    (..., N) in `x.dtype`; with `out`, writes there and returns it. There is no backward.

    On NVIDIA GPUs (e4m3 from compute capability 8.9, int8 from 8.0) one row goes through a matrix-vector kernel, up to
    64 through a kernel for Hopper's matrix units where K is a multiple of 16, and more through the library's eight-bit
    matmul where K and N are (with fp32 activations in e4m3 on 9.0 alone). Where the next of these does not run, and
    where a table says so, the matrix-vector kernel takes up to eight rows. The rest, and K beyond 32768, is multiplied
    on codes widened to fp32, or by the CPU's own integer product. A row with a NaN or an infinity gives NaN.

    `static_weight` promises that no work that may still run writes the weight, as in inference: the matrix-vector
    kernel then reads it while the kernel before it ends. Last axes that are not contiguous are copied.

    Raises `ShapeError`, `DtypeError`, `DeviceError` or `GradientError`, naming the argument.
    """
    check_quantized_linear(x, weight, weight_scale, bias=bias, out=out)
    if out is None:
        return _rms_linear_w8a8(x, weight, weight_scale, eps, bias, static_weight)
    check_separate(out, x=x, weight=weight, weight_scale=weight_scale, bias=bias)
    _rms_linear_w8a8_out(x, weight, weight_scale, eps, bias, static_weight, out)
    return out


@custom_op("flashnorm::rms_linear_w8a8", mutates_args=())
def _rms_linear_w8a8(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    eps: float,
    bias: Optional[Tensor],  # noqa: UP045
    static_weight: bool = False,
) -> Tensor:
    out = x.new_empty((*x.shape[:-1], weight.shape[0]))
    _write(x, weight, weight_scale, eps, bias, static_weight, out)
    return out


@_rms_linear_w8a8.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    eps: float,
    bias: Optional[Tensor],  # noqa: UP045
    static_weight: bool = False,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@custom_op("flashnorm::rms_linear_w8a8_out", mutates_args=("out",))
def _rms_linear_w8a8_out(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    eps: float,
    bias: Optional[Tensor],  # noqa: UP045
    static_weight: bool,
    out: Tensor,
) -> None:
    _write(x, weight, weight_scale, eps, bias, static_weight, out)


@_rms_linear_w8a8_out.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    eps: float,
    bias: Optional[Tensor],  # noqa: UP045
    static_weight: bool,
    out: Tensor,
) -> None:
    pass


def _write(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    eps: float,
    bias: Tensor | None,
    static_weight: bool,
    out: Tensor,
) -> None:
    if out.numel() == 0:
        return
    rows, matrix = row_contiguous(x.reshape(-1, x.shape[-1])), row_contiguous(weight)
    static_weight = static_weight and matrix is weight  # a copy has just been written
    weight_scale, bias = weight_scale.contiguous(), bias if bias is None else bias.contiguous()
    with on_device_of(x), written_in_place(out) as target:
        config = choose(problem_of(rows, matrix))
        run(config, rows, matrix, weight_scale, eps, bias, target, static_weight=static_weight)
