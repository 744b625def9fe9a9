"""The worker's main thread: every dispatched request ends in one DONE, whatever the engine does."""

import queue
from collections.abc import Callable

from common.envelope import Done, Message, Started, Tokens, decode
from common.generation import GenerationRequest, pack_request, unpack_pieces, unpack_summary
from common.outcomes import Outcome
from worker.engine import Committed, Ended, Engine, EngineFacts, Prefilled, Step, Unsupported
from worker.link import Halt, Item, SessionOver, Vitals, Work
from worker.loop import WorkerLoop

A, B = b"a" * 16, b"b" * 16


class PlayedEngine:
    """Steps that the test wrote down."""

    facts = EngineFacts(2, 100, 1, 100, ["batched"], [])

    def __init__(self, *steps: list[Step] | Exception) -> None:
        self.steps = list(steps)
        self.running: list[bytes] = []
        self.cancelled: list[bytes] = []
        self.rebuilt = 0
        self.refuse = ""
        self.start_error: Exception | None = None

    def load(self, progress: Callable[[str], None]) -> None: ...

    def lane_for(self, request: GenerationRequest) -> str:
        if self.refuse:
            raise Unsupported(self.refuse)
        return "batched"

    def start(self, request_id: bytes, request: GenerationRequest) -> None:
        if self.start_error:
            raise self.start_error
        self.running.append(request_id)

    def cancel(self, request_id: bytes) -> None:
        self.cancelled.append(request_id)
        self.running = [one for one in self.running if one != request_id]

    def step(self) -> list[Step]:
        step = self.steps.pop(0) if self.steps else []
        if isinstance(step, Exception):
            raise step
        self.running = [one for one in self.running if not any(isinstance(s, Ended) and s.request == one for s in step)]
        return step

    def due_in(self) -> float:
        return 0.0

    def rebuild(self) -> None:
        self.rebuilt += 1
        self.running = []

    @property
    def busy(self) -> bool:
        return bool(self.running)

    def memory(self) -> dict[str, int]:
        return {"active": 1}

    def close(self) -> None: ...


class PlayedLink:
    """What came in, and what was posted."""

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self.sent: list[tuple[int, Message, bytes]] = []
        self.goodbyes = 0
        self.batches = 0

    def post(self, frames: list[tuple[int, bytes, bytes]]) -> None:
        self.batches += 1
        self.sent += [(session, decode(envelope), payload) for session, envelope, payload in frames]

    def say_goodbye(self) -> None:
        self.goodbyes += 1


class Stage:
    """A loop that is driven turn by turn."""

    def __init__(self, *steps: list[Step] | Exception) -> None:
        self.engine = PlayedEngine(*steps)
        self.link = PlayedLink()
        self.vitals = Vitals()
        self.now = 0.0
        engine: Engine = self.engine
        self.loop = WorkerLoop(engine, self.link, self.vitals, "w", lambda: self.now)  # type: ignore[arg-type]

    def work(self, request: bytes = A, session: int = 1, attempt: int = 1, payload: bytes | None = None, **fields: object) -> None:
        packed = pack_request(GenerationRequest([1, 2], 10, **fields)) if payload is None else payload  # type: ignore[arg-type]
        self.link.inbox.put(Work(session, request, attempt, "label", packed))

    def turns(self, count: int = 1) -> None:
        for _ in range(count):
            self.loop._take_items()
            self.loop._flush()
            if self.engine.busy:
                self.loop._step()
                self.loop._flush()
            self.loop._note_vitals()

    def sent(self, kind: type) -> list[Message]:
        return [message for _, message, _ in self.link.sent if isinstance(message, kind)]

    def text(self, request: bytes = A) -> str:
        return "".join(
            piece.text
            for _, message, payload in self.link.sent
            if isinstance(message, Tokens) and message.request == request
            for piece in unpack_pieces(payload)
        )


def test_a_request_starts_speaks_and_is_done() -> None:
    stage = Stage([Prefilled(A, 2, 2)], [Committed(A, 5, "Hel")], [Committed(A, 6, "lo")], [Ended(A, "stop", "!")])
    stage.work()
    stage.turns(4)
    assert stage.sent(Started) == [Started(A, 1, "batched", "w")]
    assert [m.seq for m in stage.sent(Tokens)] == [0, 1]
    assert stage.text() == "Hello!"
    assert stage.sent(Done) == [Done(A, 1, Outcome.STOP, 2, 0, 2)]
    assert unpack_summary(stage.link.sent[-1][2]).completion_tokens == 2


def test_started_leaves_before_the_first_step() -> None:
    stage = Stage(RuntimeError("never mind"))
    stage.work()
    stage.loop._take_items()
    stage.loop._flush()
    assert stage.sent(Started) and not stage.sent(Done)


def test_a_steps_pieces_for_one_request_travel_in_one_frame() -> None:
    stage = Stage([Committed(A, 5, "a"), Committed(B, 5, "x"), Committed(A, 6, "b")])
    stage.work(A)
    stage.work(B)
    stage.turns()
    assert len(stage.sent(Tokens)) == 2 and stage.text(A) == "ab" and stage.text(B) == "x"


def test_a_stop_string_ends_the_row_on_its_token() -> None:
    stage = Stage([Committed(A, 5, "a EN"), Committed(A, 6, "D b"), Committed(A, 7, "c")], [])
    stage.work(stop=["END"])
    stage.turns(2)
    assert stage.text() == "a " and stage.engine.cancelled == [A]
    assert stage.sent(Done) == [Done(A, 1, Outcome.STOP, 2, 0, 2)]


def test_what_no_lane_can_honour_is_refused_by_name() -> None:
    stage = Stage()
    stage.engine.refuse = "grammar"
    stage.work()
    stage.turns()
    assert stage.sent(Done) == [Done(A, 1, Outcome.UNSUPPORTED)] and not stage.sent(Started)
    assert unpack_summary(stage.link.sent[-1][2]).error == "grammar"


def test_a_payload_that_is_none_ends_its_request_only() -> None:
    stage = Stage([Committed(B, 5, "x")])
    stage.work(A, payload=b"junk")
    stage.work(B)
    stage.turns()
    assert [(m.request, m.outcome) for m in stage.sent(Done)] == [(A, Outcome.UNSUPPORTED)] and stage.text(B) == "x"


def test_a_step_that_raises_fails_all_rows_with_its_type_and_rebuilds() -> None:
    stage = Stage([Committed(A, 5, "x")], ValueError("secret"), [])
    stage.work(A)
    stage.work(B)
    stage.turns(3)
    assert {(m.request, m.outcome) for m in stage.sent(Done)} == {(A, Outcome.ENGINE_FAILED), (B, Outcome.ENGINE_FAILED)}
    assert stage.engine.rebuilt == 1
    assert all(b"secret" not in payload for _, _, payload in stage.link.sent)
    assert unpack_summary(stage.link.sent[-1][2]).error == "ValueError"
    stage.work(A, attempt=2)
    stage.turns()
    assert stage.sent(Started)[-1] == Started(A, 2, "batched", "w")


def test_an_engine_that_cannot_start_a_request_is_rebuilt_too() -> None:
    stage = Stage([])
    stage.work(B)
    stage.turns()
    stage.engine.start_error = RuntimeError()
    stage.work(A)
    stage.turns()
    assert {m.request: m.outcome for m in stage.sent(Done)} == {A: Outcome.ENGINE_FAILED, B: Outcome.ENGINE_FAILED}
    assert stage.engine.rebuilt == 1


def test_a_halt_ends_with_cancelled_once_and_a_stale_one_does_nothing() -> None:
    stage = Stage([Committed(A, 5, "x")], [], [])
    stage.work()
    stage.turns()
    stage.link.inbox.put(Halt(1, A, 2))
    stage.link.inbox.put(Halt(0, A, 1))
    stage.turns()
    assert not stage.sent(Done)
    stage.link.inbox.put(Halt(1, A, 1))
    stage.link.inbox.put(Halt(1, A, 1))
    stage.turns()
    assert [m.outcome for m in stage.sent(Done)] == [Outcome.CANCELLED] and stage.engine.cancelled == [A]


def test_when_the_session_is_over_everything_of_it_is_dropped_in_silence() -> None:
    stage = Stage([Committed(A, 5, "x")], [Committed(A, 6, "y"), Committed(B, 5, "z")])
    stage.work(A, session=1)
    stage.turns()
    before = len(stage.link.sent)
    stage.link.inbox.put(SessionOver(1))
    stage.work(B, session=2)
    stage.turns()
    assert stage.engine.cancelled == [A]
    assert {message.request for _, message, _ in stage.link.sent[before:]} == {B}  # type: ignore[union-attr]


def test_leaving_waits_for_what_runs_and_then_cuts_it() -> None:
    stage = Stage()
    stage.work()
    stage.turns()
    stage.loop.leave(0.0)
    stage.now = 1.0
    assert stage.loop.run() is False
    assert [m.outcome for m in stage.sent(Done)] == [Outcome.SHUTDOWN] and stage.link.goodbyes == 1


def test_leaving_with_nothing_to_do_is_clean() -> None:
    stage = Stage()
    stage.loop.leave(30.0)
    assert stage.loop.run() is True and stage.link.goodbyes == 1


def test_the_step_age_counts_from_the_last_finished_step() -> None:
    stage = Stage([Committed(A, 5, "x")], [Ended(A, "stop")])
    stage.work()
    stage.now = 5.0
    stage.turns()
    assert stage.vitals.busy_since == 5.0 and stage.vitals.running == 1
    stage.now = 9.0
    stage.turns()
    assert stage.vitals.busy_since is None and stage.vitals.running == 0
