"""What the hardware allows: measured ceilings, and the time below which an operation cannot go."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashnorm.kernels.timing import time_side_by_side

_MATRIX = 8192
_READ_BYTES = 4 << 30


@dataclass(frozen=True)
class Ceilings:
    """Read bandwidth in bytes per microsecond and bf16 matmul rate in operations per microsecond, both measured."""

    bytes_per_us: float
    flops_per_us: float

    def limit(self, m: int, k: int, n: int, itemsize: int) -> float:
        """Microseconds that (m, k) x times (n, k) weight takes at least: every operand once, or every operation."""
        moved = (m * k + n * k + m * n) * itemsize
        return max(moved / self.bytes_per_us, 2 * m * n * k / self.flops_per_us)


def measure_ceilings(device: torch.device) -> Ceilings:
    """Read 4 GiB once per sample, and multiply 8192³ in bf16, on random data."""
    data = torch.randn(_READ_BYTES // 4, device=device)
    left, right = (torch.randn(_MATRIX, _MATRIX, device=device).to(torch.bfloat16) for _ in range(2))
    timings = time_side_by_side({"read": lambda _: data.sum(), "matmul": lambda _: left @ right}, 1, 15)
    return Ceilings(_READ_BYTES / timings["read"].median, 2 * _MATRIX**3 / timings["matmul"].median)
