"""What folding one site means, for tensors in a module or in a file: the numbers, and when they forbid it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from flashnorm import algebra
from flashnorm.errors import Refusal
from flashnorm.sites.types import Site


@dataclass(frozen=True)
class FoldReport:
    """What a fold did: the norms whose gains now live in the next weights, and for every other norm the reason."""

    folded: list[str]
    skipped: dict[str, str]
    grown_bytes: int = 0  # by how much an untied head makes the checkpoint larger
    already_folded: bool = False  # nothing was done: the input was the output of an earlier fold
    lost: dict[str, int] = field(
        default_factory=dict
    )  # stored tensor -> how many weights became zero, too small for fp16
    new_biases: tuple[str, ...] = ()  # stored names of the biases that linears were given
    keeps_bias: tuple[str, ...] = ()  # folded norms whose bias stays, divided by the gain

    def __str__(self) -> str:
        done = "folded already" if self.already_folded else "folded"
        return f"{len(self.folded)} norms {done}, {len(self.skipped)} left alone"


def gain_of(site: Site, weight: torch.Tensor) -> torch.Tensor:
    """The gain (width,) that a stored norm weight stands for, in float32 or better."""
    assert site.convention is not None
    return algebra.gain_of(weight.detach().reshape(-1), site.convention.offset)


def moves_shift(site: Site) -> bool:
    """The norm's bias can move into the next biases; otherwise it stays, divided by the gain."""
    return all(consumer.takes_shift for consumer in site.consumers)


def remaining_bias(gain: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The bias (width,) that a norm keeps when its gain moves and its bias does not, in float32 or better.

    A channel whose gain is zero has a zero bias here (`value_problem` sees to it), and keeps it.
    """
    return algebra.kept_shift(bias.detach().reshape(-1).to(gain.dtype), torch.where(gain == 0, 1.0, gain))


def value_problem(site: Site, weight: torch.Tensor, bias: torch.Tensor | None, shift_moves: bool) -> str | None:
    """Why the *values* of a foldable site's gain and bias forbid the fold. Raises `Refusal` on broken ones."""
    gain = gain_of(site, weight)
    broken = _first(~torch.isfinite(gain))
    if broken is not None:
        raise Refusal(f"the gain of {site.norm} is not finite at channel {broken}: the checkpoint is damaged")
    if bias is None:
        return None
    broken = _first(~torch.isfinite(bias))
    if broken is not None:
        raise Refusal(f"the bias of {site.norm} is not finite at channel {broken}: the checkpoint is damaged")
    if shift_moves:
        return None
    stuck = _first((gain == 0) & (bias.reshape(-1) != 0))
    if stuck is not None:
        return f"its gain is zero at channel {stuck} while its bias, which has to stay, is not"
    large = _first(~torch.isfinite(remaining_bias(gain, bias).to(bias.dtype)))
    if large is not None:
        return f"its bias, which has to stay, does not fit {bias.dtype} once divided by the gain at channel {large}"
    return None


def _first(wrong: torch.Tensor) -> int | None:
    """The first channel at which `wrong` is true."""
    found = wrong.reshape(-1).nonzero()
    return int(found[0]) if len(found) else None
