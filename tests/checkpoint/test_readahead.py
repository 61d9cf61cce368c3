import os
import threading

import pytest
import torch

from flashnorm.checkpoint import readahead
from flashnorm.checkpoint.readahead import reading_ahead
from flashnorm.checkpoint.source import open_source
from tests.checkpoint.tiny import write_checkpoint

pytestmark = pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system cannot be asked to read ahead")


@pytest.fixture
def source(tmp_path):
    weights = {f"w{index}": torch.zeros(1000 * (index + 1)) for index in range(3)}
    return open_source(write_checkpoint(tmp_path / "source", weights))


@pytest.fixture
def asked(monkeypatch):
    """Every request to read, as (file name, start)."""
    calls = []

    def advise(descriptor, start, count, advice):
        assert advice == os.POSIX_FADV_WILLNEED
        calls.append((os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")), start))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    return calls


def settle():
    """The reader ends by itself when it has asked for everything."""
    for thread in threading.enumerate():
        if thread.name == "read-ahead":
            thread.join()


def test_asks_for_the_largest_first(source, asked, monkeypatch):
    monkeypatch.setattr(readahead, "_STEP_BYTES", 5000)
    with reading_ahead(source):
        settle()
    names = [name for name, _ in source.by_size() if os.stat(source.folder / name).st_size]
    assert list(dict.fromkeys(name for name, _ in asked)) == [os.path.basename(name) for name in names]
    assert [start for name, start in asked if name == names[0]] == [0, 5000, 10000]


def test_takes_half_of_the_free_memory_at_most(source, asked, monkeypatch):
    monkeypatch.setattr(readahead, "_STEP_BYTES", 5000)
    monkeypatch.setattr(readahead, "_free_bytes", lambda: 2 * 7000)
    with reading_ahead(source):
        settle()
    assert [start for _, start in asked] == [0, 5000]


def test_stops_with_the_block(source, monkeypatch):
    started, calls = threading.Event(), []

    def slow(descriptor, start, count, advice):
        calls.append(start)
        started.set()
        stop.wait(10)

    stop = threading.Event()
    monkeypatch.setattr(os, "posix_fadvise", slow)
    monkeypatch.setattr(readahead, "_STEP_BYTES", 100)
    thread = threading.Thread(target=lambda: (started.wait(10), stop.set()))
    thread.start()
    with reading_ahead(source):
        started.wait(10)
    thread.join()
    assert len(calls) < 100
    assert not [thread for thread in threading.enumerate() if thread.name == "read-ahead"]


def test_an_error_is_left_to_the_real_reader(source, monkeypatch):
    def fail(*arguments):
        raise OSError("no such thing here")

    monkeypatch.setattr(os, "posix_fadvise", fail)
    with reading_ahead(source):
        settle()
