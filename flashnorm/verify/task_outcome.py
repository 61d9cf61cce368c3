"""Tasks of the harness as a check of the battery: the subject's scores beside its reference's, or alone."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import nn

from flashnorm.verify.checks import task_checks
from flashnorm.verify.harness import Harness
from flashnorm.verify.outcome import Outcome
from flashnorm.verify.report import Check
from flashnorm.verify.subject import Subject
from flashnorm.verify.tasks import pair_scores, shown

NAME = "tasks"


def check_tasks(
    harness: Harness, model: nn.Module, subject: Subject, reference: Callable[[], nn.Module] | None
) -> Outcome:
    """`model`: what runs, `subject`: whose tokenizer both read with. `reference`: loads what scores are compared with.

    The reference runs on the model's device. Without one the scores are told, and that they are numbers is all that is
    judged.
    """
    ours = harness.scores(model, subject)
    if reference is None:
        notes = [f"{task}, {metric}: {shown(score.value, score.error)}" for (task, metric), score in ours.items()]
        broken = [note for note, score in zip(notes, ours.values(), strict=True) if not math.isfinite(score.value)]
        finite = Check("task_scores_not_finite", len(broken), 0, broken[0] if broken else "")
        return Outcome(NAME, (finite,), notes=(*notes, "there is no reference to compare these scores with"))
    expected = harness.scores(reference().to(next(model.parameters()).device), subject)
    pairs = pair_scores(expected, ours)
    return Outcome(NAME, tuple(task_checks(pairs)), notes=tuple(map(str, pairs)))
