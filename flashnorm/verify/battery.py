"""`flashnorm.verify`: run both models, one after the other, and decide."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Union

import torch
from torch import nn

from flashnorm.checkpoint.manifest import is_folded
from flashnorm.errors import CheckpointError, FlashnormError, Refusal
from flashnorm.verify.checks import finite_check, greedy_check, perplexity_check, task_checks
from flashnorm.verify.evaluate import Answers, dtype_name, evaluate
from flashnorm.verify.greedy import GreedyPair, compare_greedy
from flashnorm.verify.harness import Harness, open_harness
from flashnorm.verify.logits import compare_logits, masked_tokens, without_tokens
from flashnorm.verify.parity import where_they_part
from flashnorm.verify.perplexity import compare_perplexity
from flashnorm.verify.reach import differing
from flashnorm.verify.report import Check, VerifyReport
from flashnorm.verify.samples import BUILT_IN, Samples, make_samples
from flashnorm.verify.steps import Progress, Steps
from flashnorm.verify.stored import stored_checks
from flashnorm.verify.subject import Subject, check_comparable, open_subject, refusing
from flashnorm.verify.tasks import pair_scores

Model = Union[str, "os.PathLike[str]", nn.Module]


def verify(
    reference: Model,
    candidate: Model,
    *,
    text: str | None = None,
    positions: int = 256,
    tokens: int = 4096,
    new_tokens: int = 64,
    dtype: torch.dtype | None = None,
    tasks: Sequence[str] = (),
    download: bool = False,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
    quiet: bool = True,
) -> VerifyReport:
    """Does `candidate` compute what `reference` computes, up to the rounding that folding norm gains explains?

    `reference`, `candidate`: checkpoint folders (strict folded ones included) or Transformers models, which are copied.
    `text`: where the token ids come from, and what perplexity is taken of; without it, built-in passages and no
    perplexity. `positions`: at how many the logits are compared. `tokens`: how many of the text count for perplexity.
    `new_tokens`: how far each greedy continuation goes (0: none). `dtype`: run both in it instead of the dtype that the
    reference is stored in. `tasks`: names of the lm-eval harness, which must be installed, to run on both; `download`:
    it may fetch data sets that are not there. `progress`: called with a line of text before each step. `quiet`: without
    the progress on stderr of the comparison of stored tensors, which is made where one of two folders was written by
    `flashnorm fold`.

    The bounds are derived in `flashnorm.verify.bounds`. Raises `ConfigError` and `CheckpointError` where the two cannot
    be loaded or compared, and `Refusal` where the text or the memory does not do. A failed check raises nothing: it is
    in the report's `failures`.
    """
    if positions < 1 or tokens < 2 or new_tokens < 0:
        raise Refusal(
            f"positions={positions}, tokens={tokens}, new_tokens={new_tokens}: give at least 1, 2 and 0 of them"
        )
    steps = Steps(progress or _silent)
    ours, theirs = open_subject(reference, trust_remote_code), open_subject(candidate, trust_remote_code)
    check_comparable(ours, theirs)
    harness = open_harness(tasks, download) if tasks else None
    samples = make_samples(ours, text, positions, tokens)
    source = evaluate(ours, samples, new_tokens, dtype, None, steps)
    masked = masked_tokens(source.exact)
    source = without_tokens(source, masked)
    if not (source.logits.isfinite().all() and source.exact.isfinite().all()):
        raise CheckpointError(f"the logits of {ours.name} are not finite: there is nothing to compare with")
    steps.second_model()
    folded = evaluate(theirs, samples, new_tokens, source.arithmetic.own, source.arithmetic.oracle, steps)
    unreached = differing(source.unused, folded.unused)
    if _stored_known(ours, theirs):
        steps(f"{theirs.name}: every stored tensor")
    rest = _compare_stored(ours, theirs, unreached, trust_remote_code, quiet)
    report = _judge(ours, theirs, samples, source, without_tokens(folded, masked), rest)
    if any(check.name in _OF_LOGITS for check in report.failures):
        steps(f"{theirs.name}: where it parts from {ours.name}")
        report = _with_place(report, ours, theirs, samples, source.arithmetic.oracle)
    return _with_tasks(report, harness, (ours, theirs), source.arithmetic.fine, steps) if harness else report


_OF_LOGITS = {"non_finite_positions", "drift_ratio", "exact_drift_ratio", "typical_exact_drift_ratio", "kl_ratio"}


def _with_place(
    report: VerifyReport, ours: Subject, theirs: Subject, samples: Samples, oracle: torch.dtype
) -> VerifyReport:
    with refusing(f"{theirs.name} cannot be run"):
        place = where_they_part(ours, theirs, samples.excerpts[0], oracle)
    return replace(report, notes=(*report.notes, place)) if place else report


def _with_tasks(
    report: VerifyReport, harness: Harness, subjects: tuple[Subject, Subject], dtype: torch.dtype, progress: Progress
) -> VerifyReport:
    """`dtype`: that of text, in which the rounding of activations does not hide what the checkpoints do."""
    scores = []
    for subject in subjects:
        progress(f"{subject.name}: {', '.join(harness.tasks)}")
        scores.append(harness.scores(subject.load(dtype), subject))
    pairs = pair_scores(*scores)
    return replace(report, tasks=pairs, checks=(*report.checks, *task_checks(pairs)))


def _silent(step: str) -> None:
    pass


@dataclass(frozen=True)
class _Rest:
    """What is known of the weights beyond what the logits say of them."""

    checks: tuple[Check, ...] = ()
    not_compared: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def _stored_known(ours: Subject, theirs: Subject) -> bool:
    """Whether it is known what is to be stored: two folders, one of which says how it was folded."""
    return (
        ours.folder is not None and theirs.folder is not None and (is_folded(ours.folder) or is_folded(theirs.folder))
    )


def _compare_stored(
    ours: Subject, theirs: Subject, unreached: tuple[str, ...], trust_remote_code: bool, quiet: bool
) -> _Rest:
    """`unreached`: weights that differ and that no token id reaches, so that the stored tensors alone speak of them."""
    why = f"token ids do not reach {len(unreached)} weights that differ ({unreached[0]} for one)" if unreached else ""
    if ours.folder is None or theirs.folder is None:
        notes = (f"{why}, so they were not compared: give checkpoint folders",) if unreached else ()
        return _Rest((), unreached, notes)
    if not _stored_known(ours, theirs) and not unreached:
        return _Rest()
    try:
        checks = stored_checks(ours.folder, theirs.folder, trust_remote_code, quiet=quiet)
    except FlashnormError as reason:  # a folder that is no whole checkpoint, or a model that cannot be audited
        what = f"{why}, and they" if unreached else "stored tensors and settings"
        return _Rest((), unreached, (f"{what} were not compared: {reason}",))
    if unreached:
        return _Rest(checks, (), (f"{why}: those were compared as they are stored, with the norms' readers by audit",))
    return _Rest(checks)


def _judge(
    ours: Subject, theirs: Subject, samples: Samples, source: Answers, folded: Answers, rest: _Rest
) -> VerifyReport:
    checks = [finite_check(folded.logits, folded.exact), *rest.checks]
    figures, perplexity = None, None
    pairs: tuple[GreedyPair, ...] = ()
    if checks[0].passed:
        figures, logit_checks, noise = compare_logits(source, folded)
        checks += logit_checks
        finer = source.arithmetic.fine != source.arithmetic.own
        if source.losses is not None and folded.losses is not None:
            perplexity = compare_perplexity(source.losses, folded.losses)
            checks.append(perplexity_check(perplexity, noise.divergence, finer))
        if source.continuations:
            pairs = compare_greedy(samples.prompts, source.continuations, folded.continuations, ours.decode)
            checks.append(greedy_check(pairs, noise.logit_error))
    return VerifyReport(
        reference=ours.name,
        candidate=theirs.name,
        dtype=dtype_name(source.arithmetic.own),
        text_dtype=dtype_name(source.arithmetic.fine),
        oracle_dtype=dtype_name(source.arithmetic.oracle),
        samples=samples.origin,
        logits=figures,
        perplexity=perplexity,
        greedy=pairs,
        checks=tuple(checks),
        notes=(*_notes(samples, source, folded), *rest.notes),
        not_compared=rest.not_compared,
    )


def _notes(samples: Samples, source: Answers, folded: Answers) -> list[str]:
    """What a reader should know about how the figures came about."""
    stored, own, oracle = source.arithmetic.stored, source.arithmetic.own, source.arithmetic.oracle
    notes = []
    if own != stored:
        notes.append(f"run in {dtype_name(own)}, stored in {dtype_name(stored)}")
    if folded.arithmetic.stored != stored:
        notes.append(f"the candidate is stored in {dtype_name(folded.arithmetic.stored)}, not {dtype_name(stored)}")
    if oracle != torch.float64:
        notes.append(f"the oracle is in {dtype_name(oracle)}: float64 does not fit into memory")
    if samples.windows is not None and not source.causal:
        notes.append("no perplexity: it is defined for causal language models only")
    elif samples.origin == BUILT_IN and source.causal:
        notes.append("no perplexity: it is taken of a text of yours, which --text FILE gives")
    return notes
