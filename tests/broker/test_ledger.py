"""Admission, order, places and slots: the ledger's rules one by one."""

import pytest

from broker import invariants, policy
from broker.ledger import ASSEMBLY_S, Ledger
from broker.records import Effect, Relay, ToApi, ToWorker
from broker.settings import BrokerSettings
from common.envelope import (
    Dispatch,
    Done,
    ModelPlan,
    Rejected,
    Reserve,
    Reserved,
    Stale,
    Started,
    Stop,
    Submit,
    WorkerFacts,
)
from common.outcomes import Outcome

API = b"api"


def id_(number: int) -> bytes:
    return b"%016d" % number


class Book:
    """A ledger that is checked after every event."""

    def __init__(self, slots: int = 2, workers: int = 1, kv_tokens: int = 10_000, **settings: object) -> None:
        self.ledger = Ledger(BrokerSettings(**settings), 0.0)  # type: ignore[arg-type]
        self.now = 0.0
        for number in range(workers):
            self.join(b"w%d" % number, slots, kv_tokens)

    def join(self, peer: bytes, slots: int = 2, kv_tokens: int = 10_000, fingerprint: str = "print") -> list[Effect]:
        facts = WorkerFacts("m", fingerprint, slots, kv_tokens, 1, 1000, ["batched"], [])
        return self.seen(self.ledger.worker_joined(peer, peer.decode(), facts, self.now))

    def seen(self, effects: list[Effect]) -> list[Effect]:
        invariants.check(self.ledger, self.now)
        return effects

    def reserve(self, *numbers: int, priority: int = 0, api: bytes = API, key: str = "", weight: float = 1.0) -> object:
        """The answer; those who were displaced for it are in .displaced."""
        message = Reserve([id_(n) for n in numbers], "label", "m", priority, key, weight)
        *others, effect = self.seen(self.ledger.reserve(api, message, self.now))
        assert isinstance(effect, ToApi)
        self.displaced = [other.message for other in others if isinstance(other, ToApi)]
        return effect.message

    def submit(
        self, number: int, tokens: int = 30, fingerprint: str = "print", prefix: bytes = b"", **more: object
    ) -> list[Effect]:
        self.reserve(number, **more)  # type: ignore[arg-type]
        return self.send(number, tokens, fingerprint, prefix)

    def send(self, number: int, tokens: int = 30, fingerprint: str = "print", prefix: bytes = b"") -> list[Effect]:
        message = Submit(id_(number), tokens - 10, 10, prefix, fingerprint)
        return self.seen(self.ledger.submit(API, message, b"p%d" % number, self.now))

    def done(self, number: int, peer: bytes = b"w0", attempt: int = 1) -> list[Effect]:
        return self.seen(self.ledger.done(peer, Done(id_(number), attempt, Outcome.STOP), b"", self.now))

    def waiting(self) -> list[int]:
        return [int(id) for id in self.ledger.models["m"].line]


def dispatched(effects: list[Effect]) -> list[tuple[int, int, bytes]]:
    return [
        (int(e.message.request), e.message.attempt, e.peer)
        for e in effects
        if isinstance(e, ToWorker) and isinstance(e.message, Dispatch)
    ]


def ends(effects: list[Effect]) -> dict[int, Outcome]:
    return {int(e.message.request): e.message.outcome for e in effects if isinstance(e, ToApi) and isinstance(e.message, Done)}


def test_places_are_inflight_plus_queue_counted_from_reserve() -> None:
    book = Book(slots=2, max_queue=1)
    assert isinstance(book.reserve(1), Reserved)
    assert isinstance(book.reserve(2, 3), Reserved)
    assert book.reserve(4) == Rejected(id_(4), Outcome.QUEUE_FULL, 2000)
    book.seen(book.ledger.release(API, [id_(1)], 0.0))
    assert isinstance(book.reserve(4), Reserved)


def test_several_places_are_given_all_or_none() -> None:
    book = Book(slots=2, max_queue=1)
    book.reserve(1)
    assert book.reserve(2, 3, 4) == Rejected(id_(2), Outcome.QUEUE_FULL, 2000)
    assert len(book.ledger.requests) == 1


def test_more_places_than_there_will_ever_be_is_not_a_matter_of_time() -> None:
    assert Book(slots=2, max_queue=1).reserve(1, 2, 3, 4) == Rejected(id_(1), Outcome.TOO_MANY_PLACES, 0)


def test_the_planned_slots_bound_admission_while_workers_restart() -> None:
    book = Book(workers=0, max_queue=0)
    book.ledger.planned([ModelPlan("m", 2, 2, "starting", 1000, 0)], 0.0)
    assert [type(book.reserve(n)) for n in range(5)] == [Reserved] * 4 + [Rejected]
    assert dispatched(book.send(0)) == []
    assert [d[0] for d in dispatched(book.join(b"w0"))] == [0]


def test_the_operators_limit_bounds_what_runs() -> None:
    book = Book(slots=4, max_inflight=1, max_queue=3)
    assert len(dispatched(book.submit(1))) == 1
    assert dispatched(book.submit(2)) == []
    assert dispatched(book.done(1)) == [(2, 1, b"w0")]


@pytest.mark.parametrize(
    ("plan", "outcome"),
    [
        (None, Outcome.NO_WORKER),
        (ModelPlan("m", 0, 2, "starting", 1000, 0), Outcome.NO_WORKER),
        (ModelPlan("m", 1, 2, "failed", 1000, 0), Outcome.MODEL_FAILED),
    ],
)
def test_a_model_that_nobody_will_serve_is_refused_at_once(plan: ModelPlan | None, outcome: Outcome) -> None:
    book = Book(workers=0)
    book.now = ASSEMBLY_S
    if plan is not None:
        book.ledger.planned([plan], book.now)
    answer = book.reserve(1)
    assert isinstance(answer, Rejected) and answer.outcome is outcome and answer.retry_after_ms == 2000


def test_a_young_broker_queues_until_pool_and_workers_are_back() -> None:
    book = Book(workers=0, max_inflight=2)
    assert dispatched(book.submit(1)) == []
    assert dispatched(book.join(b"w0")) == [(1, 1, b"w0")]


def test_when_the_last_hope_goes_everybody_who_waits_is_told() -> None:
    book = Book(slots=1)
    book.ledger.planned([ModelPlan("m", 1, 4, "ready", 1000, 0)], 0.0)
    book.submit(1)
    book.submit(2)
    book.seen(book.ledger.worker_lost(b"w0", 0.0))
    assert book.waiting() == [1, 2]
    effects = book.seen(book.ledger.planned([ModelPlan("m", 1, 4, "failed", 1000, 0)], 1.0))
    assert ends(effects) == {1: Outcome.MODEL_FAILED, 2: Outcome.MODEL_FAILED}


def test_priority_then_arrival() -> None:
    book = Book(slots=1, max_queue=9)
    book.submit(1)
    for number, priority in ((2, 0), (3, 5), (4, -1), (5, 5), (6, 0)):
        book.submit(number, priority=priority)
    order = []
    running = 1
    while book.ledger.requests:
        (running, _, _), *rest = dispatched(book.done(running)) or [(0, 0, b"")]
        order.append(running)
    assert order == [3, 5, 2, 6, 4, 0]


def test_work_goes_where_the_smallest_share_is_taken() -> None:
    book = Book(workers=0)
    book.join(b"w0", slots=4)
    book.join(b"w1", slots=2)
    peers = [dispatched(book.submit(n))[0][2] for n in range(6)]
    assert sorted(peers) == [b"w0"] * 4 + [b"w1"] * 2
    assert set(peers[:2]) == {b"w0", b"w1"}


def test_kv_memory_is_rows_times_the_longest_row() -> None:
    book = Book(slots=4, kv_tokens=100)
    assert dispatched(book.submit(1, tokens=40))
    assert dispatched(book.submit(2, tokens=50))
    assert dispatched(book.submit(3, tokens=30)) == []
    assert dispatched(book.done(2)) == [(3, 1, b"w0")]


def test_a_blocked_head_is_overtaken_a_bounded_number_of_times() -> None:
    book = Book(slots=2, kv_tokens=100, max_queue=99)
    book.submit(1, tokens=40)
    book.submit(2, tokens=90)
    assert book.waiting() == [2]
    for number in range(10, 10 + policy.MAX_PASSED_OVER):
        assert dispatched(book.submit(number, tokens=40)) == [(number, 1, b"w0")]
        book.done(number)
    assert dispatched(book.submit(50, tokens=40)) == []
    assert dispatched(book.done(1)) == [(2, 1, b"w0")]


@pytest.mark.parametrize("waiting", [2, policy.LOOKAHEAD + 1])
def test_who_waits_for_full_workers_keeps_nobody_from_others(waiting: int) -> None:
    """As in a swap: the new worker serves beside the old one, whose line is long."""
    book = Book(slots=2, max_queue=10_000)
    for number in range(2 + waiting):
        book.submit(number)
    book.join(b"w1", slots=4, fingerprint="new")
    for number in range(1000, 1000 + 2 * policy.MAX_PASSED_OVER):
        assert dispatched(book.submit(number, fingerprint="new")) == [(number, 1, b"w1")]
        book.done(number, b"w1")
    assert not any(request.passed_over for request in book.ledger.requests.values())
    assert dispatched(book.done(0)) == [(2, 1, b"w0")]


def test_a_request_whose_turn_has_come_keeps_only_the_workers_that_it_waits_for() -> None:
    book = Book(slots=2, kv_tokens=100, max_queue=99)
    book.join(b"w1", slots=4, fingerprint="new")
    book.submit(1, tokens=40)
    book.submit(2, tokens=90)
    for number in range(10, 10 + policy.MAX_PASSED_OVER):
        assert dispatched(book.submit(number, tokens=40)) == [(number, 1, b"w0")]
        book.done(number)
    assert dispatched(book.submit(50, tokens=40)) == []
    assert dispatched(book.submit(51, tokens=40, fingerprint="new")) == [(51, 1, b"w1")]
    assert dispatched(book.done(1)) == [(2, 1, b"w0")]


def test_with_one_fingerprint_a_dispatch_looks_no_further_than_it_may_overtake() -> None:
    book = Book(slots=2, kv_tokens=100, max_queue=2000)
    for number in range(60):
        book.submit(number, tokens=90)
    looked = 0

    def count(prefix: bytes) -> dict[bytes, int]:
        nonlocal looked
        looked += 1
        return {}

    book.ledger.models["m"].prefixes.read = count  # type: ignore[method-assign]
    assert dispatched(book.submit(5000, tokens=90)) == [] and 0 < looked <= policy.LOOKAHEAD


def test_with_two_fingerprints_a_dispatch_looks_so_far_and_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    book = Book(slots=2, max_queue=99)
    for number in range(2 + 20):
        book.submit(number)
    book.join(b"w1", fingerprint="new")
    looked = set()
    serves = policy.serves
    monkeypatch.setattr(policy, "serves", lambda worker, request: looked.add(request.id) or serves(worker, request))
    monkeypatch.setattr(policy, "SCAN", 8)
    book.ledger.planned([ModelPlan("m", 2, 2, "ready", 1000, 0)], 0.0)
    assert len(looked) == 8


def test_what_fits_no_empty_worker_is_refused() -> None:
    book = Book(kv_tokens=100)
    assert ends(book.submit(1, tokens=101)) == {1: Outcome.TOO_LONG}


def test_ids_of_another_tokenizer_are_never_dispatched() -> None:
    book = Book()
    assert book.submit(1, fingerprint="old") == [ToApi(API, Stale(id_(1), "print"))]
    book.join(b"w1", fingerprint="old")
    assert dispatched(book.submit(2, fingerprint="old"))[0][2] == b"w1"


def test_what_is_sent_back_keeps_its_place_and_stands_where_it_stood() -> None:
    book = Book(slots=1)
    book.submit(1)
    book.submit(2)
    book.submit(3)
    book.seen(book.ledger.worker_leaving(b"w0", 0.0))
    effects = book.join(b"w1", slots=1, fingerprint="new")
    assert [e.message for e in effects] == [Stale(id_(2), "new"), Stale(id_(3), "new")]  # type: ignore[union-attr]
    assert len(book.ledger.requests) == 3
    # The later one is rendered sooner and takes the slot; then the first stands in front of whoever came after it.
    assert dispatched(book.send(3, fingerprint="new")) == [(3, 1, b"w1")]
    book.submit(4, fingerprint="new")
    assert dispatched(book.send(2, fingerprint="new")) == [] and book.waiting() == [2, 4]


def test_what_became_stale_is_sent_back_at_once_however_full_the_others_are() -> None:
    book = Book(slots=1, max_queue=9)
    book.join(b"w1", slots=1, fingerprint="new")
    for number, fingerprint in ((1, "print"), (2, "new"), (3, "print"), (4, "new"), (5, "print")):
        book.submit(number, fingerprint=fingerprint)
    effects = book.seen(book.ledger.worker_leaving(b"w0", 0.0))
    assert [e.message for e in effects if isinstance(e, ToApi)] == [Stale(id_(3), "new"), Stale(id_(5), "new")]
    assert book.submit(6, fingerprint="print") == [ToApi(API, Stale(id_(6), "new"))]
    # A death is the same, and who comes back from it is sent back too.
    effects = book.seen(book.ledger.worker_lost(b"w0", 0.0))
    assert [e.message for e in effects if isinstance(e, ToApi)] == [Stale(id_(1), "new")]
    assert book.waiting() == [4]


@pytest.mark.parametrize(("released", "outcome"), [(True, Outcome.CANCELLED), (False, Outcome.STALE_MODEL)])
def test_what_ran_and_was_sent_back_counts_however_it_ends(released: bool, outcome: Outcome) -> None:
    book = Book(reservation_timeout=30.0)
    book.join(b"w1", fingerprint="new")
    book.submit(1)
    book.seen(book.ledger.started(b"w0", Started(id_(1), 1, "batched", "w0"), 0.0))
    assert ToApi(API, Stale(id_(1), "new")) in book.seen(book.ledger.worker_lost(b"w0", 0.0))
    if released:
        book.seen(book.ledger.release(API, [id_(1)], 1.0))
    else:
        assert book.seen(book.ledger.advance(31.0)) == [ToApi(API, Rejected(id_(1), outcome, 0))]
    assert not book.ledger.requests and book.ledger.models["m"].finished == {outcome: 1}


def test_while_there_are_two_fingerprints_each_gets_its_share_of_what_is_rendered() -> None:
    book = Book(slots=2)
    book.join(b"w1", slots=4, fingerprint="new")
    wanted = [book.reserve(number).fingerprint for number in range(1, 7)]  # type: ignore[attr-defined]
    assert wanted.count("new") == 4 and wanted.count("print") == 2


def test_what_is_not_rendered_again_in_time_is_over() -> None:
    book = Book()
    book.submit(1, fingerprint="old")
    assert book.ledger.advance(29.0) == []
    assert book.ledger.advance(31.0) == [ToApi(API, Rejected(id_(1), Outcome.NOT_RESERVED, 0))]
    assert not book.ledger.requests


def test_a_cancelled_request_is_over_while_its_slot_is_not() -> None:
    book = Book(slots=1)
    book.submit(1)
    effects = book.seen(book.ledger.cancel(API, id_(1), 0.0))
    assert effects == [ToWorker(b"w0", Stop(id_(1), 1)), ToApi(API, Done(id_(1), 1, Outcome.CANCELLED))]
    assert dispatched(book.submit(2)) == []
    assert book.seen(book.ledger.tokens(b"w0", id_(1), 1, 0.0)) == []
    assert dispatched(book.done(1)) == [(2, 1, b"w0")]
    assert book.seen(book.ledger.cancel(API, id_(1), 0.0)) == []


def test_nobody_cancels_another_apis_request() -> None:
    book = Book()
    book.submit(1)
    assert book.seen(book.ledger.cancel(b"other", id_(1), 0.0)) == [] and id_(1) in book.ledger.requests


def test_a_death_before_the_first_piece_is_retried_in_front_and_after_it_is_an_error() -> None:
    book = Book(slots=2, max_queue=9)
    book.submit(1)
    book.submit(2)
    book.submit(3)
    book.seen(book.ledger.started(b"w0", Started(id_(1), 1, "batched", "w0"), 0.0))
    assert book.seen(book.ledger.tokens(b"w0", id_(2), 1, 0.0)) == [Relay(API)]
    effects = book.seen(book.ledger.worker_lost(b"w0", 0.0))
    assert ends(effects) == {2: Outcome.WORKER_LOST}
    assert book.waiting() == [1, 3]
    effects = book.join(b"w1")
    assert dispatched(effects) == [(1, 2, b"w1"), (3, 1, b"w1")]
    assert next(e.payload for e in effects if isinstance(e, ToWorker)) == b"p1"


def test_two_deaths_end_a_request() -> None:
    book = Book()
    book.submit(1)
    book.seen(book.ledger.worker_lost(b"w0", 0.0))
    book.join(b"w1")
    assert ends(book.seen(book.ledger.worker_lost(b"w1", 0.0))) == {1: Outcome.POISONED}


def test_a_session_that_ends_is_no_death() -> None:
    book = Book()
    book.submit(1)
    for number in range(5):
        book.seen(book.ledger.worker_lost(b"w%d" % number, 0.0, charge=False))
        book.join(b"w%d" % (number + 1))
    assert book.ledger.requests[id_(1)].deaths == 0


def test_deadlines() -> None:
    book = Book(slots=1, queue_timeout=5.0, request_timeout=20.0, reservation_timeout=3.0)
    book.reserve(9)
    book.submit(1)
    book.submit(2)
    assert book.seen(book.ledger.advance(2.9)) == []
    assert book.seen(book.ledger.advance(3.0)) == [ToApi(API, Rejected(id_(9), Outcome.NOT_RESERVED, 0))]
    assert ends(book.seen(book.ledger.advance(5.0))) == {2: Outcome.QUEUE_TIMEOUT}
    effects = book.seen(book.ledger.advance(20.0))
    assert ends(effects) == {1: Outcome.REQUEST_TIMEOUT} and ToWorker(b"w0", Stop(id_(1), 1)) in effects
    assert book.ledger.next_deadline() is None


def test_a_submit_without_a_reservation_or_a_second_one_is_rejected() -> None:
    book = Book()
    assert book.send(1) == [ToApi(API, Rejected(id_(1), Outcome.NOT_RESERVED, 0))]
    book.submit(2)
    assert book.send(2) == [ToApi(API, Rejected(id_(2), Outcome.DUPLICATE, 0))]


def test_retry_after_follows_the_drain_rate_within_its_bounds() -> None:
    from collections import deque

    assert policy.retry_after_s(deque(), 5, 100.0) == policy.RETRY_UNMEASURED_S
    every_half_second = deque(100.0 - 0.5 * n for n in range(20, 0, -1))
    assert policy.retry_after_s(every_half_second, 10, 100.0) == pytest.approx(5.0)
    assert policy.retry_after_s(every_half_second, 1, 100.0) == 1.0
    assert policy.retry_after_s(every_half_second, 1000, 100.0) == 60.0
    assert policy.retry_after_s(every_half_second, 10, 1000.0) == policy.RETRY_UNMEASURED_S


def test_names_that_nobody_serves_are_not_kept() -> None:
    book = Book(workers=0)
    book.now = ASSEMBLY_S
    book.reserve(1)
    assert book.ledger.models == {}


def full(**settings: object) -> Book:
    """One slot and four places behind it, all of one key: 1 runs, 2 and 3 wait, 4 and 5 are reserved."""
    book = Book(slots=1, max_queue=4, **settings)
    for number in (1, 2, 3):
        book.submit(number, key="flood")
    book.reserve(4, key="flood")
    book.reserve(5, key="flood")
    return book


def test_a_full_queue_gives_its_largest_holders_youngest_place_to_who_holds_less() -> None:
    book = full()
    assert isinstance(book.reserve(9, key="flood"), Rejected) and book.displaced == []
    assert isinstance(book.reserve(6, key="other"), Reserved)
    # Reserved places go first, being the youngest, and come too late with their prompt.
    assert book.displaced == [Rejected(id_(5), Outcome.QUEUE_FULL, 2000)]
    assert book.send(5) == [ToApi(API, Rejected(id_(5), Outcome.NOT_RESERVED, 0))]
    assert isinstance(book.reserve(7, key="other"), Reserved)
    assert book.displaced == [Rejected(id_(4), Outcome.QUEUE_FULL, 2000)]
    assert book.reserve(8, key="other") == Rejected(id_(8), Outcome.QUEUE_FULL, 2000) and book.displaced == []
    assert isinstance(book.reserve(8, key="third"), Reserved)
    assert [int(rejected.request) for rejected in book.displaced] in ([3], [7])
    assert book.ledger.models["m"].refused == {Outcome.QUEUE_FULL: 5}
    assert book.ledger.models["m"].finished == {}


def test_who_waits_is_displaced_like_who_has_reserved_and_never_who_runs() -> None:
    book = Book(slots=1, max_queue=2)
    for number in (1, 2, 3):
        book.submit(number, key="flood")
    assert isinstance(book.reserve(4, key="other"), Reserved)
    assert book.displaced == [Rejected(id_(3), Outcome.QUEUE_FULL, 2000)]
    assert isinstance(book.reserve(5, key="third"), Rejected)
    assert book.seen(book.ledger.tokens(b"w0", id_(1), 1, 0.0)) == [Relay(API)]


def test_several_places_displace_all_that_are_missing_or_nobody() -> None:
    book = full()
    assert isinstance(book.reserve(6, 7, 8, key="other"), Rejected) and book.displaced == []
    assert isinstance(book.reserve(6, 7, key="other"), Reserved)
    assert [int(rejected.request) for rejected in book.displaced] == [5, 4]


def test_what_a_worker_had_once_is_not_displaced() -> None:
    book = full()
    book.seen(book.ledger.started(b"w0", Started(id_(1), 1, "batched", "w0"), 0.0))
    book.seen(book.ledger.worker_lost(b"w0", 0.0))
    book.join(b"w1", slots=1)
    book.seen(book.ledger.worker_lost(b"w1", 0.0, charge=False))
    assert book.waiting()[0] == 1
    for number in range(10, 13):
        book.reserve(number, key=f"k{number}")
    assert id_(1) in book.ledger.requests


def test_fewer_places_than_are_given_away_displace_nobody() -> None:
    book = full()
    book.ledger.planned([ModelPlan("m", 1, 2, "ready", 1000, 0)], 0.0)
    book.reserve(6, key="flood")
    book.ledger.planned([ModelPlan("m", 1, 1, "ready", 1000, 0)], 0.0)
    assert isinstance(book.reserve(7, key="other"), Rejected) and book.displaced == []


def test_a_single_request_waits_for_one_running_request_of_a_flood() -> None:
    book = full()
    numbers = iter(range(100, 1000))
    running = 1
    for _ in range(50):
        single = next(numbers)
        book.submit(single, key="other")
        assert len(book.ledger.requests) == 5
        book.submit(next(numbers), key="flood")
        # The next that is served, although five of the flood came before.
        assert [d[0] for d in dispatched(book.done(running))] == [single]
        running = dispatched(book.done(single))[0][0]
        book.submit(next(numbers), key="flood")


def test_repeat_prompts_go_where_their_head_was_read_until_that_worker_is_too_busy() -> None:
    book = Book(slots=8, workers=2, max_queue=9)
    # Six hashes are 384 tokens: worth one row and not two.
    prefix = b"".join(b"prefix-%d" % n for n in range(6))

    def ask(number: int, prefix: bytes, *, speaks: bool = True) -> bytes:
        (_, _, peer), *_ = dispatched(book.submit(number, prefix=prefix))
        if speaks:
            book.seen(book.ledger.tokens(peer, id_(number), 1, 0.0))
        return peer

    first = ask(1, prefix)
    assert ask(2, prefix) == first
    other = ask(3, prefix, speaks=False)
    assert other != first
    assert book.ledger.models["m"].routed == {"new": 1, "hit": 1, "diverted": 1}
    # Not read before its first token.
    assert list(book.ledger.models["m"].prefixes.read(prefix)) == [first]
    book.seen(book.ledger.tokens(other, id_(3), 1, 0.0))
    # Both have read it now; a longer prompt is known by its longest head.
    assert ask(4, prefix + b"longer--") == other
    book.done(1, first)
    assert ask(5, prefix + b"longer--") == first
    book.done(3, other)
    assert ask(6, prefix + b"longer--") == other
    assert book.ledger.models["m"].routed == {"new": 1, "hit": 3, "diverted": 2}
    book.seen(book.ledger.worker_lost(other, 0.0))
    assert len(book.ledger.models["m"].prefixes) == 7


def test_without_prefix_routing_and_with_one_worker_nothing_is_remembered() -> None:
    for book in (Book(workers=2, prefix_routing=False), Book(workers=1)):
        for number in (1, 2):
            (_, _, peer), *_ = dispatched(book.submit(number, prefix=b"prefix-1"))
            book.seen(book.ledger.tokens(peer, id_(number), 1, 0.0))
        assert len(book.ledger.models["m"].prefixes) == 0 and not any(book.ledger.models["m"].routed.values())


def test_only_workers_that_take_the_request_are_a_choice() -> None:
    """One that leaves, or is of another fingerprint, is neither where a prompt should go nor remembered."""
    book = Book(slots=8, workers=2)
    book.join(b"w2", slots=8, fingerprint="new")
    prefix = b"prefix-1" * 2

    def ask(number: int, fingerprint: str = "print") -> bytes:
        (_, _, peer), *_ = dispatched(book.submit(number, prefix=prefix, fingerprint=fingerprint))
        book.seen(book.ledger.tokens(peer, id_(number), 1, 0.0))
        return peer

    model = book.ledger.models["m"]
    ask(1, "new")
    # The only one of its kind: nothing was chosen, and nothing that others have read is of use to it.
    assert not any(model.routed.values()) and not model.prefixes.readers()
    first = ask(2)
    assert model.routed == {"new": 1, "hit": 0, "diverted": 0} and model.prefixes.readers() == {first}
    late = dispatched(book.submit(3, prefix=prefix))[0][2]
    book.seen(book.ledger.worker_leaving(late, 0.0))
    book.join(b"w3", slots=8)
    book.seen(book.ledger.tokens(late, id_(3), 1, 0.0))
    assert late not in model.prefixes.readers()


def test_what_workers_of_another_fingerprint_have_read_is_no_hit_that_was_missed() -> None:
    book = Book(slots=8, workers=2)
    for peer in (b"w2", b"w3"):
        book.join(peer, slots=8, fingerprint="new")
    for number, fingerprint in ((1, "print"), (2, "new")):
        (_, _, peer), *_ = dispatched(book.submit(number, prefix=b"prefix-1", fingerprint=fingerprint))
        book.seen(book.ledger.tokens(peer, id_(number), 1, 0.0))
    assert book.ledger.models["m"].routed == {"new": 2, "hit": 0, "diverted": 0}
