"""Layers that are alike share a row that names each of them; what differs in anything keeps its own."""

from __future__ import annotations

import pytest

from flashnorm.cli.audit_rows import grouped, ranges
from flashnorm.sites.types import Blocker, Consumer, GainConvention, Site

PLAIN = GainConvention(0.0, 1e-5, "inside_sqrt", False, False, "after_cast", 8, False)
OTHER = GainConvention(1.0, 1e-5, "inside_sqrt", False, False, "after_cast", 8, False)


def _site(norm: str, *readers: str, reason: str = "", width: int = 8, convention: GainConvention = PLAIN) -> Site:
    blockers = (Blocker("residual-add", "add", "where", reason),) if reason else ()
    consumers = tuple(Consumer(reader, 1, "mm", "where") for reader in readers)
    return Site(norm, f"{norm}.weight", None, width, convention, consumers, blockers)


def _layer(n: int, **changes: object) -> Site:
    return _site(f"model.layers.{n}.norm", f"model.layers.{n}.q.weight", f"model.layers.{n}.k.weight", **changes)


def _names(*sites: Site) -> list[str]:
    return [site.norm for site in grouped(sites)]


@pytest.mark.parametrize(
    ("numbers", "text"), [((3,), "3"), ((0, 1, 2), "0-2"), ((0, 2, 3, 5), "0,2-3,5"), ((9, 10, 11), "9-11"), ((), "")]
)
def test_ranges(numbers: tuple[int, ...], text: str) -> None:
    assert ranges(numbers) == text


def test_layers_that_are_alike_are_one_row_with_their_readers() -> None:
    [row] = grouped([_layer(n) for n in range(32)])
    assert row.norm == "model.layers.0-31.norm"
    assert [c.weight for c in row.consumers] == ["model.layers.0-31.q.weight", "model.layers.0-31.k.weight"]
    assert row.foldable


def test_a_reason_names_the_layers_too() -> None:
    def at(n: int) -> Site:
        return _layer(n, reason=f"it is added [aten.add, model.layers.{n}, x.py:1] to model.layers.{n}.norm (layer 1)")

    [row] = grouped([at(n) for n in (1, 2, 4, 10)])
    assert row.reason == (
        "it is added [aten.add, model.layers.1-2,4,10, x.py:1] to model.layers.1-2,4,10.norm (layer 1)"
    )


@pytest.mark.parametrize(
    "odd",
    [
        _layer(1, convention=OTHER),
        _layer(1, width=16),
        _layer(1, reason="it is added"),
        _site("model.layers.1.norm", "model.layers.1.q.weight"),
        _site("model.layers.1.norm", "model.layers.1.k.weight", "model.layers.1.q.weight"),
        _site("model.layers.1.norm", "model.layers.1.q.weight", "model.layers.2.k.weight"),
        _site("model.layers.1.norm", "model.layers.1.q.weight", "model.layers.0.k.weight"),
    ],
)
def test_one_that_differs_in_anything_keeps_its_own_row(odd: Site) -> None:
    assert _names(_layer(0), odd, _layer(2), _layer(3)) == ["model.layers.0,2-3.norm", "model.layers.1.norm"]


def test_a_norm_that_the_next_layer_reads_is_not_mistaken() -> None:
    """Layer 0's is read by layer 1, layer 1's by layer 2: no name with the layer's own number says that."""
    sites = [_site(f"layers.{n}.norm", f"layers.{n + 1}.q.weight") for n in range(3)]
    assert grouped(sites) == sites


def test_numbers_inside_numbers() -> None:
    """Stages and blocks are joined only where each of the stages has each of the blocks."""

    def block(stage: int, number: int) -> Site:
        return _site(f"stages.{stage}.blocks.{number}.norm", f"stages.{stage}.blocks.{number}.q.weight")

    whole = [block(stage, number) for stage in (0, 1) for number in (0, 1)]
    [row] = grouped(whole)
    assert row.norm == "stages.0-1.blocks.0-1.norm"
    assert [c.weight for c in row.consumers] == ["stages.0-1.blocks.0-1.q.weight"]
    assert _names(*whole, block(2, 0)) == ["stages.0-1.blocks.0-1.norm", "stages.2.blocks.0.norm"]


def test_other_norms_stay_in_their_place() -> None:
    first, last = _site("embed.norm", "layers.0.q.weight"), _site("norm", "head.weight")
    assert _names(first, _layer(0), _layer(1), last) == ["embed.norm", "model.layers.0-1.norm", "norm"]
    assert grouped([]) == []
