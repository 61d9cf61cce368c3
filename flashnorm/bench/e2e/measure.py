"""One row: every contender checked, then all of them timed, taking turns."""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from flashnorm.bench.decode import random_model, random_prompts
from flashnorm.bench.e2e.contender import Contender, Memory
from flashnorm.bench.e2e.correctness import Error, Judge
from flashnorm.bench.e2e.ours import ProgramPrefill, ProgramSteps
from flashnorm.bench.e2e.recipe_steps import RecipeSteps
from flashnorm.bench.e2e.rows import (
    HF_COMPILED,
    HF_EAGER,
    LEVEL_ONE,
    OURS,
    PREFILL_COMPILED,
    PREFILL_EAGER,
    PROJECT,
    RECIPE,
    TUNED_RECIPE,
    Row,
    Work,
    contenders_of,
)
from flashnorm.bench.e2e.stock import ForwardPrefill, GenerateSteps
from flashnorm.bench.limits import Ceilings
from flashnorm.bench.traffic import cache_bytes, prefill_operations, weight_bytes
from flashnorm.errors import CheckFailed
from flashnorm.runtime.accelerate import accelerate

RUNS = 5
_PROMPTS = 8  # whose last logits are compared where each prompt gives one position
Factory = Callable[[Any, Row, Tensor], Contender]


@dataclass(frozen=True)
class Timed:
    """What a contender took: microseconds of a step or a prompt, one value per run of `tokens`."""

    samples: tuple[float, ...]
    tokens: int
    error: Error
    memory: Memory | None

    @property
    def median(self) -> float:
        return statistics.median(self.samples)


@dataclass(frozen=True)
class Measured:
    """A row's results. `needed`: the bytes a step must read, or the operations a prompt takes; `limit`: in
    microseconds; `seconds`: how long all of it took, compilation included."""

    row: Row
    contenders: Mapping[str, Timed]
    needed: int
    limit: float
    ceilings: Ceilings
    seconds: float


def measure(row: Row, device: torch.device, ceilings: Ceilings, *, compiled: bool, tuned: bool = False) -> Measured:
    """Make the row's model with random weights, check everyone, and time them.

    Raises `CheckFailed`, with nothing timed, where a contender computes something else than the model does.
    """
    start = time.perf_counter()
    _sweep(device)
    needed, limit, timed = _measured(row, device, ceilings, contenders_of(row, compiled=compiled, tuned=tuned))
    return Measured(row, timed, needed, limit, ceilings, time.perf_counter() - start)


def _sweep(device: torch.device) -> None:
    """Drop what the row before left: compiled programs and their graphs hold its model."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _measured(
    row: Row, device: torch.device, ceilings: Ceilings, names: tuple[str, ...]
) -> tuple[int, float, dict[str, Timed]]:
    torch.manual_seed(0)
    model: Any = random_model(row.shape, device)
    needed, limit = _limit(model, row, ceilings)
    prompts = random_prompts(model.config.vocab_size, row.batch if row.work is Work.DECODE else _PROMPTS, row.prompt)
    with ExitStack() as closing:
        contenders: dict[str, Contender] = {}
        for name in names:  # a program first of all: compiled steps must find the weights where it puts them
            contenders[name] = FACTORIES[name](model, row, prompts)
            closing.callback(contenders[name].close)
        errors = _errors(model, row, contenders)
        samples = _take_turns(contenders)
    timed = {
        name: Timed(samples[name], contender.tokens, errors[name], getattr(contender, "memory", None))
        for name, contender in contenders.items()
    }
    return needed, limit, timed


def _errors(model: Any, row: Row, contenders: Mapping[str, Contender]) -> dict[str, Error]:
    """How far everyone is from wider arithmetic, of which a copy of the model lives here only: it is twice as large."""
    judge = Judge(model)
    return {
        name: judge.judge(f"{row.name}: {name}", contender.trace(), own=name in PROJECT)
        for name, contender in contenders.items()
    }


def _take_turns(contenders: Mapping[str, Contender]) -> dict[str, tuple[float, ...]]:
    """`RUNS` samples of each, one of everyone after the other, so that a drifting clock touches all alike."""
    turns = [{name: contender.run() for name, contender in contenders.items()} for _ in range(RUNS)]
    return {name: tuple(turn[name] for turn in turns) for name in contenders}


def _limit(model: Any, row: Row, ceilings: Ceilings) -> tuple[int, float]:
    """What a step reads, or a prompt computes, at least, and the microseconds that it takes at least."""
    if row.work is Work.PREFILL:
        operations = prefill_operations(model, row.context)
        return operations, operations / ceilings.flops_per_us
    weights, cached = weight_bytes(model), cache_bytes(model, row.context + row.tokens / 2)
    if weights is None or cached is None:
        raise CheckFailed(f"the bytes that a step of {row.shape} reads cannot be counted; nothing was timed")
    needed = int(weights + row.batch * cached)
    return needed, needed / ceilings.bytes_per_us


def _level_one(model: Any, row: Row, prompts: Tensor) -> Contender:
    """On a copy, so that both models run in turns."""
    return GenerateSteps(accelerate(copy.deepcopy(model), level=1), row, prompts, static=False)


FACTORIES: Mapping[str, Factory] = MappingProxyType(
    {
        LEVEL_ONE: _level_one,
        RECIPE: RecipeSteps,
        TUNED_RECIPE: partial(RecipeSteps, tuned=True),
        HF_COMPILED: partial(GenerateSteps, static=True),
        HF_EAGER: partial(GenerateSteps, static=False),
        PREFILL_COMPILED: partial(ForwardPrefill, compiled=True),
        PREFILL_EAGER: partial(ForwardPrefill, compiled=False),
        OURS: lambda model, row, prompts: (ProgramPrefill if row.work is Work.PREFILL else ProgramSteps)(
            model, row, prompts
        ),
    }
)
