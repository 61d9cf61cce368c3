"""One gain for the scores of a layer instead of two: the query's takes over the key's where the rotation lets it.

A layer without rotary embedding, as some models have between those with it, always lets it. The kernels then read and
apply no gain to keys, and what the cache holds are keys without one. Proven like everything else that was read, since
it is done before the proof.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from flashnorm.attention_algebra import shared_gains
from flashnorm.runtime.decode.norm_reading import least_gain
from flashnorm.runtime.decode.spec import Attention, Norm


def with_shared_gain(attention: Attention) -> Attention:
    """The same attention with the key's gain in the query's; as it is where the key would keep a part of it.

    A query whose channels could leave the range of its dtype keeps the two apart: they were fine each by itself.
    """
    q, k = attention.q_norm, attention.k_norm
    if q is None or k is None or k.gain is None:
        return attention
    rope, key = attention.rope, k.gain.float()
    query = torch.ones_like(key) if q.gain is None else q.gain.float()
    rotary, interleaved = (0, False) if rope is None else (rope.cos.shape[-1], rope.interleaved)
    gain, left = shared_gains(query, key, rotary, interleaved=interleaved)
    dtype = attention.q.weight.dtype
    # A normed channel is at most sqrt(head_dim), and a rotation makes it at most sqrt(2) larger.
    largest = float(gain.abs().max()) * (2 * attention.head_dim) ** 0.5
    if not bool((left == 1).all()) or not largest <= torch.finfo(dtype).max:
        return attention
    return replace(attention, q_norm=Norm(least_gain(gain, dtype), q.eps), k_norm=Norm(None, k.eps))
