"""Transformers as users run it: `generate`, with and without a static cache, and the forward pass over a prompt."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from flashnorm.bench.clock import synchronize, timed
from flashnorm.bench.e2e.contender import CHECKED, Trace
from flashnorm.bench.e2e.ours import PROMPTS_A_RUN
from flashnorm.bench.e2e.rows import LEAD, Row
from flashnorm.errors import CheckFailed

_EAGER_TOKENS = 128  # of a run of eager `generate`, whose steps wait for the host and not for the cache
_CAUSAL = "causal_sdpa"  # a name that begins with "flash" is taken for a flash attention package


class GenerateSteps:
    """`model.generate`, greedy. With a static cache on a GPU, Transformers compiles the step by itself."""

    def __init__(self, model: Any, row: Row, prompts: Tensor, *, static: bool) -> None:
        """`prompts`: (batch, row.prompt)."""
        self.tokens = row.tokens if static else min(row.tokens, _EAGER_TOKENS)
        self._model, self._prompts = model, prompts.to(model.device)
        self._cache = {"cache_implementation": "static", "max_cache_len": row.length} if static else {}
        model.generation_config = GenerationConfig()  # a random model must not stop at what its config calls the end

    def trace(self) -> Trace:
        output = self._generate(CHECKED, [], output_logits=True, return_dict_in_generate=True)
        chosen = output.sequences[:, self._prompts.shape[1] :]
        return Trace(output.sequences[:, :-1], torch.stack(output.logits, 1), chosen)

    def run(self) -> float:
        device = self._prompts.device
        clock = _Clock(LEAD, device)
        self._generate(LEAD + self.tokens + 1, [clock])
        synchronize(device)
        return 1e6 * (time.perf_counter() - clock.started) / self.tokens

    def close(self) -> None:
        """`generate` leaves nothing."""

    def _generate(self, count: int, processors: Sequence[LogitsProcessor], **more: Any) -> Any:
        config = GenerationConfig(do_sample=False, max_new_tokens=count, pad_token_id=0, **self._cache, **more)
        output = self._model.generate(
            self._prompts,
            attention_mask=torch.ones_like(self._prompts),
            generation_config=config,
            logits_processor=LogitsProcessorList(processors),
        )
        sequences = output if isinstance(output, Tensor) else output.sequences
        made = sequences.shape[1] - self._prompts.shape[1]
        if made != count:
            raise CheckFailed(f"generate made {made} tokens instead of {count}; its time would be of something else")
        return output


class _Clock(LogitsProcessor):
    """Changes nothing, and starts when `lead` new tokens have been fed: `generate` has no other place to look in."""

    def __init__(self, lead: int, device: torch.device) -> None:
        self.started = float("nan")
        self._left, self._device = lead, device

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self._left == 0:
            synchronize(self._device)
            self.started = time.perf_counter()
        self._left -= 1
        return scores


class ForwardPrefill:
    """The forward pass over a prompt: cache filled, the last position's logits, the likeliest token.

    Attention is PyTorch's causal one, without a mask. Compiled as it stands, Transformers makes a mask, which keeps
    SDPA from its fastest kernel; so attention is registered under a name that has no mask function.
    """

    def __init__(self, model: Any, row: Row, prompts: Tensor, *, compiled: bool) -> None:
        """`prompts`: (any number, row.prompt), one timed and all of them checked."""
        self.tokens = row.prompt
        self._prompts = prompts.to(model.device)
        AttentionInterface.register(_CAUSAL, sdpa_attention_forward)
        model.set_attn_implementation(_CAUSAL)
        self._forward: Callable[..., Any] = torch.compile(model, dynamic=False) if compiled else model

    @torch.no_grad()
    def trace(self) -> Trace:
        logits = torch.cat([self._read(prompt[None])[0] for prompt in self._prompts])
        return Trace(self._prompts, logits, logits[:, -1:].argmax(-1))

    @torch.no_grad()
    def run(self) -> float:
        prompt = self._prompts[:1]
        return timed(lambda: self._read(prompt), PROMPTS_A_RUN, prompt.device, lead=1)

    def close(self) -> None:
        """A forward pass leaves nothing."""

    def _read(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (1, 1, vocabulary) and the next token. The cache goes with the output, so that it must be filled."""
        output = self._forward(input_ids=ids, use_cache=True, logits_to_keep=1)
        return output.logits, output.logits[:, -1].argmax(-1)
