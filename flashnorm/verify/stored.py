"""The weights of a folded folder, one by one: is each the reference's, with the gains that it reads folded in?

This is what is left to check where no logit depends on a weight. It takes the readers of each norm from an audit of the
reference, not from what the folded folder says of itself, and computes every product anew, in fp64.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from flashnorm.checkpoint.edit import rewritten
from flashnorm.checkpoint.manifest import is_folded, read_manifest
from flashnorm.checkpoint.plan import FoldPlan, TensorEdit
from flashnorm.checkpoint.source import Source, open_source
from flashnorm.errors import Refusal
from flashnorm.verify.report import Check


def stored_check(reference: Path, candidate: Path, trust_remote_code: bool = False) -> Check:
    """Compare every tensor that either folder stores with what folding `reference` gives; the figure counts the wrong.

    Raises `Refusal` with the reason where there is nothing to say what they should be.
    """
    if not is_folded(candidate):
        raise Refusal(f"{candidate} was not written by `flashnorm fold`")
    manifest = read_manifest(candidate)
    source, result = open_source(reference), open_source(candidate)
    from flashnorm.checkpoint.prepare import make_plan

    plan = make_plan(
        source, strict=manifest.mode == "strict", untie=manifest.untied, trust_remote_code=trust_remote_code
    )
    if {site.norm for site in plan.sites} != {site.norm for site in manifest.sites}:
        raise Refusal(f"flashnorm {manifest.tool_version} folded {candidate}, and this version folds other norms")
    wrong = list(_wrong(source, result, plan))
    shown = f"{len(wrong)} stored weights are not the reference's with its gains folded in" + (
        f", {wrong[0]} for one" if wrong else ""
    )
    return Check("stored_weights", len(wrong), 0, shown)


def _wrong(source: Source, result: Source, plan: FoldPlan) -> Iterator[str]:
    removed = {name for name, edit in plan.edits.items() if edit.remove}
    expected = {*source.tensors, *plan.additions} - removed
    yield from sorted(expected ^ set(result.tensors))
    for name in sorted(expected & set(result.tensors)):
        origin = source.tensors[plan.additions.get(name, name)]
        stored = result.read(name)
        if (stored.dtype, stored.shape) != (origin.dtype, origin.shape):
            yield name
        elif name not in plan.edits:
            if not _bytes(stored).equal(_bytes(source.read(origin.name))):
                yield name
        elif not _close(stored, rewritten(source, name, origin, plan.edits[name]), plan.edits[name]):
            yield name


def _close(stored: torch.Tensor, exact: torch.Tensor, edit: TensorEdit) -> bool:
    """Whether two roundings of one value explain the difference.

    For n scales the fold rounded at most n + 1 times, to the stored dtype or a finer one, and `exact` was rounded once:
    each moves a value by half a unit in the last place at most, which makes (n + 2) / 2 <= n + 1 units. Where a norm's
    bias moved in, terms cancel, so the unit is that of the largest entry.
    """
    if not edit.scales and not edit.shifts:
        return stored.equal(exact)
    limits = torch.finfo(stored.dtype)
    size = exact.double().abs()
    if edit.shifts:
        size = size.max().expand_as(size)
    allowed = (len(edit.scales) + 1) * (limits.eps * size + limits.smallest_normal * limits.eps)
    return bool(((stored.double() - exact.double()).abs() <= allowed).all())


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
