"""Keeps track of the module that is running, and recognises norms when they are called."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from flashnorm.sites.hollow import is_hollow
from flashnorm.sites.probe_cache import ProbeCache, kind_of_call
from flashnorm.sites.probing import NormProbe, is_candidate


class Watcher(Protocol):
    """Who is told of the calls. `name` and `norm` are module names."""

    def enter_module(self, name: str) -> None: ...

    def leave_module(self) -> None: ...

    def found_norm(self, norm: str, found: NormProbe) -> None: ...

    def irregular(self, norm: str, detail: str) -> None: ...

    def enter_norm(self, norm: str, inputs: Any) -> None: ...

    def leave_norm(self, norm: str, output: Any) -> None: ...


@contextmanager
def watch(model: nn.Module, watcher: Watcher, cache: ProbeCache) -> Iterator[None]:
    """Inside, every call of a module of `model` is told to `watcher`.

    A norm begins behind the forward pre-hooks that the model has hung on it, and ends before its forward hooks: what
    those compute is followed like everything else outside of norms. `cache`: what experiments have shown before.
    """
    names = {module: name for name, module in model.named_modules()}
    norms = _Norms(names, watcher, cache)

    def enter(module: nn.Module, args: Any) -> None:
        watcher.enter_module(names[module])

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        watcher.leave_module()

    # Most modules are no norms, and to step aside takes its time. Functions, not methods: a copy of a module, on which
    # an experiment is made, copies the hooks with all that they are bound to.
    enter_aside, leave_aside = aside(norms.enter), aside(norms.leave)

    def enter_norm(module: nn.Module, args: Any, kwargs: Any) -> None:
        if norms.may_be_one(module):
            enter_aside(module, args, kwargs)

    def leave_norm(module: nn.Module, args: Any, output: Any) -> None:
        if norms.is_one(module):
            leave_aside(module, output)

    handles: list[Any] = []
    for module in names:
        handles.append(module.register_forward_pre_hook(enter, prepend=True))
        handles.append(module.register_forward_pre_hook(enter_norm, with_kwargs=True))
        handles.append(module.register_forward_hook(leave_norm, prepend=True))
        handles.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def aside(hook: Callable[..., None]) -> Callable[..., None]:
    """The hook, as no act of the model: modes that intercept its functions or operations do not see it."""

    def run(*args: Any) -> None:
        with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
            hook(*args)

    return run


class _Norms:
    """Which modules are norms, by experiments with the arguments they are called with."""

    def __init__(self, names: dict[nn.Module, str], watcher: Watcher, cache: ProbeCache) -> None:
        self._names, self._watcher, self._cache = names, watcher, cache
        self._candidates: dict[nn.Module, bool] = {}
        self._found: dict[nn.Module, NormProbe] = {}
        self._kinds: dict[nn.Module, set[Hashable]] = defaultdict(set)  # the kinds of call that were tried
        self._hooked = {module for module in names if module._forward_hooks or module._forward_pre_hooks}

    def may_be_one(self, module: nn.Module) -> bool:
        """Whether `enter` has anything to do."""
        return self._candidates.get(module, True)

    def is_one(self, module: nn.Module) -> bool:
        return module in self._found

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module not in self._candidates:
            self._candidates[module] = bool(self._names[module]) and is_candidate(module)
        if self._candidates[module]:
            self._try(module, args, kwargs)
        if module in self._found:
            self._watcher.enter_norm(self._names[module], (args, kwargs))

    def leave(self, module: nn.Module, output: Any) -> None:
        self._watcher.leave_norm(self._names[module], output)

    def _try(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The experiment, for every kind of call: the norm of one may be another norm, or none, in the next."""
        tried = bool(self._kinds[module])
        kind = kind_of_call(args, kwargs)
        if kind in self._kinds[module] or (tried and next(module.parameters(), None) is None):
            return
        self._kinds[module].add(kind)
        found = self._cache.probe(module, *_real((args, kwargs)))
        before = self._found.get(module)
        if before is None and found is not None:
            self._recognise(module, found)
        if tried and found != before:
            self._watcher.irregular(self._names[module], "it works differently with other arguments")

    def _recognise(self, module: nn.Module, found: NormProbe) -> None:
        name = self._names[module]
        self._found[module] = found
        self._watcher.found_norm(name, found)
        if found.irregular:
            self._watcher.irregular(name, found.irregular)
        for part in module.modules():
            if part is not module and part in self._hooked:
                self._watcher.irregular(name, f"a forward hook hangs on its part {self._names[part]}")


def _real(value: Any) -> Any:
    return tree_map(lambda leaf: torch.zeros(leaf.shape) if is_hollow(leaf) else leaf, value)
