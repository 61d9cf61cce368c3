"""Whether a norm does in the model what the experiment on its copy has shown."""

from __future__ import annotations

import torch
from torch import nn

from flashnorm import algebra
from flashnorm.sites.hollow import is_hollow
from flashnorm.sites.probing import NormProbe


def not_as_found(found: NormProbe, module: nn.Module, x: torch.Tensor, output: torch.Tensor) -> str | None:
    """How a norm, called with `x`, has returned something else than what its convention says, up to roundings of
    float32; None where it has not. Of a hollow weight, such as a large table of learnt queries, nothing is known.

    An L2 norm, say, is one whose rows have another RMS than one. Where the input is at the level of an epsilon that
    is known to five digits, those come in.
    """
    if is_hollow(x):
        return "it normalises a weight that is hollow here, so that its output cannot be compared"
    core = algebra.layer_norm_core if found.convention.subtracts_mean else algebra.rms_norm
    expected = core(x, found.convention.eps)
    if found.weight is not None:
        expected = expected * (module.get_parameter(found.weight) + found.convention.offset)
    if found.bias is not None:
        expected = expected + module.get_parameter(found.bias)
    alike = bool((expected - output).abs().max() <= 1e-4 * output.abs().max())
    return None if alike else "it multiplies by more than its gain"


def not_one_scalar(found: NormProbe, x: torch.Tensor) -> str | None:
    """Why a norm, called with `x`, is not a division of each row by sqrt(mean square + epsilon); None where it is."""
    convention = found.convention
    if convention.gated:
        return "it takes a gate beside its input"
    if convention.eps_placement not in ("inside_sqrt", "none") or convention.eps != convention.eps:
        return "its epsilon does not stand inside the square root"
    if convention.group_size != x.shape[-1]:
        return "it does not divide a row by one number"
    return None
