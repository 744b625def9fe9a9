"""A first run of everything that requests will run, so that none of them waits for a kernel to be compiled.

Owns the requests of that run. Must never know which engine it warms. Invariant: the engine is idle before and after.
"""

from common.generation import GenerationRequest, Sampling
from common.ids import RequestId
from worker.engine import Engine

# Greedy alone; rows of one sampler and of several; each kind of processor; with and without log-probabilities.
ROUNDS = (
    [Sampling(temperature=0.0)],
    [Sampling(temperature=1.0, top_p=0.9), Sampling(temperature=0.0)],
    [
        Sampling(temperature=1.0, top_k=20, min_p=0.05, seed=1, repetition_penalty=1.1),
        Sampling(temperature=1.0, presence_penalty=0.5, frequency_penalty=0.5, logit_bias={0: 1.0}),
    ],
)


def warm_up(engine: Engine) -> None:
    """Run the rounds, each to its end."""
    for number, settings in enumerate(ROUNDS):
        for row, sampling in enumerate(settings):
            # Two lengths in one batch are padded, which is other code than one.
            prompt = [0] * (3 + 5 * row)
            request = GenerationRequest(prompt, 2 + row, sampling, top_logprobs=number)
            engine.start(RequestId(bytes([number, row])), request)
        while engine.busy:
            engine.step()
