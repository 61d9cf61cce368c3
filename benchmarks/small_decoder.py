"""A small decoder, trained within seconds on text that every Python installation brings, so that perplexity means some.

Bytes are tokens. The text is the standard library's sources, file after file in the order of their paths; its end is
held out.
"""

from __future__ import annotations

import hashlib
import math
import sysconfig
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

_HELD_OUT = 0.02  # of the text
_ROWS, _LENGTH = 64, 512  # of a batch
_RATE, _WARM_UP = 2e-3, 0.05  # the largest learning rate, and the share of the time in which it is reached
_SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}


@dataclass(frozen=True)
class Source:
    """The text in bytes (count,) uint8 each, and what identifies it."""

    read: Tensor
    held_out: Tensor
    sha256: str


@dataclass(frozen=True)
class Training:
    """What was done. `loss`: the last batch's, in nats for each byte."""

    steps: int
    seconds: float
    loss: float


def standard_library(folder: Path | None = None) -> Source:
    """Every Python source under `folder`, by default the standard library's, of what was installed none."""
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    installed = {"site-packages", "dist-packages"}
    files = [path for path in sorted(folder.rglob("*.py")) if not installed & set(path.parts)]
    whole = b"".join(path.read_bytes() for path in files)
    if not whole:
        raise SystemExit(f"{folder} holds no Python sources to learn from; nothing was measured")
    text = torch.frombuffer(bytearray(whole), dtype=torch.uint8)
    kept = int(len(text) * (1 - _HELD_OUT))
    return Source(text[:kept], text[kept:], hashlib.sha256(whole).hexdigest())


def new_decoder(device: torch.device, **sizes: Any) -> LlamaForCausalLM:
    """An untrained decoder of 256 tokens, fp32; `sizes` in place of the usual ones."""
    none = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    common = {"vocab_size": 256, "max_position_embeddings": _LENGTH, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**_SIZES | common | none | sizes)).to(device)


def train(
    model: nn.Module, text: Tensor, seconds: float, *, rows: int = _ROWS, length: int = _LENGTH, most: int | None = None
) -> Training:
    """AdamW on random windows of `text` (count,), in bf16 on a GPU, for so long or for `most` steps.

    The learning rate rises and then falls to nothing as the time, or the number of steps, passes.
    """
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    start, steps, passed, loss = time.monotonic(), 0, 0.0, math.nan
    model.train()
    while passed < 1:
        for group in optimizer.param_groups:
            group["lr"] = _RATE * min(passed / _WARM_UP, (1 - passed) / (1 - _WARM_UP))
        batch = _windows(text, rows, length + 1, generator).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        found = nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        found.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss, steps = float(found.detach()), steps + 1  # which waits for the device, so that the clock is right
        passed = max((time.monotonic() - start) / seconds, steps / most if most else 0)
    model.eval()
    return Training(steps, round(time.monotonic() - start, 1), loss)


def evenly(text: Tensor, count: int, length: int) -> Tensor:
    """(count, length) int64: windows that begin at even distances. Raises `SystemExit` where the text is too short."""
    if len(text) < count * length:
        raise SystemExit(f"{len(text)} bytes are fewer than {count} windows of {length}; nothing was measured")
    starts = torch.linspace(0, len(text) - length, count).long()
    return torch.stack([text[start : start + length] for start in starts]).long()


def described(model: LlamaForCausalLM, source: Source, training: Training) -> dict[str, Any]:
    """For a record: sizes, text and training, and how far the gains of the norms have been learned."""
    gains = torch.cat([p.detach().flatten() for name, p in model.named_parameters() if "norm" in name])
    return {
        **{name: getattr(model.config, name) for name in _SIZES},
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "gains": {"least": float(gains.min()), "largest": float(gains.max())},
        "text": {"bytes": len(source.read), "held_out": len(source.held_out), "sha256": source.sha256},
        "training": asdict(training),
    }


def _windows(text: Tensor, rows: int, length: int, generator: torch.Generator) -> Tensor:
    starts = torch.randint(len(text) - length, (rows,), generator=generator)
    return text[starts[:, None] + torch.arange(length)].long()
