"""`flashnorm lora`: output, JSON and exit statuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flashnorm.cli.main import main
from tests.checkpoint.lora_cases import Folded, write_case


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Folded:
    return write_case("llama", tmp_path_factory.mktemp("llama"))


def _status(*arguments: object) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(["lora", *map(str, arguments)])
    return int(stopped.value.code or 0)


def test_it_says_what_it_did(llama: Folded, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _status(llama.adapter, llama.folded, tmp_path / "out") == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert out.startswith(f"{tmp_path / 'out'}: an adapter for the folded base; ")
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()


def test_json(llama: Folded, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _status(llama.adapter, llama.folded, tmp_path / "out", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["side"], report["base"]) == ("folded", str(llama.folded))
    assert "model.layers.0.self_attn.q_proj" in report["scaled"]
    assert "model.layers.0.self_attn.o_proj" in report["unchanged"]


def test_the_other_way_warns_that_no_base_is_named(
    llama: Folded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _status(llama.adapter, llama.folded, tmp_path / "out", "--to", "original") == 0
    assert "names no base model now" in capsys.readouterr().out
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] is None


def test_progress_goes_to_stderr_unless_quiet(
    llama: Folded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _status(llama.adapter, llama.folded, tmp_path / "out") == 0
    assert capsys.readouterr().err == f"lora: opening {llama.adapter}\n"
    assert _status(llama.adapter, llama.folded, tmp_path / "quiet", "--quiet") == 0
    assert capsys.readouterr().err == ""


def test_a_refusal_is_one_line_and_status_2(llama: Folded, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _status(llama.adapter, llama.base, tmp_path / "out", "--quiet") == 2
    error = capsys.readouterr().err
    assert error.startswith("flashnorm: ")
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_an_unknown_side_is_refused(llama: Folded, tmp_path: Path) -> None:
    assert _status(llama.adapter, llama.folded, tmp_path / "out", "--to", "both") == 2
