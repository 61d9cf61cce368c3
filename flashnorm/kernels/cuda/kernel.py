"""From a source file of this folder and its macros to a function on a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import torch

from flashnorm.kernels.cuda.compiler import cubin
from flashnorm.kernels.cuda.driver import load

ARCHITECTURE = "sm_90a"  # wgmma and setmaxnreg are Hopper's own
HALF = {torch.bfloat16: "bf16", torch.float16: "f16"}


@dataclass(frozen=True)
class Kernel:
    """A loaded function, the shared memory that a block of it takes, and how many blocks run at once, one on each
    multiprocessor."""

    function: Any
    shared: int
    multiprocessors: int


def source(
    names: tuple[str, ...], macros: Mapping[str, object], dtype: torch.dtype, activation: str | None, extra: str = ""
) -> str:
    """The text to compile: macros, `extra`, what all kernels share, and the files of these names, the last a .cu."""
    gate = {"GATED": int(activation is not None), "ACTIVATION": (activation or "linear").upper()}
    element = {"IS_BF16": int(dtype == torch.bfloat16), "HALF": f'"{HALF[dtype]}"'}
    definitions = "".join(f"#define {macro} {value}\n" for macro, value in (gate | element | dict(macros)).items())
    *headers, main = names
    files = [*(f"{name}.cuh" for name in ("primitives", *headers)), f"{main}.cu"]
    return definitions + extra + "".join(map(_read, files))


@cache
def kernel(text: str, name: str, shared: int, device: torch.device) -> Kernel:
    """Compile `text` if need be and load its function `name`, for blocks of `shared` bytes of shared memory."""
    function = load(cubin(text, ARCHITECTURE), name, shared, device)
    return Kernel(function, shared, torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def _read(name: str) -> str:
    return resources.files("flashnorm.kernels.cuda").joinpath(name).read_text(encoding="utf-8")
