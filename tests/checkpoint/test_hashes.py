import pytest

from flashnorm.checkpoint.apply import apply_plan
from flashnorm.checkpoint.hashes import verify_hashes
from flashnorm.checkpoint.manifest import MANIFEST
from flashnorm.checkpoint.source import open_source
from flashnorm.errors import CheckpointError
from tests.checkpoint.tiny import hand_plan, write_checkpoint


@pytest.fixture
def folded(tmp_path):
    source = open_source(write_checkpoint(tmp_path / "source"))
    apply_plan(source, hand_plan(source), tmp_path / "out", quiet=True)
    return tmp_path / "out"


def check(folder):
    return verify_hashes(folder, quiet=True)


def test_nothing_changed(folded):
    report = check(folded)
    assert report.passed
    assert len(report.unchanged) == len([path for path in folded.rglob("*") if path.is_file()]) - 1


@pytest.mark.parametrize(
    "name", ["model-00002-of-00003.safetensors", "flashnorm.gains", "config.json", "LICENSE", "code/modeling_custom.py"]
)
@pytest.mark.parametrize("place", [0, -1])
def test_one_flipped_bit(folded, name, place):
    data = bytearray((folded / name).read_bytes())
    data[place] ^= 1
    (folded / name).write_bytes(data)
    report = check(folded)
    assert not report.passed
    assert (report.changed, report.missing, report.extra) == ((name,), (), ())


def test_missing_and_extra_files(folded):
    (folded / "empty").unlink()
    (folded / "extra.safetensors").touch()
    report = check(folded)
    assert not report.passed
    assert (report.changed, report.missing, report.extra) == ((), ("empty",), ("extra.safetensors",))


def test_a_download_tools_bookkeeping_is_not_extra(folded):
    (folded / ".cache").mkdir()
    (folded / ".cache" / "x").touch()
    assert check(folded).passed


def test_a_bit_flipped_in_the_manifest(folded):
    text = (folded / MANIFEST).read_text()
    (folded / MANIFEST).write_text(text.replace('"compatible"', '"compatiblf"'))
    with pytest.raises(CheckpointError, match="digest does not match"):
        check(folded)


def test_a_folder_that_is_not_folded(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no flashnorm\.json"):
        check(write_checkpoint(tmp_path / "source"))
