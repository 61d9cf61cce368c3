"""Products of eight-bit codes by the library's matmuls, with a scale for each row of either operand.

`codes`: (M, K) contiguous and `weight`: (N, K) with contiguous rows, of one dtype, K and N multiples of 16; `scale`:
(M,) and `weight_scale`: (N,), fp32, contiguous; `bias`: (N,) or None and `out`: (M, N), rows contiguous, of one dtype.
Each writes (codes · weightᵀ) ⊙ scale[:, None] ⊙ weight_scale + bias into `out`.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LEAST_ROWS = 32  # of codes in int8: the library's integer product takes no fewer than 17
_REFUSED = "CUBLAS_STATUS_NOT_SUPPORTED"


def rows_of_codes(m: int, dtype: torch.dtype) -> int:
    """How many rows the codes of `m` rows must have room for; what those beyond give is not read."""
    return max(m, _LEAST_ROWS) if dtype == torch.int8 else m


def library_product(
    codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    """The product for the dtype of the codes, which have `rows_of_codes` rows."""
    product = int8_product if weight.dtype == torch.int8 else float8_product
    product(codes, scale, weight, weight_scale, bias, out)


def float8_product(
    codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    """e4m3. Fast accumulation stays off: Hopper's matrix units alone keep only some 14 bits of a sum.

    The library adds no fp32 bias, and writes contiguous outputs. For some shapes, few rows and large K, cuBLAS has no
    kernel with a scale for each row (pytorch/ao issue 4582: 9216 to 3072 on an H100, up to 256 rows): there it
    multiplies with none, to fp32, and a kernel applies the scales.
    """
    inside = bias is not None and out.dtype != torch.float32
    written = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
    try:
        torch._scaled_mm(
            codes,
            weight.t(),
            scale[:, None],
            weight_scale[None, :],
            bias=bias if inside else None,
            out_dtype=out.dtype,
            out=written,
        )
    except RuntimeError as error:
        if _REFUSED not in str(error):
            raise
        _scaled_after(codes, scale, weight, weight_scale, bias, out)
        return
    if bias is not None and not inside:
        written.add_(bias)
    if written is not out:
        out.copy_(written)


def _scaled_after(
    codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    from flashnorm.kernels.quantise import scale_products

    one = scale.new_ones(())
    products = torch._scaled_mm(codes, weight.t(), one, one, out_dtype=torch.float32)
    scale_products(products, scale, weight_scale, bias, out)


def int8_product(
    codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    """int8, exact in int32. `codes` has `rows_of_codes` rows."""
    from flashnorm.kernels.quantise import scale_products

    scale_products(torch._int_mm(codes, weight.t()), scale, weight_scale, bias, out)
