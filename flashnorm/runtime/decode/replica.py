"""A model run in fp32 whatever its dtype, one layer at a time, with everything that its layers do written down.

A replica shares nothing with the model. Outside its layers it is an fp32 copy; each layer is copied when it is called,
run, shown to a reader and dropped, so that a model of any size costs its embeddings and one layer.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from flashnorm.errors import Unsupported
from flashnorm.runtime.decode.locating import layers_of, nested_configs
from flashnorm.sites.probe_cache import ProbeCache

IMPLEMENTATION = "flashnorm_recording"


@dataclass(frozen=True)
class Call:
    """One call of a module: its name (relative to the layer, if in one), what went in, what came out."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    @property
    def input(self) -> Tensor | None:
        """The first tensor argument."""
        return next((a for a in (*self.args, *self.kwargs.values()) if isinstance(a, Tensor)), None)


@dataclass(frozen=True)
class AttentionCall:
    """What a layer gave Transformers' attention interface: q, k, v are (rows, heads, tokens, head_dim)."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    scale: float
    options: dict[str, Any]


@dataclass(frozen=True)
class LayerRun:
    """One layer, run in fp32. `calls`: of its norms, linears and other small modules, in order."""

    index: int
    layer: nn.Module  # the model's own
    input: Tensor
    output: Tensor
    kwargs: dict[str, Any]
    before: tuple[Call, ...]
    attention: AttentionCall
    after: tuple[Call, ...]
    probes: ProbeCache  # shared by the layers of a replica, whose norms are mostly equal


@dataclass
class Surroundings:
    """What was seen outside the layers: small modules' calls, and masks with the rule that each follows."""

    calls: list[Call] = field(default_factory=list)
    masks: list[tuple[Tensor, Callable[..., Tensor]]] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)  # of every layer
    outputs: list[Tensor] = field(default_factory=list)


Reader = Callable[[LayerRun, Surroundings], None]


def _unread(run: LayerRun, seen: Surroundings) -> None:
    """The reader of runs that nobody is interested in."""


class Replica:
    """An fp32 copy of `model` that shows each layer's run to a reader as soon as it is over."""

    def __init__(self, model: nn.Module) -> None:
        self.seen, self.probes = Surroundings(), ProbeCache()
        name, layers = layers_of(model)
        self._memo: dict[int, Any] = {}
        for config in nested_configs(model):
            copy.deepcopy(config, self._memo)._attn_implementation_internal = IMPLEMENTATION
        stand_ins = [_StandIn(layer, self._run_layer, index) for index, layer in enumerate(layers)]
        self._reader: Reader = _unread
        self._passing = self._reading = self._gives_tuple = False
        memo = {**self._memo, id(layers): nn.ModuleList(stand_ins)}
        self.module = copy.deepcopy(model, memo).float().eval()
        self.outside = {n: m for n, m in self.module.named_modules() if not n.startswith(f"{name}.")}

    def close(self) -> None:
        """Give the copy's memory back at once: it is part of a cycle, which Python collects some time or other."""
        for parameter in self.module.parameters():
            parameter.data = parameter.data.new_empty(0)
        self.seen, self._reader = Surroundings(), _unread  # logits among what was seen

    def run(self, ids: Tensor, reader: Reader, *, start: int = 0) -> Tensor:
        """Logits (rows, tokens, vocabulary) fp32 of `ids` (rows, tokens), which stand at positions from `start` on.

        `seen` is then what this run has shown. A run from position 0 is left to number its tokens itself.
        Raises what the reader raises, and `Unsupported` for whatever the model's own forward raises.
        """
        self.seen, self._reader = Surroundings(), reader
        given = {"position_ids": torch.arange(start, start + ids.shape[1], device=ids.device)[None]} if start else {}
        with _recorded(self.outside, self.seen.calls), _masks_recorded(self.seen):
            try:
                output: Tensor = self.module(input_ids=ids, use_cache=False, **given).logits
            except Exception as error:  # a foreign forward may raise anything, and all of it means the same
                if self._reading or isinstance(error, Unsupported):
                    raise
                what = f"{type(error).__name__}: {error}"
                raise Unsupported(f"an fp32 copy of it could not be run: {what}") from error
        return output

    @contextmanager
    def layers_passed(self) -> Iterator[None]:
        """Inside, a layer gives back its input, and nothing is recorded: for questions about what surrounds them."""
        self._passing = True
        try:
            with _masks_recorded(Surroundings()):
                yield
        finally:
            self._passing = False

    def _run_layer(self, index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor) and a.is_floating_point()), None)
        if self._passing:
            return (x,) if self._gives_tuple else x
        copied = copy.deepcopy(layer, dict(self._memo)).float().eval()
        calls: list[Call] = []
        attention: list[tuple[AttentionCall, int]] = []
        with _recorded(dict(copied.named_modules()), calls), _attention_recorded(attention, calls):
            output = copied(*args, **kwargs)
        if len(attention) != 1:
            raise Unsupported(
                f"layer {index} calls Transformers' attention {len(attention)} times, where a decode step runs it once"
            )
        self._gives_tuple = isinstance(output, tuple)
        result = output[0] if self._gives_tuple else output
        if x is None or not isinstance(result, Tensor) or result.shape != x.shape:
            raise Unsupported(f"layer {index} does not map one hidden state to one of the same shape")
        call, at = attention[0]
        self.seen.inputs.append(x)
        self.seen.outputs.append(result)
        run = LayerRun(index, layer, x, result, kwargs, tuple(calls[:at]), call, tuple(calls[at:]), self.probes)
        self._reading = True
        self._reader(run, self.seen)
        self._reading = False
        return output


class _StandIn(nn.Module):
    """In a layer's place: answers questions about it, and hands calls on."""

    def __init__(self, layer: nn.Module, run: Callable[..., Any], index: int) -> None:
        super().__init__()
        self.__dict__.update(_layer=layer, _run=run, _index=index)  # not as a submodule: it stays as it is

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_layer"], name)

    def __deepcopy__(self, memo: dict[int, Any]) -> _StandIn:
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_run"](self.__dict__["_index"], self.__dict__["_layer"], args, kwargs)


@contextmanager
def _recorded(modules: dict[str, nn.Module], calls: list[Call]) -> Iterator[None]:
    """Append the calls of all modules without submodules to `calls`; tensors as they were at the time."""

    def hook_for(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            calls.append(Call(name, module, args, kwargs, output))

        return hook

    leaves = {n: m for n, m in modules.items() if not any(True for _ in m.children()) and not isinstance(m, _StandIn)}
    handles = [m.register_forward_hook(hook_for(n), with_kwargs=True) for n, m in leaves.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _attention_recorded(found: list[tuple[AttentionCall, int]], calls: list[Call]) -> Iterator[None]:
    """Inside, the recording implementation is the attention module's own eager function, watched."""

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **options: Any,
    ) -> Any:
        eager = getattr(_python_module(module), "eager_attention_forward", None)
        if eager is None:
            raise Unsupported(f"{type(module).__name__} has no eager attention beside it to compare with")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        found.append((AttentionCall(query, key, value, attention_mask, float(scale), options), len(calls)))
        return eager(module, query, key, value, attention_mask, scaling=scale, **options)

    with _registered(AttentionInterface, attention):
        yield


@contextmanager
def _masks_recorded(seen: Surroundings) -> Iterator[None]:
    def mask(*args: Any, **kwargs: Any) -> Tensor | None:
        made = eager_mask(*args, **kwargs)
        if made is not None and "mask_function" in kwargs:
            seen.masks.append((made, kwargs["mask_function"]))
        return made

    with _registered(AttentionMaskInterface, mask):
        yield


@contextmanager
def _registered(interface: Any, function: Callable[..., Any]) -> Iterator[None]:
    """Transformers keeps one mapping of implementations per process; ours is in it only while it is used."""
    interface.register(IMPLEMENTATION, function)
    try:
        yield
    finally:
        interface._global_mapping.pop(IMPLEMENTATION, None)


def _python_module(module: nn.Module) -> Any:
    return sys.modules[type(module).__module__]
