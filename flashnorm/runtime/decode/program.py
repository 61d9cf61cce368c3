"""A decode program: slots in a preallocated cache, steps in buckets of rows, each step one CUDA graph where it can be.

All that a step reads that changes from step to step lies in device memory: which slots take part, their lengths, the
tokens chosen last, the sampling settings. So a captured step is replayed as it is when sequences join and leave. So is
the first chunk of a prompt, whatever the slot, for all prompts of about one length.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import index

import torch
from torch import Tensor

from flashnorm.errors import CapacityError, Refusal, Unsupported
from flashnorm.runtime.decode.cache import Cache, allocate
from flashnorm.runtime.decode.graphs import Runner
from flashnorm.runtime.decode.guard import queued, running_on
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
        one_kernel: bool | None = None,
        chunk: int = CHUNK,
    ) -> None:
        """`slots`: sequences at once; `max_length`: tokens of one, at most (default) those that the spec was read for.

        `kernels`: run steps through the Triton kernels (default: on a CUDA device). `graphs`: capture them, and the
        first chunk of prompts (default: with kernels on a CUDA device). `one_kernel`: run steps of one sequence as one
        kernel, which needs a Hopper GPU (default: with kernels, where that and the model allow it).
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
        self._spec, self._max_length, self._closed = spec, max_length, False
        with running_on(spec.device):
            # One slot more than is offered: rows that fill a bucket up run in it, and nobody reads it.
            self.cache: Cache = allocate(spec, slots + 1, max_length)
        self._lengths: list[int | None] = [None] * slots  # None: free
        self._settings = [_GREEDY] * slots
        capture = on_gpu and kernels if graphs is None else graphs
        with running_on(spec.device):
            self._prepare(kernels, one_kernel, capture, chunk)

    def _prepare(self, kernels: bool, one_kernel: bool | None, capture: bool, chunk: int) -> None:
        spec, slots = self._spec, self.slots
        self._packing: Packing = pack(spec)
        table = SamplingTable(slots + 1, spec.vocabulary, spec.device)
        self._state = State(slots, spec.device, table)
        self._prefill = Prefill(spec, self._packing, self.cache, chunk=chunk, kernels=kernels, capture=capture)
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
        length = self._lengths[self._used(slot)]
        assert length is not None
        return length

    def prefill(self, slot: int, ids: Sequence[int] | Tensor, sampling: Sampling = _GREEDY) -> Tensor:
        slot = self._exists(slot)
        if self._lengths[slot] is not None:
            raise CapacityError(f"slot {slot} holds a sequence; free it first, or take one of {self.free_slots()}")
        tokens = self._tokens(ids)
        if tokens.dim() != 1 or not 1 <= len(tokens) <= self._max_length:
            raise CapacityError(
                f"a prompt of shape {tuple(tokens.shape)}; it must be one row of 1 to {self._max_length} tokens"
            )
        with running_on(self._spec.device):
            tokens = queued(tokens, self._spec.device)
            logits = self._prefill(tokens, slot)
            self._state.start(slot, tokens, logits, sampling)
        self._lengths[slot], self._settings[slot] = len(tokens), sampling
        return logits

    def decode(self, tokens: Mapping[int, int]) -> Tensor:
        active = self._growing(tokens)
        given = self._tokens(list(tokens.values()))
        with running_on(self._spec.device):
            self._state.choose_instead(active, given)
            return self._step(active)[0].clone()

    def advance(self, active: Sequence[int]) -> Tensor:
        with running_on(self._spec.device):
            return self._step(self._growing(active))[1].clone()

    def chosen(self, slots: Sequence[int]) -> Tensor:
        used = [self._used(slot) for slot in slots]
        with running_on(self._spec.device):
            return self._state.chosen[used]

    def free(self, slot: int) -> None:
        self._lengths[self._used(slot)] = None

    def close(self) -> None:
        """Give the model's parameters memory of their own again. Whatever is asked afterwards raises `Refusal`."""
        self._closed = True
        self._runner.close()
        self._prefill.close()
        self._packing.undo()

    def _make_step(self, kernels: bool, one_kernel: bool | None) -> Step:
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
            self._lengths[slot] = self.length(slot) + 1
        return result

    def _growing(self, slots: Iterable[int]) -> tuple[int, ...]:
        """These slots, of which each must hold a sequence, once, that may grow by one token."""
        active = tuple(map(self._used, slots))
        if not active or len(set(active)) < len(active):
            raise CapacityError(f"slots {active}; a step takes at least one, and each once")
        for slot in active:
            if self.length(slot) >= self._max_length:
                raise CapacityError(f"slot {slot} is full: it holds max_length = {self._max_length} tokens")
        return active

    def _exists(self, slot: int) -> int:
        """The slot's number."""
        if self._closed:
            raise Refusal("this decode program is closed, since its model was unaccelerated; accelerate it again")
        try:
            number = index(slot)
        except TypeError:
            raise Refusal(f"slot {slot!r} is not a whole number") from None
        if not 0 <= number < self.slots:
            raise CapacityError(f"slot {number} does not exist; there are {self.slots}, from 0")
        return number

    def _used(self, slot: int) -> int:
        """The number of a slot that holds a sequence."""
        number = self._exists(slot)
        if self._lengths[number] is None:
            raise CapacityError(f"slot {number} holds no sequence; prefill it first")
        return number

    def _tokens(self, ids: Sequence[int] | Tensor) -> Tensor:
        """The ids as int64, on the device that they are on; each must be one of the vocabulary."""
        try:
            tokens = ids if isinstance(ids, Tensor) else torch.tensor(ids, device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:
            raise Refusal(f"token ids must be whole numbers in one row: {error}") from error
        if not tokens.numel():
            return tokens.long()
        if tokens.dtype == torch.bool or tokens.is_floating_point() or tokens.is_complex():
            raise Refusal(f"token ids of {tokens.dtype}; they must be whole numbers")
        rows = self._spec.embedding.shape[0]
        low, high = (int(extreme) for extreme in torch.aminmax(tokens))
        if low < 0 or high >= rows:
            raise Refusal(f"token ids from {low} to {high}; the vocabulary has {rows}")
        return tokens.long()
