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
from flashnorm.verify.harness import Harness, open_harness
from flashnorm.verify.lag import check_lag
from flashnorm.verify.language import check_language
from flashnorm.verify.levels import EXTENTS, Extent, Level
from flashnorm.verify.outcome import BatteryReport, Outcome
from flashnorm.verify.parity import Reference, check_parity, sites_of
from flashnorm.verify.ranges import check_ranges
from flashnorm.verify.rounding import Rounding, measure_rounding
from flashnorm.verify.samples import token_stream
from flashnorm.verify.slot_isolation import check_slots
from flashnorm.verify.subject import Subject, open_subject, refusing
from flashnorm.verify.task_outcome import NAME as TASKS
from flashnorm.verify.task_outcome import check_tasks

Model = Union[str, "os.PathLike[str]", nn.Module]
Target = Union[str, "os.PathLike[str]", nn.Module, Engine]
_ROWS = 4  # sequences at once, at most: a program's slots


@dataclass(frozen=True)
class Question:
    """What every check is given: the engine, token ids (count,), how far right answers may part, how much to do."""

    engine: Engine
    ids: Tensor
    rounding: Rounding
    extent: Extent
    reference: Reference | None = None
    stock: Callable[[], nn.Module] | None = None  # the model as Transformers runs it, for what needs its modules


CHECKS: dict[str, Callable[[Question], Outcome]] = {
    "parity": lambda q: check_parity(q.engine, q.ids, q.reference),
    "causality": lambda q: check_causality(q.engine, q.ids[: q.extent.length], q.rounding, q.extent.places),
    "lag": lambda q: check_lag(q.engine, q.ids[: q.extent.steps], q.rounding),
    "batching": lambda q: check_batching(q.engine, q.ids[: q.extent.length], q.rounding),
    "slots": lambda q: check_slots(q.engine, q.ids[: q.extent.length], q.rounding),
    "ranges": lambda q: _ranges(q),
    "language": lambda q: check_language(
        q.engine, q.ids[: q.extent.sample], q.reference.engine if q.reference else None, q.extent.new_tokens
    ),
    "determinism": lambda q: check_determinism(q.engine, q.ids[: q.extent.length], q.extent.repeats),
}


def _ranges(question: Question) -> Outcome:
    if question.stock is None:
        return Outcome("ranges", skipped=f"{question.engine.name} is no model whose norms can be watched")
    model = question.stock()
    ids = question.ids[: question.extent.length]
    return check_ranges(model, sites_of(model), ids, question.engine.dtype)


def battery(
    target: Target,
    *,
    level: str = "standard",
    only: Sequence[str] = (),
    accelerated: bool = False,
    reference: Model | None = None,
    text: str | None = None,
    tasks: Sequence[str] = (),
    download: bool = False,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
    progress: Callable[[str], None] | None = None,
) -> BatteryReport:
    """Run the checks that find what unit tests and perplexity miss, without a second model to compare with.

    `target`: a checkpoint folder, a Transformers model (which is run as it is, and copied for the oracle), or an
    `Engine`. `level`: "quick", "standard" or "thorough". `only`: names of checks, all where empty. `accelerated`: a
    folder's model is run through `flashnorm.accelerate`, with its decode program where it has one. `reference`: a
    folder or model that computes what `target` should; an accelerated one has its stock form. `text`: where token ids
    come from, where there is a tokenizer; else built-in passages, or random ids. `tasks`: names of the lm-eval harness,
    run last, beside the reference's where there is one; `download`: it may fetch data sets. `device`: where a folder's
    model runs; oracles run on the CPU.

    Raises `Refusal` for unknown names, and what `open_subject` raises. A failed check raises nothing.
    """
    chosen = _chosen(only, tasks)
    if level not in Level.__members__:
        raise Refusal(f"level {level!r} does not exist; use one of {', '.join(Level.__members__)}")
    extent = EXTENTS[Level(level)]
    harness = open_harness(tasks, download) if tasks else None
    say = progress or (lambda _: None)
    say("opening")
    opened = _open(target, accelerated, dtype, torch.device(device), trust_remote_code, extent)
    engine, notes = opened.engine, opened.notes
    ids = _ids(engine, opened.subject, text, extent)
    say("rounding, against the oracle" if engine.exact else "rounding, estimated")
    with refusing(f"{engine.name} cannot be run"):
        rounding = measure_rounding(engine, ids[None, : extent.sample])
    if not rounding.measured:
        notes = (*notes, "no oracle: what rounding explains is estimated, so that small faults pass")
    stock = _reference(opened, reference, dtype, trust_remote_code)
    subject = opened.subject
    question = Question(engine, ids, rounding, extent, stock, (lambda: subject.load(dtype)) if subject else None)
    outcomes = []
    for name in chosen:
        say(name)
        outcomes.append(_timed(name, question))
    if harness is not None:
        say(TASKS)
        outcomes.append(_tasks(harness, opened, stock))
    return BatteryReport(engine.name, level, tuple(outcomes), notes)


def _tasks(harness: Harness, opened: _Opened, reference: Reference | None) -> Outcome:
    start, subject, model = time.monotonic(), opened.subject, opened.model
    if subject is None or model is None:
        raise Refusal(f"{opened.engine.name} is no Transformers model, so the harness cannot ask it; leave tasks out")
    return replace(
        check_tasks(harness, model, subject, reference.load if reference else None), seconds=time.monotonic() - start
    )


def _chosen(only: Sequence[str], tasks: Sequence[str] = ()) -> list[str]:
    unknown = [name for name in only if name not in CHECKS and not (tasks and name == TASKS)]
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


@dataclass(frozen=True)
class _Opened:
    """The subject, ready to be asked. `model`: what it runs, where that is a module; `stock`: it is not replaced."""

    engine: Engine
    subject: Subject | None = None
    model: nn.Module | None = None
    stock: bool = True
    notes: tuple[str, ...] = ()


def _open(
    target: Target,
    accelerated: bool,
    dtype: torch.dtype | None,
    device: torch.device,
    trust_remote_code: bool,
    extent: Extent,
) -> _Opened:
    if isinstance(target, (Engine, nn.Module)):
        if accelerated or dtype is not None:
            raise Refusal("accelerated and dtype are for checkpoint folders; an engine or a model is run as it is")
        return _Opened(target) if isinstance(target, Engine) else _opened_module(target)
    subject = open_subject(target, trust_remote_code)
    model = subject.load(dtype).to(device)
    opened = _Opened(model_engine(model, subject.name, lambda: subject.load(dtype)), subject, model)
    return _accelerated(opened, extent) if accelerated else opened


def _opened_module(model: nn.Module) -> _Opened:
    """A model in memory; one with a decode program is asked through it."""
    subject = open_subject(model)
    stock = not hasattr(model, "acceleration")
    engine = model_engine(model, subject.name, (lambda: subject.load(None)) if stock else None)
    slots = getattr(model, "slots", None)
    notes = () if stock else ("the model is accelerated already; give its folder with accelerated=True for an oracle",)
    return _Opened(engine if slots is None else slots_engine(slots, engine), subject, model, stock, notes)


def _accelerated(opened: _Opened, extent: Extent) -> _Opened:
    from flashnorm.runtime.accelerate import accelerate
    from flashnorm.runtime.decode.program import Program
    from flashnorm.runtime.level_two import spec_of

    engine, model = opened.engine, opened.model
    assert model is not None
    name = f"{engine.name}, accelerated"
    length = min(engine.limit, max(extent.steps, extent.length))
    try:
        spec = spec_of(model, length) if _captures(model) else None  # read from the stock model
        accelerate(model, level=2, max_batch=_ROWS, max_length=length)
    except Unsupported as reason:
        accelerate(model)
        notes = (f"accelerated to level one, without a decode program: {reason}",)
        return replace(opened, engine=replace(engine, name=name), stock=False, notes=notes)
    # The packed weights of the first program serve the second one: it adds its cache alone.
    eager = None if spec is None else Program(spec, slots=_ROWS, graphs=False)
    return replace(opened, engine=slots_engine(model.slots, engine, name, eager), stock=False)  # type: ignore[arg-type]


def _captures(model: nn.Module) -> bool:
    """Whether a decode program of the model runs its steps as captured graphs."""
    return next(model.parameters()).device.type == "cuda"


def _reference(
    opened: _Opened, reference: Model | None, dtype: torch.dtype | None, trust_remote_code: bool
) -> Reference | None:
    """What parity is judged by: what was given, or the stock form of a folder's accelerated model."""
    model, subject = opened.model, opened.subject
    if reference is not None:
        subject = open_subject(reference, trust_remote_code)
    elif opened.stock or subject is None or subject.folder is None:
        return None
    assert subject is not None
    given = subject

    def load() -> nn.Module:
        return given.load(dtype)

    if model is None:
        candidate = None
    elif opened.stock:
        own = opened.subject
        assert own is not None
        candidate = lambda: own.load(dtype)  # noqa: E731
    else:
        candidate = lambda: model  # noqa: E731
    return Reference(model_engine(load(), given.name, load), load, candidate, runs_exactly=opened.stock)


def _ids(engine: Engine, subject: Subject | None, text: str | None, extent: Extent) -> Tensor:
    count = min(engine.limit, max(extent.steps, extent.length, extent.sample))
    if subject is None:
        if text is not None:
            raise Refusal("an engine has no tokenizer, so it cannot read the text; leave the text out")
        generator = torch.Generator().manual_seed(0)
        return torch.randint(engine.vocabulary, (count,), generator=generator)
    return token_stream(subject, text, count)
