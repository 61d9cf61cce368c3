"""The gpt-fast recipe as a contender."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashnorm.bench.clock import timed
from flashnorm.bench.e2e.contender import CHECKED, Trace
from flashnorm.bench.e2e.recipe import RecipeModel
from flashnorm.bench.e2e.rows import LEAD, RECIPE, Row
from flashnorm.errors import CheckFailed

Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class RecipeSteps:
    """The prompt is read uncompiled, which is not timed; each step is one call of the compiled model."""

    def __init__(self, model: Any, row: Row, prompts: Tensor, *, compiled: bool = True, tuned: bool = False) -> None:
        """`prompts`: (batch, row.prompt). `tuned`: search the tiles of the compiler's kernels by coordinate descent,
        and let it write matrix-vector products itself, as gpt-fast's scripts do: minutes of compilation."""
        self.tokens = row.tokens
        self._prompts = prompts.to(model.device)
        self._model = RecipeModel(model, len(prompts), row.length)
        self._step: Step = _compiled(self._model, tuned=tuned) if compiled else self._model

    @torch.no_grad()
    def trace(self) -> Trace:
        skipped = skipped_graphs()
        tokens, logits, position = self._read_prompts()
        fed, seen = [tokens], [logits]
        with sdpa_kernel(SDPBackend.MATH):  # the one that the compiler sees through, as in gpt-fast
            for _ in range(CHECKED - 1):
                tokens, logits = (result.clone() for result in self._step(tokens, position))
                position += 1
                fed.append(tokens)
                seen.append(logits)
        if position.is_cuda and self._step is not self._model:
            require_graphs(skipped)
        chosen = torch.cat(fed, 1)
        return Trace(torch.cat([self._prompts, chosen[:, :-1]], 1), torch.stack(seen, 1), chosen)

    @torch.no_grad()
    def run(self) -> float:
        tokens, _, position = self._read_prompts()

        def step() -> None:
            nonlocal tokens
            tokens = self._step(tokens, position)[0].clone()  # the graph's own result is overwritten by the next replay
            position.add_(1)

        with sdpa_kernel(SDPBackend.MATH):
            return timed(step, self.tokens, position.device, lead=LEAD)

    def close(self) -> None:
        """The model's weights may stay where they are."""

    def _read_prompts(self) -> tuple[Tensor, Tensor, Tensor]:
        """The first tokens, the logits, and the position (1,) of the tokens."""
        length = self._prompts.shape[1]
        tokens, logits = self._model(self._prompts, torch.arange(length, device=self._prompts.device))
        return tokens, logits, torch.tensor([length], device=tokens.device)


def skipped_graphs() -> int:
    """How often the compiler has gone without CUDA graphs in this process."""
    return int(counters["inductor"]["cudagraph_skips"])


def require_graphs(before: int) -> None:
    """Raise `CheckFailed` where that happened since there were `before`: then it is not the recipe that is timed."""
    if skipped_graphs() > before:
        raise CheckFailed(f"{RECIPE} is not what is timed: the compiler left CUDA graphs out; nothing was timed")


def _compiled(model: RecipeModel, *, tuned: bool) -> Step:
    how: dict[str, Any] = {"mode": "reduce-overhead"}
    if tuned:
        how = {"options": torch._inductor.list_mode_options("reduce-overhead") | {"coordinate_descent_tuning": True}}
    step: Step = torch.compile(model, fullgraph=True, dynamic=False, **how)
    return step
