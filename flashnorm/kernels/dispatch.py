"""Which way to run a deferred norm: the tuned table of the device, and rules for what it does not list.

A table holds, for each weight shape, the fastest configuration at a few numbers of rows; every one of them was first
compared with fp64. A shape between two listed numbers of rows takes the next larger one's. A shape that is not listed
follows rules carried over from the listed ones and not timed itself: matrix-vector for one row, split K up to 64 rows,
and beyond that the fast norm before the library's matmul. Two entries of the Hopper table, (4096, 6144) with 256 and
4096 rows, were set by hand to the fast norm: the tuner's choice there was within its spread, and lost in later runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.util import find_spec

import torch
from torch import Tensor

from flashnorm.kernels.configs import (
    Config,
    DeferredGemm,
    Fused,
    Gemv,
    NormLinear,
    Reference,
    SplitK,
    from_dict,
)
from flashnorm.kernels.layout import addressable

FEW_ROWS = 8
MATRIX_ROWS = 64
WIDEST_ROW = 32768  # the norm kernel keeps a row in registers: 128 fp32 values for each of 256 threads
_TABLE_BY_CAPABILITY = {(9, 0): "hopper.json"}
_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Problem:
    """What decides how an operation runs. `addressable`: the bulk copy engine reaches x, weight and output."""

    m: int
    k: int
    n: int
    dtype: torch.dtype
    gained: bool
    addressable: bool


def problem_of(x: Tensor, weight: Tensor, gain: Tensor | None, out: Tensor) -> Problem:
    """The problem that (M, K) `x`, (N, K) `weight` and (M, N) `out` pose."""
    return Problem(
        m=x.shape[0],
        k=x.shape[1],
        n=weight.shape[0],
        dtype=x.dtype,
        gained=gain is not None,
        addressable=all(map(addressable, (x, weight, out))),
    )


def choose(problem: Problem, device: torch.device) -> Config:
    """The configuration that runs `problem` on `device`; `Reference` where Triton cannot run."""
    if not triton_runs(device) or problem.dtype == torch.float64 or problem.k > WIDEST_ROW:
        return Reference()
    return _choose(problem, _table(torch.cuda.get_device_capability(device)))


def _choose(problem: Problem, table: Mapping[tuple[int, int], Mapping[int, Config]]) -> Config:
    if problem.dtype in _HALF:
        listed = table.get((problem.k, problem.n), {})
        rows = min((rows for rows in listed if rows >= problem.m), default=max(listed, default=0))
        if rows and fits(listed[rows], problem):
            return listed[rows]
    if problem.m == 1:
        return Gemv()
    if problem.m <= MATRIX_ROWS and fits(SplitK(), problem):
        return SplitK(split=_split(problem))
    return Gemv() if problem.m <= FEW_ROWS else NormLinear(warps=4 if problem.k <= 8192 else 8)


def fits(config: Config, problem: Problem) -> bool:
    """Whether `config` can run `problem` at all."""
    match config:
        case Gemv():
            return problem.m <= FEW_ROWS
        case SplitK():
            return problem.m <= MATRIX_ROWS and problem.dtype in _HALF and problem.addressable and not problem.gained
        case DeferredGemm():
            return problem.dtype in _HALF and problem.addressable and not problem.gained
        case Fused():
            return not problem.gained
    return True


def _split(problem: Problem) -> int:
    """Programs along K: enough tiles of 64 outputs for a large GPU, each with at least 512 of K to stream."""
    tiles = -(-problem.n // 64)
    return max(1, min(8, 192 // tiles, problem.k // 512))


@cache
def triton_runs(device: torch.device) -> bool:
    """Whether Triton is installed and can compile for `device`: tensor cores with bf16 need compute capability 8."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def _table(capability: tuple[int, int]) -> Mapping[tuple[int, int], Mapping[int, Config]]:
    """(K, N) to rows to configuration, for the GPUs of one compute capability; empty where none is shipped."""
    name = _TABLE_BY_CAPABILITY.get(capability)
    if name is None:
        return {}
    text = resources.files("flashnorm.kernels").joinpath("tables", name).read_text(encoding="utf-8")
    table: dict[tuple[int, int], dict[int, Config]] = {}
    for entry in json.loads(text)["entries"]:
        table.setdefault((entry["k"], entry["n"]), {})[entry["m"]] = from_dict(entry["config"])
    return table
