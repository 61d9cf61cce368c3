"""Where two models part: the first module whose output differs by more than rounding explains.

Both run in exact arithmetic on the same ids. The reference also runs in its own dtype, and how far that carries each
module's output from the exact one, S, is the yardstick: the candidate's weights may have been rounded once more by a
fold, which adds at most S / sqrt(2) to a squared distance (`flashnorm.verify.bounds`), so a module has parted when its
squared distance exceeds that, widened by the sampling error over positions. Everything after the first parted module
has parted too, or hides it.

A norm's output may legitimately be another one: the gain has moved into its readers. So for norms, which an audit
names, the best factor for each channel is taken out first; what is left is the scalar of each token.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from flashnorm.verify.bounds import ADDED_ROUTED, ratio_of_sums, sampling_slack
from flashnorm.verify.forward import TransformersModel, logits_of
from flashnorm.verify.oracle import exact_logits
from flashnorm.verify.recording import watched

POSITIONS = 32  # of one excerpt: every module's output is held in fp64


@dataclass(frozen=True)
class ModuleDrift:
    """One module: distances of the candidate and of the reference in its own dtype, relative to the exact output.

    `excess`: the candidate's squared distance over the largest that is allowed.
    """

    name: str
    candidate: float
    reference: float
    excess: float

    @property
    def parted(self) -> bool:
        return not self.excess <= 1


@dataclass(frozen=True)
class Parting:
    """Every module that both models have, in the order in which they finish, and the first that parted, if any.

    `exact` and `candidate`: the outputs of the first that parted, (positions, width) fp64; `normed`: the exact output
    of the norm that it is or reads.
    """

    modules: tuple[ModuleDrift, ...]
    first: ModuleDrift | None
    exact: Tensor | None = None
    candidate: Tensor | None = None
    normed: Tensor | None = None

    @property
    def place(self) -> str:
        """ "layer 3, self_attn.q_proj" for "model.layers.3.self_attn.q_proj"; the name where it has no number."""
        return place_of(self.first.name) if self.first else ""


def place_of(name: str) -> str:
    """A module's name with its layer first: "layer 3, self_attn.q_proj" for "model.layers.3.self_attn.q_proj"."""
    match = re.match(r"(?:[^.]+\.)*?(\d+)(?:\.(.+))?$", name)
    if match is None:
        return name
    return f"layer {match.group(1)}" + (f", {match.group(2)}" if match.group(2) else "")


def find_parting(
    load_reference: Callable[[], TransformersModel],
    load_candidate: Callable[[], TransformersModel],
    ids: Tensor,
    norm_of: Mapping[str, str],
    *,
    oracle: torch.dtype = torch.float64,
    exact_candidate: bool = True,
) -> Parting:
    """Run both on the first `POSITIONS` of `ids` (length,). `norm_of`: module -> the norm that it is or reads.

    `exact_candidate` False: the candidate runs as it is, since its kernels have a dtype, and may be as far from the
    exact outputs as the reference in its own dtype with the fold's rounding on top.
    """
    ids = ids[None, :POSITIONS]
    own, exact = _outputs(load_reference(), ids, None, oracle)
    (theirs,) = _outputs(load_candidate(), ids, oracle if exact_candidate else None)
    added = ADDED_ROUTED if exact_candidate else 1 + ADDED_ROUTED
    drifts: list[ModuleDrift] = []
    norms = set(norm_of.values())
    for name, values in theirs.items():
        if not (name in exact and name in own and exact[name].shape == own[name].shape == values.shape):
            continue  # only one of the two has it, or experts took other tokens
        drifts.append(_drift(name, own[name], exact[name], values, name in norms, added))
    first = next((drift for drift in drifts if drift.parted), None)
    if first is None:
        return Parting(tuple(drifts), None)
    normed = exact.get(norm_of.get(first.name, ""))
    return Parting(tuple(drifts), first, exact[first.name], theirs[first.name], normed)


def _outputs(model: TransformersModel, ids: Tensor, *dtypes: torch.dtype | None) -> list[dict[str, Tensor]]:
    """For each dtype (None: the model's own), name -> (positions, width) of each module's first call."""
    runs = []
    ids = ids.to(model.device)
    for dtype in dtypes:
        seen: dict[str, Tensor] = {}
        with watched(model, partial(_keep, seen)):
            if dtype is None:
                logits_of(model, ids)
            else:
                exact_logits(model, ids, dtype)
        runs.append(seen)
    return runs


def _keep(seen: dict[str, Tensor], name: str, output: Tensor) -> None:
    if name not in seen:
        seen[name] = (output.reshape(-1, output.shape[-1]) if output.dim() > 1 else output[None]).cpu().clone()


def _drift(name: str, own: Tensor, exact: Tensor, candidate: Tensor, norm: bool, added: float) -> ModuleDrift:
    if norm:
        candidate = without_gain(candidate, exact)
    size = float(exact.norm()) or 1.0
    squares = [(values.double() - exact.double()).square().sum(-1) for values in (own, candidate)]
    reference, other = squares
    if not other.isfinite().all():
        return ModuleDrift(name, math.inf, math.sqrt(float(reference.sum())) / size, math.inf)
    # One rounding of the output itself is always allowed: a reference that happens to be exact is no yardstick.
    reference = reference + (torch.finfo(own.dtype).eps / 2 * exact.double().norm(dim=-1)).square()
    excess = ratio_of_sums(other, reference) / (added * sampling_slack(other, reference))
    theirs, ours = (math.sqrt(float(squared.sum())) / size for squared in (other, reference))
    return ModuleDrift(name, theirs, ours, excess)


def without_gain(values: Tensor, exact: Tensor) -> Tensor:
    """`values` (positions, width) with each channel scaled to fit `exact` best, in the sense of least squares."""
    ours, theirs = values.double(), exact.double()
    energy = ours.square().sum(0)
    factor = torch.where(energy > 0, (ours * theirs).sum(0) / energy.clamp(min=torch.finfo(torch.float64).tiny), 0.0)
    return ours * factor
