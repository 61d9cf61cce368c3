import io
import time

import pytest

from flashnorm.checkpoint import progress
from flashnorm.checkpoint.progress import metered


def test_plain_lines_where_there_is_no_terminal(monkeypatch):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    stream = io.StringIO()
    with metered("fold", 3_000_000_000, stream=stream) as meter:
        assert stream.getvalue() == "fold: 0 B of 3.0 GB\n"  # at once, not after the first gigabyte
        time.sleep(0.01)
        meter.add(1_500_000_000)
        meter.add(1_500_000_000)
    lines = stream.getvalue().splitlines()
    assert lines[1].startswith("fold: 1.5 GB of 3.0 GB, ")
    assert lines[1].endswith(" s left")
    assert "/s, 0 s left" in lines[2]


def test_lines_are_few():
    stream = io.StringIO()
    with metered("fold", 1000, stream=stream) as meter:
        for _ in range(999):
            meter.add(1)
    assert len(stream.getvalue().splitlines()) == 1


def test_a_bar_on_a_terminal(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with metered("fold", 2_000_000, stream=stream) as meter:
        meter.add(1_000_000)
    assert "1.0/2.0 MB" in stream.getvalue()


def test_quiet(capsys):
    with metered("fold", 10, quiet=True) as meter:
        meter.add(10)
    assert meter.done == 10
    assert capsys.readouterr() == ("", "")


def test_stderr_is_where_it_goes(capsys):
    with metered("fold", 10):
        pass
    assert capsys.readouterr() == ("", "fold: 0 B of 10 B\n")


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2.5e12, "2.50 TB")])
def test_sizes(count, text):
    assert progress._size(count) == text
