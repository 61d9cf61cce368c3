"""An operation under PyTorch's CUDA sanitizer, in a process of its own: `python -m ... module:function`.

The sanitizer watches every operation that the dispatcher sees, ours included since they are registered with
`torch.library`, and stops at the first unordered pair of accesses to one allocation. It must be on before anything runs
on the device, hence the process.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

from flashnorm.errors import Refusal

_TIMEOUT = 300  # seconds: importing torch and compiling kernels, not the operation
_WORD = "CSAN detected a possible data race"


def sanitizer_findings(target: str) -> str:
    """What the sanitizer says of `target`, "module:function" of no arguments that uses a CUDA device; "" for nothing.

    Raises `Refusal` where the run fails in another way.
    """
    done = subprocess.run(
        [sys.executable, "-m", __name__, target],
        env={**os.environ, "TORCH_CUDA_SANITIZER": "1"},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT,
        check=False,
    )
    if _WORD in done.stderr:
        return done.stderr[done.stderr.index(_WORD) :].strip()
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise Refusal(f"{target} could not be run under the sanitizer: {last}")
    return ""


def _main(target: str) -> None:
    module, _, name = target.partition(":")
    import torch

    getattr(importlib.import_module(module), name)()
    torch.cuda.synchronize()


if __name__ == "__main__":
    _main(sys.argv[1])
