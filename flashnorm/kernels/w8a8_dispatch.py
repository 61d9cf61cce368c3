"""Which way to multiply by a weight in eight bits: the tuned table of the device, and rules for what it does not list.

One row, and a few where split K does not run, go through a matrix-vector product that makes the codes itself, up to 64
through split K on matrix units, which was tuned on Hopper GPUs alone, and more through the library's matmul. The table
is read as that of `dispatch.py` is; every configuration in it was compared with fp64.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

import torch
from torch import Tensor

from flashnorm.kernels.dispatch import WIDEST_ROW, triton_runs
from flashnorm.kernels.layout import addressable
from flashnorm.kernels.w8a8_configs import CodesGemv, CodesSplitK, Config, Library, Reference, from_dict

HOPPER = (9, 0)
FEW_ROWS = 4  # through the matrix-vector product, where split K does not run: on Hopper that took less for four rows
MOST_ROWS = 8  # that one of its programs goes through
MATRIX_ROWS = 64
CODES = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8}
_NAMES = {dtype: name for name, dtype in CODES.items()}
_TABLE_BY_CAPABILITY = {HOPPER: "hopper-eight-bits.json"}
CAPABILITY = {torch.float8_e4m3fn: (8, 9), torch.int8: (8, 0)}  # from which on a GPU multiplies such codes
# (codes, K, N) to rows to configuration.
Table = Mapping[tuple[str, int, int], Mapping[int, Config]]


@dataclass(frozen=True)
class Problem:
    """What decides how an operation runs: (m, k) x in `dtype` and (n, k) `codes` of a weight.

    `addressable`: the bulk copy engine reaches the weight. `capability`: that of the GPU, (0, 0) where Triton does not
    run.
    """

    m: int
    k: int
    n: int
    dtype: torch.dtype
    codes: torch.dtype
    addressable: bool
    capability: tuple[int, int]


def problem_of(x: Tensor, weight: Tensor) -> Problem:
    """The problem that (M, K) `x` and (N, K) codes pose."""
    return Problem(
        m=x.shape[0],
        k=x.shape[1],
        n=weight.shape[0],
        dtype=x.dtype,
        codes=weight.dtype,
        addressable=addressable(weight),
        capability=torch.cuda.get_device_capability(x.device) if triton_runs(x.device) else (0, 0),
    )


def choose(problem: Problem) -> Config:
    """The configuration that runs `problem`; `Reference` where nothing else does."""
    listed = _shipped(problem.capability).get((_NAMES[problem.codes], problem.k, problem.n), {})
    rows = min((rows for rows in listed if rows >= problem.m), default=0)
    tuned = [listed[rows]] if rows else []
    one, few = ([matrix_vector(problem.k)] * (problem.m <= rows) for rows in (1, FEW_ROWS))
    ways = (*tuned, *one, split_k(problem), *few, Library(), matrix_vector(problem.k), Reference())
    return next(config for config in ways if fits(config, problem))


def fits(config: Config, problem: Problem) -> bool:
    """Whether `config` can run `problem` at all."""
    if isinstance(config, Reference):
        return True
    if problem.capability < CAPABILITY[problem.codes] or problem.k > WIDEST_ROW:
        return False
    match config:
        case CodesGemv():
            return problem.m <= MOST_ROWS
        case CodesSplitK():
            return problem.m <= MATRIX_ROWS and _reachable(problem) and problem.capability == HOPPER
        case Library():
            scales = problem.codes == torch.int8 or problem.capability == HOPPER or problem.dtype != torch.float32
            return _reachable(problem) and problem.n % 16 == 0 and scales


def _reachable(problem: Problem) -> bool:
    """Whether rows of codes are requests of whole 16 bytes."""
    return problem.addressable and problem.k % 16 == 0


def matrix_vector(k: int) -> CodesGemv:
    """Rows of x held by 32 values a thread, and 64 to 128 codes of the weight."""
    warps = max(1, min(16, -(-k // 1024)))
    return CodesGemv(4 if k <= 16384 else 2, 1 << (warps - 1).bit_length())


def split_k(problem: Problem) -> CodesSplitK:
    """Programs enough to keep a large GPU's memory busy, each with at least 512 of K to stream."""
    tiles = -(-problem.n // 64)
    return CodesSplitK(split=max(1, min(8, 264 // tiles, problem.k // 512)), prefetch=512)


@cache
def _shipped(capability: tuple[int, int]) -> Table:
    """The configurations for the GPUs of one compute capability; empty where none are shipped."""
    name = _TABLE_BY_CAPABILITY.get(capability)
    if name is None:
        return {}
    return parse(resources.files("flashnorm.kernels").joinpath("tables", name).read_text(encoding="utf-8"))


def parse(text: str) -> Table:
    """A table's entries. Raises `ValueError`, `KeyError` or `TypeError` where the text is no table."""
    table: dict[tuple[str, int, int], dict[int, Config]] = {}
    for entry in json.loads(text)["entries"]:
        table.setdefault((entry["codes"], entry["k"], entry["n"]), {})[entry["m"]] = from_dict(entry["config"])
    return table
