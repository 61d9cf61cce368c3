from __future__ import annotations

import pytest
import torch
import transformers

from flashnorm.bench import decode
from flashnorm.bench.decode import SHAPES, DecodeSpeed, bytes_per_step, random_model, tokens_per_second
from flashnorm.runtime.decode.reading import read_spec
from tests.runtime.decode.models import LENGTH, tiny

# The parameters that a step reads, as published: 1.24, 7.5 (8.03 less the embedding), 0.135 and 1.7 billion.
_READ = {"llama-3.2-1b": 1.236e9, "llama-3.1-8b": 7.505e9, "smollm2-135m": 0.1345e9, "qwen3-1.7b": 1.72e9}


def test_a_small_model_is_timed_on_the_cpu():
    speed = tokens_per_second(tiny("llama"), rows=2, prompt=4, tokens=3, repeats=2)
    assert (speed.rows, speed.context, len(speed.step_us), speed.limit_us) == (2, (12, 15), 2, None)
    assert speed.tokens_per_second > 0
    assert "tokens/s" in str(speed)
    with_limit = tokens_per_second(tiny("llama"), prompt=4, tokens=3, repeats=1, bytes_per_us=1e3)
    assert with_limit.limit_us == with_limit.bytes_per_step / 1e3
    assert "% of the bandwidth limit" in str(with_limit)


def test_the_figures_are_of_all_rows_and_the_median_run():
    speed = DecodeSpeed(4, (10, 20), (100.0, 50.0, 1000.0), 1000, 25.0)
    assert speed.tokens_per_second == 40_000
    assert "25.0% of the bandwidth limit" in str(speed)


def test_bytes_are_weights_once_and_the_context_of_each_row():
    spec = read_spec(tiny("gemma2", torch.bfloat16), max_length=LENGTH)
    layer = 48 * 16 * (4 + 2 + 2 + 4) + 3 * 48 * 80
    weights = 3 * layer + 48 * 101
    context = 2 * 2 * 16 * (8 + 50 + 8)  # two layers have a window of 8
    assert bytes_per_step(spec, 3, 50) == 2 * (weights + 3 * context)


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_have_the_published_sizes(name, monkeypatch):
    model = random_model(name, "meta")
    assert isinstance(model, transformers.PreTrainedModel)
    read = sum(p.numel() for n, p in model.named_parameters() if "embed" not in n or model.config.tie_word_embeddings)
    assert read == pytest.approx(_READ[name], rel=0.01)
    assert next(model.parameters()).dtype == torch.bfloat16
    assert decode.SHAPES[name][1]["hidden_size"] == model.config.hidden_size
