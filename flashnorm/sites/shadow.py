"""Shadows: for every element of an activation, which norm's gain multiplies it.

A shadow is an int32 tensor laid over the storage of the activation, so views and in-place writes need no bookkeeping:
they reach the same elements. Data movement is followed by running the same operation on the shadow.

    code  0           plain data: no gain multiplies this element
    code -1           exactly zero, for structural reasons (padding): any gain may be said to multiply it
    code  2c, 2c + 1  multiplied by gain channel c (numbered from 1 over all norms); the odd code says that the element
                      is no longer the norm's output itself: it was rescaled, so a norm's *bias* cannot be traced on
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

PLAIN = 0
ZERO = -1


class Conflict(Exception):
    """Two elements that must agree on their gain do not."""


class Shadows:
    """The shadows of all living storages. Activations without an entry are plain data."""

    def __init__(self) -> None:
        # The weak reference keeps the storage's address from being given to another storage while the entry exists.
        self._entries: dict[int, tuple[StorageWeakRef, int, torch.Tensor]] = {}
        self._since_sweep = 0

    def get(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The shadow of `tensor`, of its shape; None when it is plain data."""
        if not self._entries or tensor.device.type == "meta" or tensor.layout is not torch.strided:
            return None
        entry = self._entries.get(tensor.untyped_storage()._cdata)
        if entry is None:
            return None
        _, itemsize, flat = entry
        if itemsize != tensor.element_size():
            raise Conflict("its bits are read as another dtype")
        return torch.as_strided(flat, tensor.size(), tensor.stride(), tensor.storage_offset())

    def of_storage(self, tensor: torch.Tensor) -> torch.Tensor:
        """The codes of everything that lies in the storage of a tensor which has a shadow, whatever its dtype: 1-D."""
        return self._entries[tensor.untyped_storage()._cdata][2]

    def put(self, tensor: torch.Tensor, codes: torch.Tensor) -> None:
        """Write the shadow of `tensor`; other views of the same storage see it."""
        if tensor.device.type == "meta" or tensor.numel() == 0:
            return
        shadow = self.get(tensor)
        if shadow is None:
            if not _once(codes).count_nonzero():
                return
            self._sweep()
            storage = tensor.untyped_storage()
            count = storage.nbytes() // tensor.element_size()
            flat = torch.zeros(count, dtype=torch.int32)
            self._entries[storage._cdata] = (StorageWeakRef(storage), tensor.element_size(), flat)
            shadow = torch.as_strided(flat, tensor.size(), tensor.stride(), tensor.storage_offset())
        # An expanded tensor has several elements in one place; all of them carry the same code.
        shadow.copy_(codes)

    def _sweep(self) -> None:
        self._since_sweep += 1
        if self._since_sweep >= 256:
            self._since_sweep = 0
            self._entries = {key: entry for key, entry in self._entries.items() if not entry[0].expired()}


class Numbering:
    """Numbers the gain channels of all norms, and finds the norm of a code."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._norms: list[str] = []
        self._known: dict[str, int] = {}
        self._next = 1

    def codes(self, norm: str, width: int) -> torch.Tensor:
        """The codes of a norm's channels, (width,) int32; the same on every call."""
        if norm not in self._known:
            self._known[norm] = self._next
            self._starts.append(self._next)
            self._norms.append(norm)
            self._next += width
        start = self._known[norm]
        return torch.arange(start, start + width, dtype=torch.int32) * 2

    def __contains__(self, norm: str) -> bool:
        return norm in self._known

    def width(self, norm: str) -> int:
        """How many channels a numbered norm has."""
        return self._end(norm) - self._known[norm]

    def _end(self, norm: str) -> int:
        after = self._position(self._known[norm]) + 1
        return self._starts[after] if after < len(self._starts) else self._next

    def _position(self, channel: int) -> int:
        """Where the norm of a channel stands in `_norms`."""
        return bisect.bisect_right(self._starts, channel) - 1

    def norms_in(self, codes: torch.Tensor) -> list[str]:
        """The norms whose gains occur in `codes`."""
        codes = _once(codes)
        if not tagged(codes):
            return []
        high = codes.amax()
        first, last = (self._position(int(end) >> 1) for end in (torch.where(codes > 0, codes, high).amin(), high))
        if first == last:
            return [self._norms[first]]
        channels = distinct(codes) >> 1
        positions = torch.bucketize(channels[channels > 0], torch.tensor(self._starts, dtype=torch.int32), right=True)
        return [self._norms[position - 1] for position in torch.unique_consecutive(positions).tolist()]

    def channels_of(self, norm: str, codes: torch.Tensor) -> torch.Tensor:
        """For every code, the channel of `norm` that it names, or -1 when it names none of its channels."""
        start, end = self._known[norm], self._end(norm)
        channel = codes >> 1
        inside = (channel >= start) & (channel < end)
        return torch.where(inside, channel - start, -1).long()


def _once(codes: torch.Tensor) -> torch.Tensor:
    """The same codes without the repetitions of expanded dimensions: a plain weight's shadow has billions of them."""
    size = [1 if stride == 0 else n for n, stride in zip(codes.shape, codes.stride(), strict=True)]
    return codes if 0 in codes.shape else codes.as_strided(size, codes.stride())


def distinct(codes: torch.Tensor) -> torch.Tensor:
    """All codes that occur, each once and in order, (n,) int32.

    Those of one tensor mostly lie close together, so that marking them takes a fraction of the time of sorting them.
    """
    codes = _once(codes).reshape(-1)
    if not len(codes):
        return codes
    low, high = (int(end) for end in codes.aminmax())
    if high - low > 4 * len(codes) + 1024:
        return torch.unique(codes)
    return (torch.bincount(codes - low).nonzero().squeeze(1) + low).to(codes.dtype)


def tagged(shadow: torch.Tensor | None) -> bool:
    """Does any gain multiply any element?"""
    return shadow is not None and 0 not in shadow.shape and bool(_once(shadow).amax() > 0)


def impure(codes: torch.Tensor) -> torch.Tensor:
    """The same gains, but no longer the norm's output itself."""
    return torch.where(codes > 0, codes | 1, codes)


def same_gains(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether elements that lie in one place, once both are of one shape, all carry the same gain."""
    return bool(((a | 1) == (b | 1)).all())


def added(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The codes of a sum: both terms must carry the same gain, or be zero."""
    a, b = torch.broadcast_tensors(a, b)
    same_gain = (a > 0) & ((a | 1) == (b | 1))
    agree = (a == b) | same_gain | (a == ZERO) | (b == ZERO)
    if not agree.all():
        raise Conflict("it is added to a tensor that does not carry the same gain")
    return torch.where(same_gain, a | 1, torch.where(a == ZERO, b, a))


def constant_along(codes: torch.Tensor, dims: Iterable[int]) -> torch.Tensor:
    """Reduce the given dimensions (kept with size 1) over which the codes must not change; zeros fit anything."""
    dims = [d % codes.ndim for d in dims]
    if not dims:
        return codes
    if 0 in (codes.shape[d] for d in dims):
        return torch.full([1 if d in dims else n for d, n in enumerate(codes.shape)], ZERO, dtype=torch.int32)
    top = codes.amax(dims, keepdim=True)
    if bool((codes == top).all()):
        return top
    if not ((codes == top) | (codes == ZERO) | ((codes | 1) == (top | 1)) & (codes > 0)).all():
        raise Conflict("elements that it combines carry different gains")
    mixed = (codes == ZERO).any() and bool((top > 0).any())
    return impure(top) if mixed else top
