"""`flashnorm audit`: the table with its reasons whole, JSON and exit statuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from transformers import LlamaConfig, Qwen3Config

from flashnorm.cli.main import main
from tests.checkpoint.test_fold import SMALL


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
    assert _status(qwen3) == 0
    shown = capsys.readouterr().out
    column = "".join(line.rsplit("│", 2)[1].strip() for line in shown.splitlines() if line.count("│") == 6)
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
    assert _status(tmp_path) == 2
    error = capsys.readouterr().err
    assert error.startswith("flashnorm: ")
    assert error.count("\n") == 1
