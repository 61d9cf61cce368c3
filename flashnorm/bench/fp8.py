"""`flashnorm bench fp8`: the norm inside the activations' scale against a fused norm and quantisation, in eight bits.

The baseline ends in the library's matmul, as ours does from some number of rows: `torch._scaled_mm` for e4m3 codes, and
for int8 codes `torch._int_mm` with our kernel that applies the scales. There is a dynamic scale for each token and one
for each output. All contenders of a shape are timed side by side, as CUDA graphs, weights cold. Nothing is timed before
its codes and its output were compared with fp64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flashnorm.bench.limits import Ceilings, measure_ceilings
from flashnorm.bench.op import BARE, REPEATS, ROWS, WEIGHTS
from flashnorm.bench.timed import OURS, TimedRow, checked_error
from flashnorm.errors import CheckFailed, DeviceError
from flashnorm.kernels.codes import LARGEST, quantize_rows, quantize_weight
from flashnorm.kernels.timing import COLD_BYTES, time_side_by_side
from flashnorm.kernels.tuning import EPS, Shape
from flashnorm.kernels.w8a8_bounds import codes_exceed, expected_rms_linear_w8a8, quotients_exceed
from flashnorm.kernels.w8a8_configs import CodesGemv
from flashnorm.kernels.w8a8_dispatch import CAPABILITY, CODES, choose, problem_of
from flashnorm.kernels.w8a8_ops import rms_linear_w8a8
from flashnorm.kernels.w8a8_products import library_product, rows_of_codes

FUSED = "fused norm-quant"
STATIC = "flashinfer, static scale"
_MATRIX = 8192
_FLOAT8 = torch.float8_e4m3fn
_HALF = torch.bfloat16  # x and y
_Call = Callable[[int], object]


@dataclass(frozen=True)
class Operands:
    """Copies, enough to keep the weights out of the cache: x (M, K) bf16, its codes and scales as the linear alone
    takes them, codes (N, K) and scales (N,) of the weight, out (M, N) bf16. Call i uses the i-th of each."""

    x: tuple[Tensor, ...]
    codes: tuple[Tensor, ...]
    scale: tuple[Tensor, ...]
    weight: tuple[Tensor, ...]
    weight_scale: tuple[Tensor, ...]
    out: tuple[Tensor, ...]
    gain: Tensor
    static_value: float  # the scale of the largest normed magnitude of the first x, for every token
    static_scale: Tensor  # the same, (M,)

    @property
    def dtype(self) -> torch.dtype:
        """That of the codes."""
        return self.weight[0].dtype


@dataclass(frozen=True)
class Row(TimedRow):
    """Against the fused baseline."""

    @property
    def fused(self) -> float:
        return self.timings[FUSED].median

    @property
    def not_above(self) -> bool:
        """Whether our median is not above the fused baseline's by more than both spreads."""
        return self.ours - self.fused <= self.timings[OURS].spread + self.timings[FUSED].spread


@dataclass(frozen=True)
class Summary:
    """Rows, those not above the fused baseline, those whose median is not above it, and the geometric mean ratio."""

    rows: int
    not_above: int
    median_not_above: int
    ratio: float


def summarise(rows: Sequence[Row]) -> Summary:
    """The figures of a whole run."""
    return Summary(
        len(rows),
        sum(row.not_above for row in rows),
        sum(row.ours <= row.fused for row in rows),
        geometric_mean(row.ours / row.fused for row in rows),
    )


def shapes() -> list[Shape]:
    """Those of `flashnorm bench op`, without the one that asks for bandwidth alone."""
    return [Shape(m, k, n) for k, n in WEIGHTS for m in ROWS]


def require_matmul(device: torch.device, dtype: torch.dtype) -> None:
    """Raise `DeviceError` where the device has no matmul of codes of `dtype`."""
    name, needed = (next(name for name, codes in CODES.items() if codes == dtype), CAPABILITY[dtype])
    if torch.cuda.get_device_capability(device) < needed:
        raise DeviceError(
            f"{torch.cuda.get_device_name(device)} has no {name} matmul; use a GPU of compute capability "
            f"{needed[0]}.{needed[1]} or later"
        )


def measure(
    ceilings: Ceilings,
    device: torch.device,
    chosen: Sequence[Shape],
    *,
    static: bool = False,
    dtype: torch.dtype = _FLOAT8,
) -> Iterator[Row]:
    """Time the shapes one after another, with codes of `dtype`. `static`: with FlashInfer's kernel too, which has e4m3
    alone. Raises `CheckFailed`."""
    for shape in chosen:
        yield _measure_row(shape, ceilings, device, static=static, dtype=dtype)


def ceilings_of(device: torch.device, dtype: torch.dtype = _FLOAT8) -> Ceilings:
    """Read bandwidth, and the rate of a matmul of 8192³ codes with a scale for each row, on random data."""
    left, right = (quantize_rows(torch.randn(_MATRIX, _MATRIX, device=device), dtype)[0] for _ in range(2))
    scales = torch.ones(_MATRIX, device=device)
    out = torch.empty(_MATRIX, _MATRIX, dtype=_HALF, device=device)
    timing = time_side_by_side({"": lambda _: library_product(left, scales, right, scales, None, out)}, 1, 15)[""]
    return Ceilings(measure_ceilings(device).bytes_per_us, 2 * _MATRIX**3 / timing.median)


def limit(shape: Shape, ceilings: Ceilings) -> float:
    """Microseconds of reading x in bf16 and the codes of the weight and writing y in bf16, or of all operations."""
    moved = 2 * shape.m * shape.k + shape.n * shape.k + 2 * shape.m * shape.n
    return max(moved / ceilings.bytes_per_us, 2 * shape.m * shape.n * shape.k / ceilings.flops_per_us)


def launched(call: _Call) -> list[str]:
    """The names of the kernels that one call launches, in order; empty where the profiler sees none."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call(0)
        torch.cuda.synchronize()
    kernels: list[Any] = [event for event in profile.events() if event.device_type == torch.profiler.DeviceType.CUDA]
    return [kernel.name for kernel in sorted(kernels, key=lambda kernel: kernel.time_range.start)]


def kernels_of(device: torch.device, dtype: torch.dtype, *, static: bool) -> dict[str, list[str]]:
    """What each contender launches for the largest weight and 1024 rows, and ours for few rows too."""
    (k, n), found = WEIGHTS[-1], {}
    for m in (1, 16, 1024):
        for name, call in contenders(operands_of(Shape(m, k, n), device, dtype), static=static).items():
            if m == 1024 or name == OURS:
                found[name if m == 1024 else f"{name}, M={m}"] = launched(call)
    return found


def copies(shape: Shape) -> int:
    """How many copies of the operands keep the weights, one byte each, out of the cache."""
    return min(300, max(4, COLD_BYTES // (shape.k * shape.n) + 1))


def operands_of(shape: Shape, device: torch.device, dtype: torch.dtype = _FLOAT8) -> Operands:
    """Random operands; x of RMS near 1, weights of 0.02."""
    count = copies(shape)
    generator = torch.Generator(device).manual_seed(0)

    def normal(rows: int, size: float) -> Tensor:
        made = torch.randn(rows, shape.k, generator=generator, device=device)
        return made.mul_(size).to(_HALF)

    xs = tuple(normal(shape.m, 1.0) for _ in range(count))
    room = (0, 0, 0, rows_of_codes(shape.m, dtype) - shape.m)
    ready = [quantize_rows(x, dtype) for x in xs]
    weights = [quantize_weight(normal(shape.n, 0.02), dtype) for _ in range(count)]
    static = float((_normed(xs[0]).abs().max() / LARGEST[_FLOAT8]).float())
    return Operands(
        xs,
        tuple(F.pad(codes, room) if any(room) else codes for codes, _ in ready),
        tuple(scale for _, scale in ready),
        tuple(weight.codes for weight in weights),
        tuple(weight.scale for weight in weights),
        tuple(torch.empty(shape.m, shape.n, dtype=_HALF, device=device) for _ in range(count)),
        torch.ones(shape.k, dtype=_HALF, device=device),
        static,
        torch.full((shape.m,), static, device=device),
    )


def _normed(x: Tensor) -> Tensor:
    """RMSNorm of `x` in fp64; the gain is one."""
    return x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + EPS)


def contenders(operands: Operands, *, static: bool) -> dict[str, _Call]:
    """By name, each a function of the index of its operands; all but the linear alone end in the whole operation."""
    found: dict[str, _Call] = {
        BARE: lambda i: _multiply(operands, i, operands.codes[i], operands.scale[i]),
        FUSED: lambda i: _multiply(operands, i, *_norm_quant(operands, i)),
        OURS: lambda i: rms_linear_w8a8(
            operands.x[i],
            operands.weight[i],
            operands.weight_scale[i],
            EPS,
            static_weight=True,
            out=operands.out[i],
        ),
    }
    if static:
        found[STATIC] = lambda i: _multiply(operands, i, *_static(operands, i))
    return found


def _norm_quant(operands: Operands, i: int) -> tuple[Tensor, Tensor]:
    from flashnorm.bench.norm_quant import norm_quant

    x = operands.x[i]
    codes, scale = _room_for(x, operands.dtype)
    norm_quant(x, operands.gain, EPS, codes, scale)
    return codes, scale


def _room_for(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """For the codes of `x`, as many rows as the library's matmul needs, and their scales."""
    codes = x.new_empty((rows_of_codes(len(x), dtype), x.shape[1]), dtype=dtype)
    return codes, x.new_empty(len(x), dtype=torch.float32)


def _static(operands: Operands, i: int) -> tuple[Tensor, Tensor]:
    """FlashInfer's norm and quantisation with one scale for the whole tensor, known beforehand.

    Less work and less accurate: it looks for no largest magnitude.
    """
    from flashinfer.norm import rmsnorm_quant

    x, scale = operands.x[i], operands.static_scale
    codes = x.new_empty(x.shape, dtype=_FLOAT8)
    rmsnorm_quant(codes, x, operands.gain, operands.static_value, EPS)
    return codes, scale


def _multiply(operands: Operands, i: int, codes: Tensor, scale: Tensor) -> None:
    """The library's matmul, as our operation calls it."""
    library_product(codes, scale, operands.weight[i], operands.weight_scale[i], None, operands.out[i])


def _our_codes(operands: Operands, i: int) -> tuple[Tensor, Tensor]:
    """What our operation multiplies."""
    from flashnorm.kernels.quantise import quantise

    x = operands.x[i]
    codes, scale = _room_for(x, operands.dtype)
    quantise(x, EPS, codes, scale)
    return codes, scale


_CODES = {OURS: _our_codes, FUSED: _norm_quant, STATIC: _static}


def _measure_row(shape: Shape, ceilings: Ceilings, device: torch.device, *, static: bool, dtype: torch.dtype) -> Row:
    operands = operands_of(shape, device, dtype)
    calls = contenders(operands, static=static)
    errors = {name: _error(shape, name, calls[name], operands) for name in calls if name != BARE}
    timings = time_side_by_side(calls, len(operands.x), REPEATS)
    return Row(shape.m, shape.k, shape.n, errors[OURS], timings, limit(shape, ceilings))


def _error(shape: Shape, name: str, call: _Call, operands: Operands) -> float:
    """The worst error of a result, into a poisoned buffer, in units of its bound; nothing wrong is timed.

    Its codes must be the nearest to x, which dynamically are those of the norm too, and its output what they give.
    """
    x, codes = operands.x[0], _CODES[name](operands, 0)[0][: shape.m]
    static = operands.static_scale.double()[:, None] if name == STATIC else None
    far = codes_exceed(x, codes) if static is None else quotients_exceed(_normed(x) / static, codes, 2.0**-20)
    if not far <= 1:
        raise CheckFailed(f"codes of {name} for {shape} are wrong: {far:.3g} half steps from the quotient")
    weight = operands.weight[0], operands.weight_scale[0]
    units = x.is_cuda and not (name == OURS and isinstance(choose(problem_of(x, weight[0])), CodesGemv))
    expected = expected_rms_linear_w8a8(x, codes, *weight, EPS, matrix_units=units, row_scale=static)
    return checked_error(f"{name} for {shape}", call, operands.out[0], expected)
