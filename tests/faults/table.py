"""What catches each planted fault: `python -m tests.faults.table` measures, records and writes it to docs/battery.md.

Unit test: the logits after one token, alone, by a freshly initialised model (its gains are one), compared with the
sound model's by `torch.allclose(rtol=1e-2, atol=1e-2)`. Perplexity: of SmolLM2-135M with the fault planted, on 512
tokens of text in two windows that are read whole, as is usual; caught where it moves by one percent or more. Battery:
the checks that fail on a tiny model.
"""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flashnorm.verify.engines.engine import Engine
from flashnorm.verify.engines.model import model_engine
from flashnorm.verify.forward import logits_of
from flashnorm.verify.levels import EXTENTS, Level
from flashnorm.verify.parity import Reference
from flashnorm.verify.races.check import check_races
from flashnorm.verify.rounding import measure_rounding
from flashnorm.verify.suite import CHECKS, Question
from tests.faults.catalogue import FAULTS, Fault
from tests.faults.two_streams import FAULTS as RACES
from tests.verify.tiny import VOCABULARY, offset, tiny_model

ROOT = Path(__file__).parents[2]
RECORD, PAGE = ROOT / "docs" / "faults.json", ROOT / "docs" / "battery.md"
PERPLEXITY_MOVES = 0.01
_MARK = re.compile(r"(<!-- faults:begin -->\n).*?(<!-- faults:end -->)", re.DOTALL)
_RUN = ("parity", "causality", "lag", "batching", "slots")


def failing(fault: Fault, only: tuple[str, ...] = _RUN) -> list[str]:
    """The checks of the battery that the fault fails, on a tiny model in fp32."""
    return [name for name in only if not CHECKS[name](question(fault)).passed]


def question(fault: Fault) -> Question:
    """What the battery asks of a tiny model with the fault planted."""
    source = fault.source(tiny_model(fault.family))
    engine = engine_of(fault, source)
    stock = model_engine(source, "source", lambda: copy.deepcopy(source))
    planted = fault.plant(source)
    reference = Reference(stock, lambda: copy.deepcopy(source), lambda: copy.deepcopy(planted))
    extent = EXTENTS[Level.quick]
    ids = torch.randint(VOCABULARY, (extent.steps,), generator=torch.Generator().manual_seed(0))
    return Question(engine, ids, measure_rounding(stock, ids[None, : extent.sample]), extent, reference)


def engine_of(fault: Fault, source: nn.Module) -> Engine:
    planted = fault.plant(source)
    return fault.wrap(model_engine(planted, fault.name, lambda: copy.deepcopy(source)), planted)


@torch.inference_mode()
def unit_test_passes(fault: Fault) -> bool:
    """One token, one row, gains of one, new buffers, as unit tests go."""
    source = tiny_model(fault.family)
    for name, parameter in source.named_parameters():
        if "norm" in name:
            parameter.data.fill_(1 - offset(source))
    if fault.source.__module__ == "tests.faults.numbers" and "adapter" in fault.source.__name__:
        source = fault.source(source)  # the adapter is what is tested; activations of usual size are what tests take
    token = torch.tensor([[7]])
    planted = fault.plant(source)  # asked once, through nothing that asks it before
    return torch.allclose(logits_of(planted, token), logits_of(source, token), rtol=1e-2, atol=1e-2)


@torch.inference_mode()
def perplexity_change(fault: Fault, model: nn.Module, windows: Tensor) -> float:
    """Relative change of the perplexity of `model` on `windows` (count, length) by the fault, each read whole."""
    source = fault.source(model) if fault.source.__name__ == "with_adapter" else model
    before, after = (_loss(engine, windows) for engine in (model_engine(source, "source"), engine_of(fault, source)))
    return float((after - before).expm1())


def _loss(engine: Engine, windows: Tensor) -> Tensor:
    losses = [
        torch.nn.functional.cross_entropy(engine.fresh(window[None])[0, :-1].double(), window[1:]) for window in windows
    ]
    return torch.stack(losses).mean()


def measure() -> dict[str, Any]:
    """Everything, for the record."""
    from transformers import AutoTokenizer

    import flashnorm
    from examples.assets import sotu_text
    from tests.conftest import _imported

    folder = _imported(torch.float32)
    model = flashnorm.load(folder)
    text = sotu_text()
    encoded = AutoTokenizer.from_pretrained(folder)(text[len(text) // 4 :][:8000])["input_ids"]
    windows = torch.tensor(encoded[:512]).view(2, 256)
    record: dict[str, Any] = {}
    for fault in FAULTS:
        change = None if fault.family != "llama" else perplexity_change(fault, model, windows)
        record[fault.name] = {
            "unit_test_passes": unit_test_passes(fault),
            "perplexity_change": change if change is None or change == change else "nan",
            "checks": failing(fault),
        }
    for name, make in RACES.items():
        inputs = (torch.empty(4, 48, dtype=torch.bfloat16), torch.empty(32, 48, dtype=torch.bfloat16), 1e-5)
        caught = not check_races(make(), inputs).passed
        record[f"two streams: {name}"] = {
            "unit_test_passes": None,
            "perplexity_change": None,
            "checks": ["races"] if caught else [],
        }
    return record


def table(record: dict[str, Any]) -> str:
    """The page's table."""
    lines = ["| planted fault | unit test | perplexity of SmolLM2 | checks that catch it |", "|---|---|---|---|"]
    for name, row in record.items():
        unit = {True: "passes", False: "fails", None: "needs a GPU"}[row["unit_test_passes"]]
        checks = ", ".join(row["checks"])
        lines.append(f"| {name} | {unit} | {_change(row['perplexity_change'])} | {checks} |")
    return "\n".join(lines) + "\n"


def _change(change: float | str | None) -> str:
    if change is None:
        return "not measured"
    if isinstance(change, str):
        return "not a number"
    return f"{change:+.2%}" if abs(change) < 10 else f"times {1 + change:.3g}"


def with_table(page: str) -> str:
    """The page's text with the table between its marks."""
    text = table(json.loads(RECORD.read_text()))
    return _MARK.sub(lambda match: match.group(1) + text + match.group(2), page)


if __name__ == "__main__":
    RECORD.write_text(json.dumps(measure(), indent=1) + "\n")
    PAGE.write_text(with_table(PAGE.read_text()))
