"""Whose a parameter is: everything but the one use that a fold accounts for would change with it.

A norm's gain and bias are used inside the norm, which the trace does not follow, so their owners are kept here; other
uses are in the ledger. A parameter may also lie, tied, in a module that the trace never ran.
"""

from __future__ import annotations

from collections import defaultdict

from torch import nn

from flashnorm.sites.tracing import Trace
from flashnorm.sites.types import Blocker


class Ownership:
    """The owners of a traced model's parameters."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._ran = {trace.model.get_submodule(name) for name in trace.called}
        # Parameter -> the sites whose own it is, and as what.
        self._of_norms: dict[str, set[tuple[str, str]]] = defaultdict(set)
        for norm in trace.probes:
            for role, name in self._own(norm).items():
                self._of_norms[name].add((trace.gain_of[norm], role))

    def is_norms_own(self, parameter: str) -> bool:
        """Whether a norm has it as its gain or bias."""
        return parameter in self._of_norms

    def only_added_to(self, bias: str, weight: str) -> bool:
        """All that is done with `bias` is to add it to products of `weight`, so that the two may change together."""
        usage = self.trace.ledger.usage[bias]
        added = usage.added_to == {weight: usage.added}
        elsewhere = usage.codes or usage.reads or usage.others or self.is_norms_own(bias)
        return added and not elsewhere and self.unseen_use(bias, "the bias") is None

    def unseen_use(self, parameter: str, what: str) -> Blocker | None:
        """A tied parameter in a module that never ran: what that module would do with it is not known.

        A model that was traced on `inputs_embeds` alone still has its embedding, and a caller with token ids runs it.
        """
        aliases = self.trace.ledger.aliases[parameter]
        for alias in aliases if len(aliases) > 1 else ():
            owner = self.trace.model.get_submodule(alias.rpartition(".")[0])
            if owner not in self._ran:
                other = next(name for name in aliases if name != alias)
                remedy = "--untie" if isinstance(owner, nn.Embedding) else None
                detail = f"{what} {other} is tied to {alias}, which the trace never ran"
                return Blocker("unseen", "", alias, detail, remedy)
        return None

    def problems(self, norm: str, sharers: tuple[str, ...]) -> list[Blocker]:
        """The gain and bias must belong to this site alone, and be used by nothing but its norms, which must agree.

        `norm`: a site's first norm; `sharers`: the other norms with the same gain.
        """
        own, found = self._own(norm), []
        for other in sharers:
            if self.trace.probes[other].convention != self.trace.probes[norm].convention:
                found.append(Blocker("shared", "", norm, f"its gain is shared with {other}, which uses it differently"))
            elif self._own(other).get("bias") != own.get("bias"):
                found.append(Blocker("shared", "", norm, f"its gain is shared with {other}, which has another bias"))
        for role, name in own.items():
            found += self._other_uses(norm, role, name)
        return found

    def _other_uses(self, norm: str, role: str, name: str) -> list[Blocker]:
        usage = self.trace.ledger.usage[name]
        uses = usage.others + [(read.op, read.where) for read in usage.reads]
        if uses:
            op, where = uses[0]
            return [Blocker("shared", op, where, f"its {role} is also used outside of the norm by {op} [{where}]")]
        if usage.added:
            return [Blocker("shared", "", norm, f"its {role} is also added to a product outside of the norm")]
        for other, as_what in sorted(self._of_norms[name] - {(norm, role)}):
            return [Blocker("shared", "", other, f"its {role} is also the {as_what} of {other}")]
        unseen = self.unseen_use(name, f"its {role}")
        return [unseen] if unseen else []

    def _own(self, norm: str) -> dict[str, str]:
        """The parameters of a norm, by their names in the ledger: its gain and its bias, as far as it has them."""
        probed = self.trace.probes[norm]
        roles = {"gain": probed.weight, "bias": probed.bias}
        prefix = f"{norm}." if norm else ""
        return {role: self.trace.ledger.canonical(prefix + name) for role, name in roles.items() if name}
