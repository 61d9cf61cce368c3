"""Which weights wrote a row of an activation, when rows are added up.

A *row* is what one token's output channels of one weight are, or a sum of such with one factor each: centered weights
give rows of mean zero, and so do their sums. Every row has a number, which its elements carry as a shadow; a row that
is scaled or added becomes another row, so that elements of one number stand in one and the same sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashnorm.sites.shadow import PLAIN, distinct


@dataclass(frozen=True)
class Writer:
    """A parameter whose entries along `axis` are the channels that it writes."""

    parameter: str
    axis: int


@dataclass(frozen=True)
class Foreign:
    """Something else that is part of a row, as a sentence."""

    what: str


Members = frozenset[Writer | Foreign]


class Rows:
    """The numbers of all rows, and what each consists of. The shadow of row i is 2 i, i from 1."""

    def __init__(self) -> None:
        self._members: list[Members] = [frozenset()]
        self._known: dict[Members, int] = {self._members[0]: 0}
        self._group = torch.zeros(1024, dtype=torch.int32)  # row -> its place in `_members`
        self._count = 1

    def fresh(self, members: Members, count: int) -> torch.Tensor:
        """The shadows of as many new rows: (count,) int32."""
        return self._numbered(torch.full((count,), self._index(members), dtype=torch.int32))

    def renewed(self, codes: torch.Tensor, place: torch.Tensor | None = None) -> torch.Tensor:
        """The shadows of the same rows, times one factor or, where `place` is given, one for each number in it."""
        shape = codes.shape
        if place is None:
            (keys,) = by_row(codes.long())
        else:
            codes, place = by_row(codes, place)
            keys = torch.where(codes > 0, codes.long() * (1 << 32) + place, codes.long())
        kinds, kind = torch.unique(keys, return_inverse=True)
        rows = torch.where(kinds > 0, kinds if place is None else kinds >> 32, kinds)
        new = torch.where(rows > 0, 0, rows).to(torch.int32)
        new[rows > 0] = self._numbered(self._group[rows[rows > 0] // 2])
        return new[kind].expand(shape)

    def summed(self, a: torch.Tensor, b: torch.Tensor, plain: Foreign) -> torch.Tensor:
        """The shadows of the sums of rows, element by element; `plain`: what is added where one has no row."""
        pairs, place = torch.unique(a.long() * (1 << 32) + (b.long() + 1), return_inverse=True)
        left, right = pairs >> 32, (pairs & 0xFFFFFFFF) - 1
        new = torch.maximum(left, right).to(torch.int32)  # a row and zeros, or no row at all
        merging = (left >= PLAIN) & (right >= PLAIN) & ((left > 0) | (right > 0))
        if merging.any():
            groups = torch.stack([self._group_of(side[merging]) for side in (left, right)], -1)
            kinds, kind = torch.unique(groups, dim=0, return_inverse=True)
            merged = [self._index(self._part(i, plain) | self._part(j, plain)) for i, j in kinds.tolist()]
            new[merging] = self._numbered(torch.tensor(merged, dtype=torch.int32)[kind])
        return new[place]

    def members(self, codes: torch.Tensor) -> list[tuple[Members, torch.Tensor]]:
        """Everything that these rows consist of, and for each a mask of the rows that do."""
        (rows,) = by_row(codes)
        groups = torch.where(rows > 0, self._group[rows.clamp(min=0).long() >> 1], -1)
        return [(self._members[g], (groups == g).expand(codes.shape)) for g in distinct(groups).tolist() if g >= 0]

    def _group_of(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.where(rows > 0, self._group[rows // 2], -1)

    def _part(self, group: int, plain: Foreign) -> Members:
        return frozenset([plain]) if group < 0 else self._members[group]

    def _index(self, members: Members) -> int:
        if members not in self._known:
            self._known[members] = len(self._members)
            self._members.append(members)
        return self._known[members]

    def _numbered(self, groups: torch.Tensor) -> torch.Tensor:
        start, end = self._count, self._count + len(groups)
        if end > len(self._group):
            self._group = torch.cat([self._group, torch.zeros(max(end, len(self._group)), dtype=torch.int32)])
        self._group[start:end] = groups
        self._count = end
        return torch.arange(start, end, dtype=torch.int32) * 2


def by_row(*codes: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """One element of each row, where all of these are the same along the last axis: rows nearly always lie there."""
    if codes[0].ndim and all(bool((each == each[..., :1]).all()) for each in codes):
        return tuple(each[..., :1] for each in codes)
    return codes


@dataclass(frozen=True)
class Laid:
    """The shadows of one tensor: the row and the channel (2 c + 2) of each element; both int32, of its shape."""

    rows: torch.Tensor
    channels: torch.Tensor

    def expand(self, shape: torch.Size) -> Laid:
        return Laid(self.rows.expand(shape), self.channels.expand(shape))


def channel_codes(start: int, step: int, count: int) -> torch.Tensor:
    """The shadows of channels `start`, `start + step`, ...: (count,) int32."""
    return (torch.arange(count, dtype=torch.int32) * step + start) * 2 + 2
