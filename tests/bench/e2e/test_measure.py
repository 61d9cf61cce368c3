from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import pytest
import torch

from flashnorm.bench.decode import random_model, random_prompts
from flashnorm.bench.e2e import measure as measuring
from flashnorm.bench.e2e.contender import CHECKED
from flashnorm.bench.e2e.measure import RUNS, measure
from flashnorm.bench.e2e.ours import ProgramSteps
from flashnorm.bench.e2e.rows import HF_EAGER, LEAD, LEVEL_ONE, OURS, RECIPE
from flashnorm.bench.e2e.stock import GenerateSteps
from flashnorm.bench.traffic import cache_bytes, prefill_operations, weight_bytes
from flashnorm.errors import CheckFailed
from tests.bench.e2e.tiny import CEILINGS, DECODE, PREFILL, VOCABULARY

pytestmark = pytest.mark.usefixtures("tiny_shapes")
CPU = torch.device("cpu")


@pytest.mark.parametrize(("shape", "batch"), [("llama", 1), ("qwen3", 3)])
def test_a_row_of_steps(shape, batch):
    measured = measure(replace(DECODE, shape=shape, batch=batch), CPU, CEILINGS, compiled=True)
    assert tuple(measured.contenders) == DECODE.contenders
    for timed in measured.contenders.values():
        assert len(timed.samples) == RUNS
        assert min(timed.samples) > 0
        assert (timed.tokens, timed.memory) == (DECODE.tokens, None)
        assert timed.error.over_stock <= timed.error.allowed
    model = random_model(shape, CPU)
    assert measured.needed == weight_bytes(model) + batch * cache_bytes(model, 24 + 4 / 2)
    assert measured.limit == measured.needed / CEILINGS.bytes_per_us


def test_a_row_of_prompts():
    measured = measure(PREFILL, CPU, CEILINGS, compiled=True)
    assert tuple(measured.contenders) == PREFILL.contenders
    assert {timed.tokens for timed in measured.contenders.values()} == {PREFILL.context}
    assert measured.limit == prefill_operations(random_model("llama", CPU), 20) / CEILINGS.flops_per_us


def test_level_one_and_without_compilers():
    row = replace(DECODE, contenders=(LEVEL_ONE, RECIPE, HF_EAGER))
    measured = measure(row, CPU, CEILINGS, compiled=False)
    assert tuple(measured.contenders) == (LEVEL_ONE, HF_EAGER)


class _LagsByAStep(ProgramSteps):
    def trace(self):
        trace = super().trace()
        return replace(trace, logits=trace.logits.roll(1, 1), chosen=trace.chosen.roll(1, 1))


class _ReadsAnotherPrompt(ProgramSteps):
    """All that follows the prompt is as it should be after another one."""

    def trace(self):
        trace = super().trace()
        prompt = DECODE.prompt
        return replace(trace, ids=torch.cat([(trace.ids[:, :prompt] + 1) % VOCABULARY, trace.ids[:, prompt:]], 1))


@pytest.mark.parametrize("faulty", [_LagsByAStep, _ReadsAnotherPrompt])
def test_a_wrong_contender_stops_the_row_before_anyone_is_timed(faulty, monkeypatch):
    closed, ran = [], []
    faulty = type("Faulty", (faulty,), {"close": lambda self: closed.append(self)})
    monkeypatch.setattr(measuring, "FACTORIES", MappingProxyType({**measuring.FACTORIES, OURS: faulty}))
    monkeypatch.setattr(measuring, "_take_turns", ran.append)
    with pytest.raises(CheckFailed, match=r"decode-llama-3\.2-1b: flashnorm is wrong"):
        measure(replace(DECODE, contenders=(OURS, HF_EAGER)), CPU, CEILINGS, compiled=True)
    assert len(closed) == 1
    assert not ran


def test_contenders_take_turns():
    order: list[str] = []

    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

        def run(self) -> float:
            order.append(self.name)
            return float(len(order))

    samples = measuring._take_turns({"a": Named("a"), "b": Named("b")})
    assert order == ["a", "b"] * RUNS
    assert samples == {"a": (1.0, 3.0, 5.0, 7.0, 9.0), "b": (2.0, 4.0, 6.0, 8.0, 10.0)}


@pytest.mark.parametrize("static", [False, True])
def test_generate_is_timed_from_the_lead_on(static, monkeypatch):
    """The clock starts when prompt and lead have been read, so that exactly the row's steps follow."""
    model = random_model("llama", CPU)
    contender = GenerateSteps(model, DECODE, random_prompts(VOCABULARY, 1, DECODE.prompt), static=static)
    lengths: list[int] = []
    model.register_forward_pre_hook(
        lambda _m, _a, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    # A clock that shows how many forward passes have begun.
    monkeypatch.setattr("flashnorm.bench.e2e.stock.time.perf_counter", lambda: float(len(lengths)))
    assert contender.run() == 1e6  # one pass a step
    assert lengths == [DECODE.prompt] + [1] * (LEAD + DECODE.tokens)


def test_generate_that_stops_early_is_seen():
    model = random_model("llama", CPU)
    contender = GenerateSteps(model, DECODE, random_prompts(VOCABULARY, 1, DECODE.prompt), static=False)
    assert contender.trace().logits.shape == (1, CHECKED, VOCABULARY)
    model.generation_config.eos_token_id = list(range(VOCABULARY))
    with pytest.raises(CheckFailed, match="made 1 tokens instead of 21"):
        contender.run()


def test_operations_of_a_prompt():
    """By hand: per layer q, k, v, o and the MLP; the head once; scores and their product with v, causal."""
    layer = 64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 96
    pairs = 20 * 21 // 2
    expected = 2 * (20 * 2 * layer + 64 * VOCABULARY) + 2 * 4 * pairs * 2 * 2 * 16
    assert prefill_operations(random_model("qwen3", CPU), 20) == expected
