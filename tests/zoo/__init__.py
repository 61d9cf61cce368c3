"""A zoo of tiny random models: one of every type that the installed Transformers can build from a config.

    for model_type in model_types("causal"):
        model = tiny_model("causal", model_type)
        out = logits(model, forward_inputs(model, "causal"))

`python -m tests.zoo causal` prints which types there are, and why the others are missing.
"""

from tests.zoo.configs import tiny_config
from tests.zoo.families import CannotBuild, model_types
from tests.zoo.inputs import forward_inputs, logits
from tests.zoo.models import tiny_model
from tests.zoo.quirks import BROKEN_ROUND_TRIP
from tests.zoo.report import build_report

__all__ = [
    "BROKEN_ROUND_TRIP",
    "CannotBuild",
    "build_report",
    "forward_inputs",
    "logits",
    "model_types",
    "tiny_config",
    "tiny_model",
]
