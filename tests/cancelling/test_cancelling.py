"""Every verdict holds on real architectures: what is dropped changes no logit, what is refused would."""

from __future__ import annotations

import copy

import pytest
import torch

from flashnorm.passes.cancel import apply_cancel, cancel
from flashnorm.sites.cancelling import audit_cancellation
from tests import zoo
from tests.cancelling.examine import TOLERANCE, _moved, examine, forced
from tests.cancelling.record import DOCUMENTS
from tests.zoo.known import known

# Full, QK-norm, both kinds of latent attention, a second reader of the norm, a gate inside of q_proj, a window that the
# traced run does not fill, a norm over all heads, a norm behind RoPE, cross attention, nothing at all, a squared ReLU.
SAMPLE = ["gemma4_text", "qwen3", "deepseek_v2", "deepseek_v3", "gemma3n_text", "qwen3_next", "deepseek_v4", "olmoe"]
SAMPLE += ["hunyuan_v1_dense", "mllama", "llama", "gpt2", "bitnet"]
RECORD = DOCUMENTS.read()


@pytest.mark.parametrize("model_type", SAMPLE)
def test_cancelling_changes_nothing_and_the_record_holds(model_type: str) -> None:
    outcome = examine(known("causal", model_type))
    assert outcome.right, (outcome.error, outcome.error_small)
    if RECORD.of_this_transformers:
        then = RECORD.of(model_type)
        for part in ("full", "partial", "no", "over_cautious", "refused"):
            assert getattr(outcome, part) == getattr(then, part), "run `python -m tests.cancelling`, look at the change"


def test_the_record_is_of_every_type_and_every_one_is_right() -> None:
    if RECORD.of_this_transformers:
        assert {row.model_type for row in RECORD.outcomes} | set(RECORD.unbuilt) == set(zoo.model_types("causal"))
    assert all(row.right for row in RECORD.outcomes)
    assert all(row.full or row.partial or row.no or row.refused for row in RECORD.outcomes)
    assert all(reason for row in RECORD.outcomes for reason in (*row.no.values(), *row.partial.values()))


def test_the_table_is_generated_from_the_record() -> None:
    assert DOCUMENTS.table.read_text() == DOCUMENTS.text(RECORD)


def test_the_known_verdicts() -> None:
    """Section 1 of the equations: which families are full, which partial, and for what reason not."""
    norm = "model.layers.*.input_layernorm"
    assert norm in RECORD.of("gemma4_text").full
    for model_type in ("qwen3", "qwen3_moe", "gemma3_text"):
        assert RECORD.of(model_type).partial[norm].startswith("v_proj: ")
    for model_type in ("deepseek_v3", "minicpm3"):
        assert RECORD.of(model_type).partial[norm].startswith("kv_a_proj_with_mqa in part: ")
    assert RECORD.of("gemma3n_text").partial.get(norm) is None
    assert RECORD.of("bitnet").full == ["model.layers.*.post_attention_layernorm"]
    assert RECORD.of("llama").full == []
    assert RECORD.of("llama").partial == {}


@pytest.mark.parametrize("model_type", ["qwen3", "deepseek_v3"])
def test_a_lost_scalar_would_be_seen(model_type: str) -> None:
    """The negative control of every comparison above: the reader that has to keep the scalar is not given it."""
    model = zoo.tiny_model("causal", known("causal", model_type)).double()
    inputs = zoo.forward_inputs(model, "causal")
    audit = audit_cancellation(model)
    chosen = next(c for c in audit.cancellations if c.verdict == "partial")
    model.set_experts_implementation("eager")
    before = zoo.logits(model, inputs)
    assert _moved(model, [forced(chosen)], audit, inputs, before) > 1e4 * TOLERANCE


@pytest.mark.parametrize("model_type", ["qwen3", "gemma4_text"])
def test_generation_with_a_cache_goes_on_alike(model_type: str) -> None:
    """Also where later layers use the keys and values of earlier ones, one token at a time."""
    model = zoo.tiny_model("causal", known("causal", model_type))
    cancelled = copy.deepcopy(model)
    report = cancel(cancelled)
    assert report.full or report.partial
    ids = zoo.forward_inputs(model, "causal")["input_ids"]
    options = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    before, after = (m.generate(ids, pad_token_id=0, **options) for m in (model, cancelled))
    assert torch.equal(before.sequences, after.sequences)
    for a, b in zip(after.logits, before.logits, strict=True):
        # fp32, as in tests.coverage.examine: sqrt(D K) roundings of 2^-24 for D weights of K products.
        assert (a - b).norm() < 1e-5 * b.norm()


def test_a_dropped_norm_divides_no_more() -> None:
    """Its rows come out as large as they went in, times the gain."""
    model = zoo.tiny_model("causal", known("causal", "qwen3"))
    audit = audit_cancellation(model)
    chosen = next(c for c in audit.cancellations if c.verdict == "partial")
    apply_cancel(model, [chosen], audit)
    norm = model.get_submodule(chosen.norm)
    x = torch.randn(2, 3, model.config.hidden_size)
    torch.testing.assert_close(norm(x), x * norm.weight)
