"""Log-probabilities of committed tokens in OpenAI's shape.

Owns the one evaluation for all rows that asked. Must never know requests or the generator. Invariant: every number is
finite, so that it can be written as JSON.
"""

import mlx.core as mx

from common.generation import TokenLogprob, TopLogprob
from worker.engines.text import Texts

# OpenAI's own stand-in for minus infinity.
IMPOSSIBLE = -9999.0


def token_logprobs(texts: Texts, logprobs: mx.array, tokens: list[int], counts: list[int]) -> list[TokenLogprob]:
    """For each row of logprobs (B, V) its token's entry with the counts[row] likeliest tokens beside it."""
    count = min(max(counts), logprobs.shape[-1])
    chosen = mx.take_along_axis(logprobs, mx.array(tokens)[:, None], axis=-1)[:, 0].tolist()
    best: list[list[tuple[float, int]]] = [[] for _ in tokens]
    if count:
        ids = mx.argpartition(-logprobs, kth=count - 1, axis=-1)[:, :count]
        values = mx.take_along_axis(logprobs, ids, axis=-1)
        pairs = zip(values.tolist(), ids.tolist(), strict=True)
        best = [sorted(zip(row, of, strict=True), key=lambda pair: (-pair[0], pair[1])) for row, of in pairs]
    return [
        TokenLogprob(
            token=_shown(texts, token),
            logprob=max(value, IMPOSSIBLE),
            bytes=list(texts.raw(token)),
            top=[
                TopLogprob(_shown(texts, rival), max(logprob, IMPOSSIBLE), list(texts.raw(rival)))
                for logprob, rival in row[:wanted]
            ],
        )
        for token, value, row, wanted in zip(tokens, chosen, best, counts, strict=True)
    ]


def _shown(texts: Texts, token: int) -> str:
    return texts.raw(token).decode("utf-8", "replace")
