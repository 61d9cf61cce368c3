"""RMSNorm, then a linear in eight bits, weights and activations: the norm rides in the activations' scale.

Why that is exact: `flashnorm.kernels.codes`. The matmul is the library's, `torch._scaled_mm` for e4m3 and
`torch._int_mm` for int8.
"""

from typing import Optional

import torch
from torch import Tensor
from torch.library import custom_op

from flashnorm.kernels import reference
from flashnorm.kernels.arguments import check_quantized_linear, check_separate
from flashnorm.kernels.dispatch import WIDEST_ROW, triton_runs
from flashnorm.kernels.layout import addressable, on_device_of, row_contiguous
from flashnorm.kernels.ops import written_in_place
from flashnorm.kernels.w8a8_products import LEAST_ROWS, float8_product, int8_product


def rms_linear_w8a8(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    eps: float,
    *,
    bias: Optional[Tensor] = None,  # noqa: UP045
    out: Optional[Tensor] = None,  # noqa: UP045
) -> Tensor:
    """RMSNorm, then linear, in eight bits: y = (c(x) Wᵀ) ⊙ s(x)/sqrt(mean(x²) + eps) ⊙ weight_scale + bias.

    c(x) and s(x) are the codes and the scale of each row of x, taken dynamically: s = max|x|/L, c = round(x/s), with
    L = 448 for e4m3 and 127 for int8. They are the codes of the normed row too, so 1/RMS costs one factor of a scale.

    `x`: (..., K), bf16, fp16 or fp32; `weight`: codes (N, K), float8_e4m3fn or int8, with the norm's gain folded, and
    `weight_scale`: (N,) fp32, both from `quantize_weight`; `bias`: (N,) in `x.dtype`. All on one device. Returns
    (..., N) in `x.dtype`; with `out`, writes there and returns it. There is no backward.

    Runs on the library's eight-bit matmul on NVIDIA GPUs (e4m3 from compute capability 8.9, with fp32 activations on
    9.0 alone; int8 from 8.0) where K and N are multiples of 16; elsewhere on codes widened to fp32, or on the CPU's own
    integer product. A row with a NaN or an infinity gives NaN.

    Raises `ShapeError`, `DtypeError`, `DeviceError` or `GradientError`, naming the argument.
    """
    check_quantized_linear(x, weight, weight_scale, bias=bias, out=out)
    if out is None:
        return _rms_linear_w8a8(x, weight, weight_scale, eps, bias)
    check_separate(out, x=x, weight=weight, weight_scale=weight_scale, bias=bias)
    _rms_linear_w8a8_out(x, weight, weight_scale, eps, bias, out)
    return out


@custom_op("flashnorm::rms_linear_w8a8", mutates_args=())
def _rms_linear_w8a8(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    eps: float,
    bias: Optional[Tensor],  # noqa: UP045
) -> Tensor:
    out = x.new_empty((*x.shape[:-1], weight.shape[0]))
    _write(x, weight, weight_scale, eps, bias, out)
    return out


@_rms_linear_w8a8.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    eps: float,
    bias: Optional[Tensor],  # noqa: UP045
) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@custom_op("flashnorm::rms_linear_w8a8_out", mutates_args=("out",))
def _rms_linear_w8a8_out(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    eps: float,
    bias: Optional[Tensor],  # noqa: UP045
    out: Tensor,
) -> None:
    _write(x, weight, weight_scale, eps, bias, out)


@_rms_linear_w8a8_out.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    eps: float,
    bias: Optional[Tensor],  # noqa: UP045
    out: Tensor,
) -> None:
    pass


def _write(x: Tensor, weight: Tensor, weight_scale: Tensor, eps: float, bias: Tensor | None, out: Tensor) -> None:
    if out.numel() == 0:
        return
    rows, weight = row_contiguous(x.reshape(-1, x.shape[-1])), row_contiguous(weight)
    weight_scale, bias = weight_scale.contiguous(), bias if bias is None else bias.contiguous()
    with on_device_of(x), written_in_place(out) as target:
        if not library_multiplies(rows, weight):
            target.copy_(reference.rms_linear_w8a8(rows, weight, weight_scale, eps, bias))
        else:
            _multiply(rows, weight, weight_scale, eps, bias, target)


def library_multiplies(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernels and the library's eight-bit matmul take (M, K) `x` and (N, K) codes."""
    if not triton_runs(x.device) or x.shape[1] > WIDEST_ROW or x.shape[1] % 16 or weight.shape[0] % 16:
        return False
    if not addressable(weight):
        return False
    capability = torch.cuda.get_device_capability(x.device)
    return weight.dtype == torch.int8 or capability == (9, 0) or (capability >= (8, 9) and x.dtype != torch.float32)


def _multiply(x: Tensor, weight: Tensor, weight_scale: Tensor, eps: float, bias: Tensor | None, out: Tensor) -> None:
    from flashnorm.kernels.quantise import quantise

    integer = weight.dtype == torch.int8
    rows = max(len(x), LEAST_ROWS) if integer else len(x)
    codes = x.new_empty((rows, x.shape[1]), dtype=weight.dtype)
    scale = x.new_empty(len(x), dtype=torch.float32)
    quantise(x, eps, codes, scale)
    product = int8_product if integer else float8_product
    product(codes, scale, weight, weight_scale, bias, out)
