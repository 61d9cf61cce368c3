"""Does folding before quantisation cost or gain quality? Perplexity of SmolLM2-135M, quantised with and without a fold.

    python -m benchmarks.quantise RECORD.json [--tokens 8192] [--dithered]

Each scheme rounds the weights of every linear of the decoder layers to nearest, with symmetric scales; norms, embedding
and head stay as they are. "Folded" folds the gains into the weights first. Both read the same tokens in fp32, and the
difference of their losses comes with a block bootstrap interval (`flashnorm.verify.language`).

The interval knows only how the text varies. A fold also makes every weight round anew, which moves the perplexity of
any model by chance, up or down. So a control rounds the weights anew without a fold: the same scheme with all steps
0.5% and 1% longer. A difference proves something of the fold where its interval leaves zero out and it is larger than
the control's two differences.

The weights are the values of a 4-bit file (Q4_1, blocks of 32 with a scale and a least value each), widened. No scheme
here has that grid, but weights on a grid without the fold, and on none with it, may favour the former. `--dithered`
answers that, for int4: every weight of the source is first moved at random within its cell of the grid, which leaves a
worse model without one. The record is written after every scheme.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import flashnorm
from examples.assets import sotu_text
from flashnorm.bench.record import provenance, write
from flashnorm.kernels.codes import LARGEST, quantize_rows
from flashnorm.verify.language import bootstrap_interval
from flashnorm.verify.perplexity import token_losses
from flashnorm.verify.samples import make_samples
from flashnorm.verify.subject import open_subject
from tests.conftest import _imported

LARGEST_CODE = {"int8": LARGEST[torch.int8], "int4": 7.0, "e4m3": LARGEST[torch.float8_e4m3fn]}
STEPS = (1.005, 1.01)  # of the control
_BLOCK = 32  # inputs that share a step in Q4_1
_ACTIVATIONS = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn}


@dataclass(frozen=True)
class Scheme:
    """Weights in `kind`, with a scale for each `group`: "tensor", "channel" (an output), or a number of inputs.

    `activations`: the inputs of the linears too, in the same kind, with a dynamic scale for each token.
    """

    kind: str
    group: str | int
    activations: bool = False


SCHEMES = (
    *(Scheme(kind, group) for kind in ("int8", "int4") for group in ("tensor", "channel", 64)),
    *(Scheme(kind, "channel", activations=True) for kind in ("int8", "e4m3")),
)


def dither(model: nn.Module) -> None:
    """Move the weights of the layers' linears at random within half a step of the grid of Q4_1, the same each time."""
    generator = torch.Generator().manual_seed(0)
    for linear in linears_of(model):
        blocks = linear.weight.data.unflatten(1, (-1, _BLOCK))
        step = (blocks.amax(-1, keepdim=True) - blocks.amin(-1, keepdim=True)) / 15
        moved = blocks + (torch.rand(blocks.shape, generator=generator) - 0.5) * step
        linear.weight.data = moved.view_as(linear.weight)


def rounded(weight: Tensor, scheme: Scheme, stretch: float = 1.0) -> Tensor:
    """The values that the codes of `weight` (N, K) stand for; `stretch` makes every step longer."""
    if isinstance(scheme.group, int):
        parts = weight.unflatten(1, (-1, scheme.group))
        magnitude = parts.abs().amax(-1, keepdim=True)
    else:
        parts = weight
        magnitude = weight.abs().amax() if scheme.group == "tensor" else weight.abs().amax(1, keepdim=True)
    scale = (magnitude / LARGEST_CODE[scheme.kind] * stretch).clamp(min=torch.finfo(weight.dtype).tiny)
    quotient = parts / scale
    codes = quotient.to(torch.float8_e4m3fn).to(weight.dtype) if scheme.kind == "e4m3" else quotient.round()
    return (codes * scale).view_as(weight)


@contextmanager
def quantised(model: nn.Module, scheme: Scheme, stretch: float = 1.0) -> Iterator[None]:
    """The linears of the decoder layers compute with what codes stand for; afterwards they are as before."""
    linears = linears_of(model)
    originals = [linear.weight.data for linear in linears]
    hooks = []
    for linear in linears:
        linear.weight.data = rounded(linear.weight.data, scheme, stretch)
        if scheme.activations:
            hook = partial(_round_input, dtype=_ACTIVATIONS[scheme.kind])
            hooks.append(linear.register_forward_pre_hook(hook))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for linear, original in zip(linears, originals, strict=True):
            linear.weight.data = original


def linears_of(model: Any) -> list[nn.Linear]:
    """Those of the decoder's layers: all but the head."""
    return [module for module in model.get_decoder().layers.modules() if isinstance(module, nn.Linear)]


def _round_input(module: nn.Module, inputs: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    rows = inputs[0].flatten(0, -2)
    codes, scale = quantize_rows(rows, dtype)
    return ((codes.to(rows.dtype) * scale[:, None]).view_as(inputs[0]), *inputs[1:])


def row(scheme: Scheme, source: nn.Module, folded: nn.Module, losses: Callable[[nn.Module], Tensor]) -> dict[str, Any]:
    """Perplexities under one scheme, and differences of the mean losses: of the fold, and of the control."""

    def asked(model: nn.Module, stretch: float = 1.0) -> Tensor:
        with quantised(model, scheme, stretch):
            return losses(model)

    plain, first = asked(source), asked(folded)
    low, high = bootstrap_interval(first - plain)
    return {
        "weights": scheme.kind,
        "group": scheme.group,
        "activations": scheme.activations,
        "perplexity_quantised": perplexity(plain),
        "perplexity_folded_then_quantised": perplexity(first),
        "difference": {"mean": float((first - plain).mean()), "low": low, "high": high},
        "control_differences": [float((asked(source, stretch) - plain).mean()) for stretch in STEPS],
    }


def perplexity(losses: Tensor) -> float:
    """Of the losses (tokens,)."""
    return float(losses.mean().exp())


def measure(record: Path, tokens: int, *, dithered: bool) -> None:
    """Every scheme in turn; of a dithered source those of int4."""
    command = f"python -m benchmarks.quantise --tokens {tokens}" + (" --dithered" if dithered else "")
    source_line = provenance(torch.device("cpu"), command, None)
    schemes = [scheme for scheme in SCHEMES if scheme.kind == "int4" or not dithered]
    folder = _imported(torch.float32)
    source, folded = (flashnorm.load(folder, dtype=torch.float32) for _ in range(2))
    if dithered:
        dither(source)
        dither(folded)
    flashnorm.fold(folded)
    samples = make_samples(open_subject(folder), sotu_text(), 1, tokens)
    assert samples.windows is not None
    losses = partial(token_losses, windows=samples.windows, prefix=samples.prefix)
    exact = [losses(model) for model in (source, folded)]
    table: dict[str, Any] = {
        "kind": "quantise",
        "complete": False,
        "provenance": source_line,
        "model": "SmolLM2-135M-Instruct, widened from Q4_1" + (" and dithered" if dithered else ""),
        "tokens": len(exact[0]),
        "interval": 0.999,
        "perplexity": perplexity(exact[0]),
        "perplexity_folded": perplexity(exact[1]),
        "rows": [],
    }
    for scheme in schemes:
        table["rows"].append(row(scheme, source, folded, losses))
        table["complete"] = len(table["rows"]) == len(schemes)
        write(table, record)
        print(table["rows"][-1], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--dithered", action="store_true", help="take the source's own 4-bit grid away first")
    arguments = parser.parse_args()
    measure(arguments.record, arguments.tokens, dithered=arguments.dithered)


if __name__ == "__main__":
    main()
