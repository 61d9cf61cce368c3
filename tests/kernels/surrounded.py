"""The fp64 oracle of a product with its surroundings, shared by the tests of all kernels that take them."""

from __future__ import annotations

import torch
from torch import Tensor

from flashnorm.kernels.bounds import CONFIDENCE, Expected
from flashnorm.kernels.decode import reference
from flashnorm.kernels.surroundings import Surroundings


def expected(x: Tensor, weight: Tensor, around: Surroundings, dtype: torch.dtype) -> Expected:
    """fp64 result and bound: K fp32 additions, the scale, the activation (slope at most 1.13), the last rounding."""
    options = {
        "eps": around.eps,
        "gain": _double(around.gain),
        "bias": _double(around.bias),
        "activation": around.activation,
        "gated": around.gated,
        "multiplier": around.multiplier,
        "residual": _double(around.residual),
    }
    value = reference.matvec(x.double(), weight.double(), **options)
    normed = reference.rms_norm(x.double(), around.eps, options["gain"])
    products = normed @ weight.double().t() + (0 if around.bias is None else options["bias"])
    magnitude = normed.abs() @ weight.double().abs().t() + (0 if around.bias is None else options["bias"].abs())
    moved = (CONFIDENCE * 2.0**-24 * x.shape[1] ** 0.5 + 2.0**-21) * magnitude
    if around.gated:
        (gate, up), (gate_moved, up_moved) = products.chunk(2, -1), moved.chunk(2, -1)
        gate = reference.ACTIVATIONS[around.activation](gate)
        moved = 1.13 * gate_moved * (up.abs() + up_moved) + gate.abs() * up_moved + 2.0**-20 * (gate * up).abs()
    elif around.activation == "relu2":
        moved = 2 * products.abs() * moved + moved.square()
    elif around.activation is not None:
        moved = 1.13 * moved + 2.0**-20 * products.abs()
    unit = torch.finfo(dtype).eps / 2
    last = unit * value.abs() + torch.finfo(dtype).smallest_normal * unit
    return Expected(value, abs(around.multiplier) * moved + 2.0**-23 * value.abs() + last)


def _double(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.double()
