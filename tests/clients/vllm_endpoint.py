"""The black-box checks on stock vLLM on the CPU: `python -m tests.clients.vllm_endpoint VLLM_PYTHON CHECKPOINT`.

The server must pass, and each proxy that plants a fault before it must be told apart by the check that is meant for it.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from flashnorm.verify.endpoint.suite import endpoint_battery
from tests.verify.endpoint import server

_NAME = "checked"
_PATIENCE = 300.0  # seconds until the server answers
_FAULTS = {
    server.late_by_one_step: "lag",
    server.late_once: "lag",
    server.other_among_others: "batching",
    server.other_every_time: "determinism",
}


@contextmanager
def vllm(python: str, folder: str) -> Iterator[str]:
    """A stock server of a checkpoint folder; its address up to `/v1`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ("--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "512", "--served-model-name", _NAME)
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, *options]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1"}
    command += ["--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(command, env=environment, stdout=sys.stderr)  # what is printed here are verdicts
    try:
        _wait_for(f"http://127.0.0.1:{port}/health", process)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait()


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(url):
                return
        except OSError:
            time.sleep(1)
    raise SystemExit("vLLM did not start")


def main(python: str, folder: str) -> int:
    wrong = 0
    with vllm(python, folder) as url:
        for level in ("quick", "standard"):
            report = endpoint_battery(url, _NAME, reference=folder, level=level)
            print(f"stock vLLM, {level}: {report.verdict}", flush=True)
            wrong += not report.passed or any(outcome.skipped for outcome in report.outcomes)
        for fault, check in _FAULTS.items():
            with server.serving(server.proxy(url, fault)) as bad:
                report = endpoint_battery(bad, _NAME, reference=folder, level="quick")
            print(f"{fault.__name__}: {report.verdict}", flush=True)
            wrong += check not in [outcome.name for outcome in report.failures]
    return wrong


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
