"""`flashnorm audit`: the table with its reasons whole, JSON and exit statuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config

from flashnorm.checkpoint.fold import fold_checkpoint
from flashnorm.cli.main import main
from tests.checkpoint.test_fold import SMALL, saved


def _status(*arguments: object) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(["audit", *map(str, arguments)])
    return int(stopped.value.code or 0)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("audit") / "qwen3"
    Qwen3Config(**SMALL, head_dim=8, architectures=["Qwen3ForCausalLM"], tie_word_embeddings=True).save_pretrained(
        folder
    )
    return folder


def test_every_reason_is_shown_whole(qwen3: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What stands in brackets, the operation and its place, is the reason, not markup."""
    assert _status(qwen3, "--json") == 0
    reasons = {site["reason"] for site in json.loads(capsys.readouterr().out)["sites"] if site["reason"]}
    assert any("[" in reason for reason in reasons)
    assert _status(qwen3, "--all") == 0
    shown = capsys.readouterr().out
    column = "".join(line.rsplit("│", 2)[1].strip() for line in shown.splitlines() if line.count("│") == 4)
    for reason in reasons:
        assert re.sub(r"\s", "", reason) in re.sub(r"\s", "", column)


def test_the_last_line_counts(qwen3: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _status(qwen3) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("4 of 9 norms can be folded; 5 cannot (4 ")
    assert _status(qwen3, "--untie") == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("5 of 9 norms can be folded; 4 cannot (4 ")


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    LlamaConfig(**SMALL, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    assert _status(tmp_path, "--json") == 0
    table = json.loads(capsys.readouterr().out)
    assert (table["model_type"], table["norms"], table["foldable"]) == ("llama", 5, 5)
    assert {site["verdict"] for site in table["sites"]} == {"fold"}


def test_a_refusal_is_one_line_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _status(tmp_path, "--quiet") == 2
    error = capsys.readouterr().err
    assert error.startswith("flashnorm: ")
    assert error.count("\n") == 1


def _last_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert _status(folder, "--quiet") == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out.splitlines()[-1]


def test_a_folder_that_fold_would_not_fold_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = saved(tmp_path, LlamaForCausalLM(LlamaConfig(**SMALL)))
    assert _last_line(source, capsys) == "5 of 5 norms can be folded"
    fold_checkpoint(source, tmp_path / "folded")
    assert _last_line(tmp_path / "folded", capsys) == (
        f"note: {tmp_path / 'folded'} is folded already, in compatible mode: 5 of these norms have their gain at one"
    )
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": {"quant_method": "gptq"}}
    (source / "config.json").write_text(json.dumps(config))
    assert _last_line(source, capsys).startswith("note: `flashnorm fold` refuses this folder: ")
    assert _status(source, "--json", "--quiet") == 0
    [note] = json.loads(capsys.readouterr().out)["notes"]
    assert "holds quantised or packed weights" in note
    (source / "model.safetensors").unlink()  # the config alone says it
    assert "holds quantised or packed weights" in _last_line(source, capsys)


def test_layers_that_are_alike_are_one_row_and_all_are_shown_on_request(
    qwen3: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _status(qwen3, "--quiet") == 0
    short = capsys.readouterr().out
    assert "qwen3: 9 norms" in short
    assert "model.layers.0-1.input_layernorm" in short
    assert "model.layers.1.input_layernorm" not in short
    assert _status(qwen3, "--all", "--quiet") == 0
    whole = capsys.readouterr().out
    for name in ("model.layers.0.input_layernorm", "model.layers.1.input_layernorm", "qwen3: 9 norms"):
        assert name in whole
    assert short.splitlines()[-1] == whole.splitlines()[-1]
