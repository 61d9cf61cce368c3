"""Which torch `make` installs, decided from pip's own plan."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tools import install_torch

CPU_PLAN = {"install": [{"metadata": {"name": "torch"}}, {"metadata": {"name": "sympy"}}]}
CUDA_PLAN = {"install": [{"metadata": {"name": "torch"}}, {"metadata": {"name": "nvidia-cublas"}}]}


def _commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, plan: dict, gpu: bool, reachable: bool = True
) -> list[str]:
    """The installing commands, in order: "pip torch", "pip uv", "uv torch"."""
    done = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess:
        if "--dry-run" in command:
            return subprocess.CompletedProcess(command, 0, stdout=json.dumps(plan).encode())
        tool = "uv" if "--torch-backend=cpu" in command else "pip"
        done.append(f"{tool} {'uv' if command[-1] == 'uv' else 'torch'}")
        return subprocess.CompletedProcess(command, 0 if reachable or tool == "pip" else 2)

    monkeypatch.setattr(install_torch.subprocess, "run", run)
    monkeypatch.setattr(install_torch.shutil, "which", lambda name: "/usr/bin/nvidia-smi" if gpu else None)
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("# pins\ntokenizers==0.23.3\ntorch==2.13.0\n")
    install_torch.main(constraints)
    return done


def test_pip_installs_a_cpu_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _commands(tmp_path, monkeypatch, plan=CPU_PLAN, gpu=False) == ["pip torch"]


def test_cuda_is_for_machines_with_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _commands(tmp_path, monkeypatch, plan=CUDA_PLAN, gpu=True) == ["pip torch"]
    assert _commands(tmp_path, monkeypatch, plan=CUDA_PLAN, gpu=False) == ["pip uv", "uv torch"]


def test_where_the_cpu_build_cannot_be_reached_the_other_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = _commands(tmp_path, monkeypatch, plan=CUDA_PLAN, gpu=False, reachable=False)
    assert done == ["pip uv", "uv torch", "pip torch"]
    assert "CPU build of torch cannot be reached" in capsys.readouterr().err


def test_the_pin_is_the_one_of_constraints() -> None:
    assert install_torch.pinned_torch(Path(__file__).parents[2] / "constraints.txt") == "torch==2.13.0"
