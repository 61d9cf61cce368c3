"""Norms of many layers that differ in a layer's number alone, as one: no one reads a table of a thousand rows.

Nothing is summarised away. All numbers of a group are named, and its readers and reasons are those of each of its norms
with that norm's numbers put in.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from flashnorm.sites.types import Site

_Part = str | tuple[int, ...]  # of a module's name: a word, or the numbers of a group there


@dataclass(frozen=True)
class _Row:
    """A norm, or several under one name, and what they have in common; `site`: the first of them."""

    name: tuple[_Part, ...]
    site: Site
    content: object


def grouped(sites: Iterable[Site]) -> list[Site]:
    """One site for each group, in the order of their first norms, with ranges in its names: `layers.0-31.norm`.

    Norms are alike when width, convention, readers, verdict and reason are the same, once the numbers in a norm's own
    name are taken out wherever that name, or a beginning of it, stands (`model.layers.7` of `model.layers.7.norm`).
    """
    rows = [_Row(_parts(site.norm), site, _content(site)) for site in sites]
    deepest = max((len(row.name) for row in rows), default=0)
    for position in reversed(range(deepest)):  # the inner numbers first: blocks within stages, then the stages
        rows = _merged(rows, position)
    return [_shown(row) for row in rows]


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as text: `0-3,5,8-9`."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _parts(name: str) -> tuple[_Part, ...]:
    return tuple((int(part),) if part.isdecimal() else part for part in name.split("."))


def _content(site: Site) -> object:
    stars = ["*" if isinstance(part, tuple) else part for part in _parts(site.norm)]
    readers = tuple((_renumbered(c.weight, site.norm, stars), c.axis) for c in site.consumers)
    reason = _renumbered(site.reason, site.norm, stars)
    return site.weight is None, site.foldable, site.width, site.convention, readers, reason


def _merged(rows: list[_Row], position: int) -> list[_Row]:
    """Rows that differ only in the number at one position of their names become one."""
    groups: dict[object, list[_Row]] = {}
    for order, row in enumerate(rows):
        numbered = position < len(row.name) and isinstance(row.name[position], tuple)
        key = (row.name[:position], row.name[position + 1 :], row.content) if numbered else order
        groups.setdefault(key, []).append(row)
    return [_joined(group, position) if len(group) > 1 else group[0] for group in groups.values()]


def _joined(rows: list[_Row], position: int) -> _Row:
    numbers = tuple(sorted(n for row in rows for n in row.name[position] if isinstance(n, int)))
    name = rows[0].name
    return replace(rows[0], name=(*name[:position], numbers, *name[position + 1 :]))


def _shown(row: _Row) -> Site:
    """The first norm of a group, under the names of all."""
    parts = [part if isinstance(part, str) else ranges(part) for part in row.name]
    norm = row.site.norm
    consumers = tuple(replace(c, weight=_renumbered(c.weight, norm, parts)) for c in row.site.consumers)
    blockers = tuple(replace(b, detail=_renumbered(b.detail, norm, parts)) for b in row.site.blockers)
    return replace(row.site, norm=".".join(parts), consumers=consumers, blockers=blockers)


def _renumbered(text: str, norm: str, parts: Sequence[str]) -> str:
    """`text` with `parts` for those of the norm's name, in every name that begins like it, up to a number at least."""
    own = norm.split(".")
    ends = [end for end in range(len(own), 0, -1) if own[end - 1].isdecimal()]
    begins = {".".join(own[:end]): ".".join(parts[:end]) for end in ends}
    if not begins:
        return text
    # In one pass, the longest first: what was put in begins like the norm's name again.
    longest = "|".join(map(re.escape, begins))
    return re.sub(rf"(?<![\w.])(?:{longest})(?!\w)", lambda match: begins[match[0]], text)
