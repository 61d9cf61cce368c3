"""`flashnorm.accelerate` over many architectures: the same logits and text, not less exact, and all of it undone."""

from __future__ import annotations

import copy
import math
import re

import pytest
import torch
import torch.nn.functional as F
import transformers
from packaging.version import Version

import flashnorm
from flashnorm.errors import Refusal
from flashnorm.verify.drift import squared_drift
from tests import zoo
from tests.coverage.examine import TOLERANCE
from tests.runtime.small import Block, GatedBlock, Norm, Sequence, bits, llama, prompt, same_bits

# Model type -> norms replaced, and MLPs among them whose gate, up and activation are one product.
CAUSAL = {
    "llama": (4, 2), "mistral": (4, 2), "qwen2": (4, 2), "qwen3": (4, 2), "phi3": (4, 2), "granite": (4, 2),
    "gemma": (4, 2), "gemma2": (4, 2), "gemma3_text": (4, 2), "smollm3": (4, 2), "llama4_text": (4, 1),
    "minicpm3": (6, 2), "mixtral": (2, 0), "gpt_oss": (2, 0), "mamba": (2, 0), "jamba": (8, 3), "nemotron_h": (3, 0),
    "recurrent_gemma": (6, 0), "olmo2": (0, 0), "opt": (0, 0), "gpt2": (0, 0), "cohere": (0, 0),
}  # fmt: skip
if Version(transformers.__version__) < Version("5.24"):
    CAUSAL["mamba"] = (0, 0)  # its generate passes a mask, by which its mixer multiplies what the norm returned
OTHERS = {"seq2seq": {"t5": (10, 0), "bart": (0, 0)}, "image_text": {"qwen2_5_vl": (4, 2)}}
IN_BF16 = [
    "llama",
    "qwen2",
    "qwen3",
    "phi3",
    "granite",
    "gemma2",
    "gemma3_text",
    "smollm3",
    "mixtral",
    "gpt_oss",
    "mamba",
]


def cases():
    return [("causal", *case) for case in CAUSAL.items()] + [
        (family, *case) for family, types in OTHERS.items() for case in types.items()
    ]


@pytest.mark.parametrize(
    ("family", "model_type", "expected"), cases(), ids=lambda case: case if isinstance(case, str) else ""
)
def test_logits_are_the_same_and_the_stock_model_comes_back(family, model_type, expected):
    model = zoo.tiny_model(family, model_type)
    inputs = zoo.forward_inputs(model, family)
    before, logits, modules = bits(model), zoo.logits(model, inputs), dict(model.named_modules())
    assert flashnorm.accelerate(model) is model
    products = [product for own in model.acceleration.replaced.values() for product in own]
    assert (len(model.acceleration.replaced), sum("*" in p or "gated" in p for p in products)) == expected
    assert all(model.acceleration.stock.values())
    error = (zoo.logits(model, inputs) - logits).norm() / logits.norm()
    assert error <= TOLERANCE
    assert same_bits(model, before)
    assert model.unaccelerate() is model
    assert dict(model.named_modules()) == modules  # the same objects under the same names
    assert same_bits(model, before)
    assert torch.equal(zoo.logits(model, inputs), logits)
    assert not hasattr(model, "acceleration")


def test_a_norm_whose_output_is_cached_stays_stock():
    """Multi-head latent attention caches it: the reader takes what earlier steps returned as well. Only generating
    shows that."""
    reasons = flashnorm.accelerate(zoo.tiny_model("causal", "minicpm3")).acceleration.stock
    assert "something else than exactly" in reasons["model.layers.0.self_attn.kv_a_layernorm"]


@pytest.mark.parametrize("model_type", IN_BF16)
def test_in_bf16_it_is_not_further_from_exact_than_stock(model_type):
    model = zoo.tiny_model("causal", model_type).to(torch.bfloat16)
    inputs = {"input_ids": torch.randint(5, 100, (8, 48), generator=torch.Generator().manual_seed(3))}
    exact = zoo.logits(copy.deepcopy(model).float(), inputs).flatten(0, 1)
    stock = squared_drift(zoo.logits(model, inputs).flatten(0, 1), exact).sum()
    accelerated = squared_drift(zoo.logits(flashnorm.accelerate(model), inputs).flatten(0, 1), exact).sum()
    assert len(model.acceleration.replaced) == CAUSAL[model_type][0]
    assert accelerated <= 1.05 * stock


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gemma3_text", "qwen3", "mixtral", "mamba", "phi3"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_greedy_text_is_the_same(model_type, implementation):
    model = zoo.tiny_model("causal", model_type)
    if model_type not in ("mamba", "gemma2"):  # these have one implementation only
        model.set_attn_implementation(implementation)
    ids = zoo.forward_inputs(model, "causal")["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :3] = 0  # ragged, padded on the left
    arguments = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    stock = model.generate(ids, **arguments)
    flashnorm.accelerate(model)
    assert torch.equal(model.generate(ids, **arguments), stock)


def test_a_static_cache_and_a_compiled_forward_give_the_same_text():
    model = llama()
    arguments = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static"}
    stock = model.generate(prompt(), **arguments)
    flashnorm.accelerate(model)
    assert torch.equal(model.generate(prompt(), **arguments), stock)
    model.forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    assert torch.equal(model.generate(prompt(), **arguments), stock)


def test_models_in_one_process_do_not_disturb_each_other():
    first, second = llama(0), llama(1)
    with torch.no_grad():
        stock = [model(prompt()).logits for model in (first, second)]
        flashnorm.accelerate(first)
        alone = first(prompt()).logits
        flashnorm.accelerate(second)
        second(prompt())
        assert torch.equal(first(prompt()).logits, alone)
        second.unaccelerate()
        assert torch.equal(first(prompt()).logits, alone)
        assert torch.equal(second(prompt()).logits, stock[1])
        first.unaccelerate()
        assert torch.equal(first(prompt()).logits, stock[0])


def test_a_folded_model_needs_no_gain():
    model = llama()
    flashnorm.fold(model)
    with torch.no_grad():
        stock = model(prompt()).logits
        flashnorm.accelerate(model)
        assert (model(prompt()).logits - stock).norm() <= TOLERANCE * stock.norm()
    assert model.model.layers[0].self_attn.q_proj.group.gain is None


def test_what_a_base_model_returns_is_normed_as_ever():
    model = llama()
    with torch.no_grad():
        stock = model.model(prompt()).last_hidden_state
        flashnorm.accelerate(model)
        assert (model.model(prompt()).last_hidden_state - stock).norm() <= TOLERANCE * stock.norm()


def test_a_norm_that_is_not_the_one_it_seemed_stays_stock():
    """Its epsilon depends on the dtype: what was measured in fp32 does not hold for the model in fp16."""

    class ByDtype(Norm):
        def forward(self, x):
            eps = 1e-2 if x.dtype == torch.float16 else self.eps
            return (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)).to(x.dtype) * self.weight

    model = flashnorm.accelerate(Sequence(Block(GatedBlock(F.silu), ByDtype())).half())
    assert "differs from RMSNorm and linear" in model.acceleration.stock["blocks.0.norm"]
    assert flashnorm.accelerate(Sequence(Block(GatedBlock(F.silu), ByDtype()))).acceleration.stock == {}


@pytest.mark.parametrize("level", [0, 3, 2.0, True, "2"])
def test_a_level_that_does_not_exist_is_refused(level):
    with pytest.raises(Refusal, match=re.escape(f"level={level!r} does not exist")):
        flashnorm.accelerate(llama(), level=level)


@pytest.mark.parametrize(
    "arguments", [{"max_batch": 0}, {"max_length": 0}, {"max_batch": 1.5}, {"max_length": "9"}, {"max_batch": None}]
)
def test_bounds_that_hold_nothing_are_refused(arguments):
    with pytest.raises(Refusal, match="at least 1"):
        flashnorm.accelerate(llama(), **arguments)


def test_twice_and_in_training_mode_is_refused():
    model = flashnorm.accelerate(llama())
    with pytest.raises(Refusal, match="accelerated already"):
        flashnorm.accelerate(model)
    model.unaccelerate()
    flashnorm.accelerate(model).unaccelerate()
    with pytest.raises(Refusal, match=r"call model.eval\(\) first"):
        flashnorm.accelerate(model.train())


def test_what_is_no_plain_module_is_refused():
    with pytest.raises(Refusal, match="takes a loaded model"):
        flashnorm.accelerate("folder")
    with pytest.raises(Refusal, match="compiled already"):
        flashnorm.accelerate(torch.compile(llama()))
    with torch.inference_mode():
        made = llama()
    with pytest.raises(Refusal, match="load them outside it"):
        flashnorm.accelerate(made)


@pytest.mark.parametrize("level", [1, 2])
def test_the_callers_modes_do_not_matter(level):
    """Inference mode, whose tensors count no writes; a default device other than the host, as many scripts set."""
    arguments = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    model, expected = llama(), llama().generate(prompt(), **arguments)
    with torch.inference_mode():
        flashnorm.accelerate(model, level=level, max_batch=2, max_length=32)
        assert torch.equal(model.generate(prompt(), **arguments), expected)
    assert torch.equal(model.unaccelerate().generate(prompt(), **arguments), expected)
    ids = prompt()
    with torch.device("meta"):
        flashnorm.accelerate(model, level=level, max_batch=2, max_length=32)
        answers = [model.generate(ids, **arguments, **more) for more in ({}, {"no_repeat_ngram_size": 9})]
        model.generate(ids, **{**arguments, "do_sample": True})
    assert all(torch.equal(answer, expected) for answer in answers)


def test_the_check_of_greedy_text_and_logits_can_fail(monkeypatch):
    """A scale that is off by a third, not seen by the probe, would be seen above."""
    model = llama()
    with torch.no_grad():
        stock = model(prompt()).logits
        flashnorm.accelerate(model)
        for layer in model.model.layers:
            layer.self_attn.q_proj.group.eps = 1.0
        error = (model(prompt()).logits - stock).norm() / stock.norm()
    assert not error <= TOLERANCE
    assert math.isfinite(error)
