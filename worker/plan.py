"""How a memory budget is divided (pure): weights, KV cache and overhead of each worker of one model.

Owns the arithmetic and the error for what does not fit. Must never know a device or a file: facts come in as values.
Invariant: what a plan names adds up to no more than its share of the budget.
"""

from dataclasses import dataclass

from common.errors import ConfigError
from worker.model_files import ModelFacts

AUTO, FLOAT32, KEEP = "auto", "float32", "keep"

# What a worker holds besides weights and KV. Measured for the demo model on a CPU: 150 MiB for interpreter and libraries,
# 30 MiB for activations and logits of a full batch; those grow with a model's width and vocabulary.
OVERHEAD_BYTES = 512 * 2**20

# A row that joins or leaves copies the batch's whole KV, layer by layer: a peak of 1.07 to 1.25 times the buffers was
# measured on a CPU. A GPU, which evaluates ahead, may hold more layers twice.
KV_PEAK = 1.5

# mlx-lm's caches grow by so many tokens, so each row may have nearly as many that nobody asked for.
KV_STEP = 256

# Prompts worth keeping repeat within minutes: an eighth holds a few long ones and costs running rows little.
PROMPT_CACHE_SHARE = 8

# A worker that cannot hold one conversation of this length is of no use.
SHORTEST_USEFUL = 1024


@dataclass(frozen=True)
class Plan:
    """One worker of `workers` equal ones. precision: float32 or keep. Bytes are per worker."""

    workers: int
    slots: int
    kv_tokens: int
    precision: str
    share_bytes: int
    weight_bytes: int
    kv_bytes_per_token: int
    cache_bytes: int
    prompt_cache_bytes: int = 0


def plan(
    budget_bytes: int,
    facts: ModelFacts,
    workers: int,
    slots: int,
    context: int = 0,
    *,
    on_cpu: bool = False,
    cpu_weights: str = AUTO,
    prompt_cache_bytes: int = 0,
) -> Plan:
    """Divide the budget among `workers`. Raises ConfigError saying how much is missing.

    context 0: the model's own. prompt_cache_bytes 0: an eighth of the share; either way no more than what one useful
    conversation leaves.
    """
    share = budget_bytes // workers
    context = min(context or facts.context, facts.context)
    precision = held_precision(cpu_weights, facts, share, on_cpu)
    weights = weight_bytes(facts, precision)
    per_token = kv_bytes_per_token(facts, precision)
    least = _least(facts, precision, min(context, SHORTEST_USEFUL))
    if least > share:
        raise ConfigError(
            f"a worker of this model needs {_size(least)}, and its share of {_size(budget_bytes)} for {workers} "
            f"worker{'s' * (workers > 1)} is {_size(share)}: {_size(least - share)} too little; "
            "raise MILLPOND_MEMORY_BUDGET or lower MILLPOND_WORKERS"
        )
    prompt_cache = min(prompt_cache_bytes or share // PROMPT_CACHE_SHARE, share - least)
    slots, kv_tokens = _divided(slots, context, share - weights - OVERHEAD_BYTES - prompt_cache, per_token)
    return Plan(
        workers=workers,
        slots=slots,
        kv_tokens=kv_tokens,
        precision=precision,
        share_bytes=share,
        weight_bytes=weights,
        kv_bytes_per_token=per_token,
        cache_bytes=OVERHEAD_BYTES // 4,
        prompt_cache_bytes=prompt_cache,
    )


def held_precision(choice: str, facts: ModelFacts, share_bytes: int, on_cpu: bool) -> str:
    """float32 or keep. On a CPU float32 is several times faster than 4-bit; auto takes it where a worker still fits."""
    if not on_cpu:
        return KEEP
    if choice != AUTO:
        return choice
    return FLOAT32 if _least(facts, FLOAT32, min(facts.context, SHORTEST_USEFUL)) <= share_bytes else KEEP


def weight_bytes(facts: ModelFacts, precision: str) -> int:
    """What the weights take in memory."""
    return facts.float32_bytes if precision == FLOAT32 else facts.stored_bytes


def kv_bytes_per_token(facts: ModelFacts, precision: str) -> int:
    """What one token of one row takes in the cache, whose precision follows the weights'."""
    return facts.kv_values_per_token * (4 if precision == FLOAT32 else facts.value_bytes)


def _divided(slots: int, context: int, room_bytes: int, per_token: int) -> tuple[int, int]:
    """(slots, KV tokens) for the room that weights and overhead leave."""
    if not per_token:
        return slots, slots * context
    tokens = int(room_bytes / (KV_PEAK * per_token))
    # No more rows than could all be longer than what their last step of the cache wastes, nor so many that this waste
    # leaves no room for one useful conversation.
    useful = min(context, SHORTEST_USEFUL)
    slots = max(1, min(slots, tokens // (2 * KV_STEP), (tokens - useful) // KV_STEP))
    return slots, min(tokens - slots * KV_STEP, slots * context)


def _least(facts: ModelFacts, precision: str, tokens: int) -> int:
    kv = KV_PEAK * (tokens + KV_STEP + 1) * kv_bytes_per_token(facts, precision)
    return weight_bytes(facts, precision) + OVERHEAD_BYTES + int(kv)


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
