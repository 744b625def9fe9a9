"""How a row's next token is drawn: the callables that mlx-lm's batch calls for each row.

Owns temperature, top_k, top_p, min_p, seeds, penalties and logit bias. Must never know requests, text or the
generator. Invariant: a callable never raises into the step (that would break all rows of the batch): it keeps the
error's type name in `error`, gives something harmless back, and the engine ends its row.

The order is that of Hugging Face, for whose order generation_config.json is written: penalties, temperature, top_k,
top_p, min_p. Draws add Gumbel noise and take the greatest. A seeded row's noise depends on seed, position and token
id alone, so that neither batch neighbours nor the candidates' order change it.
"""

import hashlib
import math
from collections.abc import Callable

import mlx.core as mx
from mlx_lm.sample_utils import make_logits_processors

from common.generation import Sampling
from worker.engines.cpu_kernels import logsumexp

# mlx sorts 16 rows of 49k logits in 73 ms on a CPU, selects their 1,024 best and sorts those in 9. Nearly always
# these hold the whole nucleus; where they do not, everything is sorted after all.
CPU_CANDIDATES = 1024

# Below this a draw is greedy for any two logits that float32 can tell apart, and the division would overflow.
COLDEST = 1e-4

# More than any context: penalties look at the whole reply, as OpenAI's do, not at mlx-lm's default of 20 tokens.
WHOLE = 1 << 30

# Gumbel noise of a shape: for all tokens in order, or for those named.
Noise = Callable[[tuple[int, ...], mx.array | None], mx.array]


def is_greedy(sampling: Sampling) -> bool:
    """Whether the most likely token is always taken."""
    return sampling.temperature < COLDEST or sampling.top_k == 1


def greedy(logprobs: mx.array) -> mx.array:
    """The one sampler object of all greedy rows: rows that share theirs are sampled in one call."""
    return mx.argmax(logprobs, axis=-1)


class Draw:
    """Draws for rows without a seed; rows of equal settings share one object and with it one call a step."""

    def __init__(self, sampling: Sampling, candidates: int) -> None:
        self.error = ""
        self.settings = sampling
        self._candidates = candidates

    def __call__(self, logprobs: mx.array) -> mx.array:
        try:
            return draw(logprobs, self.settings, self._candidates, self._noise())
        except Exception as error:
            self.error = type(error).__name__
            return greedy(logprobs)

    def _noise(self) -> Noise:
        return lambda shape, tokens: mx.random.gumbel(shape)


class SeededDraw(Draw):
    """Draws for one row with a seed: its n-th call uses the n-th key."""

    def __init__(self, sampling: Sampling, candidates: int, choice: int) -> None:
        super().__init__(sampling, candidates)
        # Hashed, so that neighbouring seeds and choices share no keys at shifted positions.
        digest = hashlib.blake2b(f"{sampling.seed}:{choice}".encode(), digest_size=8).digest()
        self._key = int.from_bytes(digest, "little")

    def _noise(self) -> Noise:
        key = mx.random.key(self._key)
        self._key = (self._key + 1) % (1 << 64)
        return lambda shape, tokens: mx.random.gumbel(shape, key=key) if tokens is None else _gumbel_of(tokens, key)


def _gumbel_of(tokens: mx.array, key: mx.array) -> mx.array:
    """Noise of each token id in `tokens`, whatever others are there and in whichever order."""
    flat = tokens.reshape(-1).astype(mx.uint32)
    keys = mx.stack([mx.broadcast_to(key[0], flat.shape), key[1] ^ flat], axis=-1)
    uniform = mx.vmap(lambda one: mx.random.uniform(key=one))(keys)
    return -mx.log(-mx.log(mx.clip(uniform, 1e-7, 1 - 1e-7))).reshape(tokens.shape)


def draw(logprobs: mx.array, sampling: Sampling, candidates: int, noise: Noise) -> mx.array:
    """One token for each row of logprobs (B, V)."""
    width = logprobs.shape[-1]
    # Less the best, so that no temperature can overflow it.
    scaled = (logprobs - logprobs.max(axis=-1, keepdims=True)).astype(mx.float32) * (1 / sampling.temperature)
    top_k = sampling.top_k if 0 < sampling.top_k < width else 0
    if not top_k and sampling.top_p >= 1:
        return mx.argmax(_above_min_p(scaled, sampling.min_p) + noise(scaled.shape, None), axis=-1)
    tokens, best = _best(scaled, top_k or min(candidates, width))
    if sampling.top_p < 1:
        total = logsumexp(best if top_k else scaled)
        shares = mx.exp(best - total)
        # The only wait for the device inside a step, and only on a CPU, which has nothing else to do meanwhile.
        if not top_k and best.shape[-1] < width and shares.sum(axis=-1).min().item() < sampling.top_p:
            tokens, best = _best(scaled, width)
            shares = mx.exp(best - total)
        before = mx.cumsum(shares, axis=-1) - shares
        # The first token is always kept: before it there is nothing.
        best = mx.where(before < sampling.top_p, best, -math.inf)
    picked = mx.argmax(_above_min_p(best, sampling.min_p) + noise(tokens.shape, tokens), axis=-1, keepdims=True)
    return mx.take_along_axis(tokens, picked, axis=-1).squeeze(-1)


def _best(scaled: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """The `count` best tokens of each row and their values, best first."""
    if count < scaled.shape[-1]:
        tokens = mx.argpartition(-scaled, kth=count - 1, axis=-1)[..., :count]
        values = mx.take_along_axis(scaled, tokens, axis=-1)
        order = mx.argsort(-values, axis=-1)
        return mx.take_along_axis(tokens, order, axis=-1), mx.take_along_axis(values, order, axis=-1)
    tokens = mx.argsort(-scaled, axis=-1)
    return tokens, mx.take_along_axis(scaled, tokens, axis=-1)


def _above_min_p(scaled: mx.array, min_p: float) -> mx.array:
    """Values below min_p times the best's probability (which is at 0) taken out."""
    return mx.where(scaled < math.log(min_p), -math.inf, scaled) if min_p > 0 else scaled


class RowLogits:
    """One row's changes to its logits."""

    def __init__(self, sampling: Sampling, prompt_length: int) -> None:
        self.error = ""
        self._prompt_length = prompt_length
        repetition = sampling.repetition_penalty
        self._over_all = make_logits_processors(
            logit_bias=sampling.logit_bias or None,
            repetition_penalty=repetition if repetition != 1 else None,
            repetition_context_size=WHOLE,
        )
        self._over_reply = make_logits_processors(
            presence_penalty=sampling.presence_penalty or None,
            presence_context_size=WHOLE,
            frequency_penalty=sampling.frequency_penalty or None,
            frequency_context_size=WHOLE,
        )

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """tokens: prompt and reply so far (n,); logits: (1, V)."""
        try:
            for change in self._over_all:
                logits = change(tokens, logits)
            # OpenAI's penalties are for what the reply has said, not for what was asked.
            for change in self._over_reply:
                logits = change(tokens[self._prompt_length :], logits)
        except Exception as error:
            self.error = type(error).__name__
        return logits


def changes_logits(sampling: Sampling) -> bool:
    """Whether a row with these settings needs a RowLogits."""
    return bool(
        sampling.logit_bias
        or sampling.repetition_penalty != 1
        or sampling.presence_penalty
        or sampling.frequency_penalty
    )
