"""What acceleration did to a model, norm by norm, as plain data and as a table."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

_WIDTH = 120


@dataclass(frozen=True)
class SiteReport:
    """One norm: the products that took its place, or the reason why it stays as it was."""

    norm: str
    products: tuple[str, ...] = ()  # such as "q_proj + k_proj + v_proj" or "silu(gate_proj) * up_proj"
    reason: str = ""

    @property
    def replaced(self) -> bool:
        return bool(self.products)


@dataclass(frozen=True)
class Acceleration:
    """What `flashnorm.accelerate` did. `print` shows a table; norms that are alike share a row."""

    model_type: str
    level: int
    sites: tuple[SiteReport, ...]
    program: str = ""  # level two: how many sequences of what length, and their cache; or why it is not level two

    @property
    def replaced(self) -> dict[str, tuple[str, ...]]:
        """Norm -> the products that took its place."""
        return {site.norm: site.products for site in self.sites if site.replaced}

    @property
    def stock(self) -> dict[str, str]:
        """Norm -> why it was not replaced."""
        return {site.norm: site.reason for site in self.sites if not site.replaced}

    def __str__(self) -> str:
        title = f"{self.model_type}: level {self.level}, {len(self.replaced)} of {len(self.sites)} norms replaced"
        title += f"; {self.program}" if self.program else ""
        table = Table(title=Text(title), title_justify="left")
        for column in ("norms", "like", "replaced by", "stock, because"):
            table.add_column(column, overflow="fold")
        for first, count in _alike(self.sites):
            table.add_row(str(count), Text(first.norm), Text("\n".join(first.products)), Text(first.reason))
        page = io.StringIO()
        Console(file=page, width=_WIDTH, color_system=None).print(table)
        return "\n".join(map(str.rstrip, page.getvalue().splitlines()))


def _alike(sites: Iterable[SiteReport]) -> list[tuple[SiteReport, int]]:
    """The first of each kind of norm, that is of those which differ in nothing but numbers, and how many there are."""
    kinds: dict[str, list[SiteReport]] = {}
    for site in sites:
        kinds.setdefault(re.sub(r"\d+", "#", repr(site)), []).append(site)
    return [(alike[0], len(alike)) for alike in kinds.values()]
