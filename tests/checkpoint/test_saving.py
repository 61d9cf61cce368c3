"""A model written to a new folder."""

from __future__ import annotations

import errno

import pytest
from tokenizers import Tokenizer, models

from flashnorm.checkpoint.saving import os_errors


def test_the_tokenizers_errors_are_the_systems_too() -> None:
    tokenizer = Tokenizer(models.BPE())
    with pytest.raises(OSError, match="No such file") as caught, os_errors():
        tokenizer.save("/nowhere/tokenizer.json")
    assert caught.value.errno == errno.ENOENT
    with pytest.raises(ValueError, match="another"), os_errors():
        raise ValueError("another")
