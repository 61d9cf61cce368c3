from __future__ import annotations

import pytest

from flashnorm.bench.decode import SHAPES
from flashnorm.bench.e2e.measure import FACTORIES
from flashnorm.bench.e2e.rows import (
    COMPILED,
    HF_EAGER,
    LEAD,
    OURS,
    ROWS,
    TUNED_RECIPE,
    Work,
    choose_rows,
    contenders_of,
)
from flashnorm.errors import Refusal


def test_every_row_can_be_made():
    assert len({row.name for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert row.shape in SHAPES
        assert set(contenders_of(row, compiled=True, tuned=True)) <= FACTORIES.keys()
        if OURS in row.contenders:
            assert row.contenders[0] == OURS, "a program moves the weights that compiled steps read"


def test_the_context_is_what_the_timed_steps_see():
    decode = [row for row in ROWS if row.work is Work.DECODE]
    assert {(row.prompt + LEAD, row.prompt + LEAD + row.tokens) for row in decode} == {(256, 768), (7936, 8448)}
    for row in decode:
        assert row.length - 8 < row.prompt + LEAD + row.tokens + 1 <= row.length
        assert row.length % 8 == 0
    assert {row.context for row in ROWS if row.work is Work.PREFILL} == {2048}


def test_rows_come_in_the_tables_order_and_unknown_ones_are_refused():
    assert choose_rows([]) == ROWS
    names = [ROWS[3].name, ROWS[1].name]
    assert choose_rows(names) == (ROWS[1], ROWS[3])
    with pytest.raises(Refusal, match="there is no row 'nothing'; the rows are"):
        choose_rows(["nothing"])


def test_who_is_timed():
    row = next(row for row in ROWS if HF_EAGER in row.contenders and OURS in row.contenders)
    assert contenders_of(row, compiled=True, tuned=False) == row.contenders
    assert set(contenders_of(row, compiled=False, tuned=False)) == set(row.contenders) - COMPILED == {OURS, HF_EAGER}
    assert contenders_of(row, compiled=True, tuned=True) == (*row.contenders, TUNED_RECIPE)
