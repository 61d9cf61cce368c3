"""Runs a hollow model once and follows every norm's gain through whatever the model does with it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from flashnorm.errors import TracingError
from flashnorm.sites.contractions import PRODUCTS
from flashnorm.sites.exits import Exits
from flashnorm.sites.hollow import HollowMode, tensors_in
from flashnorm.sites.inputs import Run
from flashnorm.sites.interior import Interior
from flashnorm.sites.location import model_line
from flashnorm.sites.norm_calls import watch
from flashnorm.sites.operations import RULES, VALUE_FREE, Blocked, Executed, results
from flashnorm.sites.probe_cache import ProbeCache
from flashnorm.sites.probing import NormProbe
from flashnorm.sites.shadow import ZERO, Conflict, Numbering, Shadows, tagged
from flashnorm.sites.types import Blocker
from flashnorm.sites.weights import Ledger, Located, Place, Read, copy_of, place


@dataclass
class Trace:
    """Everything one or more runs of a model showed."""

    model: nn.Module
    ledger: Ledger
    live: dict[int, str] = field(default_factory=dict)  # storage of a live model's parameter -> its name
    numbering: Numbering = field(default_factory=Numbering)
    probes: dict[str, NormProbe] = field(default_factory=dict)  # norm module -> what it is
    gain_of: dict[str, str] = field(default_factory=dict)  # norm module -> the first norm module with the same gain
    called: set[str] = field(default_factory=set)  # every module that ran
    blockers: dict[str, list[Blocker]] = field(default_factory=lambda: defaultdict(list))
    operations: list[str] = field(default_factory=list)  # every aten operation, in order
    runs: tuple[Run, ...] = ()  # the calls that were made
    cache: ProbeCache = field(default_factory=ProbeCache)  # what experiments with norms have shown

    @classmethod
    def of(cls, model: nn.Module, live: nn.Module | None, cache: ProbeCache | None = None) -> Trace:
        """Of `model`, before any run. `live`, `cache`: as for `trace`."""
        originals = live.named_parameters() if live is not None else ()
        record = cls(model, Ledger(model), {p.untyped_storage()._cdata: name for name, p in originals})
        record.cache = cache or record.cache
        return record

    def block(self, codes: torch.Tensor, kind: str, op: str, where: str, detail: str) -> None:
        """Block every norm whose gain occurs in `codes`."""
        for norm in self.numbering.norms_in(codes):
            self.block_norm(norm, kind, op, where, detail)

    def block_norm(self, norm: str, kind: str, op: str, where: str, detail: str) -> None:
        blocker = Blocker(kind, op, where, f"{detail} [{', '.join(filter(None, (op, where)))}]")
        if blocker not in self.blockers[norm]:
            self.blockers[norm].append(blocker)


def trace(
    model: nn.Module, runs: Sequence[Run], live: nn.Module | None = None, cache: ProbeCache | None = None
) -> Trace:
    """Make every call of `runs` and report what happened to the gains.

    `model` must be hollow or small; its parameters are not changed. `live`: the model of which it is a copy, where
    there is one; a function that the copy holds may go on using the original's weights. `cache`: what experiments with
    its norms have shown in an earlier trace. Raises `TracingError` when a run fails.
    """
    record = Trace.of(model, live, cache)
    make_runs(model, Follower(record), runs)
    record.runs = tuple(runs)
    return record


def make_runs(model: nn.Module, mode: Follower, runs: Sequence[Run]) -> None:
    """Make every call of `runs` under `mode`. Raises `TracingError` when one fails."""
    with torch.no_grad(), watch(model, mode, mode.record.cache):
        for run in runs:
            try:
                with mode:
                    with Exits(mode.leaves_torch):
                        output = model.get_submodule(run.module)(**run.inputs)
                    mode.leave_model(output)
            except Exception as error:  # model code is third-party code and may raise anything
                raise TracingError(
                    f"the model could not be run on {', '.join(run.inputs)}: {type(error).__name__}: {error} "
                    f"[{mode.where(error.__traceback__)}]"
                ) from error


def can_run(model: nn.Module, run: Run) -> bool:
    """Whether a call goes through; tried without following anything, so that a failure leaves no half-seen readers."""
    try:
        with torch.no_grad(), HollowMode():
            model.get_submodule(run.module)(**run.inputs)
    except Exception:  # model code is third-party code and may raise anything; all of it means no
        return False
    return True


class Follower(HollowMode):
    """Executes each operation, then works out what became of the gains in its inputs."""

    def __init__(self, record: Trace) -> None:
        super().__init__()
        self.record = record
        self.shadows = Shadows()
        self.path: list[str] = []
        self.number_read = False
        # Where a gain lies -> the gain, which keeps its address from being given to another, and its site.
        self._gains: dict[Place, tuple[nn.Parameter, str]] = {}
        self.interior = Interior(record.model, record.live, lambda norm, op, why: self.irregular(norm, why, op))

    # --- what the rules ask for -------------------------------------------------------------------------------------

    def shadow(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return self.shadows.get(tensor)

    def locate(self, tensor: torch.Tensor) -> Located | None:
        return self.record.ledger.locate(tensor)

    def read(self, located: Located, dim: int, codes: torch.Tensor, read: Read) -> bool:
        return self.record.ledger.read(located, dim, codes, read)

    def read_as(self, op: str, bias: torch.Tensor | None, pure: bool) -> Read:
        found = self.locate(bias) if bias is not None else None
        return Read(op, self.path[-1] if self.path else "", found.name if found else None, pure)

    # --- following ----------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():  # what is done here is no act of the model
            return self._execute(func, args, kwargs or {})

    def _execute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = self.call(func, args, kwargs)
        tensors = tensors_in(args, kwargs)
        name = func.overloadpacket.__name__
        base = name.rstrip("_") if name.endswith("_") and not name.startswith("__") else name
        with torch.no_grad():
            self._note_number(tensors, result)
            if self.interior.norm is not None:
                self._follow_inside(base, tensors, result)
            else:
                self.record.operations.append(str(func))
                self._follow(Executed(func, base, args, kwargs, tensors, result))
        return result

    def _follow(self, done: Executed) -> None:
        base = done.base
        self.interior.read(base, done.tensors)
        if done.moves_nothing:
            return
        carrying = self._carrying(done.tensors, base)
        self._account_for_weights(done)
        if base in VALUE_FREE:
            return
        if not (carrying or asks_always(done) or base in PRODUCTS):
            write(self.shadows, done.result, None)  # plain data, also over what had a shadow, such as zeros
            return
        rule = RULES.get(base)
        try:
            if rule is None:
                raise Blocked(*_unknown(base, carrying))
            codes = rule(done.call(self))
        except Blocked as blocked:
            for tensor in carrying:
                self.record.block(self._codes(tensor), blocked.kind, base, self.where(), str(blocked))
            self._use_operands(base, done.args)
            codes = None
        except Conflict:  # bits read as another dtype: blocked where the operands were looked at
            codes = None
        write(self.shadows, done.result, codes)

    def _note_number(self, tensors: list[torch.Tensor], value: Any) -> None:
        """A float zero that was read off a tensor can come back as an argument, where nothing tells it from a literal.

        Not so for integers: they are counts and indices, which do not multiply a norm's output.
        """
        if isinstance(value, float) and value == 0.0:
            with suppress(Conflict):
                known = [self.shadows.get(tensor) for tensor in tensors]
                if all(codes is not None and bool((codes == ZERO).all()) for codes in known):
                    return
            self.number_read = True

    def _carrying(self, tensors: list[torch.Tensor], base: str) -> list[torch.Tensor]:
        carrying = []
        for tensor in tensors:
            try:
                if tagged(self.shadows.get(tensor)):
                    carrying.append(tensor)
            except Conflict as conflict:
                self._recast(tensor, base, str(conflict))
        return carrying

    def _recast(self, tensor: torch.Tensor, base: str, detail: str) -> None:
        """The bits of a tensor that has a shadow are read as another dtype."""
        self.record.block(self.shadows.of_storage(tensor), "non-linear", base, self.where(), detail)

    def _codes(self, tensor: torch.Tensor) -> torch.Tensor:
        codes = self.shadows.get(tensor)
        return torch.zeros(0, dtype=torch.int32) if codes is None else codes

    def _account_for_weights(self, done: Executed) -> None:
        """Record uses of parameters other than in products, and follow their copies."""
        ledger, base = self.record.ledger, done.base
        for position, tensor in enumerate(done.tensors):
            located = ledger.locate(tensor)
            if located is None:
                original = self.record.live.get(tensor.untyped_storage()._cdata)
                if original in ledger.usage:
                    ledger.use(original, base, self.where())
                continue
            copied = copy_of(base, done.args, tensor, located, done.result)
            if copied is not None:
                ledger.remember_copy(done.result, copied)
            elif base in PRODUCTS and position == PRODUCTS[base]:
                ledger.add(located.name)
            elif base not in PRODUCTS and base not in VALUE_FREE:  # the rules of products record what they read
                ledger.use(located.name, base, self.where())

    def _use_operands(self, base: str, args: tuple[Any, ...]) -> None:
        """The weights in a product that was refused are used by it, though its rule did not come to record how."""
        for position, tensor in enumerate(args):
            located = self.locate(tensor) if isinstance(tensor, torch.Tensor) else None
            if located is not None and base in PRODUCTS and position != PRODUCTS[base]:
                self.record.ledger.use(located.name, base, self.where())

    def leaves_torch(self, op: str, tensor: torch.Tensor) -> None:
        """The values of a tensor are taken out of PyTorch; where they come back, nothing tells."""
        detail = f"its values are taken out of PyTorch by {op}"
        if tensor.layout is not torch.strided:
            return
        norm = self.interior.norm
        if norm is not None and self.interior.carries(tensor):
            self.record.block_norm(self._site(norm), "leaves-torch", op, self.where(), detail)
        elif (located := self.locate(tensor)) is not None and op not in LOOK_ONLY:
            self.record.ledger.use(located.name, op, self.where())
        for carrying in self._carrying([tensor], op):
            self.record.block(self._codes(carrying), "leaves-torch", op, self.where(), detail)

    # --- norms ---------------------------------------------------------------------------------------------------

    def enter_module(self, name: str) -> None:
        self.path.append(name)
        self.record.called.add(name)

    def leave_module(self) -> None:
        self.path.pop()

    def enter_norm(self, norm: str, inputs: Any) -> None:
        tensors = [t for t in tree_flatten(inputs)[0] if isinstance(t, torch.Tensor)]
        if self.interior.norm is None:
            self._read_by_norm("norm", tensors)
        self.interior.enter(norm, tensors)

    def _read_by_norm(self, op: str, tensors: list[torch.Tensor]) -> None:
        for tensor in self._carrying(tensors, op):
            detail = "it is read by another norm, which is not linear"
            self.record.block(self._codes(tensor), "non-linear", op, self.where(), detail)

    def _follow_inside(self, base: str, tensors: list[torch.Tensor], result: Any) -> None:
        self._read_by_norm(base, self.interior.hidden(tensors))
        if isinstance(result, (bool, int, float)):
            for tensor in tensors:
                self.leaves_torch(base, tensor)
        self._use_inside(base, tensors, result)

    def _use_inside(self, base: str, tensors: list[torch.Tensor], result: Any) -> None:
        """A norm runs this operation, with weights that may not be its own."""
        for name in self.interior.follow(base, tensors, results(result)):
            if name in self.record.ledger.usage:
                self._use_foreign(name, base)

    def _use_foreign(self, name: str, base: str) -> None:
        self.record.ledger.use(name, base, self.where())

    def leave_norm(self, norm: str, output: Any) -> None:
        self.interior.leave(output)
        own = self.record.probes[norm].weight
        if self.interior.norm is not None or own is None:
            return
        weight = self.record.model.get_submodule(norm).get_parameter(own)
        if not isinstance(output, torch.Tensor) or output.shape[output.ndim - weight.ndim :] != weight.shape:
            self.irregular(norm, "it does not return one tensor of its input's shape")
            return
        codes = self.record.numbering.codes(self._site(norm), weight.numel())
        self.shadows.put(output, codes.view(weight.shape).expand(output.shape))

    def irregular(self, norm: str, detail: str, op: str = "") -> None:
        """A norm that is more than a norm, so that what was found out about it does not hold for every call."""
        self.record.block_norm(self._site(norm), "irregular", op, self.where(), detail)

    def _site(self, norm: str) -> str:
        return self.record.gain_of[norm]

    def found_norm(self, name: str, found: NormProbe) -> None:
        """Norms that share one gain parameter are one site, named after the first."""
        self.record.probes[name] = found
        self.record.gain_of[name] = name
        if found.weight is None:
            return
        gain = self.record.model.get_submodule(name).get_parameter(found.weight)
        _, self.record.gain_of[name] = self._gains.setdefault(place(gain), (gain, name))

    def leave_model(self, output: Any) -> None:
        """What the model returns must not change."""
        for tensor in judged(output):
            if tagged(self.shadows.get(tensor)):
                self.record.block(
                    self._codes(tensor), "model-output", "return", "the model", "it is an output of the model"
                )

    def where(self, failed: TracebackType | None = None) -> str:
        """The module that is running, and the line of model code; where an error came from, by its traceback."""
        module = (self.path and self.path[-1]) or "the model"
        line = model_line(failed)
        return f"{module}, {line}" if line else module


# What is also done with weights only to compare where they lie.
LOOK_ONLY = {"data_ptr", "untyped_storage"}
# Rules that also apply when no gain is in sight: zeros must be known as such, in-place writes must erase.
ALWAYS = {"zeros", "new_zeros", "zeros_like", "zero", "copy", "fill", "lift_fresh", "scalar_tensor", "full"}
# The same for single numbers, so that a literal zero is still known after a cast.
_OF_NUMBERS = {"_to_copy", "clone", "mul"}


def _unknown(base: str, carrying: list[torch.Tensor]) -> tuple[str, str]:
    if len(carrying) > 1:
        return "second-tensor", f"it meets another tensor that carries a gain in the operation {base}"
    return "non-linear", f"the operation {base} is not linear in it"


def asks_always(done: Executed) -> bool:
    """Whether the rule of an operation applies also where none of its arguments has a shadow."""
    number = isinstance(done.result, torch.Tensor) and done.result.ndim == 0 and done.base in _OF_NUMBERS
    return number or done.base in ALWAYS


def write(shadows: Shadows, result: Any, codes: Any) -> None:
    """Lay `codes`, one or as many as there are results, over what an operation returned; None is plain data."""
    parts = list(codes) if isinstance(codes, (tuple, list)) else [codes]
    for position, tensor in enumerate(results(result)):
        part = parts[position] if position < len(parts) else None
        plain = torch.zeros((), dtype=torch.int32)
        with suppress(Conflict):
            shadows.put(tensor, (plain if part is None else part).expand(tensor.shape))


def judged(output: Any) -> list[torch.Tensor]:
    """The tensors that a model is judged by. One with logits is judged by them: the hidden states that it returns
    beside them are by-products, and a final norm's would otherwise keep every such norm from folding."""
    if isinstance(output, dict):
        output = output["logits"] if "logits" in output else list(output.values())
    return [tensor for tensor in tree_flatten(output)[0] if isinstance(tensor, torch.Tensor)]
