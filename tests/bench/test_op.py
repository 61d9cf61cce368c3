from __future__ import annotations

import pytest

from flashnorm.bench.limits import Ceilings
from flashnorm.bench.op import OURS, Row, summarise
from flashnorm.bench.record import op_record
from flashnorm.cli.bench import _table
from flashnorm.kernels.configs import Gemv
from flashnorm.kernels.timing import Timing

CEILINGS = Ceilings(bytes_per_us=4e6, flops_per_us=8e8)


def _row(ours: tuple[float, ...], torch: tuple[float, ...] = (10.0, 11.0, 12.0), bare: float = 8.0) -> Row:
    timings = {"linear alone": Timing((bare,) * 3), "torch": Timing(torch), "slow": Timing((99.0,) * 3)}
    return Row(1, 64, 32, 0.5, {**timings, OURS: Timing(ours)}, 2.0, None, Gemv())


def test_the_linear_alone_is_no_baseline():
    assert _row((9.0, 9.0, 9.0)).best_baseline == "torch"


def test_a_gain_beyond_both_spreads_is_won():
    assert _row((6.0, 7.0, 8.0)).won


@pytest.mark.parametrize("ours", [(9.0, 10.0, 11.0), (9.9, 11.2, 11.5), (10.0, 11.0, 12.0), (11.0, 12.0, 13.0)])
def test_a_gain_within_the_spread_is_not_won(ours):
    assert not _row(ours).won


def test_summary():
    summary = summarise([_row((5.5, 5.5, 5.5)), _row((22.0, 22.0, 22.0))])
    assert (summary.rows, summary.won, summary.free) == (2, 1, 1)
    assert summary.ratio == pytest.approx(1.0)


def test_the_limit_is_the_larger_of_bytes_and_operations():
    assert CEILINGS.limit(1, 1000, 1000, 2) == pytest.approx((1000 + 1_000_000 + 1000) * 2 / 4e6)
    assert CEILINGS.limit(4096, 4096, 4096, 2) == pytest.approx(2 * 4096**3 / 8e8)


def test_record_keeps_every_sample_and_table_every_row():
    rows = [_row((5.0, 6.0, 7.0))]
    record = op_record(rows, CEILINGS, {"commit": "abc"})
    assert record["rows"][0]["samples"][OURS] == [5.0, 6.0, 7.0]
    assert record["rows"][0]["config"]["family"] == "gemv"
    assert record["provenance"]["commit"] == "abc"
    assert _table(rows).row_count == 1
