"""A GGUF written from a known model must come back as that model, or be refused with nothing written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from flashnorm.checkpoint.gguf_import import import_gguf
from flashnorm.errors import CheckpointError, ConfigError, OutputError
from tests.checkpoint.gguf_writing import CHAT_TEMPLATE, gguf_tensors, tiny_gemma, tiny_llama, write_gguf

MODELS = {
    "llama": tiny_llama,
    "llama, tied": lambda: tiny_llama(tie_word_embeddings=True),
    "gemma 2, one-plus gains": tiny_gemma,
}


def _imported(file: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    out = file.parent / f"out-{dtype}"
    import_gguf(file, out, dtype=dtype)
    return AutoModelForCausalLM.from_pretrained(out, dtype="auto").eval()


@pytest.mark.parametrize("name", MODELS)
def test_an_unquantised_gguf_comes_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    source = MODELS[name]()
    if name.startswith("gemma"):  # (1 + w) - 1 is exact in fp32 only where 1 + w was: write gains for which it is
        _round_gains(source)
    result = _imported(write_gguf(tmp_path / "model.gguf", source, tokenizer=False))
    expected, actual = source.state_dict(), result.state_dict()
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[key], actual[key]) for key in expected)
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        assert torch.equal(source(tokens).logits, result(tokens).logits)


def test_a_quantised_gguf_comes_back_as_its_dequantised_values(tmp_path: Path) -> None:
    source = tiny_llama()
    file = write_gguf(tmp_path / "model.gguf", source, quantization=gguf.GGMLQuantizationType.Q8_0)
    result = _imported(file)
    stored = gguf_tensors(source)["blk.1.ffn_gate.weight"]
    blocks = gguf.quants.quantize(stored, gguf.GGMLQuantizationType.Q8_0)
    dequantised = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0)
    assert not np.array_equal(dequantised, stored)
    assert torch.equal(result.model.layers[1].mlp.gate_proj.weight, torch.from_numpy(dequantised))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_fp32_rounded_once(dtype: torch.dtype, tmp_path: Path) -> None:
    quantization = gguf.GGMLQuantizationType.Q8_0
    file = write_gguf(tmp_path / "model.gguf", tiny_gemma(), quantization=quantization, tokenizer=False)
    exact, rounded = _imported(file).state_dict(), _imported(file, dtype).state_dict()
    assert all(torch.equal(rounded[key], exact[key].to(dtype)) for key in exact)


def test_the_report_and_the_tokenizer(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", tiny_llama(), metadata={"tokenizer.ggml.eot_token_id": 0})
    report = import_gguf(file, tmp_path / "out")
    assert (report.architecture, report.model_type, report.dtype) == ("llama", "llama", "bfloat16")
    assert report.tokenizer
    assert report.chat_template
    assert report.ignored == ()
    assert report.parameters == sum(parameter.numel() for parameter in tiny_llama().parameters())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "the <|start|>then"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer("the").input_ids == [tokenizer.convert_tokens_to_ids("the")]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|start|>", "<|end|>")
    assert (tokenizer.unk_token, tokenizer.pad_token) == ("<unk>", "<|end|>")
    assert tokenizer.chat_template == CHAT_TEMPLATE
    generation = AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config
    assert generation.eos_token_id == [2, 0]
    assert (generation.bos_token_id, generation.pad_token_id) == (1, 2)


def test_configs_beside_the_gguf_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "of another model"}')
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "config.json").write_text("{}")
    file = write_gguf(tmp_path / "model.gguf", tiny_llama())
    import_gguf(file, tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == CHAT_TEMPLATE


def test_a_gguf_without_a_tokenizer(tmp_path: Path) -> None:
    report = import_gguf(write_gguf(tmp_path / "model.gguf", tiny_llama(), tokenizer=False), tmp_path / "out")
    assert not report.tokenizer
    assert not list((tmp_path / "out").glob("tokenizer*"))


def test_settings_that_were_not_taken_over_are_listed(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", tiny_llama(), metadata={"llama.expert_count": 77})
    assert import_gguf(file, tmp_path / "out").ignored == ("llama.expert_count",)


def test_llama3_rope_scaling_is_put_into_the_config(tmp_path: Path) -> None:
    # Of 8 frequencies with theta 10000, the slowest makes 0.4 turns in 8192 tokens (so it is divided by 32); the next
    # 1.3, within the smooth part.
    turns = 8192 / (2 * np.pi * 10000.0 ** (np.arange(8) / 8))
    smooth = np.clip((turns - 1) / 3, 0, 1)
    factors = (1 / ((1 - smooth) / 32 + smooth)).astype(np.float32)
    file = write_gguf(tmp_path / "model.gguf", tiny_llama(), tensors={"rope_freqs.weight": factors})
    result = _imported(file)
    assert result.config.rope_parameters["rope_type"] == "llama3"
    plain = 10000.0 ** (-np.arange(8) / 8)
    assert np.allclose(result.model.rotary_emb.inv_freq.numpy(), plain / factors, rtol=1e-6)


def test_other_rope_factors_are_refused(tmp_path: Path) -> None:
    factors = {"rope_freqs.weight": np.full(8, 4.0, dtype=np.float32)}
    _refused(tmp_path, CheckpointError, "RoPE frequency factors", tensors=factors)


def _refused(tmp_path: Path, kind: type[Exception], match: str, **options: object) -> None:
    file = write_gguf(tmp_path / "model.gguf", tiny_llama(), **options)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(kind, match=match):
        import_gguf(file, tmp_path / "out", dtype=torch.float16)
    assert sorted(tmp_path.iterdir()) == before


def test_a_tensor_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    bias = {"blk.0.attn_q.bias": np.ones(64, dtype=np.float32)}
    _refused(tmp_path, CheckpointError, "would be lost", tensors=bias)


def test_a_tensor_that_the_gguf_lacks_is_refused(tmp_path: Path) -> None:
    _refused(
        tmp_path, CheckpointError, "has no tensor for 'model.layers.1.input_layernorm", without="blk.1.attn_norm.weight"
    )


def test_values_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    too_large = {"blk.1.attn_norm.weight": np.full(64, 1e5, dtype=np.float32)}
    _refused(tmp_path, CheckpointError, "infinite values", tensors=too_large, without="blk.1.attn_norm.weight")


def test_rope_scaling_that_is_not_taken_over_is_refused(tmp_path: Path) -> None:
    _refused(tmp_path, CheckpointError, "scales RoPE by 'yarn'", metadata={"llama.rope.scaling.type": "yarn"})


def test_an_unknown_tokenizer_is_refused(tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.model": "made-up"}
    _refused(tmp_path, CheckpointError, "tokenizer of kind 'made-up'", tokenizer=False, metadata=metadata)


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "made-up")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="architecture 'made-up'"):
        import_gguf(tmp_path / "model.gguf", tmp_path / "out")


def test_an_unstated_attention_scale_is_refused(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", tiny_gemma(head_dim=128))
    with pytest.raises(CheckpointError, match="heads of width 128"):
        import_gguf(file, tmp_path / "out")


def test_an_existing_output_is_refused(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", tiny_llama())
    (tmp_path / "out").mkdir()
    with pytest.raises(OutputError, match="exists"):
        import_gguf(file, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_nothing_is_left_when_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(tmp_path / "model.gguf", tiny_llama())

    def full_disk(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.save_pretrained", full_disk)
    with pytest.raises(OutputError, match="full"):
        import_gguf(file, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def _round_gains(model: PreTrainedModel) -> None:
    """To multiples of 2^-12, so that adding and then subtracting one loses nothing."""
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data = torch.round(parameter.data * 2**12) / 2**12


FULL_DISK = """
import resource, signal, sys
from flashnorm.cli.main import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that writing beyond the limit is an error, not the end
for limit in map(int, sys.argv[3:]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        main(["import-gguf", sys.argv[1], sys.argv[2], "--quiet"])
    except SystemExit as stopped:
        print(limit, stopped.code)
"""


def test_a_write_that_fails_is_refused_whoever_writes(tmp_path: Path) -> None:
    """Weights and tokenizers are written by libraries in Rust, whose errors are no OSError.

    In a process of its own, for the limit holds for all that a process writes: first the config and the tokenizer do
    not fit, then the weights.
    """
    file, out = write_gguf(tmp_path / "model.gguf", tiny_llama()), tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, file, out, "100", "30000"], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["100 2", "30000 2"], done.stderr
    first, second = done.stderr.splitlines()
    for refusal in (first, second):
        assert refusal.startswith(f"flashnorm: {out} cannot be written: File too large")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_half_a_model_is_never_beside_its_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(tmp_path / "model.gguf", tiny_llama())
    unchanged, seen = PreTrainedModel.save_pretrained, []

    def look(model: PreTrainedModel, folder: Path) -> None:
        unchanged(model, folder)
        seen.extend(path.name for path in Path(folder).parent.iterdir())

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", look)
    import_gguf(file, tmp_path / "out")
    assert seen == ["saved"]
    assert "saved" not in [path.name for path in (tmp_path / "out").iterdir()]
