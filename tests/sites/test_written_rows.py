"""The bookkeeping of rows: what a sum consists of, and which elements stand in one and the same sum."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashnorm.sites.shadow import PLAIN, ZERO
from flashnorm.sites.written_rows import Foreign, Rows, Writer

A, B, PLAIN_TERM = Writer("a", 0), Writer("b", 1), Foreign("something")


def _members(rows, code):
    found = rows.members(torch.tensor([code], dtype=torch.int32))
    return set(found[0][0]) if found else None


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    left=st.lists(st.sampled_from(["a0", "a1", "b0", "plain", "zero"]), min_size=1, max_size=12),
    right=st.lists(st.sampled_from(["a0", "a1", "b0", "plain", "zero"]), min_size=1, max_size=12),
)
def test_sums_consist_of_their_terms_and_are_one_row_only_where_both_terms_are(left, right):
    rows = Rows()
    a, b = rows.fresh(frozenset([A]), 2).tolist(), rows.fresh(frozenset([B]), 1).tolist()
    codes = {"a0": a[0], "a1": a[1], "b0": b[0], "plain": PLAIN, "zero": ZERO}
    parts = {"a0": {A}, "a1": {A}, "b0": {B}, "plain": {PLAIN_TERM}, "zero": set()}
    pairs = list(zip(left, right, strict=False))
    total = rows.summed(*(torch.tensor([codes[p[i]] for p in pairs], dtype=torch.int32) for i in (0, 1)), PLAIN_TERM)
    for (first, second), code in zip(pairs, total.tolist(), strict=True):
        if {first, second} <= {"plain", "zero"}:
            assert code == (ZERO if first == second == "zero" else PLAIN)
        else:
            assert _members(rows, code) == parts[first] | parts[second]
    for i, code in enumerate(total.tolist()):
        assert [j for j, other in enumerate(total.tolist()) if other == code > 0] in (
            [],
            [j for j, pair in enumerate(pairs) if _alike(pair, pairs[i])],
        )


def _alike(one, other):
    """Adding zeros is no other row."""
    return [t for t in one if t != "zero"] == [t for t in other if t != "zero"]


def test_scaled_rows_are_others_for_each_factor():
    rows = Rows()
    codes = rows.fresh(frozenset([A]), 2)[:, None].expand(2, 3)
    scaled = rows.renewed(codes)
    assert not set(scaled.unique().tolist()) & set(codes.unique().tolist())
    assert torch.equal(scaled, scaled[:, :1].expand(2, 3))
    factors = torch.tensor([[0, 0, 1], [2, 2, 2]])
    apart = rows.renewed(codes, factors)
    assert apart[0, 0] == apart[0, 1] != apart[0, 2]
    assert _members(rows, int(apart[0, 2])) == {A}
    assert rows.renewed(torch.tensor([PLAIN, ZERO], dtype=torch.int32)).tolist() == [PLAIN, ZERO]


def test_many_rows_have_numbers_of_their_own():
    rows = Rows()
    first, second = rows.fresh(frozenset([A]), 3000), rows.fresh(frozenset([B]), 3000)
    assert len(torch.cat([first, second]).unique()) == 6000
    assert _members(rows, int(first[-1])) == {A}
    assert _members(rows, int(second[0])) == {B}
