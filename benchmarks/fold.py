"""Fold against `cp -r`: the same 8 GB bf16 checkpoint, the same disk, alternately, cold, with everything on the disk.

    python benchmarks/fold.py FOLDER [--gigabytes 8] [--repeats 3]

Makes FOLDER/source once (Llama-shaped, random, several shards), then prints for each repeat the wall time of both, and
the peak resident memory of `flashnorm fold` beside its bound: torch loaded, twice the largest tensor, 1 GiB.
FOLDER/source is kept for the next run; needs three times its size.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, MLP, VOCABULARY, HEADS, KV_HEADS, HEAD_SIZE = 3072, 8192, 128256, 24, 8, 128
SHARD_BYTES = 1 << 30
# A pool of random numbers from which every tensor is cut at its own place: 8 GB of fresh ones would take minutes.
POOL = 1 << 24


def layer(index: int) -> dict[str, tuple[int, ...]]:
    """The tensors of one Llama layer and their shapes."""
    prefix = f"model.layers.{index}"
    return {
        f"{prefix}.input_layernorm.weight": (HIDDEN,),
        f"{prefix}.self_attn.q_proj.weight": (HEADS * HEAD_SIZE, HIDDEN),
        f"{prefix}.self_attn.k_proj.weight": (KV_HEADS * HEAD_SIZE, HIDDEN),
        f"{prefix}.self_attn.v_proj.weight": (KV_HEADS * HEAD_SIZE, HIDDEN),
        f"{prefix}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_SIZE),
        f"{prefix}.post_attention_layernorm.weight": (HIDDEN,),
        f"{prefix}.mlp.gate_proj.weight": (MLP, HIDDEN),
        f"{prefix}.mlp.up_proj.weight": (MLP, HIDDEN),
        f"{prefix}.mlp.down_proj.weight": (HIDDEN, MLP),
    }


def numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def shapes(gigabytes: float) -> dict[str, tuple[int, ...]]:
    """As many layers as make the wanted size, between an embedding and an untied head."""
    outside = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }
    size = sum(numel(shape) for shape in outside.values())
    per_layer = sum(numel(shape) for shape in layer(0).values())
    layers = max(1, round((gigabytes * 1e9 / 2 - size) / per_layer))
    inside = {name: shape for index in range(layers) for name, shape in layer(index).items()}
    first, norm, last = outside.items()
    return dict([first, *inside.items(), norm, last])


def shards(tensors: dict[str, tuple[int, ...]]) -> Iterator[dict[str, tuple[int, ...]]]:
    shard: dict[str, tuple[int, ...]] = {}
    for name, shape in tensors.items():
        if shard and 2 * sum(map(numel, (*shard.values(), shape))) > SHARD_BYTES:
            yield shard
            shard = {}
        shard[name] = shape
    yield shard


def make_checkpoint(folder: Path, gigabytes: float) -> None:
    tensors = shapes(gigabytes)
    folder.mkdir(parents=True)
    pool = torch.randn(2 * POOL, generator=torch.Generator().manual_seed(0)).bfloat16()
    parts = list(shards(tensors))
    weight_map = {}
    for number, part in enumerate(parts, 1):
        shard = f"model-{number:05}-of-{len(parts):05}.safetensors"
        weights = {}
        for name, shape in part.items():
            start = zlib.crc32(name.encode()) % POOL
            reach = pool[start : start + POOL]
            scale = 1.0 if len(shape) == 1 else HIDDEN**-0.5
            weights[name] = (reach.repeat(-(-numel(shape) // POOL))[: numel(shape)] * scale).view(shape)
        save_file(weights, folder / shard, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, shard)
    index = {"metadata": {"total_size": 2 * sum(map(numel, tensors.values()))}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": sum("input_layernorm" in name for name in tensors),
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def settle(source: Path) -> None:
    """Everything written is on the disk and nothing of the source is in memory, so that both sides read it cold."""
    os.sync()
    for path in source.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def time_copy(source: Path, dst: Path) -> float:
    settle(source)
    began = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(dst)], check=True)
    os.sync()
    seconds = time.perf_counter() - began
    shutil.rmtree(dst)
    return seconds


def time_fold(source: Path, dst: Path) -> tuple[float, float, int]:
    """Seconds until everything is on the disk, seconds until the first progress, and peak resident bytes."""
    settle(source)
    began = time.perf_counter()
    command = [sys.executable, "-m", "flashnorm", "fold", str(source), str(dst)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as child:
        watch = PeakMemory(child.pid)
        watch.start()
        errors = child.stderr  # a pipe, as asked for
        first = errors.readline() if errors else ""
        shown = time.perf_counter() - began
        rest = errors.read() if errors else ""
    os.sync()
    seconds = time.perf_counter() - began
    watch.join()
    if child.returncode:
        raise SystemExit(first + rest)
    shutil.rmtree(dst)
    return seconds, shown, watch.peak


class PeakMemory(threading.Thread):
    """Asks the kernel for a process's high-water mark until the process ends.

    `ru_maxrss` would not do: it starts from what the parent held when it made the child.
    """

    def __init__(self, pid: int) -> None:
        super().__init__()
        self.peak = 0
        self._status = Path(f"/proc/{pid}/status")

    def run(self) -> None:
        while True:
            try:
                lines = self._status.read_text().splitlines()
            except OSError:
                return
            marks = [int(line.split()[1]) for line in lines if line.startswith("VmHWM")]
            if not marks:  # it has ended and waits to be collected
                return
            self.peak = 1024 * marks[0]
            time.sleep(0.05)


def torch_bytes() -> int:
    """Peak resident bytes of an interpreter that loads torch and does nothing else."""
    code = "import torch; print(next(x for x in open('/proc/self/status') if x.startswith('VmHWM')).split()[1])"
    return 1024 * int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=8.0)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    source, dst = arguments.folder / "source", arguments.folder / "output"
    if not source.exists():
        make_checkpoint(source, arguments.gigabytes)
    size = sum(path.stat().st_size for path in source.iterdir())
    print(
        f"{size / 1e9:.2f} GB in {len(list(source.glob('*.safetensors')))} shards, {os.cpu_count()} cores, cold, synced"
    )
    ratios, peaks = [], []
    for repeat in range(1, arguments.repeats + 1):
        copy_seconds = time_copy(source, dst)
        fold_seconds, shown, peak = time_fold(source, dst)
        ratios.append(fold_seconds / copy_seconds)
        peaks.append(peak)
        print(
            f"{repeat}: cp -r {copy_seconds:.1f} s ({size / 1e9 / copy_seconds:.2f} GB/s), fold {fold_seconds:.1f} s "
            f"({size / 1e9 / fold_seconds:.2f} GB/s), ratio {ratios[-1]:.2f}, first progress after {shown:.2f} s",
            flush=True,
        )
    largest = 2 * max(map(numel, shapes(arguments.gigabytes).values()))
    base = torch_bytes()
    bound = base + 2 * largest + (1 << 30)
    print(f"ratio: median {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}; limit 2")
    print(
        f"peak memory: {max(peaks) / 2**20:.0f} MiB; bound {bound / 2**20:.0f} MiB (torch loaded {base / 2**20:.0f}, "
        f"twice the largest tensor {2 * largest / 2**20:.0f}, 1024)"
    )


if __name__ == "__main__":
    main()
