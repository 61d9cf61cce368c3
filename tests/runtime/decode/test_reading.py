from __future__ import annotations

import gc
import weakref

import pytest
import torch
import transformers
from torch import nn

from flashnorm.errors import Unsupported
from flashnorm.runtime.decode import reading, reference
from flashnorm.runtime.decode.reading import read_spec
from flashnorm.runtime.decode.spec import Spec
from tests.runtime.decode.models import LENGTH, SUPPORTED, other, tiny, tokens


def interpreted(spec: Spec, ids: torch.Tensor) -> torch.Tensor:
    """Logits of a whole sequence in fp32, layer after layer, without a cache."""
    at = torch.arange(ids.shape[1]).expand(ids.shape)
    x = spec.embedding[ids].float() * spec.multiplier
    for layer in spec.layers:
        x = reference.mlp_block(reference.attention_block(x, layer.attention, at), layer.mlp)
    return reference.logits(x, spec.head)


@pytest.mark.parametrize("name", SUPPORTED)
@torch.no_grad()
def test_the_spec_gives_the_models_logits(name):
    model = tiny(name)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    spec = read_spec(model, max_length=LENGTH)
    ids = torch.tensor([tokens(LENGTH)])  # longer than the probe
    expected = model(ids).logits
    assert (interpreted(spec, ids) - expected).norm() <= 1e-5 * expected.norm()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_what_was_found():
    granite = read_spec(tiny("granite"), max_length=LENGTH)
    assert granite.multiplier == 12
    assert granite.head.multiplier == pytest.approx(1 / 6, rel=1e-7)
    assert {(x.attention.multiplier, x.mlp.multiplier, x.attention.scale) for x in granite.layers} == {
        (0.22, 0.22, 0.0078125)
    }
    gemma = read_spec(tiny("gemma2"), max_length=LENGTH)
    assert (gemma.head.softcap, gemma.head.multiplier, gemma.layers[0].attention.softcap) == (30, 1, 50)
    assert [x.attention.window for x in gemma.layers] == [8, None, 8]
    assert gemma.layers[0].attention.post_norm is not None
    assert [x.attention.rope is None for x in read_spec(tiny("smollm3"), max_length=LENGTH).layers] == [
        False,
        True,
        False,
    ]
    local, full, again = (x.attention.rope for x in read_spec(tiny("gemma3"), max_length=LENGTH).layers)
    assert local is again
    assert not torch.equal(local.cos, full.cos)
    partial = read_spec(tiny("phi3_partial"), max_length=LENGTH).layers[0].attention
    assert (partial.rope.cos.shape, partial.head_dim) == ((LENGTH, 4), 16)
    assert read_spec(tiny("glm4"), max_length=LENGTH).layers[0].attention.rope.interleaved
    assert read_spec(tiny("qwen2"), max_length=LENGTH).layers[0].attention.k.bias is not None


def test_a_gain_keeps_every_bit():
    """1 + w of bf16 needs more than bf16; w itself does not."""
    llama, gemma = (tiny(name, torch.bfloat16) for name in ("llama", "gemma2"))
    plain, plus = (read_spec(m, max_length=LENGTH).layers[0].attention.norm.gain for m in (llama, gemma))
    assert torch.equal(plain, llama.model.layers[0].input_layernorm.weight)
    assert plus.dtype == torch.float32
    assert torch.equal(plus, 1 + gemma.model.layers[0].input_layernorm.weight.float())


def test_a_length_below_the_probes():
    spec = read_spec(tiny("mistral"), max_length=5)
    assert spec.max_length == 5
    assert spec.layers[0].attention.window == 8


def test_weights_are_the_models_own():
    model = tiny("phi3")
    spec = read_spec(model, max_length=LENGTH)
    fused = model.model.layers[1].self_attn.qkv_proj.weight
    for part in ("q", "k", "v"):
        weight = getattr(spec.layers[1].attention, part).weight
        assert weight.untyped_storage().data_ptr() == fused.untyped_storage().data_ptr()
    assert spec.head.linear.weight is model.lm_head.weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_model_is_proven_in_fp32(dtype):
    model = tiny("gemma3", dtype)
    spec = read_spec(model, max_length=LENGTH)
    assert spec.dtype == dtype
    assert next(model.parameters()).dtype == dtype


REFUSED = {
    "mixtral": (lambda: other("MixtralConfig"), "layer 0: 0 nn.Linear follow the attention.*mixture of experts"),
    "gpt_oss": (lambda: other("GptOssConfig", num_local_experts=4), "layer 0: attention takes a tensor 's_aux'"),
    "mamba": (lambda: other("MambaConfig", state_size=4), "layer 0 calls Transformers' attention 0 times"),
    "olmo2": (lambda: other("Olmo2Config"), "layer 0: a norm over the channels of all heads together"),
    "cohere": (lambda: other("CohereConfig"), "layer 0: input_layernorm is a LayerNorm"),
    "gpt_neox": (lambda: other("GPTNeoXConfig"), "layer 0: "),
    "gpt2": (
        lambda: other("GPT2Config", n_embd=48, n_layer=3, n_head=4),
        "layer 0: no rows of an nn.Linear give the q",
    ),
    "llama4": (
        lambda: other("Llama4TextConfig", num_local_experts=2, interleave_moe_layer_step=1, intermediate_size_mlp=80),
        "layer 0",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_what_the_spec_cannot_describe(name):
    build, sentence = REFUSED[name]
    with pytest.raises(Unsupported, match=sentence):
        read_spec(build(), max_length=LENGTH)


def test_refuses_an_encoder_decoder():
    config = transformers.T5Config(d_model=48, d_kv=12, d_ff=96, num_layers=2, num_heads=4, vocab_size=101)
    with pytest.raises(Unsupported, match="encoder-decoder"):
        read_spec(transformers.T5ForConditionalGeneration(config), max_length=LENGTH)


def test_refuses_tokens_of_several_tables():
    """As of audio codebooks."""
    model = tiny("llama")
    model.get_input_embeddings = lambda: nn.ModuleList([model.model.embed_tokens])
    with pytest.raises(Unsupported, match="looked up in a ModuleList"):
        read_spec(model, max_length=LENGTH)


def test_refuses_weights_of_mixed_dtypes():
    model = tiny("llama", torch.bfloat16)
    model.model.layers[1].mlp.down_proj.float()
    with pytest.raises(Unsupported, match="layer 1: weights of"):
        read_spec(model, max_length=LENGTH)


def _plant_between(model: nn.Module) -> None:
    """The model's loop touches the stream after layer 1, by a hook on the layer after it."""
    model.model.layers[2].register_forward_pre_hook(lambda _m, args: (args[0] * 1.0001, *args[1:]))


def _plant_in_mlp(model: nn.Module) -> None:
    mlp = model.model.layers[1].mlp
    stock = type(mlp)
    mlp.__class__ = type("Changed", (stock,), {"forward": lambda self, x: stock.forward(self, x) + 1e-4 * x})


def _plant_in_attention(model: nn.Module) -> None:
    model.model.layers[2].self_attn.register_forward_hook(
        lambda _m, _a, output: (output[0] + 1e-4 * output[0].roll(1, 1), *output[1:])
    )


def _plant_in_head(model: nn.Module) -> None:
    model.lm_head.register_forward_hook(lambda _m, _a, output: output + 1e-3)


def _plant_in_embedding(model: nn.Module) -> None:
    model.model.embed_tokens.register_forward_hook(lambda _m, _a, output: output + 1e-3)


@pytest.mark.parametrize(
    ("plant", "place"),
    [
        (_plant_between, "layer 2: its attention"),
        (_plant_in_mlp, "layer 1: its MLP"),
        (_plant_in_attention, "layer 2: its attention"),
        (_plant_in_head, "its head"),
        (_plant_in_embedding, "its embedding|embedding of the token"),
    ],
)
def test_a_planted_change_in_the_forward_is_found_and_located(plant, place):
    model = tiny("llama")
    plant(model)
    with pytest.raises(Unsupported, match=place):
        read_spec(model, max_length=LENGTH)


def test_what_depends_on_a_distant_position_is_found_there():
    """Ministral 3 scales queries from `original_max_position_embeddings` on."""
    rope = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "llama_4_scaling_beta": 0.1,
    }
    model = other("Ministral3Config", rope_parameters=rope)
    assert read_spec(model, max_length=64).max_length == 64
    with pytest.raises(Unsupported, match="layer 0 at positions from 59"):
        read_spec(model, max_length=96)


def test_a_branch_that_is_zero():
    model = tiny("llama")
    model.model.layers[1].mlp.down_proj.weight.data.zero_()
    assert read_spec(model, max_length=LENGTH).layers[1].mlp.multiplier == 1


def test_angles_that_depend_on_the_length_are_refused_beyond_it():
    scaling = {
        "rope_type": "dynamic",
        "rope_theta": 1e4,
        "factor": 2.0,
        "original_max_position_embeddings": 64,
    }
    model = other("LlamaConfig", max_position_embeddings=64, rope_parameters=scaling)
    assert read_spec(model, max_length=64).max_length == 64
    with pytest.raises(Unsupported, match="depend on the sequence's length"):
        read_spec(model, max_length=96)


def test_an_unreadable_forward_is_a_refusal_with_its_error():
    model = tiny("llama")
    model.model.norm.register_forward_pre_hook(lambda _m, _a: 1 / 0)
    with pytest.raises(Unsupported, match="could not be run: ZeroDivisionError"):
        read_spec(model, max_length=LENGTH)


def test_the_copy_that_is_read_gives_its_memory_back_at_once(monkeypatch):
    """On a GPU nothing else makes Python look for garbage, and the copy holds embedding, head and logits in fp32."""
    copies: list[nn.Parameter] = []
    shown: list[weakref.ref[torch.Tensor]] = []

    class Watched(reading.Replica):
        def __init__(self, model: nn.Module) -> None:
            super().__init__(model)
            copies.extend(self.module.parameters())

        def run(self, *args, **options) -> torch.Tensor:
            logits = super().run(*args, **options)
            shown.append(weakref.ref(logits))
            return logits

    monkeypatch.setattr(reading, "Replica", Watched)
    model = tiny("llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gc.disable()
    try:
        read_spec(model, max_length=LENGTH)
        assert copies
        assert not any(parameter.numel() for parameter in copies)
        assert shown
        assert all(logits() is None for logits in shown)
    finally:
        gc.enable()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
