"""Where a gain goes into a weight: products, convolutions and attention, as rules of `operations`."""

from __future__ import annotations

from typing import Any

import torch

from flashnorm.sites.operations import Blocked, Call, constant, rule
from flashnorm.sites.shadow import PLAIN, Conflict, constant_along, impure, tagged

# The operations that contract an activation with a weight -> the position of the bias they add, if they do.
PRODUCTS: dict[str, int | None] = {
    "mm": None, "bmm": None, "_grouped_mm": None, "addmm": 0, "baddbmm": 0, "convolution": 2,
}  # fmt: skip


@rule("mm", "bmm", "_grouped_mm")
def product(call: Call) -> Any:
    return _contract(call, call.args[0], call.args[1], bias=None)


@rule("addmm", "baddbmm")
def product_plus(call: Call) -> Any:
    bias, a, b = call.args[:3]
    if tagged(call.codes(0)):
        raise Blocked("residual-add", "it is added to the product of a weight")
    _contract(call, a, b, bias=bias)


def _contract(call: Call, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
    """`a` (..., m, k) times `b` (..., k, n)."""
    codes_a, codes_b = call.codes_of(a), call.codes_of(b)
    if tagged(codes_a) and tagged(codes_b):
        raise Blocked("second-tensor", "it is multiplied with a tensor that carries a gain as well")
    out_a = _side(call, a, codes_a, -1, b, -2, bias)
    out_b = _side(call, b, codes_b, -2, a, -1, bias)
    for passed in (out_a, out_b):
        if passed is not None and bias is None and isinstance(call.result, torch.Tensor):
            return passed.expand(call.result.shape)
    return None


def _side(
    call: Call, operand: torch.Tensor, codes: torch.Tensor, k: int, other: torch.Tensor, other_k: int, bias: Any
) -> torch.Tensor | None:
    """One operand of a product: its codes enter the other one if that is a weight, or pass where constant along k."""
    weight = call.context.locate(other)
    if not tagged(codes):
        if weight is not None:
            along = torch.full((other.shape[other_k],), PLAIN, dtype=torch.int32)
            call.context.read(weight, other_k, along, call.context.read_as(_op(call), _parameter(bias), False))
        return None
    try:
        passing = constant_along(codes, [k])
    except Conflict:
        passing = None
    if passing is not None and operand.shape[k] > 1:
        if weight is not None:
            raise Blocked("mixed-channels", "a weight combines its tokens, not its channels")
        return impure(passing)
    if weight is None:
        raise Blocked("second-tensor", "it is contracted with a tensor that is not a stored weight")
    others = [d for d in range(codes.ndim) if d != codes.ndim + k]
    vector = constant(codes, others).reshape(-1)
    unscaled = call.kwargs.get("alpha", 1) == 1 and call.kwargs.get("beta", 1) == 1
    pure = unscaled and bool((codes > 0).all() and (codes % 2 == 0).all())
    if not call.context.read(weight, other_k, vector, call.context.read_as(_op(call), _parameter(bias), pure)):
        raise Blocked("weight-layout", "the channels it meets do not lie along one axis of the weight")
    return None


@rule("convolution")
def convolved(call: Call) -> Any:
    weight, bias = call.args[1:3]
    transposed, groups = call.args[6], call.args[8]
    located = call.context.locate(weight)
    codes = call.codes(0)
    channels = codes.shape[1]
    axis, copies = (0, weight.shape[0] // channels) if groups == channels and not transposed else (1, 1)
    if not tagged(codes):
        if located is not None:
            plain = torch.full((weight.shape[axis],), PLAIN, dtype=torch.int32)
            call.context.read(located, axis, plain, call.context.read_as(_op(call), _parameter(bias), False))
        return None
    if located is None or transposed or groups not in (1, channels):
        raise Blocked("second-tensor", "it is convolved in a way that mixes its channels in groups")
    vector = constant(codes, [d for d in range(codes.ndim) if d != 1]).reshape(-1).repeat_interleave(copies)
    if not call.context.read(located, axis, vector, call.context.read_as(_op(call), _parameter(bias), False)):
        raise Blocked("weight-layout", "the channels it meets do not lie along one axis of the weight")
    return None


@rule(
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_attention_math", "scaled_dot_product_attention",
)  # fmt: skip
def attended(call: Call) -> Any:
    """Attention is linear in the values over tokens; queries and keys go through a softmax."""
    if tagged(call.codes(0)) or tagged(call.codes(1)):
        raise Blocked("non-linear", "it is a query or a key of attention")
    values = call.codes(2)
    out = call.result[0] if isinstance(call.result, (tuple, list)) else call.result
    row = impure(constant(values, [-2]))
    if row.shape[-3] != out.shape[-3]:
        row = row.repeat_interleave(out.shape[-3] // row.shape[-3], dim=-3)
    return [row.expand(out.shape)]


def _op(call: Call) -> str:
    return str(call.func.overloadpacket.__name__)


def _parameter(bias: Any) -> torch.Tensor | None:
    return bias if isinstance(bias, torch.Tensor) else None
