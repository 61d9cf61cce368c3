from __future__ import annotations

import pytest

from flashnorm.bench import scalars
from tools import scalar_tables
from tools.scalar_tables import PAGES, TABLES, with_tables


def test_the_page_shows_what_is_counted():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert with_tables(text) == text
        assert all(f"table:{name}:begin" in text for name in TABLES)


def test_another_count_changes_the_page(monkeypatch):
    text = PAGES[0].read_text(encoding="utf-8")
    monkeypatch.setattr(scalar_tables, "MOVES", scalar_tables.MOVES[1:])
    assert with_tables(text) != text


def test_what_the_page_claims_follows_from_the_counts():
    """Scalars: nothing fetched is saved. Tables of gains: more is fetched. One gain: less, and nothing else."""
    shapes = [*scalar_tables._shapes().values(), *(sizes for sizes, _, _ in scalar_tables.UNTURNED.values())]
    for sizes in shapes:
        for make in (scalars.glu, scalars.homogeneous_glu, scalars.rotation, scalars.swallowed):
            saved = make(sizes).saved
            assert saved.bytes < 0
            assert 0 < saved.products < 1e-3 * sizes.weights
        tables, shared = scalars.tables(sizes).saved, scalars.shared(sizes).saved
        assert tables.bytes < 0
        assert tables.memory < 0
        assert (shared.products, shared.bytes, shared.memory) == (
            sizes.kv_heads * sizes.head_dim, 4 * sizes.head_dim, 0,
        )  # fmt: skip
    for sizes, turned, unturned in scalar_tables.UNTURNED.values():
        cache = 4 * sizes.kv_heads * sizes.head_dim * (turned + unturned)
        assert 0.1 * cache < turned * scalars.tables(sizes).moved.memory < 10 * cache


@pytest.mark.parametrize("name", scalar_tables.UNTURNED)
def test_some_layers_turn_and_some_do_not(name):
    _, turned, unturned = scalar_tables.UNTURNED[name]
    assert turned == 3 * unturned
