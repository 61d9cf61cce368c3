"""Follows what every weight writes, until a LayerNorm subtracts its mean or something else reads it.

A linear layer or an embedding whose channels are centered writes rows without their mean. That changes nothing where
only LayerNorms read them; and where all that a LayerNorm reads is written so, it need not subtract a mean itself. Two
shadows run beside every activation: the row that an element belongs to (`written_rows`), and its channel in there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from flashnorm.sites.as_found import not_as_found, not_one_scalar
from flashnorm.sites.contractions import PRODUCTS
from flashnorm.sites.inputs import Run
from flashnorm.sites.layer import Layer
from flashnorm.sites.operations import VALUE_FREE, Blocked, Context, Executed
from flashnorm.sites.shadow import Conflict, Shadows, distinct, tagged
from flashnorm.sites.tracing import ALWAYS, LOOK_ONLY, Follower, Trace, judged, make_runs, write
from flashnorm.sites.writer_record import Normalised, WriterTrace
from flashnorm.sites.writer_rules import MOVES, SUMS, Step, laid_out
from flashnorm.sites.written_rows import Foreign, Laid, Rows, Writer, channel_codes


def trace_writers(model: nn.Module, runs: tuple[Run, ...], live: nn.Module | None = None) -> WriterTrace:
    """Make every call of `runs` on a hollow model. `live`: as for `tracing.trace`. Raises `TracingError`."""
    mode = WriterFollower(Trace.of(model, live))
    make_runs(model, mode, runs)
    return mode.found


class WriterFollower(Follower):
    """`shadows` hold rows, `channels` hold channels; both are of one shape and move together."""

    def __init__(self, record: Trace) -> None:
        super().__init__(record)
        self.channels = Shadows()
        self.rows = Rows()
        self.found = WriterTrace(record.model, record.probes)
        self.layers: tuple[Context, Context] = (Layer(self, self._rows_of), Layer(self, self._channels_of))
        self._stored: dict[int, Laid] = {}  # the shadows of the operation's operands that are parameters
        self._inputs: dict[str, torch.Tensor] = {}  # norm that runs -> what it was called with

    # --- operations -----------------------------------------------------------------------------------------------

    def _follow(self, done: Executed) -> None:
        base, tensors, result = done.base, done.tensors, done.result
        self.interior.read(base, tensors)
        if done.moves_nothing:
            return
        self._stored = {}
        self._account_for_weights(done)
        if base in VALUE_FREE or (isinstance(result, torch.Tensor) and self.locate(result) is not None):
            return
        self._note_uses(base, done.args, tensors)
        carrying = self._carrying(tensors, base)
        laid = None
        if carrying or base in ALWAYS or base in PRODUCTS or any(self.locate(t) for t in tensors):
            try:
                laid = laid_out(Step(done.func, base, done.args, done.kwargs, result, self), carrying)
            except Blocked as blocked:
                self.stop(carrying, str(blocked), base)
            except Conflict:  # bits read as another dtype: stopped where the operands were looked at
                pass
        self._put(result, laid)

    def laid(self, tensor: torch.Tensor) -> Laid | None:
        """The shadows of an operand, of its shape: what lies over it, or the rows of the parameter that it is."""
        rows, channels = self.shadows.get(tensor), self.channels.get(tensor)
        if rows is not None:
            return Laid(rows, torch.zeros_like(rows) if channels is None else channels)
        if id(tensor) not in self._stored:
            located = self.locate(tensor)
            walk = located.axes[-1] if located is not None and tensor.ndim else None
            if located is None or walk is None:
                return None
            self._stored[id(tensor)] = self.written(located.name, walk, tensor.shape)
        return self._stored[id(tensor)]

    # What the layers look up: parameters have shadows of their own here.

    def _rows_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        laid = self.laid(tensor)
        return None if laid is None else laid.rows

    def _channels_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        laid = self.laid(tensor)
        return None if laid is None else laid.channels

    def written(self, parameter: str, walk: tuple[int, int, int], shape: torch.Size) -> Laid:
        """New rows along the last axis of `shape`, of those channels of a parameter that `walk` names."""
        axis, start, step = walk
        writer = Writer(parameter, axis)
        self.found.widths[writer] = self.record.ledger.usage[parameter].shape[axis]
        rows = self.rows.fresh(frozenset([writer]), shape[:-1].numel()).view(*shape[:-1], 1)
        return Laid(rows, channel_codes(start, step, shape[-1])).expand(shape)

    def foreign(self, base: str) -> Foreign:
        return Foreign(f"something that no linear layer or embedding wrote is added to it [{base}, {self.where()}]")

    def _note_uses(self, base: str, args: tuple[Any, ...], tensors: list[torch.Tensor]) -> None:
        """Along which axis the parameters among the operands write their channels here, if they do."""
        for tensor in tensors:
            original = self.record.live.get(tensor.untyped_storage()._cdata)
            if original in self.record.ledger.usage:
                self._use(original, None, base)
            located = self.locate(tensor)
            if located is None:
                continue
            bias = PRODUCTS.get(base)
            second = args[2 if bias == 0 else 1] if base in PRODUCTS else None
            added = bias is not None and tensor is args[bias]
            writes = tensor is second or added or base == "embedding" or base in MOVES or base in SUMS
            channel = 0 if base == "convolution" and not args[6] else -1
            walk = located.axes[channel] if writes and located.axes else None
            self._use(located.name, walk and walk[0], base)

    def _use(self, parameter: str, axis: int | None, base: str) -> None:
        if axis not in self.found.uses[parameter]:
            self.found.uses[parameter][axis] = f"{base}, {self.where()}"

    def _put(self, result: Any, laid: Laid | list[Laid] | None) -> None:
        parts = laid if isinstance(laid, list) else [] if laid is None else [laid]
        write(self.shadows, result, [part.rows for part in parts])
        write(self.channels, result, [part.channels for part in parts])

    def _recast(self, tensor: torch.Tensor, base: str, detail: str) -> None:
        self._charge(self.shadows.of_storage(tensor), self.channels.of_storage(tensor), detail, base)

    def stop(self, carrying: Iterable[torch.Tensor], reason: str, base: str, where: str | None = None) -> None:
        """What these tensors hold is read by something that is no LayerNorm."""
        for tensor in carrying:
            laid = self.laid(tensor)
            if laid is not None:
                self._charge(laid.rows, laid.channels, reason, base, where)

    def _charge(
        self, rows: torch.Tensor, channels: torch.Tensor, reason: str, base: str, where: str | None = None
    ) -> None:
        for members, mask in self.rows.members(rows):
            writers = [member for member in members if isinstance(member, Writer)]
            if not writers:
                continue
            found = (distinct(channels if bool(mask.all()) else channels[mask]).long() >> 1) - 1
            last = int(found[-1])  # they are in order
            sentence = f"{reason} [{base}, {where or self.where()}]"
            for writer in writers:
                width = self.found.widths[writer]
                self.found.stop(writer, found if last < width else found[found < width], sentence)

    # --- norms ------------------------------------------------------------------------------------------------------

    def enter_norm(self, norm: str, inputs: Any) -> None:
        tensors = [t for t in tree_flatten(inputs)[0] if isinstance(t, torch.Tensor)]
        if self.interior.norm is None:
            self._stored = {}
            first = next(t for t in tensors if t.is_floating_point())
            self._inputs[norm] = first
            self.stop(self._carrying([t for t in tensors if t is not first], "norm"), "a norm reads it", f"norm {norm}")
            self._enter(norm, first)
        self.interior.enter(norm, tensors)

    def _enter(self, norm: str, x: torch.Tensor) -> None:
        found = self.record.probes[norm]
        problem = not_one_scalar(found, x)
        if not found.convention.subtracts_mean:
            problem = "a norm that subtracts no mean reads it"
        carrying = self._carrying([x], "norm")
        if problem is None:
            problem = self._rows_read(norm, x)
        if problem is not None:
            self.found.broken[norm][problem] = None
            self.stop(carrying, problem, f"norm {norm}")

    def _rows_read(self, norm: str, x: torch.Tensor) -> str | None:
        """Take down the rows that a LayerNorm reads; a sentence where it reads anything but whole rows."""
        try:
            laid = self.laid(x)
        except Conflict as conflict:
            return str(conflict)
        if laid is None or not tagged(laid.rows):
            self.found.broken[norm]["it reads something that no linear layer or embedding wrote"] = None
            return None
        rows, channels = (codes.reshape(-1, x.shape[-1]) for codes in (laid.rows, laid.channels))
        if not bool((rows == rows[:, :1]).all()):
            return "a LayerNorm reads it together with other things, not as one sum"
        if bool((rows[:, 0] == 0).any()):
            self.found.broken[norm]["it also reads something that no linear layer or embedding wrote"] = None
        rows, channels = rows[rows[:, 0] > 0, 0], channels[rows[:, 0] > 0].long() // 2 - 1
        first = channels.amin(-1)
        expected = first[:, None] + torch.arange(x.shape[-1])
        if not torch.equal(channels.sort(-1).values, expected):
            return "a LayerNorm reads channels of it that do not lie together"
        for members, mask in self.rows.members(rows):
            for start in torch.unique(first[mask]).tolist():
                self.found.normalised[norm].add(Normalised(members, start, start + x.shape[-1]))
        return None

    def leave_norm(self, norm: str, output: Any) -> None:
        self.interior.leave(output)
        if self.interior.norm is not None:
            return
        x, found = self._inputs.pop(norm), self.record.probes[norm]
        if not isinstance(output, torch.Tensor) or output.shape != x.shape:
            self.irregular(norm, "it does not return one tensor of its input's shape")
            return
        convention = found.convention
        known = not_one_scalar(found, x) is None
        unlike = not_as_found(found, self.record.model.get_submodule(norm), x, output) if known else None
        if unlike is not None:
            self.irregular(norm, unlike)
        centered = known and convention.subtracts_mean and found.weight is None and found.bias is None
        own = Foreign(f"the output of {norm} is added to it, which has a mean by its gain and bias")
        rows = self.rows.fresh(frozenset() if centered else frozenset([own]), output.shape[:-1].numel())
        self._put(
            output, Laid(rows.view(*output.shape[:-1], 1), channel_codes(0, 1, output.shape[-1])).expand(output.shape)
        )

    def _follow_inside(self, base: str, tensors: list[torch.Tensor], result: Any) -> None:
        self.stop(self._carrying(self.interior.hidden(tensors), base), "it is used inside of a norm", base)
        self._use_inside(base, tensors, result)

    def _use_foreign(self, name: str, base: str) -> None:
        self._use(name, None, base)

    def irregular(self, norm: str, detail: str, op: str = "") -> None:
        self.found.irregular[norm] = detail

    def leaves_torch(self, op: str, tensor: torch.Tensor) -> None:
        if tensor.layout is not torch.strided:
            return
        self._stored = {}
        self.stop(self._carrying([tensor], op), "its values are taken out of PyTorch", op)
        located = self.locate(tensor)
        if located is not None and op not in LOOK_ONLY:
            self._use(located.name, None, op)

    def leave_model(self, output: Any) -> None:
        self.stop(self._carrying(judged(output), "return"), "it is an output of the model", "return", "the model")
