import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from flashnorm.checkpoint import staging
from flashnorm.checkpoint.staging import (
    WriteBack,
    check_output,
    copy_file,
    new_file,
    new_folder,
    remove_leftovers,
    write_file,
)
from flashnorm.errors import CheckpointError, OutputError


def fill(folder):
    write_file(folder, "model.safetensors", b"weights")
    write_file(folder, "config.json", b"{}")


def write_new(dst, then, size=0):
    """Fill a new folder, then do something before it is finished."""
    with new_folder(dst, size) as folder:
        fill(folder)
        then()


def fails_with(error):
    def fail():
        raise error

    return fail


def test_a_folder_appears_whole(tmp_path):
    dst = tmp_path / "out"
    with new_folder(dst, 100) as folder:
        fill(folder)
        assert folder.parent == tmp_path
        assert folder.name.startswith(".out.flashnorm-partial-")
        assert not dst.exists()
        assert sorted(os.listdir(folder)) == ["config.json.flashnorm-partial", "model.safetensors"]
    assert os.listdir(tmp_path) == ["out"]
    assert {path.name: path.read_bytes() for path in dst.iterdir()} == {
        "model.safetensors": b"weights",
        "config.json": b"{}",
    }


def test_it_has_the_permissions_of_any_new_folder(tmp_path):
    (tmp_path / "plain").mkdir()
    (tmp_path / "file").touch()
    with new_folder(tmp_path / "out", 0) as folder:
        fill(folder)
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert (tmp_path / "out" / "config.json").stat().st_mode == (tmp_path / "file").stat().st_mode


@pytest.mark.parametrize("error", [ValueError("bad"), KeyboardInterrupt()])
def test_an_error_leaves_nothing(tmp_path, error):
    with pytest.raises(type(error)):
        write_new(tmp_path / "out", fails_with(error))
    assert os.listdir(tmp_path) == []


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.05)  # in this time the interruption comes


@pytest.fixture
def interruptible():
    """A shell starts what runs in its background deaf to interruptions."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_a_second_interruption_does_not_stop_the_removal(tmp_path, monkeypatch):
    unchanged, before = shutil.rmtree, signal.getsignal(signal.SIGINT)

    def remove(folder, **options):
        interrupt()
        unchanged(folder, **options)

    monkeypatch.setattr(staging.shutil, "rmtree", remove)
    with pytest.raises(KeyboardInterrupt):
        write_new(tmp_path / "out", interrupt)
    assert os.listdir(tmp_path) == []
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):  # from here on it counts again
        interrupt()


def test_the_removal_in_another_thread_leaves_interruptions_alone(tmp_path):
    found = []

    def fail():
        try:
            write_new(tmp_path / "out", fails_with(ValueError()))
        except ValueError:
            found.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    assert (found, os.listdir(tmp_path)) == ([before], [])


def test_a_file_has_no_name_before_it_is_finished(tmp_path):
    with new_file(tmp_path, "sub/x") as descriptor:
        os.write(descriptor, b"half")
        assert os.listdir(tmp_path / "sub") == ["x.flashnorm-partial"]
    assert os.listdir(tmp_path / "sub") == ["x"]


def test_a_file_that_fails_gets_no_name(tmp_path):
    with pytest.raises(ValueError), new_file(tmp_path, "x"):
        raise ValueError
    assert os.listdir(tmp_path) == ["x.flashnorm-partial"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_becomes_full(tmp_path, number):
    with pytest.raises(OutputError, match=r"the disk became full while .* nothing was left"):
        write_new(tmp_path / "out", fails_with(OSError(number, os.strerror(number))))
    assert os.listdir(tmp_path) == []


def test_other_trouble_with_the_disk(tmp_path):
    with pytest.raises(OutputError, match="cannot be written: Input/output error"):
        write_new(tmp_path / "out", fails_with(OSError(errno.EIO, os.strerror(errno.EIO))))


def test_no_room_is_found_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(staging, "free_bytes", lambda folder: 10**9)
    with pytest.raises(OutputError, match=r"needs 1\.02 GB and its disk has 1\.00 GB free"):
        write_new(tmp_path / "out", lambda: pytest.fail("must not begin"), size=10**9)
    assert os.listdir(tmp_path) == []
    write_new(tmp_path / "out", lambda: None, size=9 * 10**8)


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
def test_a_file_system_without_a_disk_is_said_to_be_none():
    with pytest.raises(OutputError, match="/proc/zz does not lie on a disk"), new_folder(Path("/proc/zz"), 1):
        pass


def test_free_bytes_is_what_an_ordinary_user_may_write(tmp_path, monkeypatch):
    class Disk:
        f_bavail, f_bfree, f_frsize = 3, 5, 4096

    monkeypatch.setattr(os, "statvfs", lambda folder: Disk)
    assert staging.free_bytes(tmp_path) == 3 * 4096


def test_an_output_made_meanwhile_is_kept(tmp_path):
    with pytest.raises(OutputError, match="was made by someone else meanwhile"):
        write_new(tmp_path / "out", (tmp_path / "out").mkdir)
    assert os.listdir(tmp_path) == ["out"]
    assert os.listdir(tmp_path / "out") == []


def test_a_folder_that_cannot_be_made(tmp_path, monkeypatch):
    def refuse(*arguments, **options):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    with pytest.raises(OutputError, match="cannot be written: Permission denied"):
        write_new(tmp_path / "out", lambda: pytest.fail("must not begin"))


def test_output_that_exists(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in ("empty", "file", "dangling"):
        with pytest.raises(OutputError, match=f"{name} exists already"):
            check_output(source, tmp_path / name)
    check_output(source, tmp_path / "new")


def test_output_and_source_inside_each_other(tmp_path):
    source = tmp_path / "a" / "source"
    source.mkdir(parents=True)
    (tmp_path / "link").symlink_to(source)
    for dst in (source, source / "out", source / "x" / "out", tmp_path / "link" / "out"):
        with pytest.raises(OutputError, match="lies inside the source"):
            check_output(source, dst)
    with pytest.raises(OutputError, match=r"the source .* lies inside"):
        check_output(source, tmp_path / "a")
    check_output(source, tmp_path / "a" / "source-out")


def test_output_in_a_folder_that_is_not_there(tmp_path):
    (tmp_path / "source").mkdir()
    with pytest.raises(OutputError, match="nowhere is not a folder; make it first"):
        check_output(tmp_path / "source", tmp_path / "nowhere" / "out")


def test_what_a_killed_run_left_is_removed(tmp_path):
    leftover = tmp_path / ".out.flashnorm-partial-0123abcd"
    others = [tmp_path / ".out2.flashnorm-partial-0123abcd", tmp_path / ".out.flashnorm-partial", tmp_path / "out.x"]
    for folder in (leftover, *others):
        folder.mkdir()
        (folder / "file").touch()
    with new_folder(tmp_path / "out", 0) as folder:
        fill(folder)
        assert not leftover.exists()
    assert all(folder.exists() for folder in others)


def test_names_with_patterns_in_them_match_only_themselves(tmp_path):
    other = tmp_path / ".model-x.flashnorm-partial-00000000"
    other.mkdir()
    remove_leftovers(tmp_path / "model-[a-z]")
    assert other.exists()


def test_another_file_may_be_the_last(tmp_path):
    with new_folder(tmp_path / "out", 0, "adapter_config.json") as folder:
        for name in ("adapter_config.json", "config.json"):
            write_file(folder, name, b"{}", "adapter_config.json")
        assert sorted(os.listdir(folder)) == ["adapter_config.json.flashnorm-partial", "config.json"]
    assert sorted(os.listdir(tmp_path / "out")) == ["adapter_config.json", "config.json"]


def test_a_folder_without_its_last_file_does_not_appear(tmp_path):
    with pytest.raises(OutputError), new_folder(tmp_path / "out", 0) as folder:
        write_file(folder, "model.safetensors", b"weights")
    assert os.listdir(tmp_path) == []


def test_everything_is_on_the_disk_before_the_folder_has_its_name(tmp_path, monkeypatch):
    """Files that other libraries wrote too: a rename that reaches the disk before the bytes would publish half."""
    unchanged, synced = os.fsync, set()

    def note(descriptor):
        synced.add(os.fstat(descriptor).st_ino)
        unchanged(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    with new_folder(tmp_path / "out", 0) as folder:
        fill(folder)
        (folder / "sub").mkdir()
        (folder / "sub" / "foreign").write_bytes(b"not through new_file")
    assert {path.stat().st_ino for path in (tmp_path / "out").rglob("*")} <= synced


def test_copies_are_whole_and_an_unreadable_source_is_not_the_outputs_fault(tmp_path):
    data = os.urandom(5 * 1024 * 1024)
    (tmp_path / "source").write_bytes(data)
    (tmp_path / "place").mkdir()
    copy_file(tmp_path / "source", tmp_path / "place", "sub/copy")
    assert (tmp_path / "place" / "sub" / "copy").read_bytes() == data
    with pytest.raises(CheckpointError, match="gone cannot be read"), new_folder(tmp_path / "out", 0) as folder:
        copy_file(tmp_path / "gone", folder, "copy")
    assert not (tmp_path / "out").exists()


HOLD = """
import sys
from pathlib import Path
from flashnorm.checkpoint.staging import new_folder, write_file
with new_folder(Path(sys.argv[1]), 0) as folder:
    write_file(folder, "config.json", b"{}")
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_what_a_live_run_still_writes_stays_until_it_is_dead(tmp_path):
    dst = tmp_path / "out"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(dst)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        held = other.stdout.readline().strip()
        remove_leftovers(dst)
        assert os.path.isdir(held)
        other.kill()
        other.wait()
        assert os.path.isdir(held)
    remove_leftovers(dst)
    assert os.listdir(tmp_path) == []


def test_where_the_file_system_has_no_locks_leftovers_stay(tmp_path, monkeypatch):
    def unsupported(*arguments):
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    leftover = tmp_path / ".out.flashnorm-partial-0123abcd"
    leftover.mkdir()
    monkeypatch.setattr(staging.fcntl, "flock", unsupported)
    with new_folder(tmp_path / "out", 0) as folder:
        fill(folder)
    assert leftover.exists()


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system cannot be asked to write back")
def test_written_pages_are_first_sent_to_the_disk_and_later_dropped(monkeypatch):
    asked = []
    monkeypatch.setattr(os, "posix_fadvise", lambda descriptor, start, count, advice: asked.append((start, count)))
    monkeypatch.setattr(staging, "_BEHIND", 10)
    behind = WriteBack(3)
    for _ in range(7):
        behind.wrote(5)
    assert [call for call in asked if call[1] == 5] == [(5 * turn, 5) for turn in range(7)]
    # A drop never reaches closer to the end of what is written than the margin, and leaves no gap.
    assert [call for call in asked if call[1] != 5] == [(0, 15)]
