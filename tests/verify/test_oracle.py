from __future__ import annotations

import pytest
import torch

from flashnorm.errors import Refusal
from flashnorm.verify.forward import logits_of
from flashnorm.verify.oracle import choose_oracle, everything_in, exact_logits
from tests.verify.tiny import tiny_model

IDS = torch.arange(60).view(2, 30)
THIRD = torch.tensor([1.0], dtype=torch.float64) / 3


def test_casts_to_float32_keep_double_precision() -> None:
    with everything_in(torch.float64):
        kept = [
            THIRD.float(),
            THIRD.to(torch.float32),
            THIRD.to(dtype=torch.float32),
            THIRD.type(torch.float32),
            torch.nn.functional.softmax(THIRD, dim=-1, dtype=torch.float32) * THIRD,
            torch.zeros(1) + THIRD,
        ]
        assert THIRD.to(torch.int64).dtype == torch.int64
    assert all(x.dtype == torch.float64 and x.item() == THIRD.item() for x in kept)


def test_nothing_of_it_is_left_behind() -> None:
    with pytest.raises(RuntimeError), everything_in(torch.float64):
        raise RuntimeError
    with everything_in(torch.float32):
        assert THIRD.float().dtype == torch.float32
    assert torch.get_default_dtype() == torch.float32
    assert THIRD.float().dtype == torch.float32


def test_the_oracle_is_better_than_a_model_that_is_only_cast_to_double() -> None:
    exact = exact_logits(tiny_model("llama"), IDS, torch.float64)
    scaled = tiny_model("llama")  # the same function: a power of two in a weight and out of the next is exact
    for layer in scaled.model.layers:
        layer.mlp.up_proj.weight.data *= 2
        layer.mlp.down_proj.weight.data /= 2
    cast = logits_of(tiny_model("llama").double(), IDS)
    assert (exact_logits(scaled, IDS, torch.float64) - exact).abs().max() < 1e-14
    assert (cast - exact).abs().max() > 1e-9
    single = exact_logits(tiny_model("llama"), IDS, torch.float32)
    assert single.dtype == torch.float32
    assert (single - exact).abs().max() < 1e-5


def test_experts_have_an_oracle_too() -> None:
    assert exact_logits(tiny_model("mixtral"), IDS, torch.float64).dtype == torch.float64


def test_the_oracle_is_chosen_by_memory() -> None:
    model = tiny_model("llama")
    parameters = sum(p.numel() for p in model.parameters())
    for own in (torch.float32, torch.bfloat16):
        assert choose_oracle(model, own, 1000, free=4 * parameters + 16000) == torch.float64
    assert choose_oracle(model, torch.bfloat16, 1000, free=4 * parameters + 15999) == torch.float32
    with pytest.raises(Refusal, match="--dtype bfloat16"):
        choose_oracle(model, torch.float32, 1000, free=4 * parameters + 15999)
    with pytest.raises(Refusal, match="use a larger machine"):
        choose_oracle(model, torch.bfloat16, 1000, free=0)
