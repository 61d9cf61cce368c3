"""Vector clocks against the order they stand for: every interleaving that the waits allow."""

from __future__ import annotations

import itertools
import random

import pytest

from flashnorm.verify.races.clocks import HOST, Clocks


def _clocks() -> Clocks:
    clocks = Clocks()
    clocks.allocate(0, 0, "buffer")
    return clocks


def test_an_event_orders_what_came_before_it() -> None:
    for recorded_after in (False, True):
        clocks = _clocks()
        event = clocks.record(0) if not recorded_after else None
        clocks.access(0, 0, write=True, what="write")
        event = clocks.record(0) if recorded_after else event
        clocks.wait(1, event)
        clocks.access(0, 1, write=False, what="read")
        assert bool(clocks.races) is not recorded_after


def test_an_event_that_nobody_recorded_orders_nothing() -> None:
    clocks = _clocks()
    clocks.access(0, 0, write=True, what="write")
    clocks.wait(1, None)
    clocks.access(0, 1, write=False, what="read")
    assert len(clocks.races) == 1


def test_two_reads_are_no_race_and_order_is_transitive() -> None:
    clocks = _clocks()
    clocks.access(0, 0, write=False, what="read")
    clocks.access(0, 1, write=False, what="read")
    assert clocks.races == []
    clocks.wait(2, clocks.record(0))
    clocks.wait(2, clocks.record(1))
    clocks.wait(3, clocks.record(2))
    clocks.access(0, 3, write=True, what="write")
    assert clocks.races == []


def test_freed_memory_waits_for_the_streams_that_were_named() -> None:
    for named in (False, True):
        clocks = _clocks()
        clocks.access(0, 0, write=True, what="write")
        clocks.wait(1, clocks.record(0))
        clocks.access(0, 1, write=False, what="read")
        if named:
            clocks.keep_for(0, 1)
        clocks.free(0)
        assert bool(clocks.races) is not named
        assert not clocks.knows(0)


@pytest.mark.parametrize("seed", range(40))
def test_a_race_is_reported_exactly_where_two_orders_are_possible(seed: int) -> None:
    """Against brute force: a race is a pair of accesses that some allowed order swaps."""
    draw = random.Random(seed)
    clocks = _clocks()
    events: dict[int, tuple[int, dict]] = {}
    nodes: list[tuple[int, bool]] = []  # stream, write
    edges: set[tuple[int, int]] = set()
    last: dict[int, list[int]] = {stream: [] for stream in (0, 1, 2, HOST)}  # what the stream's next node comes after
    marks: dict[int, list[int]] = {}
    for step in range(14):
        stream = draw.randrange(3)
        kind = draw.choice(("access", "access", "record", "wait", "host"))
        if kind == "access":
            write = draw.random() < 0.5
            edges |= {(before, len(nodes)) for before in last[stream] + last[HOST]}
            last[stream] = [len(nodes)]
            nodes.append((stream, write))
            clocks.access(0, stream, write=write, what=str(step))
        elif kind == "record":
            marks[step], events[step] = last[stream] + last[HOST], (stream, clocks.record(stream))
        elif events:
            chosen = draw.choice(sorted(events))
            waiting = HOST if kind == "host" else stream
            last[waiting] = last[waiting] + marks[chosen]
            clocks.wait(waiting, events[chosen][1])
    reach = _closure(len(nodes), edges)
    unordered = {
        (i, j)
        for i, j in itertools.combinations(range(len(nodes)), 2)
        if (nodes[i][1] or nodes[j][1]) and (i, j) not in reach
    }
    assert bool(clocks.races) is bool(unordered)


def _closure(count: int, edges: set[tuple[int, int]]) -> set[tuple[int, int]]:
    reach = set(edges)
    for k, i, j in itertools.product(range(count), repeat=3):
        if (i, k) in reach and (k, j) in reach:
            reach.add((i, j))
    return reach
