"""The public names: all there, each one thing, documented, and silent unless told otherwise."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys

import pytest

import flashnorm

CALLABLE = [name for name in flashnorm.__all__ if name != "__version__"]


@pytest.mark.parametrize("name", CALLABLE)
def test_every_name_is_there_and_documented(name: str) -> None:
    value = getattr(flashnorm, name)
    assert callable(value)
    assert inspect.getdoc(value)
    assert name in dir(flashnorm)


def test_a_name_means_the_same_whatever_was_imported() -> None:
    """In a process of its own: here everything is imported already."""
    code = """
import flashnorm
first = {name: getattr(flashnorm, name) for name in flashnorm.__all__}
import flashnorm.verify.battery, flashnorm.sites.audit, flashnorm.passes.fold, flashnorm.checkpoint.load
for name, value in first.items():
    assert getattr(flashnorm, name) is value, name
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, flashnorm; sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'rich')))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'fold_everything'"):
        flashnorm.fold_everything  # noqa: B018


@pytest.mark.parametrize("name", [name for name in CALLABLE if inspect.isfunction(getattr(flashnorm, name))])
def test_the_library_is_silent_unless_told_otherwise(name: str) -> None:
    quiet = inspect.signature(getattr(flashnorm, name)).parameters.get("quiet")
    assert quiet is None or quiet.default is True


def test_verify_is_the_package_and_the_function() -> None:
    assert flashnorm.verify is importlib.import_module("flashnorm.verify")
    with pytest.raises(flashnorm.errors.Refusal, match="positions=0"):
        flashnorm.verify("a", "b", positions=0)
