"""`flashnorm center`: output, JSON, the folder that it writes, and exit statuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import BertConfig, BertModel, GPTNeoXConfig, GPTNeoXForCausalLM

from flashnorm.cli import center as center_command
from flashnorm.cli.main import main
from tests.checkpoint.test_fold import saved

DOCUMENT = Path(__file__).parents[2] / "docs" / "center.md"
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}


def _status(*arguments: object) -> int:
    with pytest.raises(SystemExit) as stopped:
        main([*map(str, arguments)])
    return int(stopped.value.code or 0)


@pytest.fixture(scope="module")
def gpt_neox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("center"), GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES)))


def test_it_says_what_it_did(gpt_neox: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _status("center", gpt_neox) == 0
    out, err = capsys.readouterr()
    first, second = out.splitlines()
    assert first == "5 LayerNorms turned into RMSNorms, 1 of them with a bias, 0 norms left alone"
    assert second.startswith("relative error of the fp64 outputs at 64 positions: ")
    assert err.startswith(f"center: opening {gpt_neox}\n")


def test_json_and_a_new_folder(gpt_neox: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _status("center", gpt_neox, tmp_path / "out", "--json", "--quiet", "--tokens", 8) == 0
    table = json.loads(capsys.readouterr().out)
    assert len(table["centered"]) == 5
    assert list(table["keeps_bias"]) == ["gpt_neox.final_layer_norm"]
    assert table["skipped"] == table["untied"] == {}
    assert table["passed"]
    assert 0 < table["error"] <= 1e-10
    assert table["out"] == str(tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_outputs_that_move_are_a_failed_check_and_write_nothing(
    gpt_neox: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(center_command, "TOLERANCE", 0.0)
    assert _status("center", gpt_neox, tmp_path / "out", "--quiet") == 1
    assert "the outputs of" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_refusals(gpt_neox: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _status("center", tmp_path / "none", "--quiet") == 2
    assert _status("center", gpt_neox, gpt_neox, "--quiet") == 2
    assert "lies inside the source" in capsys.readouterr().err


def test_a_model_without_a_head_is_compared_by_its_hidden_states(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved(tmp_path, BertModel(BertConfig(**SIZES)))
    assert _status("center", folder, "--quiet") == 0
    out = capsys.readouterr().out
    assert "1 LayerNorm turned into RMSNorms, 1 of them with a bias, 4 norms left alone" in out
    assert "left alone: encoder.layer.0.attention.output.LayerNorm" in out


def test_the_example_of_the_documentation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = DOCUMENT.read_text()
    code = text.split("```python\n")[1].split("```")[0].replace("gpt2-tiny", str(tmp_path / "tiny"))
    exec(code, {})
    capsys.readouterr()
    assert _status("center", tmp_path / "tiny", "--quiet") == 0
    without = capsys.readouterr().out.splitlines()
    assert f"    {without[0]}\n" in text
    assert without[1].removeprefix("left alone: ").partition(" [")[0] in text
    assert _status("center", tmp_path / "tiny", tmp_path / "out", "--untie", "--quiet") == 0
    assert f"    {capsys.readouterr().out.splitlines()[0]}\n" in text
