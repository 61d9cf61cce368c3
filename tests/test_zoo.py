"""The zoo's own promises: its models run, every gain in them matters, and nothing in them is left at an identity."""

from __future__ import annotations

import pytest
import torch

from tests import zoo
from tests.zoo.families import MAPPINGS, config_class
from tests.zoo.known import known
from tests.zoo.report import check, state_of

FAMILIES = ("causal", "masked", "seq2seq", "image_text")
MISSING_FOR_A_REASON = (
    "needs an optional dependency",
    "it predicts a robot's actions",
    "its forward fails in Transformers",
)

# Plain and one-plus gains, LayerNorm, latent attention, experts, state spaces, linear attention, post-norms.
SAMPLE = [
    ("causal", "llama"),
    ("causal", "gemma2"),
    ("causal", "gemma3n_text"),
    ("causal", "olmo2"),
    ("causal", "gpt2"),
    ("causal", "cohere"),
    ("causal", "deepseek_v3"),
    ("causal", "qwen3_next"),
    ("causal", "jamba"),
    ("causal", "rwkv"),
    ("masked", "bert"),
    ("seq2seq", "t5"),
    ("image_text", "qwen2_vl"),
]


def build(family: str, model_type: str) -> tuple[torch.nn.Module, dict]:
    model = zoo.tiny_model(family, known(family, model_type))
    return model, zoo.forward_inputs(model, family)


def gains(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: p for n, p in model.named_parameters() if "norm" in n.lower() and n.endswith("weight") and p.ndim == 1}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tenth_type_runs_or_says_why_not(family):
    states = {model_type: state_of(family, model_type) for model_type in zoo.model_types(family)[::10]}
    wrong = {t: s for t, s in states.items() if s != "ok" and not s.startswith(MISSING_FOR_A_REASON)}
    assert not wrong


@pytest.mark.parametrize(("family", "model_type"), SAMPLE)
def test_every_gain_of_the_language_part_changes_the_logits(family, model_type):
    model, inputs = build(family, model_type)
    before = zoo.logits(model, inputs)
    assert torch.isfinite(before).all()
    named = {n: p for n, p in gains(model).items() if "visual" not in n}
    for name, gain in named.items():
        kept = gain.detach().clone()
        with torch.no_grad():
            gain[::2] += 1.0
        assert not torch.equal(zoo.logits(model, inputs), before), name
        with torch.no_grad():
            gain.copy_(kept)
    assert torch.equal(zoo.logits(model, inputs), before)


def test_images_reach_the_logits():
    model, _ = build("image_text", "qwen2_vl")
    inputs = zoo.forward_inputs(model, "image_text", with_images=True)
    before = zoo.logits(model, inputs)
    changed = zoo.logits(model, inputs | {"pixel_values": -inputs["pixel_values"]})
    assert not torch.allclose(before, changed)


@pytest.mark.parametrize(("model_type", "identity"), [("llama", 1.0), ("gemma2", 0.0), ("gpt_neox", 1.0)])
def test_gains_scatter_around_the_identity_of_their_own_convention(model_type, identity):
    model, _ = build("causal", model_type)
    values = torch.cat([p.detach().flatten() for p in gains(model).values()])
    # The mean of n draws of standard deviation 0.3 strays by 0.3 / sqrt(n); four of those is a certain fault.
    assert abs(values.mean().item() - identity) < 4 * 0.3 / len(values) ** 0.5
    assert values.std().item() == pytest.approx(0.3, rel=4 / (2 * len(values)) ** 0.5)


def test_biases_are_not_zero():
    model, _ = build("causal", "gpt2")
    biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
    assert biases
    assert all(p.abs().min() > 0 for p in biases)


def test_a_seed_decides_every_weight():
    one, same, other = (zoo.tiny_model("causal", "qwen3_moe", seed) for seed in (3, 3, 4))
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), same.parameters(), strict=True))
    assert not any(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


def test_building_leaves_the_global_random_state_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    zoo.tiny_model("causal", "llama")
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize(
    ("model_type", "kinds"),
    [
        ("jamba", {"JambaAttention", "JambaMambaMixer", "JambaMLP", "JambaSparseMoeBlock"}),
        ("qwen3_next", {"Qwen3NextAttention", "Qwen3NextGatedDeltaNet", "Qwen3NextSparseMoeBlock"}),
        ("deepseek_v3", {"DeepseekV3MLP", "DeepseekV3MoE"}),
        ("nemotron_h", {"NemotronHMamba2Mixer", "NemotronHAttention", "NemotronHMLP", "NemotronHMoE"}),
        ("recurrent_gemma", {"RecurrentGemmaRecurrentBlock", "RecurrentGemmaAttention"}),
    ],
)
def test_every_kind_of_layer_is_there(model_type, kinds):
    model, _ = build("causal", model_type)
    assert kinds <= {type(module).__name__ for module in model.modules()}


@pytest.mark.parametrize("model_type", ["gemma3", "llava", "qwen3_vl"])
def test_token_ids_lie_inside_the_vocabulary_and_do_not_collide(model_type):
    config = zoo.tiny_config("image_text", model_type)
    vocabulary = config.get_text_config().vocab_size
    names = ("image_token_id", "image_token_index", "video_token_id", "vision_start_token_id", "boi_token_index")
    ids = {getattr(config, name) for name in names if getattr(config, name, None) is not None}
    assert ids
    assert all(0 <= token < vocabulary for token in ids)
    model = zoo.tiny_model("image_text", model_type)
    assert not ids & set(zoo.forward_inputs(model, "image_text")["input_ids"].flatten().tolist())


class TestTheReportSeesFaults:
    """Negative controls: models with a fault planted."""

    def test_logits_that_ignore_the_input(self):
        model, _ = build("causal", "llama")
        torch.nn.init.zeros_(model.lm_head.weight)
        assert check(model, "causal") == "the logits do not depend on the input"

    def test_logits_that_are_not_finite(self):
        model, _ = build("causal", "llama")
        torch.nn.init.constant_(model.model.norm.weight, float("nan"))
        assert check(model, "causal") == "the logits are not finite"

    def test_a_type_without_a_config_or_a_class(self, monkeypatch):
        monkeypatch.setitem(MAPPINGS["causal"], "no_such_type", "LlamaForCausalLM")
        monkeypatch.setitem(MAPPINGS["causal"], "gpt2", "NoSuchModel")
        assert state_of("causal", "no_such_type") == "no config class is registered for no_such_type"
        assert state_of("causal", "gpt2") == "transformers has no class NoSuchModel"

    def test_a_config_class_that_is_not_there(self):
        with pytest.raises(zoo.CannotBuild, match="no_such_type"):
            config_class("no_such_type")


def round_trip_error(family: str, model_type: str, folder) -> float:
    """The largest difference of logits after saving and loading, relative to the largest logit."""
    model, inputs = build(family, model_type)
    model.save_pretrained(folder)
    before, after = (zoo.logits(m, inputs) for m in (model, type(model).from_pretrained(folder).eval()))
    return ((after - before).abs().max() / before.abs().max()).item()


@pytest.mark.parametrize(("family", "model_type"), SAMPLE)
def test_stock_saving_and_loading_gives_the_model_back(family, model_type, tmp_path):
    # The same operations on the same numbers; only the alignment of memory, so the order of a sum, may differ.
    assert round_trip_error(family, model_type, tmp_path) < 16 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("model_type", sorted(zoo.BROKEN_ROUND_TRIP))
def test_what_is_listed_as_broken_is_broken(model_type, tmp_path):
    assert round_trip_error("image_text", model_type, tmp_path) > 0.01
