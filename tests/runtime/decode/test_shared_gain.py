"""Where the query's gain takes over the key's, what that leaves, and that the proof sees it where it is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashnorm.attention_algebra import partners
from flashnorm.errors import Unsupported
from flashnorm.runtime.decode import reference, shared_gain
from flashnorm.runtime.decode.reading import read_spec
from flashnorm.runtime.decode.shared_gain import with_shared_gain
from flashnorm.runtime.decode.spec import Attention, Linear, Norm, Rope
from tests.runtime.decode.models import LENGTH, tiny

HEAD = 8


def attention(rotary: int, *, gains: tuple[float, float] = (1.0, 1.0), dtype=torch.float32, interleaved=False, **more):
    """Random weights, two heads over one key head; `gains`: about how large those of q and k are."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    q_norm, k_norm = (Norm((size * (1 + drawn(HEAD).abs())).to(dtype), 1e-6) for size in gains)
    angles = torch.arange(32)[:, None] * 100.0 ** -(torch.arange(rotary) / max(1, rotary))
    rope = Rope(angles.cos(), angles.sin(), interleaved) if rotary else None
    parts = {name: Linear(drawn(rows, 12)) for name, rows in (("q", 2 * HEAD), ("k", HEAD), ("v", HEAD))}
    values = {
        "norm": None, **parts, "heads": 2, "kv_heads": 1, "head_dim": HEAD, "q_norm": q_norm, "k_norm": k_norm,
        "rope": rope, "scale": HEAD**-0.5, "softcap": None, "window": None, "out": Linear(drawn(12, 2 * HEAD)),
        "post_norm": None, "multiplier": 1.0,
    }  # fmt: skip
    return Attention(**{**values, **more})


def output(by: Attention) -> torch.Tensor:
    x = torch.randn(1, 9, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return reference.attention_block(x, by, torch.arange(9)[None], start=3)


def test_a_layer_without_rotation_keeps_one_gain():
    before = attention(0)
    after = with_shared_gain(before)
    assert after.k_norm.gain is None
    assert torch.equal(after.q_norm.gain, before.q_norm.gain * before.k_norm.gain)
    # fp64, but for the gains' product, which fp32 rounds once.
    assert (output(after) - output(before)).norm() <= 2.0**-23 * output(before).norm()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary", [2, 4])
def test_a_turning_key_keeps_its_gain_unless_its_pairs_share_one(rotary, interleaved):
    apart = attention(rotary, interleaved=interleaved)
    assert with_shared_gain(apart) is apart
    gain = apart.k_norm.gain.clone()
    exchanged = partners(rotary, interleaved=interleaved)
    gain[: 2 * rotary] = gain[torch.minimum(torch.arange(2 * rotary), exchanged)]
    alike = replace(apart, k_norm=Norm(gain, 1e-6))
    after = with_shared_gain(alike)
    assert after.k_norm.gain is None
    assert (output(after) - output(alike)).norm() <= 2.0**-23 * output(alike).norm()


def test_what_is_no_pair_of_gains_stays():
    for case in (attention(0, q_norm=None), attention(0, k_norm=None), attention(0, k_norm=Norm(None, 1e-6))):
        assert with_shared_gain(case) is case
    only_key = attention(0, q_norm=Norm(None, 1e-5))
    after = with_shared_gain(only_key)
    assert torch.equal(after.q_norm.gain, only_key.k_norm.gain)
    assert (after.q_norm.eps, after.k_norm) == (1e-5, Norm(None, 1e-6))
    inverse = attention(0, q_norm=Norm(torch.full((HEAD,), 0.5), 1e-6), k_norm=Norm(torch.full((HEAD,), 2.0), 1e-6))
    assert with_shared_gain(inverse).q_norm.gain is None


def test_the_product_keeps_every_bit_of_half_precision():
    before = attention(0, dtype=torch.bfloat16)
    gain = with_shared_gain(before).q_norm.gain
    assert gain.dtype == torch.float32
    assert torch.equal(gain.double(), before.q_norm.gain.double() * before.k_norm.gain.double())


def test_a_query_that_would_leave_fp16_keeps_the_gains_apart():
    large = attention(0, gains=(200.0, 300.0), dtype=torch.float16)
    assert with_shared_gain(large) is large
    assert with_shared_gain(attention(0, gains=(200.0, 300.0), dtype=torch.bfloat16)).k_norm.gain is None


def test_a_model_with_layers_that_do_not_turn():
    model = tiny("exaone4")
    layers = [layer.attention for layer in read_spec(model, max_length=LENGTH).layers]
    assert [a.rope is None for a in layers] == [a.k_norm.gain is None for a in layers] == [False, True, False]
    own = model.model.layers[1].self_attn
    assert torch.equal(layers[1].q_norm.gain, own.q_norm.weight * own.k_norm.weight)


def test_the_proof_sees_a_gain_taken_over_from_a_key_that_turns(monkeypatch):
    def greedy(a, b, rotary, *, interleaved):
        return a * b, torch.ones_like(b)

    monkeypatch.setattr(shared_gain, "shared_gains", greedy)
    with pytest.raises(Unsupported, match="layer 0: its attention computes something else"):
        read_spec(tiny("qwen3"), max_length=LENGTH)
