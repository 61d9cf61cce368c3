"""A decode program: slots in a preallocated cache, steps in buckets of rows, each step one CUDA graph where it can be.

All that a step reads that changes from step to step lies in device memory: which slots take part, their lengths, the
tokens chosen last, the sampling settings. So a captured step is replayed as it is when sequences join and leave.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flashnorm.errors import CapacityError, Refusal, Unsupported
from flashnorm.runtime.decode.cache import Cache, allocate
from flashnorm.runtime.decode.graphs import Runner
from flashnorm.runtime.decode.guard import running_on
from flashnorm.runtime.decode.packing import Packing, pack
from flashnorm.runtime.decode.prefill import CHUNK, Prefill
from flashnorm.runtime.decode.sampling import Sampling, SamplingTable
from flashnorm.runtime.decode.slots import Slots
from flashnorm.runtime.decode.spec import Spec
from flashnorm.runtime.decode.state import State
from flashnorm.runtime.decode.step import Step, TorchStep

_GREEDY = Sampling()


class Program(Slots):
    """Runs a spec: `Slots` says what its methods do.

    Programs share nothing but the weights of models that they were both made from.
    """

    def __init__(
        self,
        spec: Spec,
        *,
        slots: int = 8,
        max_length: int | None = None,
        kernels: bool | None = None,
        graphs: bool | None = None,
        one_kernel: bool = False,
        chunk: int = CHUNK,
    ) -> None:
        """`slots`: sequences at once; `max_length`: tokens of one, at most (default) those that the spec was read for.

        `kernels`: run steps through the Triton kernels (default: on a CUDA device). `graphs`: capture them (default:
        with kernels on a CUDA device). `one_kernel`: run steps of one sequence as one kernel, which needs a Hopper GPU.
        `chunk`: tokens of a prompt at once. Raises `CapacityError` where the cache does not fit, `Refusal` for sizes
        that make no sense, and `Unsupported` where one kernel is asked for and cannot be.
        """
        max_length = spec.max_length if max_length is None else max_length
        if slots < 1 or not 1 <= max_length <= spec.max_length:
            raise Refusal(
                f"{slots} slots of {max_length} tokens; there must be at least one of each, and at most "
                f"{spec.max_length} tokens, for which the model was read"
            )
        on_gpu = spec.device.type == "cuda"
        kernels = on_gpu if kernels is None else kernels
        self._spec, self._max_length = spec, max_length
        self._lengths: list[int | None] = [None] * slots  # None: free
        self._settings = [_GREEDY] * slots
        capture = on_gpu and kernels if graphs is None else graphs
        with running_on(spec.device):
            self._prepare(kernels, one_kernel, capture, chunk)

    def _prepare(self, kernels: bool, one_kernel: bool, capture: bool, chunk: int) -> None:
        spec, slots = self._spec, self.slots
        # One slot more than is offered: rows that fill a bucket up run in it, and nobody reads it.
        self.cache: Cache = allocate(spec, slots + 1, self._max_length)
        self._packing: Packing = pack(spec)
        table = SamplingTable(slots + 1, spec.vocabulary, spec.device)
        self._state = State(slots, spec.device, table, kernels=kernels)
        self._prefill = Prefill(spec, self._packing, self.cache, chunk=chunk)
        self._runner = Runner(self._make_step(kernels, one_kernel), self._state, capture=capture)

    @property
    def slots(self) -> int:
        return len(self._lengths)

    @property
    def max_length(self) -> int:
        return self._max_length

    def free_slots(self) -> tuple[int, ...]:
        return tuple(slot for slot, length in enumerate(self._lengths) if length is None)

    def length(self, slot: int) -> int:
        return self._used(slot)

    def prefill(self, slot: int, ids: Sequence[int] | Tensor, sampling: Sampling = _GREEDY) -> Tensor:
        self._exists(slot)
        if self._lengths[slot] is not None:
            raise CapacityError(f"slot {slot} holds a sequence; free it first, or take one of {self.free_slots()}")
        tokens = torch.as_tensor(ids, dtype=torch.int64)
        if tokens.dim() != 1 or not 1 <= len(tokens) <= self._max_length:
            raise CapacityError(
                f"a prompt of shape {tuple(tokens.shape)}; it must be one row of 1 to {self._max_length} tokens"
            )
        self._in_vocabulary(tokens)
        with running_on(self._spec.device):
            tokens = tokens.to(self._spec.device)
            logits = self._prefill(tokens, slot)
            self._state.start(slot, tokens, logits, sampling)
        self._lengths[slot], self._settings[slot] = len(tokens), sampling
        return logits

    def decode(self, tokens: Mapping[int, int]) -> Tensor:
        active = self._growing(tuple(tokens))
        given = torch.tensor(list(tokens.values()), dtype=torch.int64)
        self._in_vocabulary(given)
        with running_on(self._spec.device):
            self._state.choose_instead(active, given)
            return self._step(active)[0].clone()

    def advance(self, active: Sequence[int]) -> Tensor:
        with running_on(self._spec.device):
            return self._step(self._growing(tuple(active)))[1].clone()

    def chosen(self, slots: Sequence[int]) -> Tensor:
        for slot in slots:
            self._used(slot)
        with running_on(self._spec.device):
            return self._state.chosen[list(slots)]

    def free(self, slot: int) -> None:
        self._used(slot)
        self._lengths[slot] = None

    def close(self) -> None:
        """Give the model's parameters memory of their own again. The program must not run afterwards."""
        self._runner.close()
        self._packing.undo()

    def _make_step(self, kernels: bool, one_kernel: bool) -> Step:
        if one_kernel and self._spec.device.type != "cuda":
            raise Unsupported(f"a step as one kernel needs a GPU; the model is on {self._spec.device}")
        if not kernels and not one_kernel:
            return TorchStep(self._spec, self.cache)
        from flashnorm.runtime.decode.kernel_step import KernelStep

        return KernelStep(self._spec, self._packing, self.cache, one_kernel=one_kernel)

    def _step(self, active: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        greedy = all(self._settings[slot].greedy for slot in active)
        result = self._runner.run(active, greedy=greedy)
        for slot in active:
            self._lengths[slot] = self._used(slot) + 1
        return result

    def _growing(self, active: tuple[int, ...]) -> tuple[int, ...]:
        """Check that each of these sequences exists, once, and may grow by one token."""
        if not active or len(set(active)) < len(active):
            raise CapacityError(f"slots {active}; a step takes at least one, and each once")
        for slot in active:
            if self._used(slot) >= self._max_length:
                raise CapacityError(f"slot {slot} is full: it holds max_length = {self._max_length} tokens")
        return active

    def _exists(self, slot: int) -> None:
        if not 0 <= slot < self.slots:
            raise CapacityError(f"slot {slot} does not exist; there are {self.slots}, from 0")

    def _used(self, slot: int) -> int:
        self._exists(slot)
        length = self._lengths[slot]
        if length is None:
            raise CapacityError(f"slot {slot} holds no sequence; prefill it first")
        return length

    def _in_vocabulary(self, tokens: Tensor) -> None:
        rows = self._spec.embedding.shape[0]
        low, high = (int(extreme) for extreme in torch.aminmax(tokens))
        if low < 0 or high >= rows:
            raise Refusal(f"token ids from {low} to {high}; the vocabulary has {rows}")
