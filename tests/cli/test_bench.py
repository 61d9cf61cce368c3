"""`flashnorm bench` where it cannot run: refused before anything is written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flashnorm.cli.main import main


@pytest.mark.skipif(torch.cuda.is_available(), reason="here it would run, for minutes")
@pytest.mark.parametrize("what", ["op", "fp8"])
def test_without_a_gpu_it_is_refused(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", what, "--record", str(tmp_path / "record.json")])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("flashnorm: ")
    assert "needs a CUDA GPU" in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
