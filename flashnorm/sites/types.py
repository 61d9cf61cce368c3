"""The one idea of the project as data: a site is one norm and everything that reads its output."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

EpsilonPlacement = Literal["inside_sqrt", "outside_sqrt", "clamp", "none"]
MultiplyOrder = Literal["after_cast", "before_cast", "unknown"]


@dataclass(frozen=True)
class GainConvention:
    """How a norm module turns its weight into a gain, read off by probing the module.

    The module computes `(x - m) / rms * (offset + weight) + bias`, with `m` the mean when `subtracts_mean`, or, when it
    `saturates`, `tanh(alpha * x) * (offset + weight) + bias`: dynamic tanh (DyT, Zhu et al., arXiv:2503.10622).
    """

    offset: float  # 0.0: plain (gain = weight); 1.0: one-plus (gain = 1 + weight)
    eps: float
    eps_placement: EpsilonPlacement
    subtracts_mean: bool  # LayerNorm when true, RMSNorm when false
    has_bias: bool
    multiply: MultiplyOrder  # is the gain applied before or after casting to the activation's dtype
    group_size: int  # channels that share one RMS; the width of the norm unless it is a grouped norm
    gated: bool  # a second tensor (a gate) multiplies the result, before or after the norm
    saturates: bool = False  # DyT: no norm, and no epsilon; groups of one channel

    @property
    def identity(self) -> float:
        """The stored weight at which the gain is one."""
        return 1.0 - self.offset

    @property
    def kind(self) -> str:
        if self.saturates:
            return "DyT"
        return "LayerNorm" if self.subtracts_mean else "RMSNorm"

    @property
    def name(self) -> str:
        gain = {0.0: "w", 1.0: "1+w"}.get(self.offset, f"{self.offset:g}+w")
        return f"{self.kind} {gain}{' +bias' if self.has_bias else ''}{' gated' if self.gated else ''}"


@dataclass(frozen=True)
class Consumer:
    """One weight that reads a norm's output linearly, and how the norm's channels lie along it."""

    weight: str  # the parameter's name in the module
    axis: int  # the axis of the parameter that the gain scales
    op: str  # the operation that read it, e.g. "mm"
    where: str  # the module in which it happened
    bias: str | None = None  # the parameter added to the product, when the reading operation adds one
    takes_shift: bool = False  # the norm's own bias may be moved into `bias`
    # Position i along `axis` is scaled by gain `channels[i]`; -1 leaves it alone; None is the identity map.
    channels: torch.Tensor | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Blocker:
    """Why a norm's gain cannot be moved, in terms of what the model computes."""

    kind: str  # a short stable word: "residual-add", "non-linear", "model-output", "second-tensor", "tied", ...
    op: str  # the operation, e.g. "aten.add.Tensor"
    where: str  # module path and source line
    detail: str  # one sentence
    remedy: str | None = None  # what would remove it, e.g. "--untie"

    def __str__(self) -> str:
        return self.detail + (f" ({self.remedy} removes this)" if self.remedy else "")


@dataclass(frozen=True)
class Site:
    """A norm, its convention, its readers, and what stands in the way of folding it."""

    norm: str  # module name, e.g. "model.layers.0.input_layernorm"
    weight: str | None  # parameter name of the gain; None for a norm without one
    bias: str | None
    width: int
    convention: GainConvention | None  # None when the trace never reached the module, so it was never probed
    consumers: tuple[Consumer, ...]
    blockers: tuple[Blocker, ...]
    shared_with: tuple[str, ...] = ()  # other norm modules that use the same gain parameter

    @property
    def foldable(self) -> bool:
        return self.weight is not None and bool(self.consumers) and not self.blockers

    @property
    def reason(self) -> str:
        """Why the site is not foldable; empty when it is."""
        if self.foldable:
            return ""
        if self.blockers:
            return "; ".join(dict.fromkeys(str(b) for b in self.blockers))
        return "it has no gain" if self.weight is None else "nothing reads its output"
