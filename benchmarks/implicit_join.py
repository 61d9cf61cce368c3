"""An implicit join of two streams on a GPU: what the checks say of it, and what unit tests and perplexity do.

    python -m benchmarks.implicit_join --record RECORD.json [--commit C] [--runs 100]

Norm and linear as an operation of two streams (`tests.faults.two_streams`), in four forms: joined soundly; never
joined; joined when the result is made already, for the scale alone or for the product as well. Nothing is planted but
the missing order: whether a read comes too early is up to the device. Each form goes through

- the race check, again and again: which of its probes accuse it, and within how many seconds;
- PyTorch's CUDA sanitizer, in a process of its own;
- unit tests as authors of kernels write them: `torch.allclose` of one call on an idle device, in many sizes;
- a small decoder, trained here, all of whose norms and linears run through it: its perplexity on held-out text, read
  window by window, against that of the same model through the sound form; and the lag check and greedy text, its steps
  launched one by one, so in company of other work, and captured in a CUDA graph (`benchmarks.two_stream_text`).

The record is written after every form; `complete` says whether all are there. Exit status 1: a fault was not caught in
every run, or the sound form was accused.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.small_decoder import standard_library
from benchmarks.two_stream_model import Operation
from benchmarks.two_stream_text import Bench, Expected, Extent, expected, prepare, reading, writing
from flashnorm.bench.clock import synchronize
from flashnorm.bench.op import ROWS, WEIGHTS, WIDE
from flashnorm.bench.record import provenance, write
from flashnorm.errors import Refusal
from flashnorm.kernels import reference
from flashnorm.verify.outcome import plain
from flashnorm.verify.races.check import check_races
from flashnorm.verify.races.sanitizer import sanitizer_findings
from tests.faults.two_streams import BothJoinedAfterwards, ImplicitJoin, JoinedAfterwards, TwoStreams

EPS = 1e-5
RACED = (16, 576, 960)  # rows, width and outputs of the operation whose races are looked for
PROBES = {"unordered_pairs": "clocks", "wrong_when_delayed": "delays", "unjoined_in_graph": "graph"}  # by their figures
_ODD = (2, 3, 17, 127)  # rows of unit tests beside the usual ones
SIZES = tuple((rows, *weight) for weight in (*WEIGHTS, WIDE) for rows in sorted((*ROWS, *_ODD)))
_DTYPES = (torch.bfloat16, torch.float16)
_PLACE = re.compile(r'File "[^"]*?([^/"]+/[^/"]+)"')  # in a trace: a file and its folder say enough


@dataclass(frozen=True)
class Form:
    """One way to join two streams. `runs`: of the race check, at most. `loaded`: text is also written under load."""

    name: str
    make: Callable[[], Operation]
    sound: bool = False
    runs: int = 20
    loaded: bool = False

    @property
    def target(self) -> str:
        """What the sanitizer's process runs."""
        return f"benchmarks.implicit_join:run_{self.name.replace(' ', '_')}"


SOUND = Form("sound", TwoStreams, sound=True, runs=100, loaded=True)
FORMS = (
    SOUND,
    Form("implicit join", ImplicitJoin, runs=100, loaded=True),
    Form("join after the result", JoinedAfterwards),
    Form("both joins after the result", BothJoinedAfterwards),
)


def operands(rows: int, width: int, outputs: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """x (rows, width) and a weight (outputs, width) whose products are of the size of one."""
    generator = torch.Generator(device).manual_seed(0)
    x, weight = (torch.randn(n, width, generator=generator, device=device) for n in (rows, outputs))
    return x.to(dtype), (weight / width**0.5).to(dtype)


def race_runs(make: Callable[[], Operation], runs: int, device: torch.device) -> dict[str, Any]:
    """Each run is of a new operation. `meaning`: what the first run that accuses it says."""
    inputs, rows, meaning = (*operands(*RACED, torch.bfloat16, device), EPS), [], ""
    for _ in range(runs):
        start = time.monotonic()
        outcome = check_races(make(), inputs, reference.rms_linear)
        seconds = time.monotonic() - start
        by = [PROBES[figure.name] for figure in outcome.failures]
        rows.append({"caught": not outcome.passed, "by": by, "seconds": round(seconds, 4)})
        meaning = meaning or outcome.meaning
    return {"runs": rows, "meaning": meaning}


def unit_tests(
    make: Callable[[], Operation], device: torch.device, sizes: Sequence[tuple[int, int, int]]
) -> list[dict[str, Any]]:
    """One call of a new operation on random inputs, the device idle before it, for every size and dtype."""
    rows = []
    for dtype in _DTYPES:
        for size in sizes:
            x, weight = operands(*size, dtype, device)
            expected, operation = reference.rms_linear(x, weight, EPS), make()
            synchronize(device)
            passed = torch.allclose(operation(x, weight, EPS), expected, rtol=1e-2, atol=1e-2)
            rows.append({"size": list(size), "dtype": str(dtype).removeprefix("torch."), "passed": passed})
    return rows


def sanitized(form: Form) -> dict[str, Any]:
    """The sanitizer's finding in its own words but for folders, "" for none; or why it could not be asked."""
    try:
        return {"finding": _PLACE.sub(r'File "\1"', sanitizer_findings(form.target)), "refused": ""}
    except Refusal as reason:
        return {"finding": None, "refused": str(reason)}


def measured(form: Form, bench: Bench, sound: Expected, runs: int) -> dict[str, Any]:
    """One form through everything but the sanitizer."""
    model = bench.model(form.make)
    return {
        "name": form.name,
        "sound": form.sound,
        "races": race_runs(form.make, min(runs, form.runs), bench.device),
        "unit_tests": unit_tests(form.make, bench.device, SIZES),
        "perplexity": reading(bench, model, sound),
        "decoding": writing(bench, model, sound, loaded=form.loaded),
    }


def measure(record: Path, device: torch.device, runs: int, source: dict[str, Any], extent: Extent) -> dict[str, Any]:
    """Everything, in the file at `record` as well. The sanitizer, which looks at no time, runs beside the training."""
    start = time.monotonic()
    with ThreadPoolExecutor(len(FORMS)) as pool:
        findings = [pool.submit(sanitized, form) for form in FORMS]
        bench = prepare(device, standard_library(), extent)
    print(f"trained: {bench.about}", flush=True)
    sound = expected(bench, SOUND.make)
    forms: list[dict[str, Any]] = []
    for form, finding in zip(FORMS, findings, strict=True):
        forms.append(measured(form, bench, sound, runs) | {"sanitizer": finding.result()})
        table = plain(
            {
                "kind": "implicit-join",
                "complete": len(forms) == len(FORMS),
                "seconds": round(time.monotonic() - start, 1),
                "provenance": source,
                "model": bench.about,
                "forms": forms,
            }
        )
        write(table, record)
        print(f"{form.name}: {_said(forms[-1])}", flush=True)
    return table


def as_promised(table: dict[str, Any]) -> bool:
    """Whether every run accused every fault, and none the sound form."""
    return all(run["caught"] is not form["sound"] for form in table["forms"] for run in form["races"]["runs"])


def _said(form: dict[str, Any]) -> str:
    caught = [run["caught"] for run in form["races"]["runs"]]
    passed = [test["passed"] for test in form["unit_tests"]]
    return (
        f"accused in {sum(caught)} of {len(caught)} runs, {sum(passed)} of {len(passed)} unit tests pass, perplexity "
        f"moves by {form['perplexity']['relative_difference']}"
    )


def _three_calls(make: Callable[[], Operation]) -> None:
    operation, inputs = make(), operands(*RACED, torch.bfloat16, torch.device("cuda"))
    for _ in range(3):
        operation(*inputs, EPS)


run_sound = partial(_three_calls, TwoStreams)
run_implicit_join = partial(_three_calls, ImplicitJoin)
run_join_after_the_result = partial(_three_calls, JoinedAfterwards)
run_both_joins_after_the_result = partial(_three_calls, BothJoinedAfterwards)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--commit", default=None, help="what is measured, for a tree without history")
    parser.add_argument("--runs", type=int, default=100, help="of the race check, at most")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("streams race on a CUDA GPU, and there is none; nothing was measured")
    device = torch.device("cuda", torch.cuda.current_device())
    source = provenance(device, f"python -m benchmarks.implicit_join --runs {arguments.runs}", arguments.commit)
    raise SystemExit(0 if as_promised(measure(arguments.record, device, arguments.runs, source, Extent())) else 1)


if __name__ == "__main__":
    main()
