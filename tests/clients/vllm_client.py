"""Stock vLLM loads a source and a folded checkpoint and continues the same prompts greedily, in bf16.

Usage: `python -m tests.clients.vllm_client SOURCE CANDIDATE`, in an environment with vLLM; it needs no flashnorm.
Exit status 1 when a continuation differs at anything but a near tie. Each model runs in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.clients.greedy import PROMPTS, TOKENS, Step, compare, near_tie

LIKELIEST = 5


def generate(folder: str, dtype: str, answer: str) -> None:
    """Write each prompt's tokens with their log-probabilities, and the text, to the JSON file `answer`."""
    from vllm import LLM, SamplingParams

    model = LLM(model=folder, dtype=dtype, enforce_eager=True, max_model_len=512)
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=LIKELIEST)
    outputs = [request.outputs[0] for request in model.generate(list(PROMPTS), sampling)]
    steps = [
        [
            (token, [(other, seen.logprob) for other, seen in likeliest.items()])
            for token, likeliest in zip(output.token_ids, output.logprobs, strict=True)
        ]
        for output in outputs
    ]
    Path(answer).write_text(json.dumps({"texts": [output.text for output in outputs], "steps": steps}))


def _run(folder: str, dtype: str) -> tuple[list[str], list[list[Step]]]:
    with TemporaryDirectory() as place:
        answer = Path(place) / "answer.json"  # vLLM's processes write to standard output as they please
        module = [sys.executable, "-m", "tests.clients.vllm_client"]
        subprocess.run([*module, "--generate", folder, dtype, str(answer)], check=True, stdout=sys.stderr)
        result = json.loads(answer.read_text())
    return result["texts"], [[Step(token, dict(seen)) for token, seen in steps] for steps in result["steps"]]


def main(source: str, candidate: str) -> int:
    _, exact = _run(source, "float32")
    texts, expected = _run(source, "bfloat16")
    _, actual = _run(candidate, "bfloat16")
    bound = near_tie(exact, expected)
    accepted = True
    for prompt, text, ours, theirs in zip(PROMPTS, texts, expected, actual, strict=True):
        comparison = compare(ours, theirs, bound)
        accepted &= comparison.accepted
        print(f"{prompt!r} + {text!r}\n    {comparison}")
    return 0 if accepted else 1


if __name__ == "__main__":
    if sys.argv[1] == "--generate":
        generate(*sys.argv[2:])
    else:
        sys.exit(main(*sys.argv[1:]))
