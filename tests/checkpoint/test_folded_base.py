"""What folding did to each parameter, read back from a folded folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flashnorm.checkpoint.conversion import Placement
from flashnorm.checkpoint.fold import fold_checkpoint
from flashnorm.checkpoint.folded_base import FoldedBase, Gain, Weight, laid_out, open_folded_base
from flashnorm.errors import CheckpointError
from tests.checkpoint.lora_cases import CASES, write_base


def _folded(name: str, folder: Path, *, untie: bool = False, **changes: object) -> FoldedBase:
    base = write_base(CASES[name], folder / "base", **changes)
    fold_checkpoint(base, folder / "folded", untie=untie)
    return open_folded_base(folder / "folded")


@pytest.mark.parametrize(
    ("case", "parameter", "axis", "transposed", "norm"),
    [
        ("llama", "model.layers.1.self_attn.q_proj.weight", 1, False, "model.layers.1.input_layernorm"),
        ("phi3", "model.layers.0.mlp.gate_up_proj.weight", 1, False, "model.layers.0.post_attention_layernorm"),
        ("mixtral", "model.layers.0.mlp.experts.gate_up_proj", 2, False, "model.layers.0.post_attention_layernorm"),
        ("mixtral", "model.layers.1.mlp.gate.weight", 1, False, "model.layers.1.post_attention_layernorm"),
        ("gpt_oss", "model.layers.0.mlp.experts.gate_up_proj", 1, False, "model.layers.0.post_attention_layernorm"),
        ("gpt2", "transformer.h.1.mlp.c_fc.weight", 0, True, "transformer.h.1.ln_2"),
    ],
)
def test_gains_lie_along_the_axes_of_the_parameters(
    case: str, parameter: str, axis: int, transposed: bool, norm: str, tmp_path: Path
) -> None:
    base = _folded(case, tmp_path)
    weight = base.parameters[parameter]
    (gain,) = weight.gains or ()
    assert (gain.norm, gain.axis, gain.channels, weight.transposed) == (norm, axis, None, transposed)
    stored = load_file(tmp_path / "base" / "model.safetensors")
    assert torch.equal(gain.values, stored[f"{norm}.weight"])
    assert norm in base.norms


def test_weights_that_read_no_norm_have_no_gains(tmp_path: Path) -> None:
    base = _folded("mixtral", tmp_path)
    for name in ("self_attn.o_proj.weight", "mlp.experts.down_proj"):
        assert base.parameters[f"model.layers.0.{name}"].gains == ()
    assert base.stored["model.layers.0.block_sparse_moe.experts.3.w2.weight"].gains == ()
    assert len(base.stored["model.layers.0.block_sparse_moe.experts.3.w3.weight"].gains or ()) == 1


def test_one_plus_gains_are_gains(tmp_path: Path) -> None:
    base = _folded("gemma3", tmp_path)
    (gain,) = base.parameters["model.layers.0.self_attn.k_proj.weight"].gains or ()
    stored = load_file(tmp_path / "base" / "model.safetensors")
    assert torch.equal(gain.values, 1 + stored["model.layers.0.input_layernorm.weight"])


def test_a_moved_bias_is_known_on_both_sides(tmp_path: Path) -> None:
    base = _folded("gpt2", tmp_path)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "folded"))
    (gain,) = base.parameters["transformer.h.0.attn.c_attn.weight"].gains or ()
    assert gain.shift is not None
    assert torch.equal(gain.shift, before["transformer.h.0.ln_1.bias"])
    moved = base.parameters["transformer.h.0.attn.c_attn.bias"].moved
    assert moved is not None
    assert torch.equal(moved, after["transformer.h.0.attn.c_attn.bias"] - before["transformer.h.0.attn.c_attn.bias"])
    assert base.parameters["transformer.h.0.attn.c_proj.bias"].moved is None


def test_a_tied_head_shares_what_is_known_of_the_embedding(tmp_path: Path) -> None:
    base = _folded("llama", tmp_path, tie_word_embeddings=True)
    head, embedding = base.parameters["lm_head.weight"], base.parameters["model.embed_tokens.weight"]
    assert (head.gains, embedding.gains, base.untied) == ((), (), False)
    assert (head.transposed, embedding.transposed) == (False, True)
    assert "lm_head.weight" not in base.stored


def test_an_untied_head_has_the_final_gain(tmp_path: Path) -> None:
    base = _folded("llama", tmp_path, untie=True, tie_word_embeddings=True)
    assert base.untied
    assert [gain.norm for gain in base.parameters["lm_head.weight"].gains or ()] == ["model.norm"]
    assert base.parameters["model.embed_tokens.weight"].gains == ()


def test_a_folder_that_is_not_folded_is_refused(tmp_path: Path) -> None:
    base = write_base(CASES["llama"], tmp_path / "base")
    with pytest.raises(CheckpointError, match=r"has no flashnorm\.json"):
        open_folded_base(base)


# Two stored matrices (3, 4) fused along axis 0 into a parameter (6, 4).
def _fused(*gains: tuple[Gain, ...]) -> tuple[Gain, ...] | None:
    parts = []
    for number, on_part in enumerate(gains):
        rows = torch.arange(3) + 3 * number
        parts.append(
            (Weight(f"part{number}", (3, 4), False, on_part), Placement("w", (6, 4), {0: (0, rows), 1: (1, None)}))
        )
    return laid_out((6, 4), parts)


def _gain(axis: int, channels: torch.Tensor | None = None, norm: str = "norm") -> Gain:
    return Gain(norm, axis, torch.ones(4), channels, None)


def test_parts_that_agree_make_one_gain() -> None:
    (gain,) = _fused((_gain(1),), (_gain(1),)) or ()
    assert (gain.axis, gain.channels) == (1, None)


def test_a_gain_along_the_fused_axis_stays_on_its_part() -> None:
    (gain,) = _fused((), (_gain(0, torch.tensor([2, 0, 1])),)) or ()
    assert gain.axis == 0
    assert gain.channels is not None
    assert gain.channels.tolist() == [-1, -1, -1, 2, 0, 1]


@pytest.mark.parametrize(
    "second",
    [
        (),  # not scaled
        (_gain(1, norm="other"),),  # scaled by another norm
        (_gain(1, torch.tensor([1, 0, 2, 3])),),  # scaled by other channels
    ],
)
def test_parts_that_disagree_make_none(second: tuple[Gain, ...]) -> None:
    assert _fused((_gain(1),), second) is None


def test_a_gain_on_an_axis_that_loading_rearranges_makes_none() -> None:
    part = Weight("part", (3, 4), False, (_gain(1),))
    assert laid_out((6, 2), [(part, Placement("w", (6, 2), {}))]) is None
