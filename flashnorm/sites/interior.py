"""What goes on inside the norms, which the trace does not follow: all that a norm may do is to be a norm.

A norm that takes another module's weight, or leaves a value behind that carries its gain, is more than the experiment
on its copy has shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten


class Interior:
    """Watches the operations inside the norm that runs, if one does."""

    def __init__(self, model: nn.Module, live: Mapping[int, str], block: Callable[[str, str, str], None]) -> None:
        """`live`: as in `Trace`; `block(norm, operation, sentence)` says what a norm does beside being one."""
        self._model, self._block = model, block
        self._stored = dict(live)  # storage -> the parameter or buffer that lies in it
        for name, tensor in (*model.named_buffers(), *model.named_parameters()):
            if tensor.is_floating_point():
                self._stored[_key(tensor)] = name
        self._running: list[str] = []
        self._inputs: set[int] = set()  # storages of what the running norm was called with
        self._normalised: int | None = None  # and of what it normalises, which may be a parameter: learnt queries, say
        self._own: set[int] = set()  # storages of the running norm's parameters and buffers
        self._made: dict[int, StorageWeakRef] = {}  # what the running norm has computed from them
        self._left: dict[int, tuple[StorageWeakRef, str]] = {}  # what lives on when its norm has returned, and the norm

    @property
    def norm(self) -> str | None:
        """The norm that runs; the outermost one, where one calls another."""
        return self._running[0] if self._running else None

    def enter(self, norm: str, inputs: Sequence[torch.Tensor]) -> None:
        self._running.append(norm)
        if len(self._running) > 1:
            return
        self._inputs = {_key(tensor) for tensor in inputs}
        self._normalised = next((_key(tensor) for tensor in inputs if tensor.is_floating_point()), None)
        module = self._model.get_submodule(norm)
        self._own = {_key(tensor) for tensor in (*module.parameters(), *module.buffers())}
        for name, parameter in module.named_parameters():
            if _key(parameter) not in self._stored:
                self._block(norm, "", f"its {name} is replaced while the model runs")

    def leave(self, output: object) -> None:
        """`output`: what the norm returned, all of which the trace goes on with."""
        norm = self._running.pop()
        if self._running:
            return
        returned = {_key(tensor) for tensor in tree_flatten(output)[0] if isinstance(tensor, torch.Tensor)}
        for key, reference in self._made.items():
            if key not in returned and not reference.expired():
                self._left[key] = (reference, norm)
        for key in returned:
            self._left.pop(key, None)
        self._made = {}

    def follow(self, op: str, tensors: Iterable[torch.Tensor], results: Iterable[torch.Tensor]) -> list[str]:
        """Take note of an operation inside a norm; the names of the foreign weights that it used."""
        tensors, foreign = list(tensors), []
        for tensor in tensors:
            name = self._stored.get(_key(tensor))
            if name is not None and _key(tensor) not in self._own:
                foreign.append(name)
                if _key(tensor) != self._normalised:
                    self._block(self._running[0], op, f"it also applies {name}, which is not its own")
        self.read(op, tensors)
        if any(_key(tensor) in self._made or _key(tensor) in self._own for tensor in tensors):
            self._made |= {
                _key(result): StorageWeakRef(result.untyped_storage())
                for result in results
                if _key(result) not in self._own
            }
        return foreign

    def read(self, op: str, tensors: Iterable[torch.Tensor]) -> None:
        """Block the norms that have left one of these behind: the trace does not know which gain lies on it where."""
        for tensor in tensors if self._left else ():
            reference, norm = self._left.get(_key(tensor), (None, ""))
            if reference is None or norm == self.norm:
                continue
            if reference.expired():
                del self._left[_key(tensor)]
            else:
                self._block(norm, op, "a value that it computes from its gain and keeps is used outside of it")

    def hidden(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Those that lie neither in an argument of the running norm nor in its own weights."""
        return [tensor for tensor in tensors if _key(tensor) not in self._inputs and _key(tensor) not in self._own]

    def carries(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is the running norm's own weight or was computed from it."""
        return bool(self._running) and (_key(tensor) in self._made or _key(tensor) in self._own)


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
