"""Which way to run a deferred norm: the tuned table of the device, and rules for what it does not list.

A table holds, for each weight shape, the fastest configuration at a few numbers of rows; every one of them was first
compared with fp64. A shape between two listed numbers of rows takes the next larger one's. A shape that is not listed
is tuned when it is first used, on GPUs without a shipped table (see `first_use.py`); elsewhere it follows rules carried
over from the listed ones and not timed itself: one row goes through a matrix-vector kernel, up to 64 rows through split
K, or up to 8 of a gated form through the kernel for few rows, many through the warp-specialised GEMM where it runs, and
anything else through the fast norm before the library's matmul. What `flashnorm tune` finds goes to a table of this
machine, which comes before the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.util import find_spec

import torch
from torch import Tensor

from flashnorm.kernels import first_use
from flashnorm.kernels.configs import (
    Config,
    DeferredGemm,
    Fused,
    Gemv,
    NormLinear,
    Reference,
    Skinny,
    SplitK,
    Streamed,
    TmaGemm,
)
from flashnorm.kernels.cuda.memory import SHARED_MEMORY, skinny_bytes, tiles_of
from flashnorm.kernels.layout import addressable
from flashnorm.kernels.learned import Table, parse, read, table_path

FEW_ROWS = 8
MATRIX_ROWS = 64
MANY_ROWS, MANY_OUTPUTS = 4096, 960  # from here on every listed shape took this one
MANY = TmaGemm(128, 256, 2, 4, "inside", 0, 16)
STREAMED = Streamed(2048, 6, 8, prefetch=0, rows=4, on_the_way=4, lead=6)  # two launches in a multiprocessor
STREAMED_FROM = 64 << 20  # elements of W, from which a ring of bulk copies reads faster than many small programs
WIDEST_ROW = 32768  # the norm kernel keeps a row in registers: 128 fp32 values for each of 256 threads
SKINNY_ROWS = 32  # with more, the library's matmul was faster
MANY_TILES = 264  # of 64 outputs: two blocks for each multiprocessor, without splitting K
_TABLE_BY_CAPABILITY = {(9, 0): "hopper.json"}
_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Problem:
    """What decides how an operation runs: (m, k) x and (m, n) output.

    `addressable`: the bulk copy engine reaches x, weight and output. `gated`: the output is act(gate) ⊙ up. `hopper`:
    the kernels in CUDA C++ can run.
    """

    m: int
    k: int
    n: int
    dtype: torch.dtype
    gained: bool
    addressable: bool
    gated: bool = False
    hopper: bool = False


def problem_of(
    x: Tensor,
    weight: Tensor,
    gain: Tensor | None,
    out: Tensor,
    *,
    activation: str | None = None,
) -> Problem:
    """The problem that (M, K) `x`, `weight` of (N, K), or (2N, K) with an `activation`, and (M, N) `out` pose."""
    return Problem(
        m=x.shape[0],
        k=x.shape[1],
        n=out.shape[1],
        gated=activation is not None,
        hopper=cuda_runs(x.device),
        dtype=x.dtype,
        gained=gain is not None,
        addressable=all(map(addressable, (x, weight, out))),
    )


def choose(problem: Problem, device: torch.device) -> Config:
    """The configuration that runs `problem` on `device`; `Reference` where Triton cannot run."""
    if not triton_runs(device) or problem.dtype == torch.float64 or problem.k > WIDEST_ROW:
        return Reference()
    table = _table(device)
    if _is_new(problem, table) and first_use.wanted(shipped=bool(_shipped(torch.cuda.get_device_capability(device)))):
        if first_use.tune(problem.m, problem.k, problem.n, problem.gated, device):
            forget_tables()
        table = _table(device)
    return _choose(problem, table)


def _is_new(problem: Problem, table: Table) -> bool:
    """Whether the table says nothing of this weight at about this number of rows."""
    listed = table.get((problem.k, problem.n, problem.gated), {})
    return problem.dtype in _HALF and not problem.gained and first_use.tuned_rows(problem.m) not in listed


def _choose(problem: Problem, table: Table) -> Config:
    if problem.dtype in _HALF:
        listed = table.get((problem.k, problem.n, problem.gated), {})
        rows = min((rows for rows in listed if rows >= problem.m), default=max(listed, default=0))
        if rows and fits(listed[rows], problem):
            return listed[rows]
    many = [MANY] * (problem.m >= MANY_ROWS and problem.n >= MANY_OUTPUTS)
    if problem.gated:
        return skinny_for(problem) or _first_fit(problem, STREAMED, *many, _norm_linear(problem))
    if problem.m == 1:
        return _first_fit(problem, *[STREAMED] * (problem.k * problem.n >= STREAMED_FROM), Gemv())
    if problem.m <= MATRIX_ROWS and fits(SplitK(), problem):
        return SplitK(split=_split(problem))
    return Gemv() if problem.m <= FEW_ROWS else _first_fit(problem, *many, _norm_linear(problem))


def skinny_for(problem: Problem) -> Skinny | None:
    """How the kernel for few rows runs this problem; None where it does not, or was slower than the library's matmul.

    The gated form was faster than the other ways for at most eight rows. K is split where the outputs do not occupy all
    multiprocessors.
    """
    if problem.gated:
        config, most = Skinny(128, 1, 12), FEW_ROWS
    elif problem.n >= 64 * MANY_TILES:
        config, most = Skinny(64, 1, 4), SKINNY_ROWS
    else:
        config, most = Skinny(32, 4, 12 if problem.m <= FEW_ROWS else 6), SKINNY_ROWS
    return config if 1 < problem.m <= most and fits(config, problem) else None


def _first_fit(problem: Problem, *configs: Config) -> Config:
    return next(config for config in configs if fits(config, problem))


def _norm_linear(problem: Problem) -> NormLinear:
    return NormLinear(warps=4 if problem.k <= 8192 else 8)


def fits(config: Config, problem: Problem) -> bool:
    """Whether `config` can run `problem` at all."""
    copied = problem.dtype in _HALF and problem.addressable and not problem.gained
    match config:
        case Gemv():
            return problem.m <= FEW_ROWS and not problem.gated
        case SplitK():
            return problem.m <= MATRIX_ROWS and copied and not problem.gated
        case DeferredGemm():
            return copied and not problem.gated
        case Fused():
            return not problem.gained and not problem.gated
        case TmaGemm():
            return copied and problem.hopper and not (problem.gated and config.block_n % 16)
        case Streamed():
            return copied and problem.hopper and problem.m == 1 and problem.k % 8 == 0
        case Skinny():
            small = problem.m <= MATRIX_ROWS and skinny_bytes(config, tiles_of(problem.m)) <= SHARED_MEMORY
            return copied and problem.hopper and small
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
def cuda_runs(device: torch.device) -> bool:
    """Whether the kernels in CUDA C++ run on `device`: Hopper, and NVIDIA's Python bindings to compile and launch."""
    if device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    return find_spec("cuda") is not None and find_spec("cuda.bindings") is not None


@cache
def _table(device: torch.device) -> Table:
    """The shipped configurations for the device's compute capability, and over them those found on this machine."""
    found = read(table_path(device))
    shipped = _shipped(torch.cuda.get_device_capability(device))
    return {shape: {**shipped.get(shape, {}), **found.get(shape, {})} for shape in shipped.keys() | found.keys()}


def forget_tables() -> None:
    """Have the tables read again: one on this machine has changed."""
    _table.cache_clear()


@cache
def _shipped(capability: tuple[int, int]) -> Table:
    """The configurations for the GPUs of one compute capability; empty where none are shipped."""
    name = _TABLE_BY_CAPABILITY.get(capability)
    if name is None:
        return {}
    return parse(resources.files("flashnorm.kernels").joinpath("tables", name).read_text(encoding="utf-8"))
