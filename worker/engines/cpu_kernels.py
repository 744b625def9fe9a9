"""Attention, rotary embedding, RMS norm and softmax as mlx's CPU backend does them well: the same results as mx.fast, out
of other operations.

Owns those formulas. Must never know a model, a row or a request. Invariant: what it does not compute itself (other
types, sinks, other backends) goes to mlx's own.

mlx has none of these kernels for CPUs. What stands in for attention multiplies each head of the queries for itself, though
several share their keys, and its softmax calls exp for one element after the other. Here the heads of a group are one
product, and exp is part of a compiled kernel, which is a vector loop (worker/device.py gives the compiler's flags).
What stands in for the others is many small operations, and a decode step is thousands of these: building and handing
them out takes a third as long as multiplying does. Here they are few, and what layers would compute alike from the
same arrays is computed once in a pass. Measured on two cores: docs/benchmarks.md, "What was tried".
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any

import mlx.core as mx

from worker import device, sgemm

# What mlx's own stand-in gives to a place that is masked: finite, so that a row with nothing to see is even, not NaN.
MASKED = mx.finfo(mx.float32).min

# Queries whose attention is computed together.
BLOCK = 128

_mlx_attention: Callable[..., mx.array] = mx.fast.scaled_dot_product_attention
_mlx_rope: Callable[..., mx.array] = mx.fast.rope
_mlx_rms_norm: Callable[..., mx.array] = mx.fast.rms_norm


def prepare(progress: Callable[[str], None]) -> None:
    """Before a model is loaded: make this process compute well on a CPU; nothing elsewhere.

    What mlx-lm's models call as mx.fast.scaled_dot_product_attention, rope and rms_norm are the functions here from then on.
    """
    if device.backend() != device.CPU:
        return
    no_kernels = device.ensure_kernels_compile()
    if no_kernels:
        progress(f"running without compiled kernels: {no_kernels}")
    if not sgemm.in_use():
        progress("multiplying by the BLAS alone, not by our own library, which needs g++ and AVX2")
    mx.fast.scaled_dot_product_attention = attention
    mx.fast.rope = rope
    mx.fast.rms_norm = rms_norm


# --- One pass ---------------------------------------------------------------------------------------------------------

# What was computed in the pass that is on its way, by what it was computed from, which is held as well: an identity says
# something only as long as its object lives. None between passes: there an array may change and stay the same object.
_shared: dict[tuple[Any, ...], tuple[Any, ...]] | None = None


@contextmanager
def one_pass() -> Iterator[None]:
    """One call of a model, in whose layers what is computed from the same arrays is the same. Not its evaluation: what is
    shared would be held through it."""
    global _shared
    _shared = {}
    try:
        yield
    finally:
        _shared = None


def _once(make: Callable[..., Any], *of: Any) -> Any:
    """make(*of), once in a pass. of: arrays, and what can be a key."""
    if _shared is None:
        return make(*of)
    key = (make, *(id(one) if isinstance(one, mx.array) else one for one in of))
    found = _shared.get(key)
    if found is None:
        found = _shared[key] = (make(*of), of)
    return found[0]


# --- Attention --------------------------------------------------------------------------------------------------------


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
    length, width = q.shape[2], k.shape[2]
    found = []
    for block in _once(_blocks, mask, k.shape[1], length, width):
        queries, keys, values = q, k, v
        if len(block.queries) < length:
            queries = q[:, :, block.queries.start : block.queries.stop]
        if block.keys < width:
            keys, values = k[:, :, : block.keys], v[:, :, : block.keys]
        found.append(_attention(queries * scale, keys, values, block.bias))
    return found[0] if len(found) == 1 else mx.concatenate(found, axis=2)


@dataclass(frozen=True, eq=False)
class _Block:
    """Queries that are computed together, the first keys, which are all that they see, and what is added to their scores,
    (B, groups, heads of a group, L, W) each of them or 1."""

    queries: range
    keys: int
    bias: mx.array | None


def _blocks(mask: str | mx.array | None, groups: int, length: int, width: int) -> list[_Block]:
    """Few enough queries in each for their scores to stay in the caches; what lies past the last one of them, in a causal
    mask, is not computed at all."""
    causal = BLOCK < length <= width and _is_causal(mask, length, width)
    if isinstance(mask, str):
        mask = _causal(length, width)
    elif mask is not None and mask.ndim < 2:
        mask = mask.reshape(1, -1)
    blocks = []
    for start in range(0, length, BLOCK):
        queries = range(start, min(start + BLOCK, length))
        keys = width - length + queries.stop if causal else width
        bias = None
        if mask is not None:
            some = mask[..., start : queries.stop, :] if mask.shape[-2] == length else mask
            bias = _bias(some[..., :keys] if mask.shape[-1] == width else some, groups)
        blocks.append(_Block(queries, keys, bias))
    return blocks


def _is_causal(mask: str | mx.array | None, length: int, width: int) -> bool:
    """Whether no query sees a key past its own. Computed, since a mask that looks the part may be another; so not for a
    long prompt within mx.compile."""
    if not isinstance(mask, mx.array):
        return mask is not None
    if mask.dtype != mx.bool_ or mask.shape[-2:] != (length, width):
        return False
    return not mx.any(mask & ~_causal(length, width)).item()


def _causal(length: int, width: int) -> mx.array:
    """(L, W): the last query sees all keys, and each one before it one less."""
    return mx.arange(width - length, width)[:, None] >= mx.arange(width)


def _attention(q: mx.array, k: mx.array, v: mx.array, bias: mx.array | None) -> mx.array:
    batch, heads, length, width = *q.shape[:3], k.shape[2]
    groups = k.shape[1]
    together = (batch, groups, heads // groups * length)
    scores = q.reshape(*together, -1) @ k.swapaxes(-1, -2)
    if bias is not None:
        if length == bias.shape[2] == 1:
            # One query: a group's heads are all that there is in the rows of its scores.
            scores = scores + bias[:, :, 0]
        else:
            scores = (scores.reshape(batch, groups, -1, length, width) + bias).reshape(*together, width)
    weights = _exp_less(scores, scores.max(axis=-1, keepdims=True))
    return ((weights @ v) / weights.sum(axis=-1, keepdims=True)).reshape(batch, heads, length, -1)


def _bias(mask: mx.array, groups: int) -> mx.array:
    """What is added to scores of (B, groups, heads of a group, L, W)."""
    bias = mx.where(mask, 0.0, MASKED) if mask.dtype == mx.bool_ else mask
    bias = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
    return mx.expand_dims(bias, 2) if bias.shape[1] == 1 else mx.unflatten(bias, 1, (groups, -1))


# --- Rotary embedding -------------------------------------------------------------------------------------------------


def rope(
    x: mx.array, dims: int, *, traditional: bool, base: float | None, scale: float, offset: int | mx.array,
    freqs: mx.array | None = None, **others: Any,
) -> mx.array:  # fmt: skip
    """Rotary position embedding, as mx.fast.rope; x: (B, ..., L, D)."""
    at_once = offset.size if isinstance(offset, mx.array) else 1
    usual = x.dtype == mx.float32 and x.ndim == 4 and at_once in (1, x.shape[0]) and dims % 2 == 0 and dims <= x.shape[3]
    if traditional or others or not usual or (base is None) == (freqs is None):
        return _mlx_rope(x, dims, traditional=traditional, base=base, scale=scale, offset=offset, freqs=freqs, **others)
    if isinstance(offset, mx.array):
        cosines, sines = _once(_angles, x.shape[2], dims, base, scale, offset, freqs)
    else:
        cosines, sines = _angles_at(x.shape[2], dims, base, scale, offset, _Itself(freqs))
    first, second, *rest = mx.split(x, [dims // 2, dims] if dims < x.shape[3] else 2, axis=-1)
    rotated = x[..., :dims] if rest else x
    rotated = _rotated(rotated, cosines, mx.concatenate([second, first], axis=-1), sines)
    return mx.concatenate([rotated, *rest], axis=-1) if rest else rotated


def _angles(
    length: int, dims: int, base: float | None, scale: float, offset: int | mx.array, freqs: mx.array | None
) -> tuple[mx.array, mx.array]:
    """Cosines and sines, (1 or B, 1, L, dims) each, of the first half's sines the negative: mlx's own formula, for both
    halves at once."""
    if isinstance(offset, mx.array):
        offset = offset.reshape(-1, 1, 1, 1)
    positions = (mx.arange(length, dtype=mx.float32)[:, None] + offset) * scale
    if freqs is not None:
        inverse = 1 / freqs.astype(mx.float32)
    else:
        assert base is not None
        inverse = mx.exp(mx.arange(0, -(dims // 2), -1, dtype=mx.float32) * (math.log(base) / (dims // 2)))
    angles = positions * inverse
    cosines, sines = mx.cos(angles), mx.sin(angles)
    return mx.concatenate([cosines, cosines], axis=-1), mx.concatenate([-sines, sines], axis=-1)


class _Itself:
    """A key that is equal to those of the same object alone: arrays compare by their elements."""

    def __init__(self, what: object) -> None:
        self.what = what

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.what is other.what

    def __hash__(self) -> int:
        return id(self.what)


@lru_cache(maxsize=4)
def _angles_at(
    length: int, dims: int, base: float | None, scale: float, offset: int, freqs: _Itself
) -> tuple[mx.array, mx.array]:
    """_angles() of an offset that cannot change, for which all layers, and what comes next, can share them."""
    return _angles(length, dims, base, scale, offset, freqs.what)


@partial(mx.compile, shapeless=True)
def _rotated(x: mx.array, cosines: mx.array, swapped: mx.array, sines: mx.array) -> mx.array:
    return x * cosines + swapped * sines


# --- Norms ------------------------------------------------------------------------------------------------------------


def rms_norm(x: mx.array, weight: mx.array | None, eps: float, **others: Any) -> mx.array:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, as mx.fast.rms_norm."""
    if weight is None or others or not x.dtype == weight.dtype == mx.float32 or weight.shape != x.shape[-1:]:
        return _mlx_rms_norm(x, weight, eps, **others)
    return _normal(x.shape[-1], eps)(x, (x * x).sum(axis=-1, keepdims=True), weight)


@cache
def _normal(length: int, eps: float) -> Callable[..., mx.array]:
    def normal(x: mx.array, squares: mx.array, weight: mx.array) -> mx.array:
        return x * mx.rsqrt(squares * (1 / length) + eps) * weight

    return mx.compile(normal, shapeless=True)


def logsumexp(values: mx.array) -> mx.array:
    """log(sum(exp(values))) over the last axis, which stays; the greatest value must be finite. On any backend."""
    if device.backend() != device.CPU:
        return mx.logsumexp(values, axis=-1, keepdims=True)
    most = values.max(axis=-1, keepdims=True)
    return most + mx.log(_exp_less(values, most).sum(axis=-1, keepdims=True))


@partial(mx.compile, shapeless=True)
def _exp_less(values: mx.array, less: mx.array) -> mx.array:
    return mx.exp(values - less)
