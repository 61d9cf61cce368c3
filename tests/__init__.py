"""Tests, in a tree that mirrors the package.

Where there is no GPU, Triton interprets its kernels. It decides so when it is imported, hence before anything else.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
