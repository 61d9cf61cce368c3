"""Modules that stand in the place of norms and compute them anew from what the audit has found out about them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from flashnorm import algebra
from flashnorm.errors import Refusal
from flashnorm.sites.probing import NormProbe


class StandIn(nn.Module):
    """Stands in the place of `norm`, with its parameters under their names; subclasses say what it computes."""

    def __init__(self, norm: nn.Module, probe: NormProbe) -> None:
        super().__init__()
        for name, parameter in norm.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        self.train(norm.training)
        self.convention, self.gain_name, self.bias_name = probe.convention, probe.weight, probe.bias

    def _with_gain(self, core: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Gain and bias in the precision in which the norm has them."""
        if self.gain_name is not None and self.convention.multiply == "after_cast":
            core = core.to(dtype)
        if self.gain_name is not None:
            core = core * (self.convention.offset + self._own(self.gain_name, core))
        if self.bias_name is not None:
            core = core + self._own(self.bias_name, core)
        return core.to(dtype)

    def _own(self, name: str, like: torch.Tensor) -> torch.Tensor:
        parameter = self.get_parameter(name)
        return parameter.to(torch.promote_types(parameter.dtype, like.dtype))


def replace_norms(model: nn.Module, made: Mapping[nn.Module, StandIn]) -> None:
    """Put every norm's stand-in wherever the model holds the norm, under each of its names."""
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if module in made:
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, made[module])


@torch.no_grad()
def check_stand_in(
    model: nn.Module, name: str, probe: NormProbe, plain: StandIn, centered_inputs: bool = False
) -> None:
    """Raise `Refusal` unless `plain` computes what the norm `name` does, at ordinary and at tiny inputs.

    An epsilon that depends on the dtype, say, is not the one that the experiment in another dtype has found. A norm
    with forward hooks is refused as well: they would be lost with it. `centered_inputs`: try inputs of mean zero only.
    """
    norm = model.get_submodule(name)
    if norm._forward_hooks or norm._forward_pre_hooks:
        raise Refusal(f"{name} has a forward hook, which would be lost with it; remove the hook first")
    own = next(norm.parameters(), None)
    some = own if own is not None else next(p for p in model.parameters() if p.is_floating_point())
    device = "cpu" if some.is_meta else some.device
    shape = own.shape if own is not None else (probe.convention.group_size,)
    unit = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    unit = algebra.center(unit) if centered_inputs else unit
    rows = torch.cat([unit, unit * max(probe.convention.eps, 1e-12) ** 0.5]).to(device, some.dtype)
    ours, theirs = plain(rows), norm(rows)
    # Both round the result to the dtype, and round in float32 at best inside: a few units of the coarser of the two.
    unit_roundoff = max(torch.finfo(some.dtype).eps, torch.finfo(torch.float32).eps)
    if not bool((ours - theirs).abs().max() <= 8 * unit_roundoff * theirs.abs().max()):
        raise Refusal(f"{name} computes something else in {some.dtype} than the norm that it was found to be")
