"""Records: measured figures as JSON, with everything needed to know what was measured."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from flashnorm.bench.limits import Ceilings
from flashnorm.bench.op import OURS, Row, summarise
from flashnorm.kernels.configs import to_dict
from flashnorm.version import __version__

_PACKAGES = ("torch", "transformers", "triton", "flashinfer-python", "liger-kernel", "nvidia-cublas", "cuda-bindings")


def provenance(device: torch.device, command: str, commit: str | None) -> dict[str, Any]:
    """Device, driver, versions, command and time. `commit` overrides what git says, for a tree without history."""
    return {
        "command": command,
        "commit": commit or _output("git", "rev-parse", "HEAD"),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": _device_name(device),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "flashnorm": __version__,
        "packages": {name: _version(name) for name in _PACKAGES},
    }


def op_record(rows: Sequence[Row], ceilings: Ceilings, source: dict[str, Any]) -> dict[str, Any]:
    """The record of `flashnorm bench op`; times in microseconds."""
    summary = summarise(rows)
    return {
        "kind": "op",
        "provenance": source,
        "method": "CUDA graph replays, contenders taking turns, weights rotated beyond the L2 cache, bfloat16",
        "ceilings": {
            "read_bytes_per_second": ceilings.bytes_per_us * 1e6,
            "bf16_flops_per_second": ceilings.flops_per_us * 1e6,
        },
        "summary": {
            "rows": summary.rows,
            "won": summary.won,
            "geometric_mean_over_best_baseline": round(summary.ratio, 4),
            "not_slower_than_linear_alone": summary.free,
        },
        "rows": [_row(row) for row in rows],
    }


def write(record: dict[str, Any], path: Path) -> None:
    """Write the record, whole or not at all: what the file held before may be part of it."""
    text = json.dumps(record, indent=1) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        file.write(text)
    os.chmod(file.name, 0o644)  # a temporary file is its owner's alone
    os.replace(file.name, path)


def _row(row: Row) -> dict[str, Any]:
    return {
        "m": row.m,
        "k": row.k,
        "n": row.n,
        "activation": row.activation,
        "config": to_dict(row.config),
        "error_in_bounds": round(row.error, 4),
        "limit": round(row.limit, 3),
        "won": row.won,
        "medians": {name: round(timing.median, 3) for name, timing in row.timings.items()},
        "over_best_baseline": round(row.timings[OURS].median / row.best, 4),
        "samples": {name: [round(value, 3) for value in timing.samples] for name, timing in row.timings.items()},
    }


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{os.cpu_count()} cores, {platform.machine()}"


def _output(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() or None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
