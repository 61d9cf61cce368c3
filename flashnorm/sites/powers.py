"""Powers of a token's scalar: what is homogeneous of a higher degree passes the scalar on as a power of itself.

relu(s x) = s relu(x) and relu(s x)² = s² relu(x)² for s > 0, and an RMS is greater than zero; a gate times what it
gates carries the product of both scalars. A power has codes of its own, so that a sum of two powers is seen as what it
is, a sum of different scalars.
"""

from __future__ import annotations

import torch

from flashnorm.sites.operations import Blocked, Call
from flashnorm.sites.shadow import ZERO, Numbering, impure


def named(norm: str, call: int, degree: int = 1) -> str:
    """The name under which the scalars of one call of a norm are numbered, taken to a power."""
    return f"{norm}#{call}" if degree == 1 else f"{norm}#{call}^{degree}"


def degree_of(name: str) -> int:
    """The power in such a name."""
    return int(name.rpartition("#")[2].partition("^")[2] or 1)


def raised(numbering: Numbering, codes: torch.Tensor, exponent: int) -> torch.Tensor:
    """The codes of a tensor whose elements are taken to a power."""
    result = codes.clone()
    for name in numbering.norms_in(codes):
        token = numbering.channels_of(name, codes)
        result = torch.where(token >= 0, _power(numbering, name, degree_of(name) * exponent)[token], result)
    return impure(result)


def multiplied(numbering: Numbering, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The codes of a product of elements. Raises `Blocked` where two factors carry scalars of different tokens."""
    a, b = torch.broadcast_tensors(a, b)
    result = impure(torch.where(a > 0, a, b))
    both = (a > 0) & (b > 0)
    for first in numbering.norms_in(torch.where(both, a, 0)):
        token = numbering.channels_of(first, a)
        here = both & (token >= 0)
        for second in numbering.norms_in(torch.where(here, b, 0)):
            if _base(first) != _base(second):
                raise Blocked("second-tensor", "")
            other = numbering.channels_of(second, b)
            meet = here & (other >= 0)
            if not (token == other)[meet].all():
                raise Blocked("second-tensor", "")
            power = _power(numbering, first, degree_of(first) + degree_of(second))
            result = torch.where(meet, impure(power[token]), result)
    return torch.where((a == ZERO) | (b == ZERO), ZERO, result)


def _base(name: str) -> str:
    head, _, tail = name.rpartition("#")
    return f"{head}#{tail.partition('^')[0]}"


def _power(numbering: Numbering, name: str, degree: int) -> torch.Tensor:
    power = _base(name) if degree == 1 else f"{_base(name)}^{degree}"
    return numbering.codes(power, numbering.width(name))


# --- operations that are homogeneous for scalars greater than zero, element by element ------------------------------


def exponent_of(base: str, call: Call) -> int | None:
    """The degree in which an operation on single elements is homogeneous, None for any that is not, or not known to."""
    if base in ("relu", "leaky_relu", "abs"):
        return 1
    if base in ("clamp_min", "clamp"):
        bounds = [*call.args[1:], *call.kwargs.values()]
        return 1 if all(bound is None or bool((call.codes_of(bound) == ZERO).all()) for bound in bounds) else None
    if base == "pow":
        exponent = call.args[1]
        whole = isinstance(exponent, (int, float)) and exponent == int(exponent) and exponent > 0
        return int(exponent) if whole else None
    return None
