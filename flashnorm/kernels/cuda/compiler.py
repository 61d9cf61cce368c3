"""CUDA C++ to machine code for this GPU, once: the result is kept in the user's cache folder."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from cuda.bindings import nvrtc

from flashnorm.errors import KernelError
from flashnorm.kernels.cache import cache_folder


def cubin(source: str, architecture: str) -> bytes:
    """Machine code of `source` for `architecture` ("sm_90a"), from the cache or compiled, which takes some seconds.

    Raises `KernelError` with the compiler's log where the source does not compile.
    """
    key = hashlib.sha256(f"{_version()} {architecture}\n{source}".encode()).hexdigest()
    path = cache_folder() / "cubin" / f"{key}.cubin"
    try:
        return path.read_bytes()
    except OSError:  # not there yet, or no such folder can be
        code = _compile(source, architecture)
        _keep(path, code)
        return code


def _keep(path: Path, code: bytes) -> None:
    """Written under another name first: several processes may compile the same kernel at once."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(code)
        os.replace(file.name, path)
    except OSError:
        return  # a cache that cannot be written costs time, not correctness


def _compile(source: str, architecture: str) -> bytes:
    program = _checked(nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, None, None))
    try:
        options = [
            f"--gpu-architecture={architecture}".encode(),
            b"--std=c++17",
            b"--device-as-default-execution-space",
        ]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = bytearray(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
            _checked(nvrtc.nvrtcGetProgramLog(program, log))
            raise KernelError(f"a kernel does not compile for {architecture}: {log.decode(errors='replace').strip()}")
        code = bytearray(_checked(nvrtc.nvrtcGetCUBINSize(program)))
        _checked(nvrtc.nvrtcGetCUBIN(program, code))
        return bytes(code)
    finally:
        _checked(nvrtc.nvrtcDestroyProgram(program))


def _version() -> str:
    return "{}.{}".format(*_checked(nvrtc.nvrtcVersion()))


def _checked(answer):  # type: ignore[no-untyped-def]  # NVRTC's answers are tuples: a status, then what was asked for
    status, *values = answer
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise KernelError(f"NVRTC failed: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)
