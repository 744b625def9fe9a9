"""How a memory budget is divided (pure): weights, KV cache and overhead of each worker of one model.

Owns the arithmetic and the error for what does not fit. Must never know a device or a file: facts come in as values.
Invariant: what a plan names adds up to no more than its share of the budget.
"""

from bisect import bisect_right
from dataclasses import dataclass

from common.errors import ConfigError
from worker.cache_layout import FLOAT32_BYTES, CacheBytes
from worker.model_files import ModelFacts

AUTO, FLOAT32, KEEP = "auto", "float32", "keep"

# What a worker holds besides weights and KV, at least. Measured for the demo model on a CPU: 150 MiB for interpreter and
# libraries, 30 MiB for activations and logits of a full batch.
OVERHEAD_BYTES = 512 * 2**20
PROCESS_BYTES = 192 * 2**20
# Wider models need more: layers hold about so many copies of their input and of their widest inside at once, for as many
# tokens as are read at a time; and each row's logits exist raw, changed, sorted and as float32.
READ_TOKENS = 2048
COPIES, INNER_COPIES, LOGIT_BYTES = 8, 3, 16

# A row that joins or leaves copies the batch's whole KV, layer by layer: a peak of 1.07 to 1.25 times the buffers was
# measured on a CPU. A GPU, which evaluates ahead, may hold more layers twice.
KV_PEAK = 1.5

# mlx-lm's caches grow by so many tokens, so each row may have nearly as many that nobody asked for.
KV_STEP = 256

# Prompts worth keeping repeat within minutes: an eighth holds a few long ones and costs running rows little.
PROMPT_CACHE_SHARE = 8

# What mlx may keep of freed buffers: enough that a step finds its buffers again.
BUFFER_CACHE_SHARE = 16

# A worker that cannot hold one conversation of this length is of no use.
SHORTEST_USEFUL = 1024


@dataclass(frozen=True)
class Needs:
    """What a worker takes before and for its rows: bytes of weights and of everything else, and its rows' caches."""

    weights: int
    overhead: int
    kv: CacheBytes

    def least(self, context: int) -> int:
        """Bytes of a worker that holds one useful conversation."""
        return self.weights + self.overhead + int(KV_PEAK * self.kv.total(min(context, SHORTEST_USEFUL) + KV_STEP + 1, 1))

    def most(self, slots: int, context: int) -> int:
        """Bytes of a worker whose every slot holds its whole context, with its prompt cache beside."""
        whole = self.weights + self.overhead + int(KV_PEAK * self.kv.total(slots * (context + KV_STEP), slots))
        return whole * PROMPT_CACHE_SHARE // (PROMPT_CACHE_SHARE - 1)


@dataclass(frozen=True)
class Plan:
    """One worker of `workers` equal ones. precision: float32 or keep. Bytes are per worker.

    kv_bytes_per_token: of a short row's token; kv: of any. limit: what bounds the KV tokens, "slots" (every slot may
    hold its whole context) or "memory". estimated: the files do not tell all; the worker corrects slots and KV tokens.
    """

    workers: int
    slots: int
    kv_tokens: int
    precision: str
    share_bytes: int
    weight_bytes: int
    kv_bytes_per_token: int
    cache_bytes: int
    prompt_cache_bytes: int = 0
    overhead_bytes: int = 0
    kv: CacheBytes = CacheBytes(0)
    limit: str = "slots"
    estimated: bool = False


@dataclass(frozen=True)
class Fit:
    """What a worker's share holds beside its weights."""

    slots: int
    kv_tokens: int
    prompt_cache_bytes: int


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
    beside: int = 0,
) -> Plan:
    """Divide the budget among `workers`. Raises ConfigError saying how much is missing.

    context 0: the model's own. prompt_cache_bytes 0: an eighth of the share; either way no more than what one useful
    conversation leaves. beside: bytes of each worker for what runs beside its model (beside_bytes()).
    """
    share = budget_bytes // workers
    context = min(context or facts.context, facts.context)
    precision = held_precision(cpu_weights, facts, share - beside, on_cpu)
    need = needs(facts, precision, slots, beside)
    least = need.least(context)
    if least > share:
        raise ConfigError(
            f"a worker of this model needs {size(least)}, and its share of {size(budget_bytes)} for {workers} "
            f"worker{'s' * (workers > 1)} is {size(share)}: {size(least - share)} too little; "
            "raise MILLPOND_MEMORY_BUDGET or lower MILLPOND_WORKERS"
        )
    fitted = fit(need, share, slots, context, prompt_cache_bytes)
    return Plan(
        workers=workers,
        slots=fitted.slots,
        kv_tokens=fitted.kv_tokens,
        precision=precision,
        share_bytes=share,
        weight_bytes=need.weights,
        kv_bytes_per_token=need.kv.longest_token,
        cache_bytes=share // BUFFER_CACHE_SHARE,
        prompt_cache_bytes=fitted.prompt_cache_bytes,
        overhead_bytes=need.overhead,
        kv=need.kv,
        limit="slots" if fitted.kv_tokens == slots * context else "memory",
        estimated=facts.estimated,
    )


def fit(need: Needs, share_bytes: int, slots: int, context: int, prompt_cache_bytes: int = 0) -> Fit:
    """Slots, KV tokens and prompt cache of a share that holds at least need.least(context)."""
    spare = share_bytes - need.least(context)
    prompt_cache = max(0, min(prompt_cache_bytes or share_bytes // PROMPT_CACHE_SHARE, spare))
    room = share_bytes - need.weights - need.overhead - prompt_cache
    return Fit(*_divided(slots, context, room, need.kv), prompt_cache)


def needs(facts: ModelFacts, precision: str, slots: int, beside: int = 0) -> Needs:
    """What a worker of this model takes, its weights held in this precision. beside: counted as overhead."""
    width = FLOAT32_BYTES if precision == FLOAT32 else facts.value_bytes
    kv = facts.cache.in_bytes(width)
    # Layers with windows hold what is being read beside their window.
    reading = width * (COPIES * facts.width + INNER_COPIES * facts.inner) + kv.longest_token - kv.token
    overhead = PROCESS_BYTES + READ_TOKENS * reading + LOGIT_BYTES * slots * facts.vocabulary
    return Needs(weight_bytes(facts, precision), max(OVERHEAD_BYTES, overhead) + beside, kv)


def held_precision(choice: str, facts: ModelFacts, share_bytes: int, on_cpu: bool) -> str:
    """float32 or keep. On a CPU float32 is several times faster than 4-bit; auto takes it where a worker still fits."""
    if not on_cpu:
        return KEEP
    if choice != AUTO:
        return choice
    context = min(facts.context, SHORTEST_USEFUL)
    return FLOAT32 if needs(facts, FLOAT32, 1).least(context) <= share_bytes else KEEP


def beside_bytes(draft: ModelFacts, precision: str, context: int) -> int:
    """What a draft model takes beside the model it drafts for: its weights and one row's cache."""
    kv = needs(draft, precision, 1).kv
    return weight_bytes(draft, precision) + int(KV_PEAK * kv.total(min(context, draft.context), 1))


def weight_bytes(facts: ModelFacts, precision: str) -> int:
    """What the weights take in memory."""
    return facts.float32_bytes if precision == FLOAT32 else facts.stored_bytes


def size(count: int) -> str:
    """Bytes for people."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**27 else f"{count / 2**20:.1f} MiB"


def _divided(slots: int, context: int, room_bytes: int, kv: CacheBytes) -> tuple[int, int]:
    """(slots, KV tokens) for the room that weights and overhead leave.

    The broker keeps rows x longest row within the KV tokens; each row's buffers may be a step of the cache longer.
    """
    wanted = slots * context
    useful = min(context, SHORTEST_USEFUL)

    def tokens_with(rows: int) -> int:
        """KV tokens that so many rows can share, waste aside; no more than would ever be used."""
        enough = range(wanted + 2 * rows * KV_STEP + useful + 1)
        held = bisect_right(enough, room_bytes, key=lambda tokens: int(KV_PEAK * kv.total(tokens, rows))) - 1
        return held - rows * KV_STEP

    # No more rows than could all be longer than what their last step of the cache wastes, nor so many that this waste
    # leaves no room for one useful conversation.
    fewer = bisect_right(range(2, slots + 1), False, key=lambda rows: tokens_with(rows) < max(useful, rows * KV_STEP))
    slots = 1 + fewer
    return slots, min(tokens_with(slots), slots * context)
