"""Stored tensors find their parameters, through whatever the loader does to them."""

from __future__ import annotations

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from flashnorm.checkpoint.conversion import Placement, _Loader, placements, stored_name
from flashnorm.errors import CheckpointError
from tests import zoo


def saved_shapes(model, folder) -> dict[str, tuple[int, ...]]:
    from safetensors.torch import load_file

    model.save_pretrained(folder)
    return {name: tuple(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}


def mixtral() -> MixtralForCausalLM:
    return MixtralForCausalLM(
        MixtralConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=64, num_local_experts=4,
        )
    )  # fmt: skip


def test_every_stored_tensor_is_placed_and_every_parameter_is_covered(tmp_path):
    model = mixtral()
    placed = placements(model, saved_shapes(model, tmp_path))
    assert {p.parameter for pieces in placed.values() for p in pieces} == set(model.state_dict())


def test_experts_stored_one_by_one_keep_their_input_axis(tmp_path):
    model = mixtral()
    placed = placements(model, saved_shapes(model, tmp_path))
    w3 = next(pieces for name, pieces in placed.items() if ".layers.1." in name and "experts.3.w3" in name)
    (piece,) = w3
    assert piece.parameter == "model.layers.1.mlp.experts.gate_up_proj"
    stored_axis, positions = piece.axes[2]
    assert (stored_axis, positions) == (1, None)
    rows, positions = piece.axes[1]
    assert rows == 0
    assert positions.tolist() == list(range(48, 96)), "up lies behind gate"


def test_a_tensor_that_is_stored_transposed_is_seen_to_be(tmp_path):
    """Whether it is, the loader decides by its shape; a square one tells nothing and is taken as it stands."""
    model = zoo.tiny_model("image_text", "qwen3_vl_moe")
    parameters = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    name = next(n for n in parameters if n.endswith("experts.gate_up_proj"))
    shape = parameters[name]
    straight = placements(model, {name: shape})[name][0]
    turned = placements(model, {name: (shape[0], shape[2], shape[1])})[name][0]
    assert straight.axes[1] == (1, None)
    assert turned.axes[1] == (2, None)


def test_the_stored_name_of_a_head():
    assert stored_name(mixtral(), "lm_head.weight") == "lm_head.weight"


def test_a_shape_that_the_config_does_not_ask_for_is_refused(tmp_path):
    model = mixtral()
    shapes = saved_shapes(model, tmp_path)
    shapes["model.norm.weight"] = (33,)
    with pytest.raises(CheckpointError, match="do not belong together"):
        placements(model, shapes)


def test_numbers_survive_axes_longer_than_sixteen_bits():
    from flashnorm.checkpoint.conversion import _axis_of, _stand_in

    landed = _stand_in([70_000, 2], 0).transpose(0, 1).contiguous()
    assert _axis_of(landed, 70_000) == (1, None)
    assert _axis_of(torch.zeros(3, 4, dtype=torch.int32), 4) is None


class _Stub(_Loader):
    """Places every tensor as told, and keeps the names that it was asked for."""

    def __init__(self, placed):
        self.placed, self.shapes, self.asked = placed, dict.fromkeys(placed, (2, 2)), []

    def _place(self, converter, target, sources, name):
        self.asked.append(name)
        return [Placement("experts", (9, 2, 2), {2: (self.placed[name], None)})]


def learned(placed):
    loader = _Stub(placed)
    (found,) = loader._learn(None, "experts", {"pattern": list(placed)}).values()
    return [pieces[0].axes[2][0] for pieces in found], len(set(loader.asked))


def test_experts_that_differ_in_their_numbers_alone_are_learned_from_three():
    assert learned({f"experts.{n}.w": 1 for n in range(9)}) == ([1] * 9, 3)


@pytest.mark.parametrize("odd", [0, 4, 8])
def test_a_first_middle_or_last_expert_that_is_laid_out_otherwise_has_all_looked_at(odd):
    axes = [int(n != odd) for n in range(9)]
    assert learned({f"experts.{n}.w": axis for n, axis in enumerate(axes)}) == (axes, 9)


def test_another_kind_of_expert_within_a_list_is_learned_on_its_own():
    axes = [1, 1, 0, 1, 1, 1, 1]
    names = [f"experts.{n}.w" if axis else "experts.shared.w" for n, axis in enumerate(axes)]
    assert learned(dict(zip(names, axes, strict=True)))[0] == axes


class _Failing:
    """A conversion of the loader's that does not take these tensors."""

    def add_tensor(self, *_):
        raise IndexError("no such axis")


@pytest.mark.parametrize(
    ("names", "words"),
    [(["w"], r"what is stored for target \(w\) cannot"), (["w", "v"], r"for target \(w and 1 more\) cannot")],
)
def test_tensors_that_the_loader_cannot_put_together_are_refused_by_name(names, words):
    loader = _Loader.__new__(_Loader)
    loader.shapes = dict.fromkeys(names, (4, 4))
    with pytest.raises(CheckpointError, match=f"{words} be put together: no such axis"):
        loader._follow(_Failing(), "target", {"pattern": names}, "w", 0)
