from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashnorm.errors import Unsupported
from flashnorm.runtime.decode.packing import pack
from flashnorm.runtime.decode.reading import read_spec
from tests.runtime.decode.models import LENGTH, tiny


def test_separate_projections_become_rows_of_one():
    model = tiny("qwen2")
    attention = model.model.layers[1].self_attn
    parts = [attention.q_proj, attention.k_proj, attention.v_proj]
    expected = torch.cat([p.weight for p in parts]).clone(), torch.cat([p.bias for p in parts])
    packing = pack(read_spec(model, max_length=LENGTH))
    assert torch.equal(packing.layers[1].qkv.weight, expected[0])
    assert torch.equal(packing.layers[1].qkv.bias, expected[1])
    assert packing.layers[1].qkv.weight.data_ptr() == attention.q_proj.weight.data_ptr()


def test_what_is_joined_already_stays_where_it_is():
    model = tiny("phi3")
    packing = pack(read_spec(model, max_length=LENGTH))
    assert packing.moved == ()
    assert packing.layers[0].qkv.weight.data_ptr() == model.model.layers[0].self_attn.qkv_proj.weight.data_ptr()
    again = tiny("llama")
    spec = read_spec(again, max_length=LENGTH)
    assert pack(spec).moved != ()
    assert pack(spec).moved == ()


def test_fused_parts_in_another_order_are_refused():
    spec = read_spec(tiny("phi3"), max_length=LENGTH)
    attention = spec.layers[0].attention
    swapped = replace(spec.layers[0], attention=replace(attention, k=attention.v, v=attention.k))
    with pytest.raises(Unsupported, match="an order of its own"):
        pack(replace(spec, layers=(swapped, *spec.layers[1:])))
