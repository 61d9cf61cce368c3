"""The plugin in a pytest of its own: sound code passes, a fault fails the test with its sentence, nothing is slow."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = """
import torch
from torch import nn

from flashnorm.kernels import reference
from flashnorm.kernels.two_stream import overlapped_rms_linear
from flashnorm.verify.engines.plain import callable_engine

INPUTS = (torch.randn(3, 49), torch.randn(7, 49), 1e-5)
table = torch.randn(16, 16)


def test_sound_operation(flashnorm_battery):
    assert flashnorm_battery.operation(overlapped_rms_linear, INPUTS, reference.rms_linear).passed


def test_wrong_operation(flashnorm_battery):
    flashnorm_battery.operation(lambda x, w, e: reference.rms_linear(x.flip(0), w, e), INPUTS)


def test_sound_callable(flashnorm_battery):
    engine = callable_engine(lambda ids: table[ids].cumsum(1), 16)
    assert flashnorm_battery(engine, only=["causality", "batching", "determinism"]).passed


def test_wrong_callable(flashnorm_battery):
    flashnorm_battery(callable_engine(lambda ids: table[ids].flip(1).cumsum(1).flip(1), 16), only=["causality"])
"""


def test_the_fixture_judges(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "flashnorm.pytest_plugin",
            "-p",
            "no:cacheprovider",
            str(tmp_path),
        ],
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "2 failed, 2 passed" in done.stdout, done.stdout + done.stderr
    assert "batching: row " in done.stdout
    assert "causality: prefill: changing token " in done.stdout
    assert "flashnorm/verify" not in done.stdout  # the sentence alone, without our lines


def test_loading_the_plugin_imports_nothing_heavy() -> None:
    code = "import sys, flashnorm.pytest_plugin; sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_pytest_finds_it_by_its_entry_point() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert '[project.entry-points.pytest11]\nflashnorm = "flashnorm.pytest_plugin"\n' in text
