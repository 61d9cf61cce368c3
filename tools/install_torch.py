"""Install torch into the environment that runs this file, without gigabytes of CUDA on a machine without a GPU.

Usage: `.venv/bin/python tools/install_torch.py CONSTRAINTS`.

The package index's torch for Linux depends on the CUDA libraries. Where pip is about to install those and there is no
GPU, torch comes from its own CPU builds, which `uv` knows where to find; where pip resolves to a CPU build anyway (a
local mirror, another platform), pip installs it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

CUDA_PREFIXES = ("nvidia-", "cuda-")


def _pip(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pip", "install", *arguments]


def pinned_torch(constraints: Path) -> str:
    """The line of `constraints` that pins torch."""
    lines = constraints.read_text().splitlines()
    return next(line for line in lines if line.startswith("torch=="))


def brings_cuda(report: dict) -> bool:
    """Whether a `pip install --report` plan holds CUDA libraries."""
    names = (item["metadata"]["name"].lower() for item in report["install"])
    return any(name.startswith(CUDA_PREFIXES) for name in names)


def main(constraints: Path) -> None:
    torch = pinned_torch(constraints)
    plan = subprocess.run(
        _pip("--quiet", "--dry-run", "--report", "-", "-c", str(constraints), torch),
        check=True,
        stdout=subprocess.PIPE,
    )
    if brings_cuda(json.loads(plan.stdout)) and not shutil.which("nvidia-smi"):
        subprocess.run(_pip("--quiet", "uv"), check=True)
        uv = [sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable, "--torch-backend=cpu"]
        if subprocess.run([*uv, torch]).returncode == 0:
            return
        print("The CPU build of torch cannot be reached; installing the index's own, with CUDA.", file=sys.stderr)
    subprocess.run(_pip("-c", str(constraints), torch), check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
