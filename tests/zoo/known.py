"""Types that only newer versions of Transformers have."""

from __future__ import annotations

import pytest

from tests.zoo.families import model_types


def known(family: str, model_type: str) -> str:
    """`model_type`; the test is skipped where the installed Transformers has none of that name."""
    if model_type not in model_types(family):
        pytest.skip(f"this Transformers has no {model_type}")
    return model_type
