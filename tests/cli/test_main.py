"""Exit statuses: what a script goes by."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import typer

import flashnorm.sites.transforms
from flashnorm import errors
from flashnorm.cli import options
from flashnorm.cli.main import app, main
from flashnorm.cli.options import Dtype
from flashnorm.version import __version__

REFUSALS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.FlashnormError) and kind is not errors.CheckFailed
]


def status(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    return int(stop.value.code or 0)


def raising(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> int:
    def fail(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(flashnorm.sites.transforms, "audit_fully", fail)
    return status("audit", ".", "--quiet")


@pytest.mark.parametrize("kind", REFUSALS)
def test_errors_on_purpose_are_one_line_and_status_2(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert raising(monkeypatch, kind("what was given; what to do")) == 2
    assert capsys.readouterr().err == "flashnorm: what was given; what to do\n"


def test_only_a_failed_check_is_status_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert raising(monkeypatch, errors.CheckFailed("outside its bound")) == 1
    assert capsys.readouterr().err == "flashnorm: outside its bound\n"


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyError("x"), MemoryError(), AssertionError()])
def test_a_bug_is_no_verdict_and_shows_where_it_is(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert raising(monkeypatch, error) == 70
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1].startswith("flashnorm: this error was not foreseen")


def test_an_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    assert raising(monkeypatch, KeyboardInterrupt()) == 130


def test_a_traceback_on_request(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FLASHNORM_TRACEBACK", "1")
    assert raising(monkeypatch, errors.Refusal("no")) == 2
    assert "Traceback (most recent call last):" in capsys.readouterr().err


def test_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status("--version") == 0
    assert capsys.readouterr().out == f"{__version__}\n"
    assert status("no-such-command") == 2
    assert status("fold", str(tmp_path)) == 2


def _commands() -> dict[str, typer.core.TyperCommand]:
    root = typer.main.get_command(app)
    found = {}
    for name, command in root.commands.items():
        found |= (
            {f"{name} {sub}": c for sub, c in command.commands.items()}
            if hasattr(command, "commands")
            else {name: command}
        )
    return found


@pytest.mark.parametrize("name", _commands())
def test_shared_options_are_called_alike_everywhere(name: str) -> None:
    options = {option: p for p in _commands()[name].params for option in p.opts}
    assert "--json" in options
    assert all(p.help for p in options.values() if p.param_type_name == "option")
    dtype = get_type_hints(_commands()[name].callback).get("dtype", Dtype)
    assert Dtype in (dtype, *get_args(dtype))


def _leaves(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every command that does something, with its whole name."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _leaves(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


@pytest.mark.parametrize(
    ("option", "shared"), [("--json", options.AsJson), ("--quiet", options.Quiet)], ids=["json", "quiet"]
)
def test_shared_options_mean_the_same_in_every_command(option: str, shared: Any) -> None:
    said = shared.__metadata__[0].help
    commands = dict(_leaves(typer.main.get_command(app)))
    assert {"fold", "tune", "bench op"} <= set(commands)
    for name, command in commands.items():
        assert [p.help for p in command.params if option in p.opts] == [said], name
