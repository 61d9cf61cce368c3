"""Norms among recorded calls, and what each computes, by the experiment of `sites.probing`."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from flashnorm.errors import Unsupported
from flashnorm.runtime.decode.replica import Call, LayerRun
from flashnorm.runtime.decode.spec import Norm
from flashnorm.sites.probe_cache import ProbeCache
from flashnorm.sites.probing import is_candidate


def norms(calls: Iterable[Call]) -> list[Call]:
    """Calls that may be a norm's: a small module that maps a tensor to one of the same shape and changes it."""
    return [c for c in calls if is_candidate(c.module) and _keeps_shape(c) and not isinstance(c.module, nn.Linear)]


def norm_of(run: LayerRun, call: Call) -> Norm:
    """What the norm of a recorded call computes. Raises `Unsupported`, naming it, unless it is an RMSNorm."""
    return read_norm(call, run.layer.get_submodule(call.name), f"layer {run.index}", run.probes)


def read_norm(call: Call, module: nn.Module, where: str, probes: ProbeCache) -> Norm:
    """`module`: the model's own, whose gain is read; `call`: one call of its fp32 copy."""
    found = probes.probe(call.module, call.args, call.kwargs)
    name = call.name.rpartition(".")[2]
    if found is None or found.irregular:
        raise Unsupported(f"{where}: {name} is no norm that could be read{f': {found.irregular}' if found else ''}")
    convention = found.convention
    if (
        convention.subtracts_mean
        or convention.has_bias
        or convention.gated
        or convention.eps_placement == "outside_sqrt"
    ):
        raise Unsupported(f"{where}: {name} is a {convention.name}, and not an RMSNorm with epsilon under the root")
    width = call.output.shape[-1]
    if convention.group_size != width:
        raise Unsupported(f"{where}: {name} normalises groups of {convention.group_size} of its {width} channels")
    if found.weight is None:
        return Norm(None, convention.eps)
    weight = module.get_parameter(found.weight).detach()
    return Norm(least_gain(convention.offset + weight.float(), weight.dtype), convention.eps)


def least_gain(gain: Tensor, dtype: torch.dtype) -> Tensor | None:
    """`gain`, fp32, as `Norm` has it: None where it is 1, in `dtype` if that holds it exactly, else as it is."""
    if bool((gain == 1).all()):
        return None
    rounded = gain.to(dtype)
    return rounded.contiguous() if torch.equal(rounded.float(), gain) else gain.contiguous()


def _keeps_shape(call: Call) -> bool:
    x, y = call.input, call.output
    return isinstance(y, Tensor) and x is not None and x.shape == y.shape and x.dim() > 1 and not torch.equal(x, y)
