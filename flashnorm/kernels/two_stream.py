"""The deferred norm on two streams, as first proposed: the matmul on one, the sum of squares on the other.

For study, for GPUs without programmatic dependent launch, and as the baseline of the claim that the two overlap. Each
call makes its own events and buffers, so calls never meet; under graph capture the fork and the join become edges.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashnorm.kernels import reference
from flashnorm.kernels.arguments import check_linear


def overlapped_rms_linear(x: Tensor, weight: Tensor, eps: float, *, bias: Tensor | None = None) -> Tensor:
    """y = (x Wᵀ) / sqrt(mean(x²) + eps) + bias; the scale waits for both streams.

    `x`: (..., K), `weight`: (N, K), `bias`: (N,), one dtype, one device. Returns (..., N) in `x.dtype`. Off CUDA the
    two run one after the other. Raises as `rms_linear` does.
    """
    check_linear(x, weight, bias=bias)
    if x.device.type != "cuda":
        return reference.rms_linear(x, weight, eps, bias=bias)
    main, side = torch.cuda.current_stream(x.device), torch.cuda.Stream(x.device)
    fork, join = torch.cuda.Event(), torch.cuda.Event()
    fork.record(main)
    side.wait_event(fork)
    with torch.cuda.stream(side):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        join.record(side)
    x.record_stream(side)
    product = _wide_product(x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], weight.shape[0])
    main.wait_event(join)
    scale.record_stream(main)
    product *= scale
    if bias is not None:
        product += bias
    return product.to(x.dtype)


def _wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """x Wᵀ in fp32, unrounded: in fp16 it could overflow before the scale."""
    if x.dtype in (torch.float32, torch.float64):
        return torch.mm(x, weight.t())
    return torch.mm(x, weight.t(), out_dtype=torch.float32)
