"""Rows and models so small that whole rows run on a CPU, with what needs a compiler run as it is."""

from __future__ import annotations

from functools import partial
from types import MappingProxyType
from typing import Any

import pytest

from flashnorm.bench import decode
from flashnorm.bench.e2e import measure
from flashnorm.bench.e2e.recipe_steps import RecipeSteps
from flashnorm.bench.e2e.rows import HF_COMPILED, HF_EAGER, OURS, PREFILL_COMPILED, PREFILL_EAGER, RECIPE, Row, Work
from flashnorm.bench.e2e.stock import ForwardPrefill
from flashnorm.bench.limits import Ceilings

VOCABULARY = 101
CEILINGS = Ceilings(bytes_per_us=1e3, flops_per_us=1e4)
_SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
_SIZES |= {"num_key_value_heads": 2, "vocab_size": VOCABULARY, "eos_token_id": list(range(VOCABULARY))}
_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _SIZES | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", _SIZES | {"tie_word_embeddings": False}),
}
DECODE = Row("decode-llama-3.2-1b", "llama", (OURS, RECIPE, HF_COMPILED, HF_EAGER), context=24, tokens=4)
PREFILL = Row("prefill-llama-3.2-1b", "llama", (OURS, PREFILL_COMPILED, PREFILL_EAGER), Work.PREFILL, context=20)


@pytest.fixture
def tiny_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shapes "llama" and "qwen3", every token of which their configs call the end; no compilation."""
    monkeypatch.setattr(decode, "SHAPES", MappingProxyType(_SHAPES))
    plain = {RECIPE: partial(RecipeSteps, compiled=False), PREFILL_COMPILED: partial(ForwardPrefill, compiled=False)}
    monkeypatch.setattr(measure, "FACTORIES", MappingProxyType({**measure.FACTORIES, **plain}))
