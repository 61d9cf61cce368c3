"""Put what moving scalars and gains would save into the page that says which moves are made.

Usage: `python -m tools.scalar_tables`. Counts come from `flashnorm.bench.scalars`, for the shapes of real models; how
long the scalar behind a matmul takes comes from the record of `flashnorm bench op`, and what one gain saves from that
of `benchmarks.shared_gain`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import transformers

from flashnorm.bench.decode import SHAPES
from flashnorm.bench.scalars import MOVES, Sizes, shared, swallowed, tables
from tools import tables as pages
from tools.tables import RECORDS, ROOT, table

PAGES = (ROOT / "docs" / "notes" / "scalars.md",)
RECORD = "op-h200"
_POSITIONS = 2**15
# A model with QK-norm: its layers that turn their heads, and those that do not.
UNTURNED: Mapping[str, tuple[Sizes, int, int]] = {"exaone-4.0-32b": (Sizes(5120, 27392, 40, 8, 128, 64), 48, 16)}


def layer(_: dict[str, Any]) -> str:
    """Every move that is about a scalar, for one token in one layer."""
    titles = "model", "move", "products", "moved", "saved", "of the layer's", "bytes more"
    lines = []
    for name, sizes in _shapes().items():
        normed = "Qwen3" in SHAPES[name][0]  # QK-norm
        makes = (move for move in MOVES if move not in (tables, shared) and (normed or move is not swallowed))
        for move in (make(sizes) for make in makes):
            share = f"{100 * move.saved.products / sizes.weights:.3f} %"
            plain, moved, saved = move.plain.products, move.moved.products, move.saved.products
            lines.append((name, move.name, f"{plain:,}", f"{moved:,}", f"{saved:,}", share, -move.saved.bytes))
    return "\n".join([*table(titles, lines), ""])


def gains(_: dict[str, Any]) -> str:
    """The two moves of QK-norm gains, for one token in one layer, and the tables that the first of them needs."""
    titles = "model", "move", "layers", "products", "moved", "bytes", "moved", "tables", "cache"
    shapes = {
        name: (sizes, _config(name).num_hidden_layers, 0)
        for name, sizes in _shapes().items()
        if "Qwen3" in SHAPES[name][0]
    }
    lines = []
    for name, (sizes, turned, unturned) in {**shapes, **UNTURNED}.items():
        cache = 2 * 2 * sizes.kv_heads * sizes.head_dim * (turned + unturned)  # keys and values of a position, bf16
        for move, layers in ((tables(sizes), turned), (shared(sizes), unturned)):
            counts = (layers, move.plain.products, move.moved.products, move.plain.bytes, move.moved.bytes)
            held = _gib(layers * move.moved.memory)
            if layers:
                lines.append((name, move.name, *(f"{count:,}" for count in counts), held, _gib(cache)))
    note = (
        f"Tables and the cache of one sequence: GiB for {_POSITIONS:,} positions, all of these layers and all layers."
    )
    return "\n".join([*table(titles, lines), "", note, ""])


def _gib(bytes_each: int) -> str:
    return f"{bytes_each * _POSITIONS / 2**30:,.1f}" if bytes_each else "none"


def behind(record: dict[str, Any]) -> str:
    """What the scalar costs where `rms_linear` takes it along, against the bare matmul: all that a move could save."""
    titles = "K,N", "tokens", "linear alone", "rms_linear", "difference"
    lines = [
        (f"{row['k']},{row['n']}", row["m"], f"{alone:.2f}", f"{ours:.2f}", f"{ours - alone:+.2f}")
        for row in record["rows"]
        if row["m"] >= 1024
        for alone, ours in [(row["medians"]["linear alone"], row["medians"]["flashnorm"])]
    ]
    source = f"Microseconds; {pages.where_from(record['provenance'])}."
    return "\n".join([*table(titles, lines), "", source, ""])


def shared_gain(record: dict[str, Any]) -> str:
    """The attention kernel of a layer with two gains and with one, as `benchmarks.shared_gain` names them."""
    two, one = record["rows"][0]["medians"]
    lines = []
    for row in record["rows"]:
        medians, spreads = row["medians"], row["spreads"]
        times = (f"{medians[name]:.2f} ± {spreads[name]:.2f}" for name in (two, one))
        lines.append((f"{row['context']:,}", *times, f"{medians[one] / medians[two]:.3f}"))
    source = f"Microseconds; {pages.where_from(record['provenance'])}."
    return "\n".join([*table(("context", two, one, "of it"), lines), "", source, ""])


TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {  # each with the record that it is made from
    "scalars-layer": (RECORD, layer),
    "scalars-gains": (RECORD, gains),
    "scalars-behind": (RECORD, behind),
    "shared-gain-h200": ("shared-gain-h200", shared_gain),
}


def with_tables(page: str) -> str:
    """The page with its tables made anew."""
    return pages.with_tables(
        page,
        {name: partial(make, pages.read(RECORDS / f"{record}.json")) for name, (record, make) in TABLES.items()},
    )


def _config(name: str) -> Any:
    config, sizes = SHAPES[name]
    return getattr(transformers, config)(**sizes)


def _shapes() -> dict[str, Sizes]:
    return {name: Sizes.of(_config(name)) for name in SHAPES}


if __name__ == "__main__":
    pages.fill(PAGES, with_tables)
