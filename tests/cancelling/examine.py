"""One architecture: every verdict of cancellation, the logits after it, and what a forced cancellation changes."""

from __future__ import annotations

import copy
import re
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from flashnorm.errors import TracingError
from flashnorm.passes.cancel import apply_cancel
from flashnorm.sites.cancelling import Cancellation, CancellationAudit, audit_cancellation
from flashnorm.verify.oracle import everything_in
from tests import zoo

# fp64 against fp64: both round the same sums at other places. A wrong epsilon or a lost scalar lies far above.
TOLERANCE = 1e-10
SMALL_RMS = 1e-4  # of the embeddings, so that the epsilons of the first layers are far above the mean squares


@dataclass(frozen=True)
class Outcome:
    """What cancellation did to one tiny model."""

    model_type: str
    full: list[str] = field(default_factory=list)  # norms, layers that are alike in name taken together
    partial: dict[str, str] = field(default_factory=dict)  # norm -> why not wholly
    no: dict[str, str] = field(default_factory=dict)  # norm -> why not
    error: float = 0.0  # relative error of the fp64 logits
    error_small: float = 0.0  # the same with embeddings of RMS 1e-4
    over_cautious: list[str] = field(default_factory=list)  # refused (in part), yet forcing it changes nothing
    refused: str = ""  # why the model could not be traced

    @property
    def right(self) -> bool:
        return all(
            error <= TOLERANCE for error in (self.error, self.error_small)
        )  # false for a NaN as well, once it is the first of the two

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def examine(model_type: str, force: bool = True) -> Outcome:
    """Cancel in the tiny causal model of `model_type`; raises `CannotBuild` as the zoo does.

    `force`: also drop, one at a time, every norm that was refused, and every one that was only dropped in part wholly.
    """
    model = zoo.tiny_model("causal", model_type)
    try:
        audit = audit_cancellation(model)
    except TracingError as refusal:
        return Outcome(model_type, refused=str(refusal))
    model, inputs = in_fp64(model)
    chosen = [c for c in audit.cancellations if c.verdict != "no"]
    before = logits(model, inputs)
    return Outcome(
        model_type,
        full=list(_named(audit, "full")),
        partial=_named(audit, "partial"),
        no=_named(audit, "no"),
        error=_moved(model, chosen, audit, inputs, before),
        error_small=_error_small(model, chosen, audit, inputs),
        over_cautious=_over_cautious(model, audit, inputs, before) if force else [],
    )


def in_fp64(model: nn.Module) -> tuple[nn.Module, dict[str, Any]]:
    """The model in fp64, changed in place, and inputs for it."""
    inputs = zoo.forward_inputs(model, "causal")
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped matrix product of the others has no fp64
    return model.double(), tree_map(lambda leaf: leaf.double() if _is_float(leaf) else leaf, inputs)


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def logits(model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    """The logits of a model that is in fp64, with fp64 wherever its code asks for fp32 by name."""
    with everything_in(torch.float64):
        return zoo.logits(model, inputs)


def _moved(
    model: nn.Module, chosen: list[Cancellation], audit: CancellationAudit, inputs: Any, before: torch.Tensor
) -> float:
    """Relative change of the logits."""
    cancelled = copy.deepcopy(model)
    with everything_in(torch.float64):
        apply_cancel(cancelled, chosen, audit)
    return change(before, logits(cancelled, inputs))


def change(before: torch.Tensor, after: torch.Tensor) -> float:
    """How far logits have moved, relative to all of them."""
    masked = before.abs() > 1e30  # entries that a model masks out with a huge number
    if after.isnan().any() or not torch.equal(masked, after.abs() > 1e30):
        return float("inf")
    return float((after - before)[~masked].norm() / before[~masked].norm())


def _error_small(model: nn.Module, chosen: list[Cancellation], audit: CancellationAudit, inputs: Any) -> float:
    small = with_small_embeddings(model)
    return _moved(small, chosen, audit, inputs, logits(small, inputs))


def with_small_embeddings(model: nn.Module) -> nn.Module:
    """A copy whose embeddings have the RMS `SMALL_RMS`."""
    small = copy.deepcopy(model)
    with torch.no_grad():
        for module in small.modules():
            if isinstance(module, nn.Embedding):
                module.weight.mul_(SMALL_RMS / module.weight.square().mean().sqrt())
    return small


def _over_cautious(model: nn.Module, audit: CancellationAudit, inputs: Any, before: torch.Tensor) -> list[str]:
    """Norms, one of each name and verdict, of which more could have been dropped than was."""
    candidates = [c for c in audit.cancellations if c.verdict != "full" and c.norm not in audit.irregular]
    distinct = {(unnumbered(c.norm), c.verdict): c for c in reversed(candidates)}
    return sorted(c.norm for c in distinct.values() if _moved(model, [forced(c)], audit, inputs, before) <= TOLERANCE)


def forced(cancellation: Cancellation) -> Cancellation:
    """The same norm dropped wholly: no reader gets the scalar back."""
    return replace(cancellation, kept=())


def _named(audit: CancellationAudit, verdict: str) -> dict[str, str]:
    """Norms of one verdict -> the reason of the first of those that differ in numbers alone, without its place."""
    found: dict[str, str] = {}
    for c in audit.cancellations:
        if c.verdict == verdict:
            found.setdefault(
                unnumbered(c.norm), re.sub(r"(?<= )\S*\.(?=\w+( in part)?:)", "", unnumbered(" " + c.reason)).strip()
            )
    return found


def unnumbered(name: str) -> str:
    """A name, or a sentence with names, without the numbers of layers and without places in code."""
    return re.sub(r"\.\d+\b", ".*", re.sub(r" \[[^\]]*\]", "", name))
