"""What a run shows of the scalars of its norms: where they are taken out, and where they are stopped."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch import nn

from flashnorm.sites.arrangement import Arrangement
from flashnorm.sites.probing import NormProbe

# A norm, and a module that reads it; "" stands for the norm's own output, before any reader.
Reading = tuple[str, str]
# Which output channels of each reader.
Members = dict[Reading, torch.Tensor]


@dataclass(frozen=True)
class Absorbed:
    """A call of `by`, a norm that divides the scalar of `norm` out of what these channels of its readers gave.

    `degree`: the power of the scalar that multiplies what it is called with.
    """

    by: str
    norm: str
    arrangement: Arrangement
    degree: int
    members: Members = field(compare=False)


@dataclass(frozen=True)
class Stopped:
    """What a scalar does not pass, and the channels that come to it."""

    members: Members = field(compare=False)
    reason: str


@dataclass
class ScalarTrace:
    """Everything that the runs showed of the scalars."""

    model: nn.Module
    probes: dict[str, NormProbe]
    called: set[str]
    absorbed: list[Absorbed] = field(default_factory=list)
    stopped: list[Stopped] = field(default_factory=list)
    plain: set[str] = field(default_factory=set)  # norms that were also called on what carries no scalar
    biased: set[str] = field(default_factory=set)  # norms that add a bias, which their scalar does not multiply
    irregular: dict[str, str] = field(default_factory=dict)  # norm -> why it is more, or something else, than a norm
    # Reader -> the norms whose output it was called with, None for a call with anything else.
    fed: dict[str, set[str | None]] = field(default_factory=lambda: defaultdict(set))
    whole: set[str] = field(default_factory=set)  # readers whose outputs are their channels, in order
    widths: dict[Reading, int] = field(default_factory=dict)  # output channels


def unite(members: Members, others: Members) -> None:
    """Add the channels of `others` to `members`, in place."""
    for reading, mask in others.items():
        members[reading] = members[reading] | mask if reading in members else mask
