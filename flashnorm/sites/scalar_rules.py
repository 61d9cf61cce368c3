"""What a product does to a token's scalar; all else that scalars pass, they pass by the rules of `operations`."""

from __future__ import annotations

import torch

from flashnorm.sites.contractions import PRODUCTS
from flashnorm.sites.operations import Blocked, Call
from flashnorm.sites.shadow import Conflict, constant_along, impure, tagged

# Kinds of obstacle that a scalar meets for another reason than a gain does.
REASONS = {
    "residual-add": "it is added to what does not carry the same scalar",
    "mixed-channels": "different tokens are combined",
    "second-tensor": "it meets another tensor that carries a scalar",
}


def product(base: str, call: Call) -> torch.Tensor | None:
    """A product is homogeneous in either operand, as long as no tokens are mixed."""
    bias = PRODUCTS[base]
    if base == "convolution":
        if any(tagged(call.codes_of(arg)) for arg in call.args[:3] if isinstance(arg, torch.Tensor)):
            raise Blocked("mixed-channels", "")
        return None
    a, b = call.args[1:3] if bias is not None else call.args[:2]
    codes_a, codes_b = call.codes_of(a), call.codes_of(b)
    if tagged(codes_a) and tagged(codes_b):
        raise Blocked("second-tensor", "")
    if bias is not None and tagged(call.codes(0)):
        raise Blocked("residual-add", "")
    try:
        passing = constant_along(codes_a, [-1]) if tagged(codes_a) else constant_along(codes_b, [-2])
    except Conflict:
        raise Blocked("mixed-channels", "") from None
    return impure(passing).expand(call.result.shape)
