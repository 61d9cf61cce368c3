"""`flashnorm.fold_checkpoint`: audit, plan and apply, from a folder to a new folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from flashnorm.checkpoint.apply import apply_plan
from flashnorm.checkpoint.manifest import Manifest, is_folded, read_manifest
from flashnorm.checkpoint.plan import FoldPlan
from flashnorm.checkpoint.readahead import reading_ahead
from flashnorm.checkpoint.remarks import left_alone
from flashnorm.checkpoint.source import open_source
from flashnorm.checkpoint.staging import check_output
from flashnorm.errors import Refusal
from flashnorm.sites.folding import FoldReport


def fold_checkpoint(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    strict: bool = False,
    untie: bool = False,
    add_bias: bool = False,
    trust_remote_code: bool = False,
    quiet: bool = True,
) -> FoldReport:
    """Fold the norm gains of the checkpoint folder `src` and write the result to the new folder `dst`.

    Compatible mode (default) keeps the gains at their identity, so that stock loaders work; `strict` removes them, for
    `flashnorm.load`. `untie` gives a tied head a weight of its own, so that the final norm can be folded as well.
    `add_bias` gives linears a bias where a switch of the config makes room for one, so that a norm's bias (a
    LayerNorm's, a DyT's) can move there; a bias that cannot move stays, divided by the gain.
    Products are taken in float32 or better and rounded once; every other byte of the folder is kept. `dst` appears
    whole or not at all. A `src` that is folded already, in the mode that is asked for, is left alone: the report
    repeats its manifest and `dst` is not made.

    Raises `Refusal` (with its subclasses) on every input that cannot be folded safely; nothing is written then.
    """
    if is_folded(src):
        manifest = read_manifest(src)
        _refuse_other_mode(src, manifest, strict, untie, add_bias)
        norms = [site.norm for site in manifest.sites]
        return FoldReport(
            norms,
            dict(manifest.skipped),
            already_folded=True,
            lost=manifest.lost,
            new_biases=manifest.new_biases,
        )
    source = open_source(src)
    check_output(source.folder, Path(dst))  # planning takes seconds, so an output that exists is refused before it
    with reading_ahead(source) as sums:
        # Here, because it imports Transformers, which takes seconds: a damaged checkpoint is refused before it.
        from flashnorm.checkpoint.prepare import make_plan

        plan = make_plan(source, strict=strict, untie=untie, add_bias=add_bias, trust_remote_code=trust_remote_code)
    if not plan.sites:
        raise Refusal(f"nothing in {source.folder} can be folded: {_first_reason(plan)}; see `flashnorm audit`")
    if not quiet:
        for note in left_alone(source.files, source.config, trust_remote_code):
            print(f"note: {note}", file=sys.stderr)
    apply_plan(source, plan, dst, sums=sums, quiet=quiet)
    grown = sum(source.tensors[origin].nbytes for origin in plan.additions.values())
    norms = [site.norm for site in plan.sites]
    return FoldReport(
        norms,
        dict(plan.skipped),
        grown_bytes=grown,
        lost=read_manifest(dst).lost,
        new_biases=tuple(plan.new_biases),
        keeps_bias=plan.keeps_bias,
    )


def _refuse_other_mode(
    src: str | os.PathLike[str], manifest: Manifest, strict: bool, untie: bool, add_bias: bool
) -> None:
    """Whoever asks for another mode wants another folder, and would take "folded already" for having it."""
    wanted = "strict" if strict else "compatible"
    if manifest.mode != wanted:
        raise Refusal(
            f"{src} is folded already, in {manifest.mode} mode; `flashnorm unfold` it, then fold it in {wanted} mode"
        )
    if untie and not manifest.untied:
        raise Refusal(f"{src} is folded already, with its head tied; `flashnorm unfold` it, then fold it with --untie")
    if add_bias and not manifest.new_biases:
        raise Refusal(f"{src} is folded already, without new biases; `flashnorm unfold` it, then use --add-bias")


def _first_reason(plan: FoldPlan) -> str:
    return next(iter(plan.skipped.values()), "it has no norms")
