"""Small rows on a GPU, compilation, CUDA graphs and memory included. The same rows run uncompiled on the CPU."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import pytest
import torch

from flashnorm.bench import decode
from flashnorm.bench.e2e.measure import measure
from flashnorm.bench.e2e.rows import HF_EAGER, LEVEL_ONE, OURS
from tests.bench.e2e.tiny import CEILINGS, DECODE, PREFILL

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
_SIZES = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 3, "num_attention_heads": 16}
_SIZES |= {"num_key_value_heads": 8, "head_dim": 64, "vocab_size": 8192, "tie_word_embeddings": True}


@pytest.fixture(autouse=True)
def shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"llama": ("LlamaConfig", _SIZES), "qwen3": ("Qwen3Config", _SIZES)}
    monkeypatch.setattr(decode, "SHAPES", MappingProxyType(known))


@pytest.mark.parametrize(
    "row",
    [
        replace(DECODE, context=48, tokens=32),
        replace(DECODE, shape="qwen3", batch=3, context=48, tokens=32),
        replace(DECODE, contenders=(LEVEL_ONE, HF_EAGER), context=48, tokens=32),
        replace(PREFILL, context=128),
    ],
    ids=["batch 1", "batch 3", "level one", "prefill"],
)
def test_everyone_is_right_and_timed(row):
    measured = measure(row, torch.device("cuda", 0), CEILINGS, compiled=True)
    assert tuple(measured.contenders) == row.contenders
    for timed in measured.contenders.values():
        assert min(timed.samples) > 0
    if OURS in row.contenders:
        memory = measured.contenders[OURS].memory
        assert memory is not None
        assert 0 <= memory.beyond <= 300_000_000
        assert memory.cache > 0
