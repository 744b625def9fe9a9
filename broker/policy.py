"""The decisions of admission and placement, one function each (pure, no state)."""

from collections import deque
from collections.abc import Iterable, Mapping

from broker.records import Request, Worker
from common.ids import PeerId
from common.outcomes import Outcome

# A blocked head may be overtaken by this many smaller requests before nobody passes it any more: half a default batch.
MAX_PASSED_OVER = 8
# How far behind a blocked head a smaller request for the same worker is looked for.
LOOKAHEAD = 16
# How far down the line one dispatch looks past requests that wait for full workers only, as in a swap those of the other
# fingerprint do: sixteen default queues, at most two milliseconds.
SCAN = 512

# So many tokens not to be read again are worth one row more beside oneself: about what a row has to read itself, or on a
# GPU what it costs a reply of some hundred tokens in longer steps.
ROW_TOKENS = 256

# Twenty ranks of priority are worth nine tenths of the longest wait, so that rank alone lets nobody wait in vain.
AGED_SHARE, RANKS = 0.9, 20

RETRY_UNMEASURED_S = 2.0
RETRY_MIN_S, RETRY_MAX_S = 1.0, 60.0


def admit(places: int, wanted: int, max_inflight: int, max_queue: int) -> Outcome | None:
    """None: the places are there. places: given away already; all or none of `wanted` are given."""
    if wanted > max_inflight + max_queue:
        return Outcome.TOO_MANY_PLACES
    if places + wanted > max_inflight + max_queue:
        return Outcome.QUEUE_FULL
    return None


def aging_step_s(queue_timeout_s: float) -> float:
    """How long standing back behind a higher priority raises a request's by one: 2 s at the default 45."""
    return queue_timeout_s * AGED_SHARE / RANKS


def fits(worker: Worker, tokens: int) -> bool:
    """Whether a row of `tokens` still fits the worker's KV memory.

    mlx-lm's batch cache is rectangular: it holds rows x longest row (FACTS, "Rectangular batches").
    """
    return (len(worker.leases) + 1) * max(worker.longest, tokens) <= worker.facts.kv_tokens


def fits_empty(worker: Worker, tokens: int) -> bool:
    """Whether a row of `tokens` would fit if the worker held nothing else."""
    return tokens <= min(worker.facts.kv_tokens, worker.facts.context)


def waits_for(worker: Worker, request: Request) -> bool:
    """Whether this worker would take the request if it held nothing else."""
    return serves(worker, request) and fits_empty(worker, request.tokens)


def serves(worker: Worker, request: Request) -> bool:
    """Whether the request was rendered for this worker's tokenizer and template."""
    return not request.fingerprint or request.fingerprint == worker.facts.fingerprint


def choose_worker(workers: Iterable[Worker], request: Request, read: Mapping[PeerId, int] = {}) -> Worker | None:
    """The worker with the smallest share of its slots taken, then the one that got work the longest ago; None: nobody can.

    read: tokens of the prompt's head that workers have read. Such a one is preferred while what it need not read again
    is worth the rows that it has more than the idlest.
    """
    able = [w for w in workers if w.free > 0 and serves(w, request) and fits(w, request.tokens)]
    if not able or not read:
        return min(able, key=_load, default=None)
    least = min(map(_load, able))[0]

    def cost(worker: Worker) -> tuple[float, int]:
        share, last = _load(worker)
        return (share - least) * worker.facts.slots * ROW_TOKENS - read.get(worker.peer, 0), last

    return min(able, key=cost)


def _load(worker: Worker) -> tuple[float, int]:
    return len(worker.leases) / worker.facts.slots, worker.last_dispatch


def retry_after_s(ended_at: deque[float], ahead: int, now: float) -> float:
    """Seconds until `ahead` places have come back at the measured rate, between 1 and 60; 2 when nothing was measured.

    ended_at: instants of the latest ends. Ends older than a minute say nothing about now.
    """
    recent = [at for at in ended_at if now - at <= RETRY_MAX_S]
    if len(recent) < 2 or now <= recent[0]:
        return RETRY_UNMEASURED_S
    rate = len(recent) / (now - recent[0])
    return min(RETRY_MAX_S, max(RETRY_MIN_S, ahead / rate))
