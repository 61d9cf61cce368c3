"""Every stored tensor and every setting of a folded folder: are they the source's, with the gains folded in?

Logits speak of the samples alone: a rare token's row, a late position's, a tower that token ids do not reach have no
part in them. Here every element is compared. The readers of each norm come from an audit of the source, not from what
the folded folder says of itself, and every product is computed anew, in fp64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from flashnorm.checkpoint.blocks import Block, block_factor, block_shape, blocks
from flashnorm.checkpoint.edit import new_bias, rewritten
from flashnorm.checkpoint.header import TensorInfo
from flashnorm.checkpoint.manifest import Manifest, is_folded, read_manifest
from flashnorm.checkpoint.plan import FoldPlan, NewBias, TensorEdit
from flashnorm.checkpoint.progress import Meter, metered
from flashnorm.checkpoint.source import Source, open_source
from flashnorm.errors import Refusal
from flashnorm.verify.report import Check
from flashnorm.verify.settings import settings_check

_ELEMENTS = 1 << 20  # looked at together: three times 8 MB in fp64
_UNCHANGED = TensorEdit()


def stored_checks(
    reference: Path, candidate: Path, trust_remote_code: bool = False, *, quiet: bool = True
) -> tuple[Check, Check]:
    """Compare every tensor and setting that either folder stores with what folding makes of the other one's.

    Either may be the folded one; two that were folded in the same mode must be the same. The figures count the wrong
    tensors and the wrong settings. Memory: a few blocks of a tensor, whatever its size. `quiet`: no progress on stderr.
    Raises `Refusal` with the reason where there is nothing to say what the tensors should be.
    """
    if is_folded(candidate) or not is_folded(reference):
        original, folded = reference, candidate
    else:
        original, folded = candidate, reference
    source, result = open_source(original), open_source(folded)
    plan = _plan(source, folded, trust_remote_code)
    total = 2 * sum(info.nbytes for info in result.tensors.values())  # each, and what it was made from
    with metered("verify: stored tensors", total, quiet=quiet) as meter:
        wrong = list(_wrong(source, result, plan, meter))
    shown = f"{len(wrong)} stored weights are not the reference's with its gains folded in" + (
        f", {wrong[0]} for one" if wrong else ""
    )
    return Check("stored_weights", len(wrong), 0, shown), settings_check(source, result, plan.config_changes)


def _plan(source: Source, folded: Path, trust_remote_code: bool) -> FoldPlan:
    """What folding does to the source; nothing where it is folded as `folded` is."""
    if not is_folded(folded):
        raise Refusal(f"{folded} was not written by `flashnorm fold`")
    manifest = read_manifest(folded)
    if is_folded(source.folder):
        return _nothing(source.folder, folded, read_manifest(source.folder), manifest)
    from flashnorm.checkpoint.prepare import make_plan

    plan = make_plan(
        source,
        strict=manifest.mode == "strict",
        untie=manifest.untied,
        add_bias=bool(manifest.new_biases),
        trust_remote_code=trust_remote_code,
    )
    if {site.norm for site in plan.sites} != {site.norm for site in manifest.sites}:
        raise Refusal(f"flashnorm {manifest.tool_version} folded {folded}, and this version folds other norms")
    return plan


def _nothing(first: Path, second: Path, ours: Manifest, theirs: Manifest) -> FoldPlan:
    if (ours.mode, ours.untied, ours.new_biases) != (theirs.mode, theirs.untied, theirs.new_biases):
        raise Refusal(f"{first} and {second} are both folded, in different modes")
    return FoldPlan(edits={}, additions={}, sites=(), skipped={}, mode=ours.mode, untied=ours.untied)


def _wrong(source: Source, result: Source, plan: FoldPlan, meter: Meter) -> Iterator[str]:
    removed = {name for name, edit in plan.edits.items() if edit.remove}
    expected = {*source.tensors, *plan.additions} - removed
    yield from sorted((expected | set(plan.new_biases)) ^ set(result.tensors))
    for name, bias in sorted(plan.new_biases.items()):
        if name in result.tensors and not _as_added(source, name, bias, result, plan.edits.get(name, _UNCHANGED)):
            yield name
    for name in sorted(expected & set(result.tensors)):
        origin, stored = source.tensors[plan.additions.get(name, name)], result.tensors[name]
        edit = plan.edits.get(name, _UNCHANGED)
        if (stored.code, stored.shape) != (origin.code, origin.shape):
            yield name
        elif edit.fill is not None or edit.replace is not None or edit.shifts:
            meter.add(2 * stored.nbytes)
            if not _close(result.read(name), rewritten(source, name, origin, edit), edit):
                yield name
        elif not _as_folded(source, origin, result, stored, edit, meter):
            yield name


def _as_added(source: Source, name: str, bias: NewBias, result: Source, edit: TensorEdit) -> bool:
    expected, stored = new_bias(source, name, bias, edit.shifts), result.tensors[name]
    alike = (stored.dtype, stored.shape) == (expected.dtype, tuple(expected.shape))
    return alike and _close(result.read(name), expected, edit)


def _as_folded(
    source: Source, origin: TensorInfo, result: Source, stored: TensorInfo, edit: TensorEdit, meter: Meter
) -> bool:
    """Whether each element of `stored` is that of `origin`, bit for bit or, where scales are, times its factors."""
    shape = origin.shape if edit.scales else (origin.numel,)  # without scales any cut will do
    same = _scaled_alike(edit, shape) if edit.scales else _bits_alike
    for block in blocks(shape, _ELEMENTS):
        before = source.read_span(origin.name, block.start, block.end)
        after = result.read_span(stored.name, block.start, block.end)
        meter.add(before.nbytes + after.nbytes)
        if not same(block, before, after):
            return False
    return True


_Comparison = Callable[[Block, torch.Tensor, torch.Tensor], bool]


def _bits_alike(_: Block, before: torch.Tensor, after: torch.Tensor) -> bool:
    return before.view(torch.uint8).equal(after.view(torch.uint8))


def _scaled_alike(edit: TensorEdit, shape: tuple[int, ...]) -> _Comparison:
    """Each element within one unit in the last place of the product, for one scale.

    For n scales the fold rounds n + 1 times, by half a unit of the stored dtype or a finer one at most: together
    (n + 1) / 2 units. A product of float64 is rounded here as well, n times.
    """
    factors = [(scale.axis % len(shape), scale.factor.double()) for scale in edit.scales]

    def alike(block: Block, before: torch.Tensor, after: torch.Tensor) -> bool:
        exact = before.double().view(block_shape(shape, block))
        for axis, factor in factors:
            exact = exact * block_factor(factor, axis, len(shape), block)
        exact = exact.reshape(-1)
        roundings = len(factors) + 1 + (len(factors) if after.dtype == torch.float64 else 0)
        return _within(after, exact, exact.abs(), roundings / 2)

    return alike


def _close(stored: torch.Tensor, expected: torch.Tensor, edit: TensorEdit) -> bool:
    """Whether two roundings of one value explain the difference: what `expected` is, was rounded as well.

    Where a norm's bias moved in, terms cancel, so the unit is that of the largest entry.
    """
    if not edit.scales and not edit.shifts:
        return stored.equal(expected)
    size = expected.double().abs()
    if edit.shifts:
        size = size.nan_to_num(0.0, 0.0).max().expand_as(size)  # the largest finite one: an infinity allows all
    return _within(stored, expected.double(), size, len(edit.scales) + 1)


def _within(stored: torch.Tensor, exact: torch.Tensor, size: torch.Tensor, units: float) -> bool:
    """Whether no element of `stored` lies more than `units` units in the last place of `size` from `exact` (fp64).

    A NaN or an infinity that the source has too is no difference; `exact` holds it then.
    """
    limits = torch.finfo(stored.dtype)
    allowed = units * (limits.eps * size + limits.smallest_normal * limits.eps)
    there = stored.double()
    near = exact.isfinite() & ((there - exact).abs() <= allowed)  # beside an infinity, everything would be near
    return bool((near | (there == exact) | (there.isnan() & exact.isnan())).all())
