"""Follows the scalar of every norm, one number per token, until another norm takes it out or something stops it.

A norm divides a token's row by one number r, its RMS. Left out, r multiplies everything that is computed from the row
by linear means; a second norm divides it out again (`algebra.carried_epsilon`). So the same shadows that follow gains
follow these scalars: a code names the token whose r multiplies an element. Beside them runs a second set of shadows
that says which output channel of which reader an element comes from, so that a stop is charged to those channels alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from flashnorm.sites.arrangement import Arrangement, arrangement_of
from flashnorm.sites.as_found import not_as_found, not_one_scalar
from flashnorm.sites.contractions import PRODUCTS, attended
from flashnorm.sites.inputs import Run
from flashnorm.sites.layer import Layer
from flashnorm.sites.norm_calls import aside
from flashnorm.sites.operations import RULES, VALUE_FREE, Blocked, Executed, same_elements
from flashnorm.sites.powers import degree_of, exponent_of, multiplied, named, raised
from flashnorm.sites.probing import NormProbe
from flashnorm.sites.scalar_record import Absorbed, Members, ScalarTrace, Stopped, unite
from flashnorm.sites.scalar_rules import REASONS, product
from flashnorm.sites.shadow import Conflict, Numbering, Shadows, constant_along, distinct, same_gains, tagged
from flashnorm.sites.tracing import Follower, Trace, asks_always, judged, make_runs, write


def trace_scalars(model: nn.Module, runs: tuple[Run, ...], live: nn.Module | None = None) -> ScalarTrace:
    """Make every call of `runs` on a hollow model. `live`: as for `tracing.trace`. Raises `TracingError`."""
    mode = ScalarFollower(Trace.of(model, live))
    with _arguments_told(model, mode):
        make_runs(model, mode, runs)
    return mode.found


@contextmanager
def _arguments_told(model: nn.Module, mode: ScalarFollower) -> Iterator[None]:
    """Inside, `mode` is told what the modules that own a matrix are called with and what they return."""
    handles = []
    for name, module in model.named_modules():
        if any(p.ndim > 1 for p in module.parameters(recurse=False)):
            handles.append(module.register_forward_pre_hook(_told(mode.feed, name), with_kwargs=True))
            handles.append(module.register_forward_hook(_told(mode.returned, name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _told(tell: Callable[..., None], name: str) -> Callable[..., None]:
    return aside(lambda module, *what: tell(name, *what))


class ScalarFollower(Follower):
    """`shadows` hold tokens, `origins` hold channels of readers; both are of one shape and move together."""

    def __init__(self, record: Trace) -> None:
        super().__init__(record)
        self.origins = Shadows()
        self._token_layer, self._origin_layer = Layer(self, self.shadows.get), Layer(self, self.origins.get)
        self.found = ScalarTrace(record.model, record.probes, record.called)
        self._channels = Numbering()
        self._merged: dict[str, Members] = {}  # name of a code that stands for many channels -> those
        self._calls: Counter[str] = Counter()
        self._lead: dict[str, torch.Size] = {}  # norm -> the token axes of its latest call
        self._inputs: dict[str, torch.Tensor] = {}  # norm that runs -> what it was called with
        self._feeding: dict[str, str | None] = {}  # reader -> the norm whose output its latest call got

    # --- operations -----------------------------------------------------------------------------------------------

    def _follow(self, done: Executed) -> None:
        base, result = done.base, done.result
        if done.moves_nothing:
            return
        carrying = self._carrying(done.tensors, base)
        self._account_for_weights(done)
        if base in VALUE_FREE:
            return
        if not (carrying or asks_always(done)):
            self._put(result, None, None)
            return
        tokens, origins = None, None
        try:
            tokens = self._tokens(done, carrying)
            origins = self._origins(done, carrying, tokens)
            if tokens is not None and PRODUCTS.get(base) is not None:  # what the product gives is charged with its bias
                self._put(result, tokens, origins)
                raise Blocked("bias", "a bias is added to it")
        except Blocked as blocked:
            charged = [result] if blocked.kind == "bias" else carrying
            self._stop(charged, REASONS.get(blocked.kind, str(blocked)), base)
            tokens = None
        except Conflict:  # bits read as another dtype: stopped where the operands were looked at
            tokens = None
        self._put(result, tokens, origins)

    def _tokens(self, done: Executed, carrying: list[torch.Tensor]) -> Any:
        base, call = done.base, done.call(self._token_layer)
        if base in PRODUCTS:
            return product(base, call)
        exponent = exponent_of(base, call)
        if exponent is not None:
            if self._unread(carrying):
                raise Blocked("unread", f"the operation {base} comes before any product with a weight")
            return raised(self.record.numbering, call.codes(0), exponent)
        if base == "mul" and len(carrying) > 1 and not self._unread(carrying):
            return multiplied(self.record.numbering, call.codes(0), call.codes(1))
        rule = RULES.get(base)
        if rule is attended:
            raise Blocked("attention", "attention is homogeneous in no query or key, and mixes the tokens of values")
        if rule is None:
            raise Blocked("non-linear", f"the operation {base} is not homogeneous in it")
        return rule(call)

    def _origins(self, done: Executed, carrying: list[torch.Tensor], tokens: Any) -> Any:
        base, args = done.base, done.args
        if base in PRODUCTS:
            return self._read(args[1:] if PRODUCTS[base] is not None else args, done.result, carrying)
        try:
            return RULES.get(base, same_elements)(done.call(self._origin_layer))
        except (Blocked, Conflict):  # a sum over channels of one token, say: what comes out is of all of them
            code = self._code_of(self._members(carrying))
            parts = tokens if isinstance(tokens, (list, tuple)) else [tokens]
            return [torch.where(part > 0, code, part) for part in parts if part is not None]

    def _read(
        self, operands: tuple[Any, ...], result: torch.Tensor, carrying: list[torch.Tensor]
    ) -> torch.Tensor | None:
        """A product with a weight: the first one gives its outputs their origin, later ones mix what they are given."""
        if not carrying:
            return None
        members = self._members(carrying)
        norms = self._norms(carrying)
        if any(reader for _, reader in members) or len(norms) != 1:
            return self._code_of(members).expand(result.shape)
        norm = norms[0]
        reader = self.path[-1] if self.path else ""
        weight = self.locate(operands[1])
        if weight is None:
            raise Blocked("not-a-reader", "it is not the left factor of a product with a stored weight")
        walk = weight.axes[-1]  # a product's second operand is (..., in, out)
        width = self.record.ledger.usage[weight.name].shape[walk[0]] if walk else result.shape[-1]
        start, step = (walk[1], walk[2]) if walk else (0, 1)
        if self.found.widths.setdefault((norm, reader), width) != width:
            raise Blocked("not-a-reader", "a module multiplies it by several weights")
        codes = self._channels.codes(f"{norm}>{reader}", width)
        return codes[start : start + step * result.shape[-1] : step].expand(result.shape)

    def _put(self, result: Any, tokens: Any, origins: Any) -> None:
        write(self.shadows, result, tokens)
        write(self.origins, result, origins if tokens is not None else None)

    def _recast(self, tensor: torch.Tensor, base: str, detail: str) -> None:
        self._stop([tensor], detail, base)

    # --- what is found ----------------------------------------------------------------------------------------------

    def _norms(self, carrying: list[torch.Tensor]) -> list[str]:
        """The norms whose scalars multiply parts of these tensors."""
        names: dict[str, None] = {}
        for tensor in carrying:
            for name in self.record.numbering.norms_in(_codes(self.shadows, tensor)):
                names[name.rpartition("#")[0]] = None
        return list(names)

    def _members(self, carrying: list[torch.Tensor]) -> Members:
        """The channels of readers that these tensors come from; all of a norm's where an element does not say which."""
        members: Members = {}
        for tensor in carrying:
            origins = _codes(self.origins, tensor)
            codes = distinct(origins)
            if bool((codes <= 0).any()) and bool(((_codes(self.shadows, tensor) > 0) & (origins <= 0)).any()):
                unite(members, {(norm, ""): torch.ones(1, dtype=torch.bool) for norm in self._norms([tensor])})
            for name in self._channels.norms_in(codes):
                if name in self._merged:
                    unite(members, self._merged[name])
                    continue
                norm, _, reader = name.partition(">")
                channels = self._channels.channels_of(name, codes)
                mask = torch.zeros(self._channels.width(name), dtype=torch.bool)
                mask[channels[channels >= 0]] = True
                unite(members, {(norm, reader): mask})
        return members

    def _unread(self, carrying: list[torch.Tensor]) -> bool:
        """Whether some of it is a norm's output that no weight has multiplied yet. To take the scalar behind a product
        that reads a power of it would be another thing than to defer it (`cancelling.before_any_linear`)."""
        return any(not reader for _, reader in self._members(carrying))

    def _code_of(self, members: Members) -> torch.Tensor:
        """A code that stands for many channels."""
        name = f"*{len(self._merged)}"
        self._merged[name] = members
        return self._channels.codes(name, 1)[0]

    def _stop(self, carrying: list[torch.Tensor], reason: str, op: str, where: str | None = None) -> None:
        for tensor in carrying:
            self.found.stopped.append(Stopped(self._members([tensor]), f"{reason} [{op}, {where or self.where()}]"))

    def feed(self, reader: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module that owns a matrix is called: with a norm's output as it is, or with something else."""
        first = next((t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)), None)
        norm = self._whole_output(first) if args and first is args[0] else None
        self.found.fed[reader].add(norm)
        self._feeding[reader] = norm

    def _whole_output(self, tensor: torch.Tensor | None) -> str | None:
        """The norm whose latest output `tensor` is, token by token in the same axes."""
        with suppress(Conflict):
            if tensor is None or not tagged(self.shadows.get(tensor)):
                return None
            readings = list(self._members([tensor]))
            if len(readings) == 1 and not readings[0][1] and self._in_order(readings[0][0], tensor):
                return readings[0][0]
        return None

    def _in_order(self, norm: str, tensor: torch.Tensor) -> bool:
        """Row after row of `tensor` carries the scalar of token after token of the norm's latest call."""
        lead = self._lead[norm]
        if tensor.shape[:-1] != lead:
            return False
        expected = self.record.numbering.codes(named(norm, self._calls[norm]), lead.numel()).view(*lead, 1)
        return same_gains(_codes(self.shadows, tensor), expected)

    def _latest(self, norm: str, codes: torch.Tensor, degree: int = 1) -> torch.Tensor:
        name = named(norm, self._calls[norm], degree)
        known = name in self.record.numbering
        return self.record.numbering.channels_of(name, codes) if known else torch.full_like(codes, -1)

    def returned(self, reader: str, args: Any, output: Any) -> None:
        """A reader returned: are its outputs its channels in order, so that some of them can be scaled there?"""
        norm = self._feeding.get(reader)
        width = self.found.widths.get((norm or "", reader))
        if norm is None or width is None or not isinstance(output, torch.Tensor) or output.shape[-1] != width:
            return
        expected = self._channels.codes(f"{norm}>{reader}", width)
        if self._in_order(norm, output) and same_gains(_codes(self.origins, output), expected):
            self.found.whole.add(reader)

    # --- norms ------------------------------------------------------------------------------------------------------

    def enter_norm(self, norm: str, inputs: Any) -> None:
        tensors = [t for t in tree_flatten(inputs)[0] if isinstance(t, torch.Tensor)]
        if self.interior.norm is None:
            first = next(t for t in tensors if t.is_floating_point())
            self._inputs[norm] = first
            if inputs[1] or len(inputs[0]) != 1:
                self.irregular(norm, "it is called with more than its input")
            self._enter(norm, first, [t for t in tensors if t is not first])
        self.interior.enter(norm, tensors)

    def _enter(self, norm: str, x: torch.Tensor, others: list[torch.Tensor]) -> None:
        self._stop(self._carrying(others, "norm"), "it is a second argument of a norm", "norm")
        carrying = self._carrying([x], "norm")
        if not carrying:
            self.found.plain.add(norm)
            return
        norms = self._norms(carrying)
        found = self._arrangement(norms[0], x) if len(norms) == 1 else None
        problem = _not_absorbing(self.record.probes[norm], x)
        if found is None:
            problem = problem or "it reaches a norm whose rows do not each carry the scalar of one token"
        if problem is not None or found is None:
            self.found.plain.add(norm)
            self._stop(carrying, problem or "", f"norm {norm}")
            return
        self.found.absorbed.append(Absorbed(norm, norms[0], *found, self._members(carrying)))

    def _arrangement(self, norm: str, x: torch.Tensor) -> tuple[Arrangement, int] | None:
        """How the tokens of the latest call of `norm` lie in `x`, and which power of their scalars multiplies it."""
        try:
            rows = constant_along(_codes(self.shadows, x), [-1])
        except Conflict:
            return None
        degrees = {degree_of(name) for name in self.record.numbering.norms_in(rows)}
        if len(degrees) != 1:
            return None
        (degree,) = degrees
        arrangement = arrangement_of(self._latest(norm, rows, degree)[..., 0], self._lead[norm])
        return None if arrangement is None else (arrangement, degree)

    def leave_norm(self, norm: str, output: Any) -> None:
        self.interior.leave(output)
        if self.interior.norm is not None:
            return
        x = self._inputs.pop(norm)
        problem = not_one_scalar(self.record.probes[norm], x)
        if problem is not None:
            self.irregular(norm, problem)
            return
        if not isinstance(output, torch.Tensor) or output.shape != x.shape:
            self.irregular(norm, "it does not return one tensor of its input's shape")
            return
        unlike = not_as_found(self.record.probes[norm], self.record.model.get_submodule(norm), x, output)
        if unlike is not None:
            self.irregular(norm, unlike)
        if self.record.probes[norm].convention.has_bias:
            self.found.biased.add(norm)
            return
        self._calls[norm] += 1
        self._lead[norm] = lead = output.shape[:-1]
        codes = self.record.numbering.codes(named(norm, self._calls[norm]), lead.numel())
        self.shadows.put(output, codes.view(*lead, 1).expand(output.shape))
        self.origins.put(output, self._channels.codes(f"{norm}>", 1).expand(output.shape))

    def _follow_inside(self, base: str, tensors: list[torch.Tensor], result: Any) -> None:
        self._stop(self._carrying(self.interior.hidden(tensors), base), "it is used inside of another norm", base)
        self._use_inside(base, tensors, result)

    def irregular(self, norm: str, detail: str, op: str = "") -> None:
        self.found.irregular[norm] = detail

    def leaves_torch(self, op: str, tensor: torch.Tensor) -> None:
        if tensor.layout is torch.strided:
            self._stop(self._carrying([tensor], op), "its values are taken out of PyTorch", op)

    def leave_model(self, output: Any) -> None:
        self._stop(self._carrying(judged(output), "return"), "it is an output of the model", "return", "the model")


def _not_absorbing(found: NormProbe, x: torch.Tensor) -> str | None:
    reason = not_one_scalar(found, x)
    return reason and f"it reaches a norm that cannot take it out: {reason}"


def _codes(shadows: Shadows, tensor: torch.Tensor) -> torch.Tensor:
    """The shadow of a tensor, or of everything that lies in its storage where its bits are read as another dtype."""
    try:
        codes = shadows.get(tensor)
    except Conflict:
        return shadows.of_storage(tensor)
    return torch.zeros(tensor.shape, dtype=torch.int32) if codes is None else codes
