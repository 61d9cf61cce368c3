"""Runs the live model once and notes who was called with what: which modules read exactly what a norm returned."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from flashnorm.errors import TracingError
from flashnorm.sites.inputs import main_runs, one_row

_NEW_TOKENS = 3


@dataclass
class Call:
    """One call of a module, with the tensors it took and returned; few tokens, so that they can all be kept."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    # The norm whose output the first argument is, untouched since: all of it, or None.
    reads: str | None = None
    output: Any = None
    before: int = 0  # version of the first argument when the call began
    after: int = 0  # version of the output when it ended

    @property
    def only_tensor(self) -> Tensor | None:
        """The argument, where the module was called with one tensor and nothing else."""
        alone = len(self.args) == 1 and not self.kwargs and isinstance(self.args[0], Tensor)
        return self.args[0] if alone else None


@dataclass
class Observation:
    """All calls of all modules in one run, and the norms whose output a model hands to its caller."""

    calls: dict[str, list[Call]] = field(default_factory=lambda: defaultdict(list))
    returned: dict[str, str] = field(default_factory=dict)  # norm -> the model that returns its output


@dataclass(frozen=True)
class Probe:
    """The few tokens on which sites are observed and checked."""

    inputs: dict[str, Any]
    generation: dict[str, Any] | None  # arguments of `generate`, whose steps may take other paths; None if it cannot

    @torch.no_grad()
    def run(self, model: nn.Module) -> None:
        """One forward call, and then a few tokens generated after a prompt."""
        model(**self.inputs)
        if self.generation is not None:
            model.generate(**self.generation)  # type: ignore[operator]


def find_probe(model: nn.Module) -> Probe:
    """The first inputs that go through. Raises `TracingError` where none do."""
    failure: Exception | None = None
    runs = main_runs(model)
    for run in [*runs, *map(one_row, runs)]:
        inputs = _placed(run.inputs, model)
        failure = _failure(model, Probe(inputs, None))
        if failure is None:
            whole = Probe(inputs, _generation(model, inputs))
            return whole if _failure(model, whole) is None else Probe(inputs, None)
    raise TracingError(f"{type(model).__name__} could not be run on a few tokens: {failure}") from failure


def _generation(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """Arguments with which `generate` goes on from the inputs, without a word about padding."""
    prompt = {name: value for name, value in inputs.items() if name not in ("use_cache", "decoder_input_ids")}
    ids = prompt.get("input_ids")
    if ids is not None and "attention_mask" in inspect.signature(model.forward).parameters:
        prompt.setdefault("attention_mask", torch.ones_like(ids))
    tokens = {"min_new_tokens": _NEW_TOKENS, "max_new_tokens": _NEW_TOKENS, "pad_token_id": 0}
    # Without compiling, which a static cache of the model's own choice would bring: the hooks are to see real tensors.
    return prompt | tokens | {"do_sample": False, "disable_compile": True}


def _failure(model: nn.Module, probe: Probe) -> Exception | None:
    try:
        probe.run(model)
    except Exception as error:  # model code is third-party code and may raise anything
        return error
    return None


def observe(model: nn.Module, probe: Probe, norms: set[str]) -> Observation:
    """Run the probe and note every call; `norms`: the modules whose output is followed."""
    seen = Observation()
    with _watched(model, norms, seen):
        probe.run(model)
    return seen


def _placed(inputs: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """The inputs on the device of the model's first parameter, numbers in its dtype."""
    first = next(model.parameters())

    def place(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to(first.device, first.dtype if leaf.is_floating_point() else leaf.dtype)

    placed: dict[str, Any] = tree_map(place, inputs)
    return placed


@contextmanager
def _watched(model: nn.Module, norms: set[str], seen: Observation) -> Iterator[None]:
    """Hooks that note every call. A hook of the model's own would have run too late or too early to be seen here; who
    has one is not replaced (`planning`)."""
    names = {module: name for name, module in model.named_modules()}
    made: dict[int, tuple[str, Call]] = {}  # storage of a norm's output -> the norm and its call
    running: list[Call] = []

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = Call(args, kwargs)
        first = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)
        if first is not None:
            call.before = first._version
            norm, source = made.get(first.untyped_storage().data_ptr(), ("", None))
            if source is not None and _untouched(first, source):
                call.reads = norm
        running.append(call)
        seen.calls[names[module]].append(call)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        call = running.pop()
        call.output = output
        if names[module] in norms and isinstance(output, Tensor):
            call.after = output._version
            made[output.untyped_storage().data_ptr()] = names[module], call
        if isinstance(module, PreTrainedModel):
            for tensor in _tensors(output):
                norm, _ = made.get(tensor.untyped_storage().data_ptr(), ("", None))
                if norm:
                    seen.returned[norm] = names[module] or "the model"

    handles: list[Any] = []
    for module in names:
        handles.append(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
        handles.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _untouched(tensor: Tensor, source: Call) -> bool:
    """`tensor` is all of what the norm returned, and neither that nor the norm's input was written to since."""
    output, x = source.output, source.only_tensor
    whole = tensor.data_ptr() == output.data_ptr() and tensor.numel() == output.numel() and tensor.is_contiguous()
    same = x is not None and x._version == source.before and output._version == source.after
    return whole and same and tensor.dtype == output.dtype and tensor.shape[-1] == output.shape[-1]


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in what a model returned, through dataclasses that are dictionaries, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
