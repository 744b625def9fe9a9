"""Attention and softmax as mlx's CPU backend does them well: the same results as mx.fast, out of other operations.

Owns those formulas. Must never know a model, a row or a request. Invariant: what it does not compute itself (other
types, sinks, other backends) goes to mlx's own.

mlx has no attention kernel for CPUs. What stands in for it multiplies each head of the queries for itself, though
several share their keys, and its softmax calls exp for one element after the other. Here the heads of a group are one
product, and exp is part of a compiled kernel, which is a vector loop (worker/device.py gives the compiler's flags).
Measured on two cores: docs/benchmarks.md, "What was tried".
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx

from worker import device, few_rows

# What mlx's own stand-in gives to a place that is masked: finite, so that a row with nothing to see is even, not NaN.
MASKED = mx.finfo(mx.float32).min

_mlx_attention: Callable[..., mx.array] = mx.fast.scaled_dot_product_attention


def prepare(progress: Callable[[str], None]) -> None:
    """Before a model is loaded: make this process compute well on a CPU; nothing elsewhere.

    mx.fast.scaled_dot_product_attention, which mlx-lm's models call, is attention() from then on.
    """
    if device.backend() != device.CPU:
        return
    no_kernels = device.ensure_kernels_compile()
    if no_kernels:
        progress(f"running without compiled kernels: {no_kernels}")
    if not few_rows.in_use():
        progress("few rows are multiplied by the BLAS, not by our own library, which needs g++ with OpenMP, and AVX")
    mx.fast.scaled_dot_product_attention = attention


def attention(
    q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: str | mx.array | None = None,
    sinks: mx.array | None = None, **others: Any,
) -> mx.array:  # fmt: skip
    """softmax(q kᵀ · scale + mask) v, as mx.fast.scaled_dot_product_attention.

    q: (B, heads, L, D); k, v: (B, heads of keys, W, D). mask: True or 0 where a query (L) sees a key (W), or "causal":
    the last query sees all.
    """
    if sinks is not None or others or not q.dtype == k.dtype == v.dtype == mx.float32:
        return _mlx_attention(q, k, v, scale=scale, mask=mask, sinks=sinks, **others)
    batch, heads, length, width = *q.shape[:3], k.shape[2]
    groups = k.shape[1]
    together = (batch, groups, heads // groups * length)
    scores = (q * scale).reshape(*together, -1) @ k.swapaxes(-1, -2)
    if mask is not None:
        scores = scores.reshape(batch, groups, -1, length, width) + _bias(mask, groups, length, width)
        scores = scores.reshape(*together, width)
    weights = _exp_less(scores, scores.max(axis=-1, keepdims=True))
    return ((weights @ v) / weights.sum(axis=-1, keepdims=True)).reshape(batch, heads, length, -1)


def _bias(mask: str | mx.array, groups: int, length: int, width: int) -> mx.array:
    """What is added to scores of (B, groups, heads of a group, L, W)."""
    if isinstance(mask, str):
        mask = mx.arange(width - length, width)[:, None] >= mx.arange(width)
    bias = mx.where(mask, 0.0, MASKED) if mask.dtype == mx.bool_ else mask
    bias = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
    return mx.expand_dims(bias, 2) if bias.shape[1] == 1 else mx.unflatten(bias, 1, (groups, -1))


def logsumexp(values: mx.array) -> mx.array:
    """log(sum(exp(values))) over the last axis, which stays; the greatest value must be finite. On any backend."""
    if device.backend() != device.CPU:
        return mx.logsumexp(values, axis=-1, keepdims=True)
    most = values.max(axis=-1, keepdims=True)
    return most + mx.log(_exp_less(values, most).sum(axis=-1, keepdims=True))


@partial(mx.compile, shapeless=True)
def _exp_less(values: mx.array, less: mx.array) -> mx.array:
    return mx.exp(values - less)
