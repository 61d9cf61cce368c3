"""What depends on where a token stands: rotary tables and attention windows, taken from the model by asking it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from flashnorm.errors import CapacityError, Unsupported
from flashnorm.runtime.decode.cache import available_bytes
from flashnorm.runtime.decode.matching import Rotation, by_head, rotation, same
from flashnorm.runtime.decode.replica import Call, LayerRun, Surroundings
from flashnorm.runtime.decode.spec import Rope


class Positions:
    """Answers for positions 0 … max_length - 1, each question put to the model once and shared by its layers."""

    def __init__(self, seen: Surroundings, max_length: int) -> None:
        self._seen = seen
        self._max_length = max_length
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}  # by the identity of a recorded call, which is kept
        self._ropes: dict[tuple[int, Rotation], Rope] = {}
        self._windows: dict[int, int | None] = {}

    def rope(self, run: LayerRun, q: Tensor, k: Tensor) -> Rope | None:
        """The rotation between q and k as projected, (tokens, heads, head_dim), and as attention read them."""
        after = [by_head(t, t.shape[1], t.shape[3], t.shape[2]) for t in (run.attention.q, run.attention.k)]
        if all(same(b, a) for b, a in zip((q, k), after, strict=True) if a is not None):
            return None
        call = self._rotary_call(run)
        found = {rotation(b, a, *self._short(call)) for b, a in zip((q, k), after, strict=True) if a is not None}
        how = found.pop() if len(found) == 1 else None
        if how is None:
            raise Unsupported(f"layer {run.index}: its queries and keys are not turned by the model's rotary tables")
        key = id(call), how
        if key not in self._ropes:
            cos, sin = (how.of(table).contiguous() for table in self._long(call, run.index))
            self._ropes[key] = Rope(cos, sin, how.interleaved)
        return self._ropes[key]

    def window(self, run: LayerRun) -> int | None:
        """How many tokens a token sees, itself included; None where that is all before it."""
        if run.attention.mask is None:
            raise Unsupported(f"layer {run.index}: its attention has no causal mask")
        rules = [rule for made, rule in self._seen.masks if made is run.attention.mask]
        if len(rules) != 1:
            raise Unsupported(f"layer {run.index}: its attention mask is not made by Transformers' mask functions")
        key = id(rules[0])
        if key not in self._windows:
            self._windows[key] = _window(rules[0], self._max_length, run.input.device, run.index)
        return self._windows[key]

    def _rotary_call(self, run: LayerRun) -> Call:
        given = run.kwargs.get("position_embeddings")
        for call in self._seen.calls:
            if isinstance(call.output, tuple) and isinstance(given, tuple) and call.output[0] is given[0]:
                return call
        raise Unsupported(f"layer {run.index}: its rotary embedding comes from no module outside the layer")

    def _short(self, call: Call) -> tuple[Tensor, Tensor]:
        cos, sin = call.output
        return cos.float()[0], sin.float()[0]

    def _long(self, call: Call, index: int) -> tuple[Tensor, Tensor]:
        """The tables for all positions, from the same module; they must not depend on how many are asked for."""
        if id(call) not in self._tables:
            cos = call.output[0]
            tokens = cos.shape[-2]
            # Positions, angles, and two tables as the model returns them and in fp32.
            _require_room(self._max_length, 8 + 4 * 5 * cos.shape[-1], cos.device)

            def lengthen(leaf: Any) -> Any:
                if isinstance(leaf, Tensor) and not leaf.is_floating_point() and leaf.shape[-1] == tokens:
                    return torch.arange(self._max_length, device=leaf.device).expand(*leaf.shape[:-1], -1)
                return leaf

            with torch.no_grad():
                cos, sin = call.module(*tree_map(lengthen, call.args), **tree_map(lengthen, call.kwargs))
            self._tables[id(call)] = cos.float()[0], sin.float()[0]
        shared = min(self._max_length, call.output[0].shape[-2])
        for long, short in zip(self._tables[id(call)], self._short(call), strict=True):
            if len(long) != self._max_length or not same(long[:shared], short[:shared]):
                raise Unsupported(
                    f"layer {index}: its rotary angles depend on the sequence's length; ask for a shorter max_length"
                )
        return self._tables[id(call)]


def _window(rule: Callable[..., Tensor], max_length: int, device: torch.device, index: int) -> int | None:
    """Ask the rule about the last, a middle and the first position; it must be causal with one window."""
    _require_room(max_length, 3 * 8, device)
    keys = torch.arange(max_length, device=device)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    answers = {
        q: rule(zero, zero, torch.tensor(q, device=device), keys).expand(max_length)
        for q in (max_length - 1, max_length // 2, 0)
    }
    window = int(answers[max_length - 1].sum())
    for q, seen in answers.items():
        if not torch.equal(seen, (keys <= q) & (q - keys < window)):
            raise Unsupported(f"layer {index}: its attention mask is neither causal nor a causal sliding window")
    return None if window == max_length else window


def _require_room(max_length: int, bytes_each: int, device: torch.device) -> None:
    there = available_bytes(device)
    if there is not None and max_length * bytes_each > there:
        raise CapacityError(
            f"tables for {max_length} positions take {max_length * bytes_each / 2**20:,.0f} MiB, and "
            f"{there / 2**20:,.0f} MiB are free on {device}; ask for a shorter max_length"
        )
