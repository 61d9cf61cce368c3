"""The text of one `wgmma` instruction: it names half as many registers as a tile has columns."""

from __future__ import annotations


def wgmma_source(columns: int, half: str) -> str:
    """CUDA C++ of `wgmma(products, x, w, keep)`: products (64 rows, `columns`) = x wᵀ + (keep ? products : 0), fp32.

    `columns`: a multiple of 8 up to 256; `half`: "bf16" or "f16". `x` and `w` are shared-memory descriptors of 64 and
    `columns` rows of 16 values. PTX ISA, "wgmma.mma_async".
    """
    count = columns // 2  # registers of one thread
    registers = ", ".join(f"%{index}" for index in range(count))
    outputs = ", ".join(f'"+f"(products[{index}])' for index in range(count))
    return f"""
__device__ __forceinline__ void wgmma(float* products, unsigned long long x, unsigned long long w, int keep) {{
    asm volatile("{{ .reg .pred keep; setp.ne.b32 keep, %{count + 2}, 0;\\n"
                 "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{half}.{half} {{{registers}}}, "
                 "%{count}, %{count + 1}, keep, 1, 1, 0, 0; }}"
                 : {outputs}
                 : "l"(x), "l"(w), "r"(keep));
}}
"""
