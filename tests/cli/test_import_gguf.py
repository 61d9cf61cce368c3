"""`flashnorm import-gguf`: output, JSON and exit statuses."""

from __future__ import annotations

import builtins
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flashnorm.cli.main import main
from tests.checkpoint.gguf_writing import tiny_llama, write_gguf

_NO_BARS = "TQDM_DISABLE"


def _status(*arguments: object) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(["import-gguf", *map(str, arguments)])
    return int(stopped.value.code or 0)


def test_it_says_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_gguf(tmp_path / "model.gguf", tiny_llama())
    assert _status(file, tmp_path / "out", "--dtype", "float32") == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert "95,168 parameters in float32, with tokenizer and chat template" in out
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_gguf(tmp_path / "model.gguf", tiny_llama())
    assert _status(file, tmp_path / "out", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["out"] == str(tmp_path / "out")
    assert report["dtype"] == "bfloat16"


def test_a_refusal_is_one_line_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _status(tmp_path / "nothing.gguf", tmp_path / "out") == 2
    opening, error = capsys.readouterr().err.splitlines()
    assert opening.startswith("import-gguf: opening ")
    assert error.startswith("flashnorm: ")
    assert not (tmp_path / "out").exists()


def test_quiet_means_silence(tmp_path: Path) -> None:
    """In a process of its own: the bars are those of Transformers, which decides about them when it is imported."""
    file = write_gguf(tmp_path / "model.gguf", tiny_llama())
    own = {key: value for key, value in os.environ.items() if key != _NO_BARS}  # commands run above set it
    command = [sys.executable, "-m", "flashnorm", "import-gguf", file, tmp_path / "out", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=own)
    assert done.stderr == ""
    assert done.stdout.startswith(f"{tmp_path / 'out'}: llama")


@pytest.mark.parametrize(("options", "bars"), [(["--quiet"], False), (["--json"], False), ([], True)])
def test_who_asks_for_no_bars_is_heard_before_transformers_is_imported(
    options: list[str], bars: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the same means as in the process above. Here it was imported before, so that there are bars to be seen."""
    monkeypatch.setenv(_NO_BARS, "")  # to be put back as it was
    monkeypatch.delenv(_NO_BARS)
    heard: list[bool] = []
    plain_import = builtins.__import__

    def watched(name: str, *rest: Any) -> Any:
        if name == "flashnorm.checkpoint.gguf_import":
            heard.append(_NO_BARS in os.environ)
        return plain_import(name, *rest)

    monkeypatch.setattr(builtins, "__import__", watched)
    file = write_gguf(tmp_path / "model.gguf", tiny_llama())
    assert _status(file, tmp_path / "out", *options) == 0
    assert heard == [not bars]
    opening = "" if "--quiet" in options else f"import-gguf: opening {file}\n"
    err = capsys.readouterr().err
    assert err.startswith(opening)
    assert len(err) > len(opening)
