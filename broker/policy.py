"""The decisions of admission and placement, one function each (pure, no state)."""

from collections import deque
from collections.abc import Collection, Iterable

from broker.records import Request, Worker
from common.ids import PeerId
from common.outcomes import Outcome

# A blocked head may be overtaken by this many smaller requests before nobody passes it any more: half a default batch.
MAX_PASSED_OVER = 8
# How far behind a blocked head a smaller request is looked for, which bounds the work of one dispatch.
LOOKAHEAD = 16

# How much more of its slots may be taken of the worker that has read a prompt's head than of the idlest one: a row more in a
# batch costs a few hundredths of a step, reading a long prompt again costs many steps.
PREFIX_MARGIN = 0.25

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


def serves(worker: Worker, request: Request) -> bool:
    """Whether the request was rendered for this worker's tokenizer and template."""
    return not request.fingerprint or request.fingerprint == worker.facts.fingerprint


def choose_worker(workers: Iterable[Worker], request: Request, readers: Collection[PeerId] = ()) -> Worker | None:
    """The worker with the smallest share of its slots taken, then the one that got work the longest ago; None: nobody can.

    readers: workers that have read the prompt's head. The idlest of them is preferred while it is not much busier.
    """
    able = [w for w in workers if w.free > 0 and serves(w, request) and fits(w, request.tokens)]
    idlest = min(able, key=_load, default=None)
    if idlest is None or not readers:
        return idlest
    reader = min((w for w in able if w.peer in readers), key=_load, default=idlest)
    return reader if _near_enough(reader, idlest) else idlest


def _near_enough(reader: Worker, idlest: Worker) -> bool:
    # Nobody stands idle while a reader has company; two rows on one worker and none on the other waste half the machine.
    if len(reader.leases) <= 1:
        return True
    return bool(idlest.leases) and _load(reader)[0] <= _load(idlest)[0] + PREFIX_MARGIN


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
