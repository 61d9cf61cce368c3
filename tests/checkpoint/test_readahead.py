import hashlib
import threading

import pytest
import torch

from flashnorm.checkpoint import readahead
from flashnorm.checkpoint.readahead import reading_ahead
from flashnorm.checkpoint.source import open_source
from tests.checkpoint.tiny import write_checkpoint


@pytest.fixture
def source(tmp_path):
    weights = {f"w{index}": torch.zeros(1000 * (index + 1)) for index in range(3)}
    return open_source(write_checkpoint(tmp_path / "source", weights))


def settle():
    """The reader ends by itself when it has read everything."""
    for thread in threading.enumerate():
        if thread.name == "read-ahead":
            thread.join()


def test_every_file_is_hashed(source, monkeypatch):
    monkeypatch.setattr(readahead, "_STEP_BYTES", 5000)
    with reading_ahead(source) as sums:
        settle()
    expected = {name: hashlib.sha256((source.folder / name).read_bytes()).hexdigest() for name in source.files}
    assert sums == expected


def test_takes_half_of_the_free_memory_at_most(source, monkeypatch):
    (largest, size), (_, next_size), *_ = source.by_size()
    for room, read in ((size - 1, []), (size, [largest]), (size + next_size - 1, [largest])):
        monkeypatch.setattr(readahead, "_free_bytes", lambda room=room: 2 * room)
        with reading_ahead(source) as sums:
            settle()
        assert list(sums) == read


def test_stops_with_the_block_and_gives_no_sum_of_half_a_file(source, monkeypatch):
    monkeypatch.setattr(readahead, "_STEP_BYTES", 100)
    started, over = threading.Event(), threading.Event()

    def slow(descriptor, position):
        started.set()
        over.wait(10)

    monkeypatch.setattr(readahead, "_ask_for_next", slow)
    with reading_ahead(source) as sums:
        started.wait(10)
        threading.Timer(0.1, over.set).start()  # the first step ends after the block has asked to stop
    assert sums == {}
    assert not [thread for thread in threading.enumerate() if thread.name == "read-ahead"]


def test_a_file_that_vanishes_is_left_to_the_real_reader(source):
    (source.folder / source.by_size()[0][0]).unlink()
    with reading_ahead(source) as sums:
        settle()
    assert sums == {}


def test_an_error_of_the_block_is_passed_on(source):
    with pytest.raises(KeyError), reading_ahead(source):
        raise KeyError
