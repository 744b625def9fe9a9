"""Log-probabilities are the model's own: those of one forward pass over prompt and reply, whatever the row went
through."""

import random
from pathlib import Path

import mlx.core as mx
import pytest
from common.generation import GenerationRequest, Sampling
from common.ids import RequestId
from tests.worker.driving import run, rid
from worker.engines.batched import BatchedEngine

# Products of other shapes are summed in other orders. On the tiny model in float32, whose logits reach 40, that made no
# difference with mlx's reference BLAS and 1.5e-5 at most with OpenBLAS.
LARGEST = 1e-4


def test_they_are_those_of_a_direct_forward_pass(tiny_model: Path) -> None:
    engine = BatchedEngine(tiny_model, slots=8, prefill_step=32)
    engine.load(lambda words: None)
    chooser = random.Random(1)
    head = [chooser.randrange(3, 250) for _ in range(50)]
    settings = [
        Sampling(temperature=0.0),
        Sampling(temperature=1.0, seed=1, presence_penalty=1.0, repetition_penalty=1.4),
        Sampling(temperature=0.7, top_p=0.8),
        Sampling(temperature=0.0, logit_bias={50: 20.0}),
    ]
    wanted = {
        rid(n): GenerationRequest(
            head[: 10 * (n % 6)] + [chooser.randrange(3, 250) for _ in range(1 + 7 * n)],
            12,
            settings[n % 4],
            top_logprobs=[0, 5, 20][n % 3],
            grammar='{"type":"array","items":{"type":"string"}}' if n == 5 else "",
        )
        for n in range(8)
    }
    largest = 0.0
    for _ in range(2):  # the second time from the prompt cache
        for id, reply in run(engine, wanted).items():
            prompt = wanted[id].prompt
            logits = engine._model(mx.array([prompt + reply.tokens]))[0, len(prompt) - 1 : -1]
            direct = (logits - mx.logsumexp(logits, axis=-1, keepdims=True)).tolist()
            assert len(direct) == len(reply.logprobs) == len(reply.tokens)
            for token, entry, row in zip(reply.tokens, reply.logprobs, direct, strict=True):
                assert entry is not None and len(entry.top) == wanted[id].top_logprobs
                best = sorted(row, reverse=True)[: len(entry.top)]
                pairs = [(entry.logprob, row[token]), *zip([rival.logprob for rival in entry.top], best, strict=True)]
                largest = max(largest, *(abs(given - own) for given, own in pairs))
    print(f"largest difference: {largest:.1e}")
    assert largest < LARGEST
    engine.close()
