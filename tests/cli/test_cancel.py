"""`flashnorm cancel` and `flashnorm audit --cancel`: output, JSON and exit statuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from flashnorm.cli import cancel as cancel_command
from flashnorm.cli.main import main
from tests.checkpoint.test_fold import SMALL, saved

DOCUMENT = Path(__file__).parents[2] / "docs" / "cancel.md"


def _status(*arguments: object) -> int:
    with pytest.raises(SystemExit) as stopped:
        main([*map(str, arguments)])
    return int(stopped.value.code or 0)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("cancel"), Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=8)))


def test_it_says_what_it_did(qwen3: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _status("cancel", qwen3) == 0
    out, err = capsys.readouterr()
    first, second = out.splitlines()
    assert first == "0 norms dropped, 2 more for a part of the readers, 7 left alone"
    assert second.startswith("relative error of the fp64 logits at 64 positions: ")
    assert err.startswith(f"cancel: opening {qwen3}\n")


def test_json(qwen3: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _status("cancel", qwen3, "--json", "--quiet", "--tokens", 8) == 0
    table = json.loads(capsys.readouterr().out)
    assert table["partial"]["model.layers.0.input_layernorm"] == ["model.layers.0.self_attn.v_proj"]
    assert table["passed"]
    assert 0 < table["error"] <= 1e-10
    assert "before any linear layer" in table["skipped"]["model.layers.0.self_attn.q_norm"]


def test_logits_that_move_are_a_failed_check(
    qwen3: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cancel_command, "TOLERANCE", 0.0)
    assert _status("cancel", qwen3, "--quiet") == 1
    assert "the logits of" in capsys.readouterr().err


def test_approximate_says_what_each_norm_may_lose(
    qwen3: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, text = shutil.copytree(qwen3, tmp_path / "model"), tmp_path / "text"
    words = {f"w{i}": i for i in range(SMALL["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)
    text.write_text(" ".join(words))
    options = ("--approximate", "--text", text, "--quiet")
    assert _status("cancel", folder, *options, "--limit", 1, "--json") == 0
    table = json.loads(capsys.readouterr().out)
    norms = [f"model.layers.{n}.self_attn.{name}" for n in (0, 1) for name in ("q_norm", "k_norm")]
    assert table["approximate"] == list(table["bounds"]) == norms
    assert all(0 < bound["bound"] < 1 for bound in table["bounds"].values())
    assert table["error"] > 1e-10  # which would fail the check of an exact cancellation
    assert table["passed"]
    assert _status("cancel", folder, *options, "--limit", 0) == 0
    out = capsys.readouterr().out
    assert out.count("kept exact") == 4
    assert "its own epsilon" not in out


def test_approximate_needs_a_text_and_a_tokenizer(
    qwen3: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _status("cancel", qwen3, "--approximate", "--quiet") == 2
    assert "give both --approximate and --text" in capsys.readouterr().err
    (tmp_path / "text").write_text("words")
    assert _status("cancel", qwen3, "--approximate", "--text", tmp_path / "text", "--quiet") == 2
    assert "has no tokenizer" in capsys.readouterr().err
    assert _status("cancel", qwen3, "--approximate", "--text", tmp_path / "none", "--quiet") == 2
    assert "cannot be read as UTF-8 text" in capsys.readouterr().err


def test_no_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _status("cancel", tmp_path / "none", "--quiet") == 2
    assert capsys.readouterr().err.startswith("flashnorm: ")


def test_the_audit_names_free_and_kept_readers(qwen3: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _status("audit", qwen3, "--cancel", "--json", "--quiet") == 0
    rows = {row["norm"]: row for row in json.loads(capsys.readouterr().out)["cancellations"]}
    first = rows["model.layers.0.input_layernorm"]
    assert first["cancellable"] == "partial"
    assert first["free"] == ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"]
    assert [(k["reader"], k["channels"]) for k in first["kept"]] == [("model.layers.0.self_attn.v_proj", None)]
    assert first["absorbed_by"] == ["model.layers.0.self_attn.q_norm", "model.layers.0.self_attn.k_norm"]
    assert {row["cancellable"] for name, row in rows.items() if "input" not in name} == {"no"}
    assert all(row["reason"] for row in rows.values())


def test_layers_that_are_alike_share_a_row(qwen3: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _status("audit", qwen3, "--cancel", "--quiet") == 0
    out = capsys.readouterr().out
    (row,) = (line for line in out.partition("cancellable norms")[2].splitlines() if "partial" in line and "│" in line)
    assert "model.layers.0-1.input_layernorm" in row
    assert "0 of 9 norms can be dropped, 2 more for a part of their readers" in out
    assert _status("audit", qwen3, "--quiet") == 0
    assert "cancellable norms" not in capsys.readouterr().out


def test_the_example_of_the_documentation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = DOCUMENT.read_text()
    code = text.split("```python\n")[1].split("```")[0].replace("qwen3-tiny", str(tmp_path / "tiny"))
    exec(code, {})
    capsys.readouterr()
    assert _status("cancel", tmp_path / "tiny", "--quiet") == 0
    assert f"    {capsys.readouterr().out.splitlines()[0]}\n" in text
    assert _status("audit", tmp_path / "tiny", "--cancel", "--json", "--quiet") == 0
    rows = {row["norm"]: row for row in json.loads(capsys.readouterr().out)["cancellations"]}
    (kept,) = rows["model.layers.0.input_layernorm"]["kept"]
    assert kept["reason"].partition(" [")[0] in text
