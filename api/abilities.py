"""Which sampling fields a model's lanes can honour (pure).

The abilities are those that its workers name; a field that none of them honours is listed as ignored instead of refused,
because clients send temperature by habit. Knows nothing of requests, lanes or workers. Invariant: what sampling() gives
needs no ability that is not there.
"""

from collections.abc import Collection, Mapping
from typing import Any

from api.fields import refuse
from common.generation import Sampling

# Field -> the ability it needs, as a worker's placement names it.
NEEDS = {
    "temperature": "sampling",
    "top_p": "sampling",
    "top_k": "sampling",
    "min_p": "sampling",
    "seed": "seed",
    "repetition_penalty": "penalties",
    "presence_penalty": "penalties",
    "frequency_penalty": "penalties",
    "logit_bias": "logit_bias",
}

# Until the first worker has spoken: those of the lanes that a model of its kind has.
AUTOREGRESSIVE = frozenset({"sampling", "seed", "penalties", "logit_bias", "logprobs", "grammar", "tools", "tool_choice"})
BLOCK_DIFFUSION = frozenset({"seed"})


def not_honoured(given: Mapping[str, Any], abilities: Collection[str], strict: bool) -> tuple[str, ...]:
    """The given sampling fields that nothing will come of. Raises RequestError for the first one when strict."""
    found = tuple(name for name in given if NEEDS[name] not in abilities)
    if strict and found:
        raise refuse(found[0], f"{found[0]} cannot be honoured by this model")
    return found


def sampling(given: Mapping[str, Any], defaults: Sampling, abilities: Collection[str]) -> Sampling:
    """What the request gives, else the model's default, as far as it can be honoured; the rest neutral."""
    names = [name for name, need in NEEDS.items() if need in abilities]
    return Sampling(**{name: given.get(name, getattr(defaults, name)) for name in names})
