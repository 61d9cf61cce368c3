"""This project's decode program as a contender: its steps, and its prefill."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flashnorm.bench.clock import synchronize, timed
from flashnorm.bench.decode import fill
from flashnorm.bench.e2e.contender import CHECKED, Memory, Trace
from flashnorm.bench.e2e.rows import LEAD, Row
from flashnorm.runtime.decode.program import Program
from flashnorm.runtime.decode.reading import read_spec

PROMPTS_A_RUN = 10  # a prompt takes milliseconds; their mean is one sample


class ProgramSteps:
    """`Program.advance`: every step chooses the next token and feeds it, on the device."""

    def __init__(self, model: nn.Module, row: Row, prompts: Tensor) -> None:
        """`prompts`: (batch, row.prompt). Raises what `read_spec` and `Program` raise."""
        self.tokens = row.tokens
        self._prompts = prompts
        self._active = tuple(range(len(prompts)))
        self._program, self.memory = measured_program(model, row, prompts)

    def trace(self) -> Trace:
        program, active = self._program, self._active
        fill(program, self._prompts)
        chosen = [program.chosen(active)]
        chosen += [program.advance(active) for _ in range(CHECKED - 1)]
        logits = [fill(program, self._prompts)]
        for tokens in chosen[:-1]:
            logits.append(program.decode(dict(zip(active, tokens.tolist(), strict=True))))
        ids = torch.cat([self._prompts.to(chosen[0].device), torch.stack(chosen[:-1], 1)], 1)
        return Trace(ids, torch.stack(logits, 1), torch.stack(chosen, 1))

    def run(self) -> float:
        program, active = self._program, self._active
        device = fill(program, self._prompts).device
        return timed(lambda: program.advance(active), self.tokens, device, lead=LEAD)

    def close(self) -> None:
        self._program.close()


class ProgramPrefill:
    """`Program.prefill`: a prompt into the cache, and the first token chosen."""

    def __init__(self, model: nn.Module, row: Row, prompts: Tensor) -> None:
        """`prompts`: (any number, row.prompt), one timed and all of them checked."""
        self.tokens = row.prompt
        self._prompts = prompts
        self._program, self.memory = measured_program(model, row, prompts[:1])

    def trace(self) -> Trace:
        program = self._program
        seen = [(fill(program, prompt[None]), program.chosen([0])) for prompt in self._prompts]
        logits, chosen = (torch.stack(parts) for parts in zip(*seen, strict=True))
        return Trace(self._prompts.to(logits.device), logits, chosen)

    def run(self) -> float:
        program, prompt = self._program, self._prompts[0]

        def read() -> None:
            program.free(0)
            program.prefill(0, prompt)

        device = fill(program, prompt[None]).device
        return timed(read, PROMPTS_A_RUN, device, lead=1)

    def close(self) -> None:
        self._program.close()


def measured_program(model: Any, row: Row, prompts: Tensor) -> tuple[Program, Memory | None]:
    """A program, and the memory that it took to make it, to read the prompts and to run some steps; None on a CPU."""
    device = model.device
    before = _allocated(device)  # whatever else lives there, the weights included
    spec = read_spec(model, max_length=row.length)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    program = Program(spec, slots=len(prompts))
    fill(program, prompts)
    for _ in range(min(2, row.length - row.prompt)):
        program.advance(tuple(range(len(prompts))))
    synchronize(device)
    if device.type != "cuda":
        return program, None
    beyond = torch.cuda.max_memory_allocated(device) - before - program.cache.nbytes
    weights = sum(parameter.nbytes for parameter in model.parameters())
    return program, Memory(weights, program.cache.nbytes, beyond)


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
