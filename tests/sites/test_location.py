"""The line that is named is one of the model's, whatever its folder is called."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import flashnorm
from flashnorm.sites.location import model_line

OURS, TORCHS = Path(flashnorm.__file__).parent, Path(torch.__file__).parent


def _line_of(path: object) -> str:
    """What is said of code that asks from the third line of a file of that path."""
    names = {"model_line": model_line}
    exec(compile("\n\nline = model_line(None)", str(path), "exec"), names)
    return str(names["line"])


@pytest.mark.parametrize("path", ["/models/modeling.py", f"{OURS}_models/modeling.py", f"{TORCHS}vision/modeling.py"])
def test_model_code_is_named_also_beside_packages_of_like_names(path: str) -> None:
    assert _line_of(path) == "modeling.py:3"


@pytest.mark.parametrize("path", [OURS / "modeling.py", TORCHS / "nn" / "modeling.py", "<string>"])
def test_packages_and_generated_code_are_passed_over(path: object) -> None:
    assert _line_of(path).startswith("test_location.py:")


def test_the_innermost_model_line_of_a_traceback() -> None:
    with pytest.raises(RuntimeError) as caught:
        exec(compile("\ntorch.zeros(2) @ torch.zeros(3)", "/models/inner.py", "exec"), {"torch": torch})
    assert model_line(caught.tb) == "inner.py:2"
