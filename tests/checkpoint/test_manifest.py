import json
from pathlib import Path

import jsonschema
import pytest

from flashnorm.checkpoint.apply import apply_plan
from flashnorm.checkpoint.manifest import MANIFEST, FileRecord, Manifest, manifest_bytes, read_manifest
from flashnorm.checkpoint.source import open_source
from flashnorm.errors import CheckpointError
from flashnorm.version import __version__
from tests.checkpoint.tiny import hand_plan, write_checkpoint

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "flashnorm.schema.json").read_text())


@pytest.fixture(params=[False, True], ids=["compatible", "strict"])
def folded(tmp_path, request):
    source = open_source(write_checkpoint(tmp_path / "source"))
    apply_plan(source, hand_plan(source, strict=request.param), tmp_path / "out", quiet=True)
    return tmp_path / "out"


def table_of(folder):
    return json.loads((folder / MANIFEST).read_text())


def rewrite(folder, change):
    table = table_of(folder)
    change(table)
    (folder / MANIFEST).write_text(json.dumps(table))


def test_real_output_fits_the_published_schema(folded):
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    table = table_of(folded)
    jsonschema.validate(table, SCHEMA)
    assert table["tool"] == {"name": "flashnorm", "version": __version__}


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.pop("digest"),
        lambda table: table.update(more=1),
        lambda table: table.update(mode="other"),
        lambda table: table.update(schema_version=2),
        lambda table: table["sites"][0].pop("offset"),
        lambda table: table["sites"][0]["readers"][0].update(axis="1"),
        lambda table: table["output"]["config.json"].update(sha256="00"),
    ],
)
def test_the_schema_sees_what_does_not_fit(folded, change):
    table = table_of(folded)
    change(table)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(table, SCHEMA)


def test_every_property_is_in_the_schema(folded):
    assert set(SCHEMA["properties"]) == set(SCHEMA["required"]) == set(table_of(folded))


def test_it_reads_what_it_wrote(tmp_path):
    manifest = Manifest(
        tool_version="0.1.0",
        mode="strict",
        untied=True,
        source={"a": FileRecord("0" * 64, 1)},
        output={},
        sites=(),
        skipped={"norm": "why: é"},
        originals=("a",),
        added=("b",),
        removed=("c",),
        config="\udcff not UTF-8, kept all the same",
    )
    (tmp_path / MANIFEST).write_bytes(manifest_bytes(manifest))
    assert read_manifest(tmp_path) == manifest


def test_reading_gives_back_the_sites(folded):
    manifest = read_manifest(folded)
    assert [site.norm for site in manifest.sites] == [f"layers.{index}.norm" for index in range(3)]
    assert all(reader.axis == 1 and reader.channels is None for site in manifest.sites for reader in site.readers)
    assert manifest_bytes(manifest) == (folded / MANIFEST).read_bytes()


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table["sites"][0].update(offset=1.0),
        lambda table: table["output"]["config.json"].update(size=0),
        lambda table: table["skipped"].clear(),
        lambda table: table.pop("digest"),
        lambda table: table.update(mode="other"),
    ],
)
def test_an_altered_manifest_is_refused(folded, change):
    rewrite(folded, change)
    with pytest.raises(CheckpointError, match="was changed after it was written: its digest does not match"):
        read_manifest(folded)


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_another_schema_version_is_refused(folded, version):
    rewrite(folded, lambda table: table.update(schema_version=version))
    with pytest.raises(CheckpointError, match=f"has schema version {version!r}, this version reads 1"):
        read_manifest(folded)


def test_no_manifest(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no flashnorm\.json; give a folder that `flashnorm fold` wrote"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_a_manifest_that_is_no_object(tmp_path, text):
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(CheckpointError, match=r"is not valid JSON|must hold a JSON object"):
        read_manifest(tmp_path)
