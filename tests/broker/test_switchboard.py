"""Who may say what to the broker, and who is lost when."""

import msgpack
import pytest

from broker.records import Answer, Effect, Hangup, Relay, ToApi, ToPool, ToWorker
from broker.settings import BrokerSettings
from broker.switchboard import Switchboard
from common import __version__
from common.envelope import (
    Admin,
    AdminReply,
    Cancel,
    Child,
    Dispatch,
    Done,
    Goodbye,
    Heartbeat,
    Hello,
    Message,
    ModelPlan,
    Order,
    PoolState,
    Rejected,
    Report,
    Reserve,
    Reserved,
    Snapshot,
    Started,
    Status,
    Stop,
    Submit,
    Tokens,
    Welcome,
    WorkerFacts,
    encode,
)
from common.outcomes import Outcome

API, WORKER, POOL, COMMAND = b"api", b"worker", b"pool", b"command"
A, B, C = b"a" * 16, b"b" * 16, b"c" * 16
FACTS = WorkerFacts("m", "print", 2, 1000, 1, 500, ["batched"], [])


def hello(role: str, name: str = "", pid: int = 1, version: str = __version__) -> Hello:
    return Hello(version, role, name or role, pid, "host", FACTS if role == "worker" else None)  # type: ignore[arg-type]


class Board:
    """A switchboard with a clock that only the test moves."""

    def __init__(self, **settings: object) -> None:
        self.now = 0.0
        self.core = Switchboard(BrokerSettings(**settings), "epoch", 0.0)  # type: ignore[arg-type]

    def say(self, peer: bytes, message: Message, payload: bytes = b"", front: bool | None = None) -> list[Effect]:
        if front is None:
            front = peer.startswith((b"api", b"command"))
        return self.core.receive(front, peer, encode(message), payload, self.now)

    def join(self, *roles: bytes) -> None:
        for peer in roles:
            effects = self.say(peer, hello(peer.decode().rstrip("0123456789")))
            assert Answer(Welcome("epoch", 1000)) in effects

    def submit(self, id: bytes = A) -> list[Effect]:
        self.say(API, Reserve([id], "label", "m", 0, ""))
        return self.say(API, Submit(id, 10, 20, b"", "print"), b"prompt")


@pytest.fixture
def board() -> Board:
    board = Board()
    board.join(API, WORKER, POOL, COMMAND)
    return board


def hangups(effects: list[Effect]) -> list[bytes]:
    return [effect.peer for effect in effects if isinstance(effect, Hangup)]


def test_a_request_walks_through(board: Board) -> None:
    assert board.say(API, Reserve([A], "label", "m", 0, "")) == [ToApi(API, Reserved(A, "print"))]
    assert board.say(API, Submit(A, 10, 20, b"", "print"), b"prompt") == [
        ToWorker(WORKER, Dispatch(A, 1, "label"), b"prompt")
    ]
    assert board.say(WORKER, Started(A, 1, "batched", "worker")) == [Relay(API)]
    assert board.say(WORKER, Tokens(A, 1, 0), b"piece") == [Relay(API)]
    assert board.say(WORKER, Done(A, 1, Outcome.STOP, 10, 0, 1), b"summary") == [Relay(API)]
    snapshot = board.core.snapshot(0.0)
    assert snapshot["finished"] == {"stop": 1}
    assert snapshot["queue"] == {"waiting": 0, "reserved": 0, "running": 0, "oldest_ms": 0}
    assert snapshot["tokens"] == {"prompt": 10, "cached": 0, "completion": 1}


def test_the_short_way_of_a_streaming_reply_is_what_receive_would_do(board: Board) -> None:
    board.say(b"worker2", hello("worker", "another"))
    pieces = encode(Tokens(A, 1, 1))

    def short(peer: bytes = WORKER, envelope: bytes = pieces) -> bytes | None:
        return board.core.streamed_to(peer, envelope, board.now)

    assert short() is None
    board.submit()
    board.say(WORKER, Started(A, 1, "batched", "worker"))
    # The first pieces end the chance of a second attempt: there is more to do than to relay them.
    assert short() is None
    assert board.say(WORKER, Tokens(A, 1, 0), b"piece") == [Relay(API)]
    board.now = 3.5
    assert short() == API
    assert board.core.roster.peers[WORKER].heard_at == 3.5
    assert board.say(WORKER, Tokens(A, 1, 1), b"piece") == [Relay(API)]
    # Another attempt, request, sender, message; no message at all.
    for peer, message in [
        (WORKER, Tokens(A, 2, 1)), (WORKER, Tokens(B, 1, 1)), (b"worker2", Tokens(A, 1, 1)), (POOL, Tokens(A, 1, 1)),
        (b"stranger", Tokens(A, 1, 1)), (WORKER, Heartbeat()), (WORKER, Done(A, 1, Outcome.STOP, 1, 0, 1)),
    ]:  # fmt: skip
        assert short(peer, encode(message)) is None
    assert short(envelope=b"junk") is None
    # A lost or cancelled request is nobody's.
    board.say(API, Cancel(A))
    assert short() is None and board.say(WORKER, Tokens(A, 1, 1)) == []


def test_who_has_not_said_hello_is_told_to(board: Board) -> None:
    assert hangups(board.say(b"api2", Heartbeat())) == [b"api2"]


@pytest.mark.parametrize(
    ("peer", "message"),
    [
        (API, Tokens(A, 1, 0)),
        (API, Admin(A, "drain", "", 0)),
        (API, PoolState([], [])),
        (WORKER, Reserve([A], "label", "m", 0, "")),
        (WORKER, Status(A)),
        (WORKER, Admin(A, "drain", "", 0)),
        (POOL, Tokens(A, 1, 0)),
        (COMMAND, Reserve([A], "label", "m", 0, "")),
        (API, Welcome("epoch", 1)),
        (WORKER, Dispatch(A, 1, "label")),
    ],
    ids=lambda value: value.decode() if isinstance(value, bytes) else type(value).__name__,
)
def test_a_message_of_another_role_costs_the_session(board: Board, peer: bytes, message: Message) -> None:
    assert hangups(board.say(peer, message)) == [peer]
    assert board.core.malformed == 1
    assert hangups(board.say(peer, Heartbeat())) == [peer]


def test_bytes_that_are_no_message_cost_only_their_sender(board: Board) -> None:
    board.submit()
    assert hangups(board.core.receive(True, b"stranger", b"\x01junk", b"", 0.0)) == [b"stranger"]
    assert board.say(WORKER, Tokens(A, 1, 0)) == [Relay(API)]
    assert hangups(board.core.receive(False, WORKER, b"junk", b"", 0.0)) == [WORKER]


@pytest.mark.parametrize(
    ("message", "front"),
    [
        (hello("worker"), True),
        (hello("api"), False),
        (Hello(__version__, "api", "api", 1, "host", FACTS), True),
        (Hello(__version__, "worker", "worker", 1, "host", None), False),
        (hello("api", version="0.0.9"), True),
    ],
)
def test_a_hello_that_does_not_fit_is_refused(message: Hello, front: bool) -> None:
    board = Board()
    assert hangups(board.say(b"x", message, front=front)) == [b"x"]
    assert not board.core.roster.peers and not board.core.ledger.workers


def test_hello_twice_is_a_mistake(board: Board) -> None:
    assert hangups(board.say(WORKER, hello("worker"))) == [WORKER]
    assert not board.core.ledger.workers


def test_a_silent_worker_is_lost_and_killed_and_its_request_goes_on_elsewhere(board: Board) -> None:
    board.submit()
    board.now = 4.9
    board.say(b"worker2", hello("worker", "other", pid=2))
    for peer in (API, POOL, COMMAND):
        board.say(peer, Heartbeat())
    assert board.core.tick(5.0) == []
    effects = board.core.tick(5.1)
    assert WORKER in hangups(effects)
    assert ToPool(Order("kill", "worker", 1, "silent for 5.1 s")) in effects
    assert [e.message.attempt for e in effects if isinstance(e, ToWorker)] == [2]


def test_a_stuck_engine_is_lost_and_killed(board: Board) -> None:
    board.submit()
    board.say(WORKER, Tokens(A, 1, 0))
    board.say(WORKER, Report(1, 119_000, {}, {}, {}))
    assert not hangups(board.core.tick(1.0))
    board.say(WORKER, Report(1, 120_001, {}, {}, {}))
    effects = board.core.tick(1.0)
    assert hangups(effects) == [WORKER]
    assert ToApi(API, Done(A, 1, Outcome.WORKER_LOST)) in effects
    assert any(isinstance(e, ToPool) and e.message.action == "kill" for e in effects)


def test_a_worker_that_never_stops_a_request_is_stuck_too(board: Board) -> None:
    board.submit()
    assert ToWorker(WORKER, Stop(A, 1)) in board.say(API, Cancel(A))
    board.now = 121.0
    for peer in (API, WORKER, POOL):
        board.say(peer, Heartbeat())
    assert WORKER in hangups(board.core.tick(121.0))


def test_a_childs_exit_is_known_at_once(board: Board) -> None:
    board.submit()
    state = PoolState([ModelPlan("m", 1, 2, "starting", 500, 1000)], [Child("worker", "m", 0, "backoff", 1, -9, [])])
    effects = board.say(POOL, state)
    assert hangups(effects) == [WORKER]
    assert board.core.ledger.requests[A].deaths == 1


def test_the_living_child_is_not_lost(board: Board) -> None:
    state = PoolState([ModelPlan("m", 1, 2, "ready", 500, 1000)], [Child("worker", "m", 1, "ready", 0, None, [])])
    assert hangups(board.say(POOL, state)) == []


def test_an_undeliverable_dispatch_is_not_a_death(board: Board) -> None:
    (effect,) = board.submit()
    assert isinstance(effect, ToWorker)
    effects = board.core.undeliverable(WORKER, effect.message, 0.0)
    assert hangups(effects) == [WORKER]
    assert board.core.ledger.requests[A].deaths == 0 and len(board.core.ledger.models["m"].line) == 1


def test_goodbye_is_not_a_death(board: Board) -> None:
    board.submit()
    board.say(WORKER, Goodbye("told to end"))
    assert board.core.ledger.workers[WORKER].leaving
    board.say(WORKER, Goodbye("done"))
    assert board.core.ledger.requests[A].deaths == 0 and not board.core.ledger.workers


def test_a_restarted_worker_replaces_its_older_session(board: Board) -> None:
    board.submit()
    board.say(WORKER, Tokens(A, 1, 0))
    effects = board.say(b"worker9", hello("worker", "worker", pid=2))
    assert WORKER in hangups(effects) and ToApi(API, Done(A, 1, Outcome.WORKER_LOST)) in effects


def test_an_api_that_is_gone_takes_its_requests_with_it(board: Board) -> None:
    board.submit(A)
    board.say(API, Reserve([B], "label", "m", 0, ""))
    effects = board.core.undeliverable(API, None, 0.0)
    assert ToWorker(WORKER, Stop(A, 1)) in effects
    assert not board.core.ledger.requests
    assert board.core.ledger.workers[WORKER].free == 1
    board.say(WORKER, Done(A, 1, Outcome.CANCELLED))
    assert board.core.ledger.workers[WORKER].free == 2


def test_commands_get_snapshots_and_can_drain_and_cancel(board: Board) -> None:
    board.submit()
    (answer,) = board.say(COMMAND, Status(B))
    assert isinstance(answer, Answer) and answer.message == Snapshot(B)
    assert msgpack.unpackb(answer.payload)["workers"][0]["running"] == 1
    assert board.say(COMMAND, Admin(B, "cancel", "nobody", 0)) == [
        Answer(AdminReply(B, False, "no request 'nobody'"))
    ]
    effects = board.say(COMMAND, Admin(B, "cancel", "label", 0))
    assert ToApi(API, Done(A, 1, Outcome.CANCELLED)) in effects
    board.say(COMMAND, Admin(B, "drain", "", 0))
    assert board.say(API, Reserve([B], "label", "m", 0, "")) == [ToApi(API, Rejected(B, Outcome.DRAINING, 2000))]


def test_an_order_needs_a_pool() -> None:
    board = Board()
    board.join(COMMAND)
    (answer,) = board.say(COMMAND, Admin(B, "restart", "m", 0))
    assert isinstance(answer, Answer) and answer.message == AdminReply(B, False, "there is no pool to carry it out")
    board.join(POOL)
    order = ToPool(Order("restart", "m", 0, "asked by a command", B))
    assert board.say(COMMAND, Admin(B, "restart", "m", 0)) == [order]


def test_what_the_pool_says_reaches_the_command_that_asked_until_it_is_final(board: Board) -> None:
    swap = Order("swap", "m", 0, "asked by a command", B, "/new")
    assert board.say(COMMAND, Admin(B, "swap", "m", 0, "/new")) == [ToPool(swap)]
    assert board.say(POOL, AdminReply(A, True, "of another")) == []
    assert board.say(POOL, AdminReply(B, True, "m-1 is ready", False)) == [Relay(COMMAND)]
    assert board.say(POOL, AdminReply(B, False, "no")) == [Relay(COMMAND)]
    assert board.say(POOL, AdminReply(B, True, "again")) == []


def test_a_command_that_has_left_is_told_nothing(board: Board) -> None:
    board.say(COMMAND, Admin(B, "roll", "m", 0))
    board.say(COMMAND, Goodbye("done"))
    assert board.say(POOL, AdminReply(B, True, "done")) == []


def test_a_pool_that_ends_leaves_nobody_waiting(board: Board) -> None:
    board.say(COMMAND, Admin(B, "scale", "m", 2))
    effects = board.say(POOL, Goodbye("ends"))
    text = "the pool left meanwhile; millpond status shows how far it came"
    assert ToApi(COMMAND, AdminReply(B, False, text)) in effects


def test_a_child_that_left_the_list_is_known_to_be_gone(board: Board) -> None:
    board.submit()
    plan = [ModelPlan("m", 1, 2, "ready", 500, 1000)]
    board.say(POOL, PoolState(plan, [Child("worker", "m", 1, "stopping", 0, None, [])]))
    assert hangups(board.say(POOL, PoolState(plan, []))) == [WORKER]
    assert A in board.core.ledger.requests


def test_messages_of_a_session_that_is_over_change_nothing(board: Board) -> None:
    board.submit()
    board.core.undeliverable(WORKER, None, 0.0)
    assert hangups(board.say(WORKER, Tokens(A, 1, 0))) == [WORKER]
    assert hangups(board.say(WORKER, Done(A, 1, Outcome.STOP))) == [WORKER]
    assert A in board.core.ledger.requests


# --- Workers over their share of memory -------------------------------------------------------------------------------

OVER = Report(1, 0, {"active": 120, "cache": 0, "peak": 120, "budget": 100}, {}, {})


def restarts(effects: list[Effect]) -> list[str]:
    orders = [e.message for e in effects if isinstance(e, ToPool) and isinstance(e.message, Order)]
    return [order.target for order in orders if order.action == "restart"]


def grown(workers: int = 2) -> Board:
    """Workers of one model, of which the first has a request and has been over its share for long."""
    board = Board(memory_patience=30.0)
    board.join(API, POOL)
    for number in range(workers):
        name = f"m-{number}"
        board.say(name.encode(), Hello(__version__, "worker", name, number + 1, "host", FACTS))
    children = [Child(f"m-{number}", "m", number + 1, "ready", 0, None, []) for number in range(workers)]
    board.say(POOL, PoolState([ModelPlan("m", workers, 2, "ready", 500, 1000)], children))
    assert [e.peer for e in board.submit(A) if isinstance(e, ToWorker)] == [b"m-0"]
    board.say(b"m-0", OVER)
    board.now = 30.0
    return board


def alive(board: Board, *peers: bytes) -> None:
    """They are heard, and the first of them is still over its share."""
    for peer in peers:
        board.say(peer, Heartbeat())


def test_a_worker_over_its_share_takes_no_new_work_and_is_started_again_when_it_has_none() -> None:
    board = grown()
    alive(board, API, POOL, b"m-0", b"m-1")
    assert restarts(board.core.tick(board.now)) == []
    assert board.core.snapshot(board.now)["workers"][0]["state"] == "draining"
    # Others serve on; what it runs ends by itself.
    assert [e.peer for e in board.submit(B) if isinstance(e, ToWorker)] == [b"m-1"]
    assert Relay(API) in board.say(b"m-0", Started(A, 1, "batched", "m-0"))
    assert restarts(board.core.tick(board.now)) == []
    assert Relay(API) in board.say(b"m-0", Done(A, 1, Outcome.STOP, 1, 0, 1))
    assert restarts(board.core.tick(board.now)) == ["m-0"]
    # Not again at once, but again if nothing comes of it.
    assert restarts(board.core.tick(board.now + 1)) == []
    assert restarts(board.core.tick(board.now + 5)) == ["m-0"]
    board.say(b"m-0", Goodbye("told to end"))
    assert restarts(board.core.tick(board.now + 20)) == []


def test_a_worker_that_drains_for_its_memory_and_is_then_told_to_end_finishes_what_it_runs() -> None:
    board = grown()
    alive(board, API, POOL, b"m-0", b"m-1")
    board.core.tick(board.now)
    assert Relay(API) in board.say(b"m-0", Tokens(A, 1, 0))
    assert not hangups(board.say(b"m-0", Goodbye("told to end")))
    assert board.say(b"m-0", Tokens(A, 1, 1)) == [Relay(API)]
    assert Relay(API) in board.say(b"m-0", Done(A, 1, Outcome.STOP, 1, 0, 2))
    # It has been told to end: nobody has to tell it again.
    assert restarts(board.core.tick(board.now)) == []
    assert hangups(board.say(b"m-0", Goodbye("done"))) == [b"m-0"]


def test_only_one_worker_of_a_model_leaves_at_a_time() -> None:
    board = grown(3)
    board.say(b"m-1", OVER)
    board.now = 60.0
    alive(board, API, POOL, b"m-0", b"m-1", b"m-2")
    board.core.tick(board.now)
    assert [row["state"] for row in board.core.snapshot(board.now)["workers"]] == ["draining", "ready", "ready"]
    board.say(b"m-0", Done(A, 1, Outcome.STOP, 1, 0, 1))
    board.say(b"m-0", Goodbye("told to end"))
    board.say(b"m-0", Goodbye("done"))
    loading = [Child(f"m-{number}", "m", number + 1, "ready", 0, None, []) for number in (1, 2)]
    board.say(POOL, PoolState([ModelPlan("m", 3, 2, "ready", 500, 1000)], [Child("m-0", "m", 9, "loading", 1, 0, []), *loading]))
    assert restarts(board.core.tick(board.now)) == []
    board.say(b"m-9", Hello(__version__, "worker", "m-0", 9, "host", FACTS))
    ready = [Child("m-0", "m", 9, "ready", 1, 0, []), *loading]
    board.say(POOL, PoolState([ModelPlan("m", 3, 2, "ready", 500, 1000)], ready))
    assert restarts(board.core.tick(board.now)) == [] and restarts(board.core.tick(board.now)) == ["m-1"]


def test_a_lone_worker_serves_on_and_is_started_again_in_a_moment_without_work() -> None:
    board = grown(1)
    alive(board, API, POOL, b"m-0")
    board.core.tick(board.now)
    assert [e.peer for e in board.submit(B) if isinstance(e, ToWorker)] == [b"m-0"]
    board.say(b"m-0", Done(A, 1, Outcome.STOP, 1, 0, 1))
    assert restarts(board.core.tick(board.now)) == []
    board.say(b"m-0", Done(B, 1, Outcome.STOP, 1, 0, 1))
    assert restarts(board.core.tick(board.now)) == []
    # What comes from now on waits for its successor.
    assert not any(isinstance(e, (ToWorker, ToApi)) and not isinstance(e.message, Reserved) for e in board.submit(C))
    assert restarts(board.core.tick(board.now)) == ["m-0"]
    board.say(b"m-0", Goodbye("told to end"))
    board.say(b"m-0", Goodbye("done"))
    effects = board.say(b"m-9", Hello(__version__, "worker", "m-0", 9, "host", FACTS))
    assert [e.peer for e in effects if isinstance(e, ToWorker)] == [b"m-9"]


def test_a_worker_that_is_no_child_of_the_pool_is_not_drained() -> None:
    for theirs in ([], [Child("m-0", "m", 77, "ready", 0, None, [])]):
        board = Board(memory_patience=30.0)
        board.join(API, POOL)
        # The roster takes a worker that the pool lists under another pid for gone, so it comes after the list.
        board.say(POOL, PoolState([ModelPlan("m", 1, 2, "ready", 500, 1000)], theirs))
        board.say(b"m-0", Hello(__version__, "worker", "m-0", 1, "host", FACTS))
        board.say(b"m-0", OVER)
        board.now = 30.0
        alive(board, API, POOL, b"m-0")
        assert restarts(board.core.tick(board.now)) == restarts(board.core.tick(board.now)) == []
        assert board.core.snapshot(board.now)["workers"][0]["state"] == "ready"


@pytest.mark.parametrize(
    ("action", "target"),
    [(action, "m") for action in ("scale", "swap", "roll", "restart")]
    + [(action, name) for action in ("drain", "roll", "restart") for name in ("m-0", "m-1")]
    + [(action, "") for action in ("roll", "restart")],
)
def test_a_change_waits_until_a_worker_that_drains_for_its_memory_is_back(action: str, target: str) -> None:
    board = grown()
    alive(board, API, POOL, b"m-0", b"m-1")
    board.join(COMMAND)
    board.core.tick(board.now)
    asked = Admin(A, action, target, 1)  # type: ignore[arg-type]
    text = "m-0 is being replaced for its memory; ask again"
    assert board.say(COMMAND, asked) == [Answer(AdminReply(A, False, text))]
    # Another model's change does not wait, nor does what the broker itself carries out.
    assert [type(e) for e in board.say(COMMAND, Admin(B, action, "other", 1))] == [ToPool]  # type: ignore[arg-type]
    assert board.say(COMMAND, Admin(C, "drain", "", 0)) == [Answer(AdminReply(C, True, "new requests are refused"))]
    assert any(isinstance(e, Answer) for e in board.say(COMMAND, Admin(C, "cancel", "label", 0)))
    for last in ("told to end", "done"):
        board.say(b"m-0", Goodbye(last))
    assert [type(e) for e in board.say(COMMAND, asked)] == [ToPool]


def test_nobody_is_drained_for_its_memory_while_the_pool_changes_what_there_is() -> None:
    board = grown()
    alive(board, API, POOL, b"m-0", b"m-1")
    board.join(COMMAND)
    board.say(COMMAND, Admin(A, "drain", "m-1", 0))
    board.core.tick(board.now)
    assert all(row["state"] == "ready" for row in board.core.snapshot(board.now)["workers"])
    board.say(POOL, AdminReply(A, True, "m-1 has left", True))
    board.core.tick(board.now)
    assert [row["state"] for row in board.core.snapshot(board.now)["workers"]] == ["draining", "ready"]


def test_without_a_pool_nobody_is_drained() -> None:
    board = grown()
    board.say(POOL, Goodbye("ends"))
    alive(board, API, b"m-0", b"m-1")
    board.core.tick(board.now)
    assert all(row["state"] == "ready" for row in board.core.snapshot(board.now)["workers"])
