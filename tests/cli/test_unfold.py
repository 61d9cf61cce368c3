import json

import pytest

from flashnorm.checkpoint.apply import apply_plan
from flashnorm.checkpoint.source import open_source
from flashnorm.cli.main import main
from tests.checkpoint.tiny import hand_plan, write_checkpoint


def run(*arguments):
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    return stop.value.code


@pytest.fixture
def folded(tmp_path):
    source = open_source(write_checkpoint(tmp_path / "source"))
    apply_plan(source, hand_plan(source), tmp_path / "folded", quiet=True)
    return tmp_path / "folded"


def test_unfold(folded, tmp_path, capsys):
    assert run("unfold", folded, tmp_path / "back") == 0
    printed = capsys.readouterr()
    assert printed.out == f"{tmp_path / 'back'}: 3 tensors restored, 6 weights divided by their gains\n"
    assert printed.err.startswith(f"unfold: opening {folded}\nunfold: 0 B of ")


def test_unfold_json(folded, tmp_path, capsys):
    assert run("unfold", folded, tmp_path / "back", "--json", "--quiet") == 0
    printed = capsys.readouterr()
    assert len(json.loads(printed.out)["divided"]) == 6
    assert printed.err == ""


def test_what_is_not_folded_is_refused(folded, tmp_path, capsys):
    assert run("unfold", tmp_path / "source", tmp_path / "back") == 2
    assert "has no flashnorm.json" in capsys.readouterr().err
