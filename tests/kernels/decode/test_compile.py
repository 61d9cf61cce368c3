"""Every decode kernel compiles for Hopper GPUs, in bf16 and with programmatic dependent launch, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.kernels import cases

cases.need_triton()

# In a process of its own: in this one, kernels are interpreted.
_SCRIPT = """
import json, traceback
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from flashnorm.kernels.decode import attention, begin, heads, join, matvec, settle

HALF, WIDE, INDEX = "*bf16", "*fp32", "*i64"
MATVEC = dict(HAS_GAIN=True, HAS_BIAS=True, PDL=True)
ATTENTION = dict(KV_HEADS=2, GROUP=4, G=16, BLOCK=32, PRECISION="tf32", PDL=True, EARLY=False)
NORMS = dict(Q_NORM=True, Q_GAIN=True, K_NORM=True, K_GAIN=True)
BARE = dict.fromkeys(NORMS, False)
CASES = {
    "linear qkv": (matvec._matvec_kernel, dict(K=2048, BLOCK_N=2, BLOCK_K=2048, NORM=True, ACTIVATION=-1, GATED=False,
                                        HAS_RESIDUAL=False, **MATVEC)),
    "linear gate_up": (matvec._matvec_kernel, dict(K=576, BLOCK_N=4, BLOCK_K=1024, NORM=True, ACTIVATION=0, GATED=True,
                                            HAS_RESIDUAL=False, **MATVEC)),
    "linear down": (matvec._matvec_kernel, dict(K=8192, BLOCK_N=2, BLOCK_K=2048, NORM=False, ACTIVATION=-1, GATED=False,
                                         HAS_RESIDUAL=True, **MATVEC)),
    "join": (join._join_kernel, dict(N=2304, BLOCK=4096, NORM=True, HAS_GAIN=True, PDL=True)),
    "attention": (attention._attention_kernel, dict(HEAD_DIM=64, D=64, SPLITS=32, ROTARY=32, INTERLEAVED=False,
                                                    WINDOWED=False, CAPPED=False, **BARE, **ATTENTION)),
    "early attention": (attention._attention_kernel, dict(HEAD_DIM=64, D=64, SPLITS=2, ROTARY=32, INTERLEAVED=False,
                                                          WINDOWED=True, CAPPED=False, **BARE,
                                                          **ATTENTION | dict(BLOCK=128, EARLY=True))),
    "all": (attention._attention_kernel, dict(HEAD_DIM=256, D=256, SPLITS=1, ROTARY=96, INTERLEAVED=True,
                                              WINDOWED=True, CAPPED=True, **NORMS, **ATTENTION)),
    "likeliest": (settle._likeliest_kernel, dict(SHARE=8192, BLOCK=4096, PARTS=32, PDL=True)),
    "settle": (settle._settle_kernel, dict(PARTS=32, PDL=True)),
    "odd": (attention._attention_kernel, dict(HEAD_DIM=96, D=128, SPLITS=8, ROTARY=0, INTERLEAVED=False,
                                              WINDOWED=True, CAPPED=False, **NORMS, **ATTENTION)),
    "prepare": (heads._prepare_kernel, dict(HEAD_DIM=128, D=128, ROTARY=32, INTERLEAVED=False, KV_HEADS=8, GROUP=3, G=4,
                                            OWN=True, **NORMS, PDL=True)),
    "begin": (begin._begin_kernel, dict(K=2880, BLOCK=1024, PDL=True)),
}
TYPES = dict.fromkeys(("x", "weight", "embedding", "bias", "residual", "out", "qkv", "keys", "values"), HALF)
TYPES |= dict.fromkeys(("own_keys", "own_values"), HALF)
TYPES |= dict.fromkeys(("gain", "cos", "sin", "q_gain", "k_gain", "partial", "statistics", "logits", "highs"), WIDE)
TYPES |= dict.fromkeys(("slots", "positions", "indices", "chosen", "lengths", "following"), INDEX)
TYPES |= {"arrived": "*i32"} | dict.fromkeys(("eps", "q_eps", "k_eps", "scale", "softcap", "multiplier"), "fp32")

def check(name):
    kernel, constants = CASES[name]
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else TYPES.get(n, "i32") for n in names}
    attributes = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n].startswith("*")}
    source = ASTSource(kernel, signature, {(names.index(n),): v for n, v in constants.items()}, attributes)
    made = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "launch_pdl": True})
    before, after = made.asm["ptx"].split("griddepcontrol.wait", 1)
    assert "griddepcontrol.launch_dependents" in before
    assert "st.global" not in before and "atom" not in before and "st.global" in after
    assert ("ld.global" in before) == name.startswith(("linear", "early"))  # weights; the cache
    assert made.metadata.shared <= 227 * 1024
    return f"compiled {len(made.asm['cubin'])}"

def said(name):
    try:
        return check(name)
    except Exception:  # told by the test of this name
        return traceback.format_exc()

print(json.dumps({name: said(name) for name in CASES}))
"""


_LINEARS = ["linear qkv", "linear gate_up", "linear down"]
_OTHERS = ["prepare", "join", "attention", "early attention", "all", "odd", "begin", "likeliest", "settle"]
pytestmark = pytest.mark.xdist_group("decode kernels compiled")  # by one process


@pytest.fixture(scope="module")
def compiled() -> dict[str, str]:
    """What became of each kernel: "compiled" and its size, or a traceback."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", _SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", _LINEARS + _OTHERS)
def test_compiles_and_reads_little_and_writes_nothing_before_it_waits(name, compiled):
    assert compiled[name].startswith("compiled"), compiled[name]


def test_every_kernel_is_asked_for(compiled):
    assert set(compiled) == {*_LINEARS, *_OTHERS}
