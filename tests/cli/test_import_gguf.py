"""`flashnorm import-gguf`: output, JSON and exit statuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashnorm.cli.main import main
from tests.checkpoint.gguf_writing import tiny_llama, write_gguf


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


def test_quiet_means_silence_and_json_no_bars(tmp_path: Path) -> None:
    """In a process of its own: the bars are those of Transformers, which decides about them when it is imported."""
    file = write_gguf(tmp_path / "model.gguf", tiny_llama())
    own = {key: value for key, value in os.environ.items() if key != "TQDM_DISABLE"}  # commands run above set it
    opening = f"import-gguf: opening {file}\n"
    for options, expected in (["--quiet"], ""), (["--json"], opening), ([], None):
        out = tmp_path / f"out{''.join(options)}"
        command = [sys.executable, "-m", "flashnorm", "import-gguf", str(file), str(out), *options]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=own)
        assert done.stderr == expected if expected is not None else len(done.stderr) > len(opening)
