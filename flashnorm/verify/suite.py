"""`flashnorm.battery`: every check that a subject can take, one after the other."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Union

import torch
from torch import Tensor, nn

from flashnorm.errors import CheckpointError, Refusal, Unsupported
from flashnorm.verify.batching import check_batching
from flashnorm.verify.causality import check_causality
from flashnorm.verify.determinism import check_determinism
from flashnorm.verify.engines.engine import Engine
from flashnorm.verify.engines.model import model_engine
from flashnorm.verify.engines.slots import slots_engine
from flashnorm.verify.lag import check_lag
from flashnorm.verify.levels import EXTENTS, Extent, Level
from flashnorm.verify.outcome import BatteryReport, Outcome
from flashnorm.verify.rounding import Rounding, measure_rounding
from flashnorm.verify.samples import token_stream
from flashnorm.verify.slot_isolation import check_slots
from flashnorm.verify.subject import Subject, open_subject, refusing

Target = Union[str, "os.PathLike[str]", nn.Module, Engine]
_ROWS = 4  # sequences at once, at most: a program's slots


@dataclass(frozen=True)
class Question:
    """What every check is given: the engine, token ids (count,), how far right answers may part, how much to do."""

    engine: Engine
    ids: Tensor
    rounding: Rounding
    extent: Extent


CHECKS: dict[str, Callable[[Question], Outcome]] = {
    "causality": lambda q: check_causality(q.engine, q.ids[: q.extent.length], q.rounding, q.extent.places),
    "lag": lambda q: check_lag(q.engine, q.ids[: q.extent.steps], q.rounding),
    "batching": lambda q: check_batching(q.engine, q.ids[: q.extent.length], q.rounding),
    "slots": lambda q: check_slots(q.engine, q.ids[: q.extent.length], q.rounding),
    "determinism": lambda q: check_determinism(q.engine, q.ids[: q.extent.length], q.extent.repeats),
}


def battery(
    target: Target,
    *,
    level: str = "standard",
    only: Sequence[str] = (),
    accelerated: bool = False,
    text: str | None = None,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
    progress: Callable[[str], None] | None = None,
) -> BatteryReport:
    """Run the checks that find what unit tests and perplexity miss, without a second model to compare with.

    `target`: a checkpoint folder, a Transformers model (which is run as it is, and copied for the oracle), or an
    `Engine`. `level`: "quick", "standard" or "thorough". `only`: names of checks, all where empty. `accelerated`: a
    folder's model is run through `flashnorm.accelerate`, with its decode program where it has one. `text`: where token
    ids come from, where there is a tokenizer; else built-in passages, or random ids.

    Raises `Refusal` for unknown names, and what `open_subject` raises. A failed check raises nothing.
    """
    chosen = _chosen(only)
    if level not in Level.__members__:
        raise Refusal(f"level {level!r} does not exist; use one of {', '.join(Level.__members__)}")
    extent = EXTENTS[Level(level)]
    say = progress or (lambda _: None)
    say("opening")
    engine, subject, notes = _open(target, accelerated, dtype, trust_remote_code, extent)
    ids = _ids(engine, subject, text, extent)
    say("rounding, against the oracle" if engine.exact else "rounding, estimated")
    with refusing(f"{engine.name} cannot be run"):
        rounding = measure_rounding(engine, ids[None, : extent.sample])
    if not rounding.measured:
        notes = (*notes, "no oracle: what rounding explains is estimated, so that small faults pass")
    question = Question(engine, ids, rounding, extent)
    outcomes = []
    for name in chosen:
        say(name)
        outcomes.append(_timed(name, question))
    return BatteryReport(engine.name, level, tuple(outcomes), notes)


def _chosen(only: Sequence[str]) -> list[str]:
    unknown = [name for name in only if name not in CHECKS]
    if unknown:
        raise Refusal(f"there is no check {unknown[0]!r}; there are {', '.join(CHECKS)}")
    return [name for name in CHECKS if not only or name in only]


def _timed(name: str, question: Question) -> Outcome:
    start = time.monotonic()
    try:
        with refusing(f"{question.engine.name} cannot be asked"):
            outcome = CHECKS[name](question)
    except (
        CheckpointError
    ) as reason:  # third-party code that raised: the report says so, and other checks may still run
        outcome = Outcome(name, skipped=str(reason))
    return replace(outcome, seconds=time.monotonic() - start)


def _open(
    target: Target, accelerated: bool, dtype: torch.dtype | None, trust_remote_code: bool, extent: Extent
) -> tuple[Engine, Subject | None, tuple[str, ...]]:
    if isinstance(target, Engine):
        if accelerated or dtype is not None:
            raise Refusal("accelerated and dtype are for checkpoint folders; an engine is run as it is")
        return target, None, ()
    if isinstance(target, nn.Module):
        if accelerated or dtype is not None:
            raise Refusal("accelerated and dtype are for checkpoint folders; a model is run as it is")
        return _engine_of_module(target)
    subject = open_subject(target, trust_remote_code)
    model = subject.load(dtype)
    engine = model_engine(model, subject.name, lambda: subject.load(dtype))
    if not accelerated:
        return engine, subject, ()
    return _accelerated(model, engine, subject, extent)


def _engine_of_module(model: nn.Module) -> tuple[Engine, Subject, tuple[str, ...]]:
    """A model in memory; one with a decode program is asked through it."""
    subject = open_subject(model)
    stock = not hasattr(model, "acceleration")
    engine = model_engine(model, subject.name, (lambda: subject.load(None)) if stock else None)
    slots = getattr(model, "slots", None)
    notes = () if stock else ("the model is accelerated already; give its folder with accelerated=True for an oracle",)
    return (engine if slots is None else slots_engine(slots, engine)), subject, notes


def _accelerated(
    model: nn.Module, engine: Engine, subject: Subject, extent: Extent
) -> tuple[Engine, Subject, tuple[str, ...]]:
    from flashnorm.runtime.accelerate import accelerate

    length = min(engine.limit, max(extent.steps, extent.length))
    try:
        accelerate(model, level=2, max_batch=_ROWS, max_length=length)
    except Unsupported as reason:
        accelerate(model)
        note = f"accelerated to level one, without a decode program: {reason}"
        return replace(engine, name=f"{engine.name}, accelerated"), subject, (note,)
    slots = slots_engine(model.slots, engine, f"{engine.name}, accelerated")  # type: ignore[arg-type]
    return slots, subject, ()


def _ids(engine: Engine, subject: Subject | None, text: str | None, extent: Extent) -> Tensor:
    count = min(engine.limit, max(extent.steps, extent.length, extent.sample))
    if subject is None:
        if text is not None:
            raise Refusal("an engine has no tokenizer, so it cannot read the text; leave the text out")
        generator = torch.Generator().manual_seed(0)
        return torch.randint(engine.vocabulary, (count,), generator=generator)
    return token_stream(subject, text, count)
