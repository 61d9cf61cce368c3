import os
import threading
from types import SimpleNamespace

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
    """The first request lasts until the block has ended, so a second one would come after that."""
    started, over, calls = threading.Event(), threading.Event(), []

    class Stop(threading.Event):
        def set(self):
            super().set()
            over.set()

    def slow(descriptor, start, count, advice):
        calls.append(start)
        started.set()
        over.wait(10)

    monkeypatch.setattr(os, "posix_fadvise", slow)
    monkeypatch.setattr(readahead, "_STEP_BYTES", 100)
    monkeypatch.setattr(readahead, "threading", SimpleNamespace(Event=Stop, Thread=threading.Thread))
    with reading_ahead(source):
        started.wait(10)
    assert len(calls) == 1
    assert not [thread for thread in threading.enumerate() if thread.name == "read-ahead"]


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_folder_that_is_gone_is_left_to_the_real_reader(source):
    source.folder.rename(source.folder.with_name("gone"))
    with reading_ahead(source):
        settle()


def test_an_error_is_left_to_the_real_reader(source, monkeypatch):
    def fail(*arguments):
        raise OSError("no such thing here")

    monkeypatch.setattr(os, "posix_fadvise", fail)
    with reading_ahead(source):
        settle()
