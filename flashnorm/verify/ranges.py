"""Ranges: where the deferred scale would overflow, which channels stick out, and where epsilon matters.

A deferred norm multiplies before it divides: the product W diag(g) x is as large as the residual stream is, while the
plain norm keeps its reader's input near one. In fp16, whose largest number is 65504, an unscaled product may overflow
although the scaled one would not; kernels here keep it in fp32, others may not. What a model's activations really are
depends on the text, so they are measured, norm by norm, on the tokens given:

- `product`: the largest |W diag(g) x| over the norm's readers, tokens and outputs;
- `outliers`: channels whose RMS is more than 6 times that of the median channel, as in LLM.int8 (Dettmers et al., 2022)
  for the magnitude of single values;
- `epsilon`: ε over the smallest mean square of a token: at 1, epsilon halves the energy of what it norms.

The figure that is judged is the product over the largest number of the model's own dtype: above 1, the deferred form
overflows in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flashnorm.sites.folding import gain_of
from flashnorm.sites.types import Site
from flashnorm.verify.forward import TransformersModel, logits_of
from flashnorm.verify.outcome import Outcome
from flashnorm.verify.report import Check

FP16_LARGEST, FP8_LARGEST = 65504.0, 448.0  # of E4M3
_OUTLIER = 6.0
_ROWS = 1024  # outputs of a reader at once


@dataclass(frozen=True)
class SiteRange:
    """What one norm's input did over the tokens. `epsilon`: ε over the smallest mean square of a token."""

    norm: str
    largest: float
    product: float
    outliers: int
    epsilon: float


def check_ranges(model: TransformersModel, sites: Sequence[Site], ids: Tensor, dtype: torch.dtype) -> Outcome:
    """`model`: stock, in any dtype; `ids`: (length,). `dtype`: what the subject computes in."""
    ranges = measure_ranges(model, sites, ids)
    if not ranges:
        return Outcome("ranges", skipped="the model has no norm whose readers are known")
    limit = torch.finfo(dtype).max
    worst = max(ranges, key=lambda r: r.product)
    name = str(dtype).removeprefix("torch.")
    figure = Check(
        "deferred_product",
        worst.product / limit,
        1.0,
        f"at {worst.norm} the product before the scale reaches {worst.product:.3g}, and {name} ends at {limit:.3g}: "
        "defer the scale in float32 or norm first",
    )
    return Outcome("ranges", (figure,), notes=tuple(_notes(ranges)), series=_series(ranges))


def measure_ranges(model: TransformersModel, sites: Sequence[Site], ids: Tensor) -> list[SiteRange]:
    """One forward pass; a row for each norm with a convention and readers, in the order in which they run."""
    known = {s.norm: s for s in sites if s.convention is not None and s.consumers}
    found: dict[str, SiteRange] = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))

    def measure(site: Site, args: tuple[Any, ...]) -> None:
        if site.norm not in found and args and isinstance(args[0], Tensor) and args[0].shape[-1] == site.width:
            found[site.norm] = _measured(site, args[0].detach(), parameters)

    handles = [
        model.get_submodule(name).register_forward_pre_hook(lambda _m, args, site=site: measure(site, args))
        for name, site in known.items()
    ]
    try:
        logits_of(model, ids[None])
    finally:
        for handle in handles:
            handle.remove()
    return list(found.values())


def _measured(site: Site, x: Tensor, parameters: dict[str, nn.Parameter]) -> SiteRange:
    assert site.convention is not None
    rows = x.reshape(-1, site.width).float()
    weight = parameters.get(site.weight) if site.weight else None
    gained = rows if weight is None else rows * gain_of(site, weight).float()
    products = [
        _largest_product(gained, parameters[c.weight].detach(), c.axis)
        for c in site.consumers
        if c.channels is None and c.weight in parameters
    ]
    channels = rows.square().mean(0).sqrt()
    smallest = float(rows.square().mean(-1).min())
    eps = site.convention.eps
    return SiteRange(
        norm=site.norm,
        largest=float(rows.abs().max()),
        product=max(products, default=0.0),
        outliers=int((channels > _OUTLIER * channels.median()).sum()),
        epsilon=eps / smallest if smallest > 0 else (float("inf") if eps else 0.0),
    )


def _largest_product(gained: Tensor, weight: Tensor, axis: int) -> float:
    """max |W x| of a weight that is read along `axis`; a stack of experts counts as one tall weight."""
    tall = weight.movedim(axis, -1).reshape(-1, gained.shape[-1])
    return max(float((gained @ part.float().t()).abs().max()) for part in tall.split(_ROWS))


def _notes(ranges: Sequence[SiteRange]) -> list[str]:
    notes = []
    for limit, name in ((FP16_LARGEST, "fp16"), (FP8_LARGEST, "fp8 (E4M3)")):
        over = [r for r in ranges if r.product > limit]
        if over:
            worst = max(over, key=lambda r: r.product)
            notes.append(
                f"in {name} the product before the scale would overflow at {len(over)} of {len(ranges)} norms, most at "
                f"{worst.norm} ({worst.product:.3g})"
            )
    sticking = [r for r in ranges if r.outliers]
    if sticking:
        most = max(sticking, key=lambda r: r.outliers)
        notes.append(f"{len(sticking)} norms read outlier channels, {most.norm} the most ({most.outliers})")
    small = max(ranges, key=lambda r: r.epsilon)
    notes.append(f"epsilon is at most {small.epsilon:.3g} of a token's mean square, at {small.norm}")
    return notes


def _series(ranges: Sequence[SiteRange]) -> dict[str, list[Any]]:
    columns = ("norm", "largest", "product", "outliers", "epsilon")
    return {column: [getattr(r, column) for r in ranges] for column in columns}
