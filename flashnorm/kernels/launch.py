"""Programmatic dependent launch (PDL), and the one rule that keeps it safe.

With PDL a kernel starts while the kernel before it still runs. The rule, which the first kernel of every operation
obeys:

    a kernel announces its dependents (`gdc_launch_dependents`) only after its own wait (`gdc_wait`).

So when a kernel starts, everything before its predecessor is complete and visible. It may read all that its predecessor
does not write, at once; what its predecessor writes, only after the wait. The first kernel of an operation knows
nothing about its predecessor, so it waits before it reads anything: weights too may have just been written, unless its
caller promises that they are static. Bringing lines into the L2 cache is allowed before the wait, because the L2 is
where writes become visible.

The kernels of a decode step, `cuda/streamed.cu` where its weight is static, and the kernel that adds up what split K
has left announce before their wait: each of them, and each first kernel of an operation, reads nothing but static
weights, or what its operation has found complete, before its own wait, and what it waits for has waited in turn. So
kernels may gather behind a running one, and begin with what they have in registers or shared memory when it ends.

When attention over several rows starts, whose qkv an operation or the library has written, the kernels before that
operation are complete: it reads the step's slots and positions, and the cache as earlier steps left it, before its own
wait; and from the L2, since a wait is what renews a multiprocessor's L1.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs

HOPPER = (9, 0)


@cache
def supports_pdl(device: torch.device) -> bool:
    """Whether kernels on `device` can be launched before their predecessor ends: compute capability 9 and up."""
    if device.type != "cuda" or knobs.runtime.interpret or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= HOPPER


def launch_options(pdl: bool) -> dict[str, Any]:
    """Keyword arguments of a kernel launch; the interpreter does not know `launch_pdl`."""
    return {"launch_pdl": True} if pdl else {}


@triton.jit
def prefetch_rows(base, rows, row_stride, start, stop, COUNT: tl.constexpr):
    """Ask the L2 for `COUNT` elements (a power of two) of each row, from `start`, none beyond `stop`.

    One request, the least, brings 128 bytes: 64 elements of 16 bits, 128 of 8; wider elements are asked for in part.
    """
    STEP: tl.constexpr = 128 if base.dtype.element_ty.primitive_bitwidth == 8 else 64
    columns = tl.minimum(start + tl.arange(0, COUNT // STEP) * STEP, stop - 1)
    addresses = base + rows.to(tl.int64)[:, None] * row_stride + columns[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [addresses.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_weight(weight, stride, N, BYTES: tl.constexpr, THREADS: tl.constexpr):
    """Ask the L2 for the first `BYTES` (a multiple of 16) of each of the N rows, shared out among all programs.

    For kernels that precede a matmul and leave the memory idle. `THREADS` is the program's number of threads, so that
    each issues its own requests; base and row stride must be multiples of 16 bytes.
    """
    programs = tl.num_programs(0)
    for first in range(0, N, programs * THREADS):
        row = first + tl.arange(0, THREADS) * programs + tl.program_id(0)
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $3; mov.u32 $0, 0; }",
            "=r,l,r,r",
            [(weight + row.to(tl.int64) * stride).to(tl.int64), (row < N).to(tl.int32), BYTES],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
