"""What an operation of two streams does to a language model that runs through it: what it reads, and what it writes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.small_decoder import Source, described, evenly, new_decoder, train
from benchmarks.two_stream_model import CapturedDecoding, Operation, through
from flashnorm.passes.fold import fold
from flashnorm.sites.audit import audit
from flashnorm.sites.types import Site
from flashnorm.verify.determinism import busy
from flashnorm.verify.engines.engine import Begin, Engine
from flashnorm.verify.engines.model import model_engine
from flashnorm.verify.lag import check_lag
from flashnorm.verify.language import decode_greedily, repetition
from flashnorm.verify.outcome import Outcome
from flashnorm.verify.perplexity import compare_perplexity, token_losses
from flashnorm.verify.races.capture import NotCaptured
from flashnorm.verify.rounding import Rounding, measure_rounding

EAGER, LOADED, CAPTURED = "launched one by one", "launched one by one, under load", "captured"


@dataclass(frozen=True)
class Extent:
    """How much is done. `seconds` of training, or at most `most` steps; `windows` (count, tokens) of perplexity.

    `written` tokens after each of `prompts` (count, tokens); `steps` of the lag check; under load `loaded` times less.
    """

    seconds: float = 18.0
    most: int | None = None
    windows: tuple[int, int] = (64, 512)
    prompts: tuple[int, int] = (2, 64)
    written: int = 192
    steps: int = 128
    loaded: int = 4


@dataclass(frozen=True)
class Bench:
    """A trained model whose norms have no gain, and what its copies through operations are asked.

    `engine`: the model as it is, which answers afresh. `about`: what it is, for a record.
    """

    folded: nn.Module
    sites: tuple[Site, ...]
    engine: Engine
    rounding: Rounding
    windows: Tensor
    prompts: Tensor
    ids: Tensor
    extent: Extent
    about: dict[str, Any]

    @property
    def device(self) -> torch.device:
        return self.windows.device

    def model(self, make: Callable[[], Operation]) -> nn.Module:
        """A copy of the model, an operation of `make` for each of its norms and linears."""
        return through(self.folded, self.sites, make)

    def read(self, model: nn.Module) -> Tensor:
        """Its losses (tokens,) fp64 on the held-out windows, each read whole and by itself."""
        return token_losses(model, self.windows, 1).cpu()

    def write(self, begin: Begin, fewer: int = 1) -> Tensor:
        """Greedy text (prompts, tokens)."""
        return decode_greedily(replace(self.engine, begin=begin), self.prompts, self.extent.written // fewer)

    def lag(self, begin: Begin, fewer: int = 1) -> Outcome:
        """The lag check of what `begin` decodes, against what the model as it is computes afresh."""
        ids = self.ids[: self.extent.steps // fewer]
        return check_lag(replace(self.engine, begin=begin), ids, self.rounding)

    def begins(self, model: nn.Module) -> dict[str, Begin]:
        """How sequences of `model` begin, by how their steps run."""
        length = max(self.extent.steps, self.extent.prompts[1] + self.extent.written)
        eager = model_engine(model, "a copy").begin
        if eager is None:
            raise SystemExit("the copy of the model cannot decode; nothing was measured")
        return {EAGER: eager, CAPTURED: lambda rows: CapturedDecoding(model, length)}


def prepare(device: torch.device, source: Source, extent: Extent, **sizes: Any) -> Bench:
    """Train a decoder of `sizes` on `device`, fold it in fp32, and round its weights to bf16."""
    model = new_decoder(device, **sizes)
    windows = evenly(source.held_out, *extent.windows).to(device)
    untrained = token_losses(model, windows, 1)
    about = described(model, source, train(model, source.read, extent.seconds, most=extent.most))
    about |= {"untrained_perplexity": float(untrained.mean().exp()), "dtype": "bfloat16"}
    fold(model)
    for parameter in model.parameters():  # not the frequencies of the rotary embedding
        parameter.data = parameter.data.to(torch.bfloat16)
    engine = model_engine(model, "the model as it is", lambda: copy.deepcopy(model).cpu())
    ids = evenly(source.held_out, 1, extent.steps)[0]
    rounding = measure_rounding(engine, ids[None])
    prompts = evenly(source.held_out, *extent.prompts)
    return Bench(model, tuple(audit(model).sites), engine, rounding, windows, prompts, ids, extent, about)


@dataclass(frozen=True)
class Expected:
    """What the sound form reads and writes: losses (tokens,) and, by how steps run, texts (prompts, tokens)."""

    losses: Tensor
    texts: dict[str, Tensor]


def expected(bench: Bench, sound: Callable[[], Operation]) -> Expected:
    model = bench.model(sound)
    return Expected(bench.read(model), {steps: bench.write(begin) for steps, begin in bench.begins(model).items()})


def reading(bench: Bench, model: nn.Module, sound: Expected) -> dict[str, Any]:
    """Its perplexity on the held-out text, against the sound form's."""
    return asdict(compare_perplexity(sound.losses, bench.read(model)))


def writing(bench: Bench, model: nn.Module, sound: Expected, *, loaded: bool) -> list[dict[str, Any]]:
    """The lag check and greedy text for every way to run the steps; `loaded`: under load as well, and less of it."""
    begins = bench.begins(model)
    rows = [_written(bench, EAGER, begins[EAGER], sound.texts[EAGER])]
    if loaded:
        with busy(bench.device):
            rows.append(_written(bench, LOADED, begins[EAGER], sound.texts[EAGER], bench.extent.loaded))
    return [*rows, _written(bench, CAPTURED, begins[CAPTURED], sound.texts[CAPTURED])]


def _written(bench: Bench, steps: str, begin: Begin, wanted: Tensor, fewer: int = 1) -> dict[str, Any]:
    try:
        lag, text = bench.lag(begin, fewer), bench.write(begin, fewer)
    except NotCaptured as reason:
        return {"steps": steps, "refused": str(reason)}
    figures = {figure.name: figure.value for figure in lag.figures}
    about = {"passed": lag.passed, "meaning": lag.meaning, "steps": len(lag.series["position"]), "figures": figures}
    return {"steps": steps, "refused": "", "lag": about, "text": compared(text, wanted[:, : text.shape[1]])}


def compared(text: Tensor, wanted: Tensor) -> dict[str, Any]:
    """Both (prompts, tokens). `same`: tokens before the first difference, of each prompt; `repeats`: see
    `flashnorm.verify.language.repetition`; `first` and `first_wanted`: the first prompt's text."""
    same = [int((one == other).long().cumprod(0).sum()) for one, other in zip(text, wanted, strict=True)]
    written, sound = ([repetition(row) for row in rows.tolist()] for rows in (text, wanted))
    return {
        "tokens": text.shape[1],
        "same": same,
        "repeats": sum(written) / len(written),
        "repeats_wanted": sum(sound) / len(sound),
        "first": _string(text[0]),
        "first_wanted": _string(wanted[0]),
    }


def _string(tokens: Tensor) -> str:
    return bytes(tokens.tolist()).decode(errors="replace")
