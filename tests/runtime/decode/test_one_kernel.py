"""What a step as one kernel is compiled for, and what it refuses.

What it computes is tested on a GPU in test_on_gpu.py, and on the CPU in tests/kernels/cuda/test_step_on_host.py; its
oracle, `TorchStep`, in test_program.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashnorm.errors import Unsupported
from flashnorm.passes.fold import fold
from flashnorm.runtime.decode.one_kernel import layer_data, shape_of
from flashnorm.runtime.decode.packing import pack
from flashnorm.runtime.decode.program import Program
from flashnorm.runtime.decode.reading import read_spec
from flashnorm.runtime.decode.spec import Spec
from tests.runtime.decode.models import HIDDEN, LENGTH, SUPPORTED, tiny


def spec_of(name: str, **changes: object) -> Spec:
    return read_spec(tiny(name, **changes), max_length=LENGTH)


@pytest.mark.parametrize("name", SUPPORTED)
def test_every_family_has_one_shape(name):
    shape = shape_of(spec_of(name))
    assert (shape.hidden, shape.inner, shape.heads, shape.kv_heads, shape.head_dim) == (HIDDEN, 80, 4, 2, 16)
    assert shape.gated == (name != "arcee")
    assert shape.capped == (name == "gemma2")
    assert shape.interleaved == (name == "glm4")
    assert shape.rotary == (4 if name in ("phi3_partial", "glm4") else 8)
    assert shape.gains


def test_a_folded_model_has_no_gains():
    model = tiny("llama")
    fold(model)
    assert not shape_of(read_spec(model, max_length=LENGTH)).gains


def test_layers_of_two_shapes_are_refused():
    spec = spec_of("llama")
    last = spec.layers[-1]
    odd = replace(last, mlp=replace(last.mlp, activation="gelu"))
    with pytest.raises(Unsupported, match="layer 2 has another shape"):
        shape_of(replace(spec, layers=(*spec.layers[:-1], odd)))


def test_layers_without_rotation_are_no_other_shape():
    shape = shape_of(spec_of("smollm3"))
    assert shape.rotary == 8


def test_vectors_are_given_in_fp32_and_matrices_as_they_are():
    spec = read_spec(tiny("qwen2", torch.bfloat16), max_length=LENGTH)
    packed = pack(spec).layers[0]
    cache = torch.zeros(2, 2, LENGTH, 16, dtype=torch.bfloat16)
    layer = layer_data(spec.layers[0], packed, cache, cache)
    assert layer.qkv.data_ptr() == packed.qkv.weight.data_ptr()
    assert layer.biases[0].dtype == layer.norms[0].gain.dtype == torch.float32
    assert torch.equal(layer.biases[0], packed.qkv.bias.float())
    assert layer.biases[1:] == (None, None, None)


def test_no_gpu_no_kernel():
    with pytest.raises(Unsupported, match="needs a GPU; the model is on cpu"):
        Program(spec_of("llama"), slots=1, one_kernel=True)
