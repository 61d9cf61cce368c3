"""The first tokens of prompts in buckets of lengths, each captured as a CUDA graph at its first use, or run eagerly.

What lies behind a prompt's end is padding. Causal attention hides it from the prompt, its keys and values lie behind
the sequence's end, where later steps overwrite them before anything reads them, and it never reaches beyond the slot.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashnorm.runtime.decode.graphs import bucket_of, warm_up

# From a prompt's ids (bucket,), its slot (1,) and the place of its last token (1,), all int64 on the device, to the
# logits (vocabulary,) fp32 after that token. Reads and writes device memory only, the same at every call.
Forward = Callable[[Tensor, Tensor, Tensor], Tensor]

_FEW = 128  # up to here buckets are powers of two, from here on multiples
_GRAPHS = 32  # kept at a time; more than there are buckets of 2,048 tokens
_HELD = 256 << 20  # bytes that the graphs' intermediates may hold; a bucket that takes more runs eagerly


@dataclass(frozen=True)
class _Captured:
    """A graph and where it leaves its result."""

    graph: torch.cuda.CUDAGraph
    logits: Tensor


def length_bucket(tokens: int, longest: int) -> int:
    """The smallest power of two up to 128, or multiple of it, that holds so many tokens; at most `longest`."""
    return min(bucket_of(tokens) if tokens <= _FEW else -(-tokens // _FEW) * _FEW, longest)


class FirstChunk:
    """Runs `forward` for prompts of any length up to `longest`, in any slot."""

    def __init__(
        self, forward: Forward, longest: int, spare: int, device: torch.device, *, capture: bool, held: int = _HELD
    ) -> None:
        """`spare`: a slot that nobody reads, in which buckets are tried; `held`: see `_HELD`."""
        self._forward, self._longest, self._spare, self._capture = forward, longest, spare, capture
        self._most = held
        self._ids = torch.zeros(longest, dtype=torch.int64, device=device)
        self._slot = torch.full((1,), spare, dtype=torch.int64, device=device)
        self._last = torch.zeros(1, dtype=torch.int64, device=device)
        self._graphs: OrderedDict[int, _Captured] = OrderedDict()  # by bucket, the one used last at the end
        self._pool: Any = None  # all graphs' intermediates share it: they run one after the other
        self._held, self._largest = 0, 0  # its bytes, and the bucket that it was made for
        self._ceiling = longest  # larger buckets run eagerly
        self._eager: set[int] = set()  # and so do these

    def run(self, ids: Tensor, slot: int) -> Tensor:
        """Logits (vocabulary,) fp32 after `ids` (tokens,), at most `longest`, which then are in the slot's cache."""
        bucket = length_bucket(len(ids), self._longest)
        captured = self._graph(bucket) if self._capture else None
        self._fill(ids, bucket, slot)
        if captured is None:
            return self._forward(self._ids[:bucket], self._slot, self._last)
        captured.graph.replay()
        return captured.logits.clone()  # the next prompt of this length writes there

    def close(self) -> None:
        """Drop the graphs and their pool."""
        self._graphs.clear()
        self._eager.clear()
        self._pool, self._held, self._largest = None, 0, 0

    def _fill(self, ids: Tensor, bucket: int, slot: int) -> None:
        """Set what a call reads. The padding repeats the last token: whatever it gives, the prompt itself gives."""
        self._ids[: len(ids)] = ids
        self._ids[len(ids) : bucket] = ids[-1]
        self._slot.fill_(slot)
        self._last.fill_(len(ids) - 1)

    def _graph(self, bucket: int) -> _Captured | None:
        """The bucket's graph, captured now if need be; None where it cannot be."""
        if bucket > self._ceiling or bucket in self._eager:
            return None
        if bucket not in self._graphs:
            self._add(bucket)
        if bucket in self._graphs:
            self._graphs.move_to_end(bucket)
        return self._graphs.get(bucket)

    def _add(self, bucket: int) -> None:
        """Capture a bucket, or give it up.

        Nothing of a larger bucket fits where the intermediates of smaller ones lie. So a bucket larger than all before
        begins with a new pool, and the smaller ones are captured again, within it, when they are next used: what is
        held is what the largest takes, not the sum.
        """
        self._try(bucket)
        if bucket > self._largest:
            self.close()
        while len(self._graphs) >= _GRAPHS:
            self._graphs.popitem(last=False)
        try:
            captured, taken = self._record(bucket)
        except RuntimeError as error:  # from CUDA, whose memory may be full; without the graph, the program goes on
            warnings.warn(
                f"prompts of about {bucket} tokens run without a CUDA graph, since capturing one failed: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
            self._give_up(bucket)
            return
        if taken and self._held + taken > self._most:
            self._give_up(bucket)
            return
        self._graphs[bucket], self._pool = captured, captured.graph.pool()
        self._held, self._largest = self._held + taken, max(self._largest, bucket)

    def _give_up(self, bucket: int) -> None:
        """Let a bucket run eagerly; and larger ones too, unless others stood in its way."""
        if self._graphs:
            self._eager.add(bucket)
        else:
            self._ceiling = bucket - 1

    def _try(self, bucket: int) -> None:
        """Run a bucket on the spare slot."""
        self._fill(torch.zeros_like(self._last), bucket, self._spare)
        warm_up(lambda: self._forward(self._ids[:bucket], self._slot, self._last))

    def _record(self, bucket: int) -> tuple[_Captured, int]:
        """A bucket's graph, and the bytes that it added to the pool."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # as the capture does: what is reserved beyond this is the pool's
        before = torch.cuda.memory_reserved()
        graph = torch.cuda.CUDAGraph()
        # A capture that fails leaves its own stream current; the outer context puts that right. Other threads, which
        # may serve other models, go on meanwhile.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            logits = self._forward(self._ids[:bucket], self._slot, self._last)
        return _Captured(graph, logits), torch.cuda.memory_reserved() - before
