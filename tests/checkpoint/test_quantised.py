import pytest
import torch
from safetensors.torch import save_file

from flashnorm.checkpoint.source import open_source
from flashnorm.errors import CheckpointError
from tests.checkpoint.tiny import random_weights, write_checkpoint

LAYER = "layers.0.q_proj"
METHODS = (
    "bitsandbytes gptq awq compressed-tensors fp8 mxfp4 hqq torchao quanto aqlm vptq eetq higgs spqr bitnet fbgemm_fp8 "
    "quark fp_quant auto-round nvfp4 mxfp8"
)


def refuses(folder, words):
    with pytest.raises(CheckpointError, match="holds quantised or packed weights .*" + words):
        open_source(folder)


@pytest.mark.parametrize("method", METHODS.split())
@pytest.mark.parametrize("nested", [False, True])
def test_a_config_that_says_so(tmp_path, method, nested):
    settings = {"quantization_config": {"quant_method": method}}
    folder = write_checkpoint(tmp_path / "source", **({"text_config": settings} if nested else settings))
    refuses(folder, f"quantization_config says '{method}'")


def test_other_words_for_it_in_a_config(tmp_path):
    refuses(write_checkpoint(tmp_path / "mlx", quantization={"bits": 4, "group_size": 64}), "quantization says")
    refuses(write_checkpoint(tmp_path / "ct", compression_config={"format": "dense"}), "compression_config says")


@pytest.mark.parametrize("name", ["quantize_config.json", "quant_config.json", "hf_quant_config.json", "qmodel.pt"])
def test_a_side_file_that_says_so(tmp_path, name):
    folder = write_checkpoint(tmp_path / "source")
    (folder / name).write_text("{}")
    refuses(folder, name)


BYTES, INTS = torch.zeros(64, 8, dtype=torch.uint8), torch.zeros(8, 64, dtype=torch.int32)
HALF = torch.ones(4, 8, dtype=torch.float16)
EVIDENCE = {
    "gptq": {"qweight": INTS, "qzeros": INTS, "scales": HALF, "g_idx": torch.zeros(64, dtype=torch.int32)},
    "awq": {"qweight": INTS, "qzeros": INTS, "scales": HALF},
    "bnb 4-bit": {"weight": torch.zeros(1024, 1, dtype=torch.uint8), "weight.absmax": torch.ones(8)},
    "bnb 4-bit, nested": {"weight.quant_state.bitsandbytes__nf4": torch.zeros(90, dtype=torch.uint8)},
    "bnb 8-bit": {"weight": torch.zeros(64, 8, dtype=torch.int8), "SCB": torch.ones(64)},
    "compressed-tensors int4": {"weight_packed": INTS, "weight_scale": HALF, "weight_shape": torch.ones(2)},
    "compressed-tensors int8": {"weight": torch.zeros(64, 8, dtype=torch.int8), "weight_scale": HALF},
    "fp8 blocks": {"weight": torch.zeros(64, 8).to(torch.float8_e4m3fn), "weight_scale_inv": torch.ones(1, 1)},
    "fp8 alone": {"weight": torch.zeros(64, 8).to(torch.float8_e5m2)},
    "fp8 scales alone": {"weight_scale_inv": torch.ones(1, 1)},
    "mxfp4": {"gate_up_proj_blocks": torch.zeros(2, 4, 2, 16, dtype=torch.uint8), "gate_up_proj_scales": BYTES},
    "nvfp4": {"weight": BYTES, "weight_scale": HALF, "weight_scale_2": torch.ones(())},
    "hqq": {"W_q": BYTES, "scale": HALF, "zero": HALF},
    "torchao": {"_weight_qdata": torch.zeros(64, 8, dtype=torch.int8), "_weight_scale": HALF},
    "quanto": {"weight._data": torch.zeros(64, 8, dtype=torch.int8), "weight._scale": HALF},
    "mlx": {"weight": torch.zeros(64, 8, dtype=torch.uint32), "scales": HALF, "biases": HALF},
    "aqlm": {"codes": torch.zeros(4, 8, 1, dtype=torch.int8), "codebooks": HALF},
    "packed 16-bit words": {"weight": torch.zeros(64, 8, dtype=torch.int16)},
}


@pytest.mark.parametrize("scheme", EVIDENCE)
def test_tensors_that_say_so_under_a_stripped_config(tmp_path, scheme):
    weights = random_weights()
    del weights[f"{LAYER}.weight"]
    folder = write_checkpoint(tmp_path / "source", weights, shards=1)
    save_file(
        {**weights, **{f"{LAYER}.{n}": t.clone() for n, t in EVIDENCE[scheme].items()}}, folder / "model.safetensors"
    )
    refuses(folder, f"'{LAYER}")


def test_what_only_looks_like_it_is_accepted(tmp_path):
    """Masks, positions and lookup tables are integers in floating-point models; so are learnt scales in name only."""
    weights = random_weights() | {
        "h.0.attn.bias": torch.ones(1, 1, 16, 16, dtype=torch.uint8),
        "h.0.attn.masked_bias": torch.tensor(-1e4),
        "embeddings.position_ids": torch.arange(16).view(1, 16),
        "attn.relative_position_index": torch.zeros(16, 16, dtype=torch.int64),
        "mask": torch.ones(16, 16, dtype=torch.bool),
        "gate.tid2eid": torch.zeros(64, 6, dtype=torch.int32),
        "layers.0.layer_scale": torch.ones(48),
        "logit_scale": torch.ones(()),
        "router.per_expert_scale": torch.ones(8),
        "layers.0.layer_scalar": torch.ones(1),
        "vision.scales": torch.ones(4),
    }
    folder = write_checkpoint(tmp_path / "source", weights, quantization_config=None, text_config={"quantization": {}})
    assert set(open_source(folder).tensors) == set(weights)
