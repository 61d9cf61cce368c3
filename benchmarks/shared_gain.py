"""What one gain instead of two saves in the attention kernel of a step, in a layer with QK-norm and without rotation.

    python -m benchmarks.shared_gain RECORD.json [--repeats 50]

The same scores in both forms: gains of queries and keys apart, with keys in the cache that have theirs; and the query's
with the key's in it, with keys that have none. Before it is timed, each is compared with fp64. Needs a GPU.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashnorm.attention_algebra import shared_gains
from flashnorm.bench.record import provenance, write
from flashnorm.errors import CheckFailed
from flashnorm.kernels.decode import reference
from flashnorm.kernels.decode.shapes import AttentionShape, QkNorm
from flashnorm.kernels.timing import time_side_by_side

SHAPE = AttentionShape(40, 8, 128, 128**-0.5)  # of EXAONE 4.0 32B, in every fourth layer
CONTEXTS = (256, 2048, 8192)
TWO, ONE = "two gains", "one gain"
_EPS = 1e-6
_CALLS = 64  # in a graph
# Both round queries, keys, weights and the result alike; only what is multiplied when differs.
_LIKE = 1.5


@dataclass(frozen=True)
class Form:
    """One row's step at position `context`, in one of the two forms. `exact`: its keys in fp64, with their gain."""

    qkv: Tensor
    keys: Tensor
    values: Tensor
    norms: QkNorm
    shape: AttentionShape
    exact: Tensor

    def run(self) -> Tensor:
        """(1, heads · head_dim) of the kernel, the step's own key and value written to the cache."""
        from flashnorm.kernels.decode.attention import decode_attention, splits_for

        rows, device, length = len(self.qkv), self.qkv.device, self.keys.shape[2]
        out = self.qkv.new_empty((rows, self.shape.heads * self.shape.head_dim))
        places = torch.zeros(rows, dtype=torch.int64, device=device)
        decode_attention(
            self.qkv, self.keys, self.values, places, places + length - 1, None, out, self.shape, self.norms,
            splits=splits_for(rows, self.keys),
            arrived=torch.zeros(rows * self.shape.kv_heads, dtype=torch.int32, device=device),
        )  # fmt: skip
        return out


def forms(context: int, dtype: torch.dtype, device: torch.device, shape: AttentionShape = SHAPE) -> dict[str, Form]:
    """Random operands for a step with `context` tokens behind it; the same layer in both forms."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator)

    qkv = drawn(1, (shape.heads + 2 * shape.kv_heads) * shape.head_dim).to(device, dtype)
    gains = [(1 + 0.3 * drawn(shape.head_dim)).to(device) for _ in range(2)]
    normed = reference.rms_norm(drawn(1, shape.kv_heads, context + 1, shape.head_dim), _EPS, None).to(device)
    values = drawn(*normed.shape).to(device, dtype)
    alone, left = shared_gains(*gains, 0, interleaved=False)
    assert bool((left == 1).all())
    exact = normed.double() * gains[1].double()
    return {
        TWO: Form(qkv, exact.to(dtype), values, QkNorm(_EPS, gains[0], _EPS, gains[1]), shape, exact),
        ONE: Form(qkv, normed.to(dtype), values.clone(), QkNorm(_EPS, alone, _EPS, None), shape, exact),
    }


def errors(found: dict[str, Form]) -> dict[str, float]:
    """Each form's relative distance from fp64 of the layer as it stands. Raises `CheckFailed` where one is farther."""
    plain, length = found[TWO], found[TWO].keys.shape[2]
    wide = QkNorm(*(v.double() if isinstance(v, Tensor) else v for v in vars(plain.norms).values()))
    place = torch.zeros(1, dtype=torch.int64)
    exact, _, _ = reference.attention(
        plain.qkv.double(), plain.exact, plain.values.double(), place, place + length - 1, None, plain.shape, wide,
        stored=torch.float64,
    )  # fmt: skip
    apart = {name: float((form.run().double() - exact).norm() / exact.norm()) for name, form in found.items()}
    if not apart[ONE] <= _LIKE * apart[TWO]:
        raise CheckFailed(f"one gain is {apart[ONE]:.1e} from fp64 and two are {apart[TWO]:.1e}, so neither is timed")
    return apart


def measure(repeats: int, device: torch.device) -> dict[str, Any]:
    """The record; times in microseconds."""
    rows = []
    for context in CONTEXTS:
        found = forms(context, torch.bfloat16, device)
        apart = errors(found)
        calls = {name: lambda _, form=form: form.run() for name, form in found.items()}
        times = time_side_by_side(calls, _CALLS, repeats)
        medians = {name: round(timing.median, 3) for name, timing in times.items()}
        spreads = {name: round(timing.spread, 3) for name, timing in times.items()}
        rows.append({"context": context, "errors": apart, "medians": medians, "spreads": spreads})
        print(rows[-1], flush=True)
    return {
        "kind": "shared-gain",
        "provenance": provenance(device, f"python -m benchmarks.shared_gain --repeats {repeats}", None),
        "method": "CUDA graph replays, taking turns, one row, bfloat16, cache warm",
        "shape": vars(SHAPE),
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--repeats", type=int, default=50)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("it times a kernel on a CUDA device, and there is none")
    write(measure(arguments.repeats, torch.device("cuda")), arguments.record)


if __name__ == "__main__":
    main()
