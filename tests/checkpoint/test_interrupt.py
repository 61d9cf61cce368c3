"""A fold that is killed, interrupted or starved at any moment leaves the source as it was and nothing that loads."""

import errno
import itertools
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest

from flashnorm.checkpoint.apply import apply_plan
from flashnorm.checkpoint.hashes import verify_hashes
from flashnorm.checkpoint.source import open_source
from flashnorm.errors import OutputError, Refusal
from tests.checkpoint.tiny import hand_plan, random_weights, tree, write_checkpoint

LAYERS = 4
# Processes forked from one that has torch loaded: starting an interpreter takes longer than the fold.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["flashnorm.checkpoint.apply", "tests.checkpoint.tiny"])
STEPS = ("preadv", "write", "fsync", "rename", "mkdir", "open")


def fold(source, dst):
    opened = open_source(source)
    apply_plan(opened, hand_plan(opened, layers=LAYERS), dst, quiet=True)


def count_calls(steps, at_call):
    """Wrap the functions `os.<step>`: `at_call(n)` runs before the n-th call of any of them."""
    calls = itertools.count()

    def wrap(unchanged):
        def call(*arguments, **options):
            at_call(next(calls))
            return unchanged(*arguments, **options)

        return call

    for step in steps:
        setattr(os, step, wrap(getattr(os, step)))


def fold_until(source, dst, steps, moment, signal_number):
    """Fold, but send this very process a signal before call number `moment` of the functions `os.<step>`."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs in its background deaf to it

    def at_call(number):
        if number == moment:
            os.kill(os.getpid(), signal_number)
            time.sleep(0.2)  # an interruption reaches the main thread, not this one

    count_calls(steps, at_call)
    fold(source, dst)


def fold_and_count(source, dst, found):
    """Fold, and send how many calls of all steps that took."""
    total = itertools.count()
    count_calls(STEPS, lambda _: next(total))
    fold(source, dst)
    found.send(next(total))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """13 MB in 5 shards."""
    weights = random_weights(layers=LAYERS, width=512, out=1024)
    return write_checkpoint(tmp_path_factory.mktemp("source") / "source", weights, shards=5)


@pytest.fixture(scope="module")
def original(source):
    return tree(source)


def run(target, *arguments):
    process = FORKS.Process(target=target, args=arguments)
    process.start()
    return process


def loadable(parent: Path) -> list[Path]:
    """Folders that any loader would take for a model."""
    return [path.parent for path in parent.rglob("config.json") if list(path.parent.glob("*.safetensors"))]


def check_after(source, original, dst):
    """Whatever loads is complete; the source is untouched; running again succeeds and clears what was left."""
    assert tree(source) == original
    for folder in loadable(dst.parent):
        assert verify_hashes(folder, quiet=True).passed
    if not dst.exists():
        fold(source, dst)
    assert verify_hashes(dst, quiet=True).passed
    assert os.listdir(dst.parent) == [dst.name]


@pytest.fixture(scope="module")
def calls(source, tmp_path_factory):
    """How many system calls that read, write or name something one fold makes."""
    receive, send = FORKS.Pipe(duplex=False)
    run(fold_and_count, source, tmp_path_factory.mktemp("count") / "out", send)
    return receive.recv()


@pytest.mark.parametrize("trial", range(20))
def test_killed_at_a_random_moment(source, original, calls, tmp_path, trial):
    moment = random.Random(trial).randrange(calls)
    process = run(fold_until, source, tmp_path / "out", STEPS, moment, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    check_after(source, original, tmp_path / "out")


@pytest.mark.parametrize("back", [1, 2, 3])
def test_killed_at_the_last_renames(source, original, tmp_path, back):
    """The config and the folder get their names last: 15 files, then the folder itself."""
    renames = len(original) + 2 + 1  # the manifest and the gains, then the folder
    dst = tmp_path / "out"
    process = run(fold_until, source, dst, ("rename",), renames - back, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not dst.exists()
    assert [folder.name.startswith(".out.") for folder in loadable(tmp_path)] == [True] * (back == 1)
    check_after(source, original, dst)


@pytest.mark.parametrize(("step", "count"), [("write", 3), ("fsync", 2), ("rename", 4)])
def test_interrupted_by_the_user(source, original, tmp_path, step, count):
    dst = tmp_path / "out"
    process = run(fold_until, source, dst, (step,), count, signal.SIGINT)
    process.join()
    assert process.exitcode == 1
    assert os.listdir(tmp_path) == []
    assert tree(source) == original


@pytest.mark.parametrize("number", [0, 7, 30])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_the_disk_becomes_full(source, original, tmp_path, monkeypatch, number, code):
    unchanged, calls = os.write, iter(range(10**9))

    def write(descriptor, data):
        if next(calls) >= number:
            raise OSError(code, os.strerror(code))
        return unchanged(descriptor, data[: 1 + len(data) // 2])  # a disk may take a part only

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(OutputError, match="the disk became full"):
        fold(source, tmp_path / "out")
    monkeypatch.undo()
    assert os.listdir(tmp_path) == []
    check_after(source, original, tmp_path / "out")


def test_the_source_shrinks_meanwhile(source, tmp_path):
    opened = open_source(source)
    plan = hand_plan(opened, layers=LAYERS)
    moved = tmp_path / "moved"
    write_checkpoint(moved, random_weights(layers=LAYERS, width=512, out=1024), shards=5)
    opened = open_source(moved)
    os.truncate(moved / opened.shards[0].name, 10_000)
    (tmp_path / "outputs").mkdir()
    with pytest.raises(Refusal, match="became shorter"):
        apply_plan(opened, plan, tmp_path / "outputs" / "out", quiet=True)
    assert os.listdir(tmp_path / "outputs") == []


def test_the_check_catches_a_partial_folder_that_loads(source, original, tmp_path):
    """The planted fault: a folder whose config came before its last shard."""
    fold(source, tmp_path / "out")
    (tmp_path / "out" / open_source(source).shards[-1].name).unlink()
    assert loadable(tmp_path) == [tmp_path / "out"]
    with pytest.raises(AssertionError):
        check_after(source, original, tmp_path / "out")
