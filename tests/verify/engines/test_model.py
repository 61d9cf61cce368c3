from __future__ import annotations

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

from flashnorm.errors import ConfigError, Refusal, ShapeError
from flashnorm.verify.engines.model import model_engine
from flashnorm.verify.engines.plain import callable_engine
from flashnorm.verify.engines.slots import slots_engine
from tests.runtime.plain_slots import PlainSlots
from tests.verify.tiny import tiny_model

IDS = torch.arange(3, 15)[None]


def test_cached_chunks_and_a_padded_batch_give_what_a_fresh_pass_gives() -> None:
    model = tiny_model("llama", torch.float64)
    engine = model_engine(model, "tiny")
    fresh = engine.fresh(IDS)
    decoding = engine.begin(1)
    cached = torch.cat([decoding.extend(part) for part in IDS.split([5, 1, 4, 2], dim=1)], dim=1)
    decoding.close()
    padded = engine.padded(
        torch.cat([torch.zeros(1, 3, dtype=torch.int64), IDS], 1), torch.tensor([[0] * 3 + [1] * 12])
    )
    for other in (cached, padded[:, 3:]):
        torch.testing.assert_close(other, fresh, rtol=0, atol=1e-12)


def test_the_oracle_reads_a_stock_copy_in_fp64() -> None:
    model = tiny_model("llama", torch.bfloat16)
    engine = model_engine(model, "tiny", lambda: tiny_model("llama", torch.bfloat16))
    exact = engine.exact(IDS)
    assert exact.dtype == torch.float64
    assert 0 < (engine.fresh(IDS).double() - exact).norm() / exact.norm() < 0.1
    assert next(model.parameters()).dtype == torch.bfloat16


def test_what_generates_no_text_is_refused() -> None:
    config = BertConfig(vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    with pytest.raises(ConfigError, match="no decoder-only language model"):
        model_engine(BertForMaskedLM(config), "bert")


def test_slots_give_what_the_model_gives_and_are_freed() -> None:
    model = tiny_model("llama")
    slots = PlainSlots(model, slots=3)
    engine = slots_engine(slots, model_engine(model, "tiny"))
    decoding = engine.begin(2)
    rows = torch.stack([IDS[0], IDS[0] + 20])
    first, last = decoding.extend(rows[:, :7]), decoding.extend(rows[:, 7:])
    assert len(slots.free_slots()) == 1
    fresh = engine.fresh(rows)
    torch.testing.assert_close(first[:, 0], fresh[:, 6], rtol=0, atol=1e-4)
    torch.testing.assert_close(last[:, 0], fresh[:, 11], rtol=0, atol=1e-4)
    with pytest.raises(Refusal, match="2 sequences at once were asked for, and 1 slots are free"):
        engine.begin(2)
    with pytest.raises(Refusal, match="needs all of them free"):
        slots_engine(slots, model_engine(model, "tiny"))
    decoding.close()
    assert slots.free_slots() == (0, 1, 2)


def test_a_callable_of_another_shape_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"gave logits of shape \(1, 3\); they must be \(1, 2, 3\)"):
        callable_engine(lambda ids: torch.zeros(len(ids), 3), 3)
    assert callable_engine(tiny_model("llama").get_submodule("model.embed_tokens"), 48).dtype == torch.float32
