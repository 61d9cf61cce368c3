"""What a run shows of the weights that write what its norms read."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch import nn

from flashnorm.sites.probing import NormProbe
from flashnorm.sites.written_rows import Members, Writer


@dataclass(frozen=True)
class Normalised:
    """What a norm was called with: rows that consist of channels `start` to `stop` of all members."""

    members: Members
    start: int
    stop: int


@dataclass
class WriterTrace:
    """Everything that the runs showed of the weights' rows."""

    model: nn.Module
    probes: dict[str, NormProbe]
    normalised: dict[str, set[Normalised]] = field(default_factory=lambda: defaultdict(set))
    broken: dict[str, dict[str, None]] = field(default_factory=lambda: defaultdict(dict))  # norm -> other inputs, why
    irregular: dict[str, str] = field(default_factory=dict)  # norm -> why it is more, or something else, than a norm
    widths: dict[Writer, int] = field(default_factory=dict)  # channels
    # Channels that something else than a LayerNorm reads, and what.
    stopped: dict[Writer, torch.Tensor] = field(default_factory=dict)
    reasons: dict[Writer, dict[str, None]] = field(default_factory=lambda: defaultdict(dict))
    # Parameter -> the axis along which its channels are written, None for any other use -> where first.
    uses: dict[str, dict[int | None, str]] = field(default_factory=lambda: defaultdict(dict))

    def stop(self, writer: Writer, channels: torch.Tensor, reason: str) -> None:
        """These channels (1-D) of a writer reach what depends on their mean."""
        if writer not in self.stopped:
            self.stopped[writer] = torch.zeros(self.widths[writer], dtype=torch.bool)
        self.stopped[writer][channels] = True
        self.reasons[writer][reason] = None
