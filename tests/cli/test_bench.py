"""`flashnorm bench`: refused where it cannot run, before anything is written; what it prints and keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from flashnorm.bench import fp8, record
from flashnorm.bench.limits import Ceilings
from flashnorm.bench.op import BARE, OURS
from flashnorm.cli.main import main
from flashnorm.kernels.timing import Timing


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


def test_fp8_prints_its_table_and_keeps_its_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command around the measurement, which is replaced; `tests/bench/test_fp8.py` runs that."""
    times = {BARE: 8.0, fp8.FUSED: 11.0, OURS: 10.0}
    rows = [fp8.Row(m, 64, 32, 0.5, {name: Timing((t,) * 3) for name, t in times.items()}, 2.0) for m in (1, 16)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(record, "_device_name", lambda device: "a GPU")
    monkeypatch.setattr(fp8, "require_matmul", lambda device, dtype: None)
    monkeypatch.setattr(fp8, "ceilings_of", lambda device, dtype: Ceilings(4e6, 1.5e9))
    monkeypatch.setattr(fp8, "measure", lambda ceilings, device, shapes, static, dtype: iter(rows))
    monkeypatch.setattr(fp8, "operands_of", lambda shape, device, dtype: None)
    monkeypatch.setattr(fp8, "launched", lambda call: ["a kernel"])
    path = tmp_path / "record.json"
    _done("bench", "fp8", "--record", str(path), "--commit", "abc")
    printed = capsys.readouterr()
    assert "a GPU: Not above the fused norm and quantisation, beyond both spreads, in 2 of 2 rows" in printed.out
    assert "0.909" in printed.out
    assert "K=64 N=32 M=16: 10.00 us, fused 11.00 us" in printed.err
    kept = json.loads(path.read_text())
    assert (kept["provenance"]["commit"], kept["provenance"]["command"]) == ("abc", "flashnorm bench fp8")
    assert set(kept["kernels"]) == {BARE, fp8.FUSED, OURS, f"{OURS}, M=1", f"{OURS}, M=16"}
    assert kept["kernels"][OURS] == ["a kernel"]
    assert len(kept["rows"]) == 2
    _done("bench", "fp8", "--json", "--quiet")
    assert json.loads(capsys.readouterr().out)["summary"]["rows"] == 2
    _done("bench", "fp8", "--int8", "--json", "--quiet")
    integer = json.loads(capsys.readouterr().out)
    assert integer["kind"] == "int8"
    assert integer["ceilings"]["int8_flops_per_second"] == 1.5e15
    assert integer["provenance"]["command"] == "flashnorm bench fp8 --int8"


def test_fp8_refuses_the_static_baseline_in_int8(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "fp8", "--int8", "--static"])
    assert stopped.value.code == 2
    assert "--static has no int8" in capsys.readouterr().err


def _done(*arguments: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    assert stopped.value.code == 0
