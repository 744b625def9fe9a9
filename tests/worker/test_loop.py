"""The worker's main thread: every dispatched request ends in one DONE, whatever the engine does."""

import json
import queue
from collections.abc import Callable

import pytest

from common.envelope import Done, Message, Started, Tokens, decode
from common.generation import REASONING, GenerationRequest, pack_request, unpack_pieces, unpack_summary
from common.outcomes import Outcome
from worker.engine import Committed, Ended, Engine, EngineFacts, Markup, Prefilled, Step, Unsupported
from worker.link import Halt, Item, SessionOver, Vitals, Work
from worker.loop import WorkerLoop
from worker.seat import COALESCE_S

A, B = b"a" * 16, b"b" * 16
MARKUP = Markup("<t>", "</t>", "[c]", "[/c]", lambda text, tools: json.loads(text))


class PlayedEngine:
    """Steps that the test wrote down."""

    facts = EngineFacts(2, 100, 1, 100, ["batched"], [], markup=MARKUP)

    def __init__(self, *steps: list[Step] | Exception) -> None:
        self.steps = list(steps)
        self.running: list[bytes] = []
        self.cancelled: list[bytes] = []
        self.rebuilt = 0
        self.refuse = ""
        self.start_error: Exception | None = None
        self.cancel_error: Exception | None = None
        self.rebuild_error: Exception | None = None
        self.wait_s = 0.0
        self.on_step: Callable[[], None] = lambda: None

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
        if self.cancel_error:
            raise self.cancel_error
        self.running = [one for one in self.running if one != request_id]

    def step(self) -> list[Step]:
        step = self.steps.pop(0) if self.steps else []
        self.on_step()
        if isinstance(step, Exception):
            raise step
        self.running = [one for one in self.running if not any(isinstance(s, Ended) and s.request == one for s in step)]
        return step

    def due_in(self) -> float:
        return self.wait_s

    def rebuild(self) -> None:
        self.rebuilt += 1
        if self.rebuild_error:
            raise self.rebuild_error
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
        self.closed = False
        self.batches = 0

    def post(self, frames: list[tuple[int, bytes, bytes]]) -> None:
        self.batches += 1
        self.sent += [(session, decode(envelope), payload) for session, envelope, payload in frames]

    def say_goodbye(self) -> None:
        self.goodbyes += 1

    def close(self) -> None:
        self.closed = True


class Stage:
    """A loop that is driven turn by turn."""

    def __init__(self, *steps: list[Step] | Exception) -> None:
        self.engine = PlayedEngine(*steps)
        self.link = PlayedLink()
        self.vitals = Vitals()
        self.now = 0.0
        engine: Engine = self.engine
        self.loop = WorkerLoop(engine, self.link, self.vitals, "w", lambda: self.now)  # type: ignore[arg-type]

    def work(
        self, request: bytes = A, session: int = 1, attempt: int = 1, payload: bytes | None = None, **fields: object
    ) -> None:
        if payload is None:
            payload = pack_request(GenerationRequest([1, 2], 10, **fields))  # type: ignore[arg-type]
        self.link.inbox.put(Work(session, request, attempt, "label", payload))

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
    stage.engine.refuse = "grammar: it is too large"
    stage.work()
    stage.turns()
    assert stage.sent(Done) == [Done(A, 1, Outcome.UNSUPPORTED)] and not stage.sent(Started)
    assert unpack_summary(stage.link.sent[-1][2]).error == "grammar"
    stage.engine.refuse = ""
    for fields, need in (({"top_logprobs": 2}, "logprobs"), ({"tools": "{"}, "")):
        stage.work(B, **fields)
        stage.turns()
        assert stage.sent(Done)[-1] == Done(B, 1, Outcome.UNSUPPORTED) and not stage.sent(Started)
        assert unpack_summary(stage.link.sent[-1][2]).error == need
    assert stage.engine.running == []


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
    assert {m.request: m.outcome for m in stage.sent(Done)} == dict.fromkeys((A, B), Outcome.ENGINE_FAILED)
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


def test_draining_takes_as_long_as_what_runs_and_cuts_nothing() -> None:
    stage = Stage([Committed(A, 5, "x")], [Ended(A, "stop")])
    stage.work()
    stage.turns(1)
    stage.loop.drain()
    stage.now = 1e6
    assert stage.loop.run() is True
    assert [m.outcome for m in stage.sent(Done)] == [Outcome.STOP] and stage.link.goodbyes == 1


def test_what_drains_can_still_be_told_to_leave_soon() -> None:
    stage = Stage()
    stage.work()
    stage.turns()
    stage.loop.drain()
    stage.loop.leave(0.0)
    assert stage.loop.run() is False
    assert [m.outcome for m in stage.sent(Done)] == [Outcome.SHUTDOWN]


def test_leaving_with_nothing_to_do_is_clean() -> None:
    stage = Stage()
    stage.loop.leave(30.0)
    assert stage.loop.run() is True and stage.link.goodbyes == 1


def test_the_step_age_counts_from_the_last_finished_step() -> None:
    stage = Stage([Committed(A, 5, "x")], [Committed(A, 5, "x")], [Ended(A, "stop")])
    stage.work()
    stage.now = 5.0
    stage.turns()
    assert stage.vitals.busy_since == 5.0 and stage.vitals.running == 1
    stage.now = 6.0
    stage.turns()
    assert stage.vitals.busy_since == 6.0
    stage.now = 9.0
    stage.turns()
    assert stage.vitals.busy_since is None and stage.vitals.running == 0


# --- Reasoning and calls ----------------------------------------------------------------------------------------------


def test_reasoning_and_calls_go_their_own_channels() -> None:
    call = '[c]{"name": "f", "arguments": {"a": 1}}[/c]'
    stage = Stage([Committed(A, 5, "<t>hm</t>a"), Committed(A, 6, call), Ended(A, "stop")])
    stage.work(tools='[{"function": {"name": "f"}}]')
    stage.turns()
    ((_, _, frame),) = [one for one in stage.link.sent if isinstance(one[1], Tokens)]
    pieces = unpack_pieces(frame)
    assert [(piece.channel, piece.text, piece.name) for piece in pieces] == [
        (REASONING, "hm", ""), (0, "a", ""), (2, '{"a": 1}', "f"),
    ]  # fmt: skip
    assert stage.sent(Done) == [Done(A, 1, Outcome.TOOL_CALLS, 2, 0, 2)]
    assert unpack_summary(stage.link.sent[-1][2]).reasoning_tokens == 1


def test_the_one_call_that_is_wanted_halts_the_engine() -> None:
    call = '[c]{"name": "f", "arguments": {}}[/c]'
    stage = Stage([Committed(A, 5, call), Committed(A, 6, call)])
    stage.work(tools='{"tools": [{"function": {"name": "f"}}], "parallel": false}')
    stage.turns()
    assert stage.engine.cancelled == [A] and stage.sent(Done) == [Done(A, 1, Outcome.TOOL_CALLS, 2, 0, 1)]


# --- Frames -----------------------------------------------------------------------------------------------------------


def quick(step_s: float, *steps: list[Step]) -> Stage:
    """A stage whose steps take so long."""
    stage = Stage(*steps)

    def pass_time() -> None:
        stage.now += step_s

    stage.engine.on_step = pass_time
    return stage


def words(count: int, request: bytes = A) -> list[list[Step]]:
    return [[Committed(request, 5, f"{number} ")] for number in range(count)]


def frames(stage: Stage) -> list[int]:
    """How many pieces each frame held."""
    return [len(unpack_pieces(payload)) for _, message, payload in stage.link.sent if isinstance(message, Tokens)]


def test_pieces_of_quick_steps_share_frames_after_the_first() -> None:
    stage = quick(0.01, *words(9), [Ended(A, "stop")])
    stage.work()
    sent_at = []
    for turn in range(10):
        before = len(stage.sent(Tokens))
        stage.turns()
        if len(stage.sent(Tokens)) > before:
            sent_at.append(turn)
    assert sent_at == [0, 3, 6, 9] and frames(stage) == [1, 3, 3, 2]
    assert stage.text() == "".join(f"{number} " for number in range(9))
    assert 3 * 0.01 > COALESCE_S > 2 * 0.01


def test_pieces_of_slow_steps_never_wait() -> None:
    for step_s, wait_s in ((0.025, 0.0), (0.001, 0.025)):
        stage = quick(step_s, *words(5))
        stage.engine.wait_s = wait_s
        stage.work()
        stage.turns(5)
        assert frames(stage) == [1] * 5


def test_a_slow_rows_pieces_do_not_wait_for_other_rows_steps() -> None:
    slow, fast = Committed(A, 5, "a"), Committed(B, 5, "b")
    stage = quick(0.01, *([slow, fast] if step % 5 == 0 else [fast] for step in range(16)))
    stage.work(A)
    stage.work(B)
    sent_at = []
    for turn in range(16):
        before = len(stage.sent(Tokens))
        stage.turns()
        sent_at += [turn for message in stage.sent(Tokens)[before:] if message.request == A]  # type: ignore[attr-defined]
    assert sent_at == [0, 5, 10, 15]


def test_nothing_waits_while_a_prompt_is_read() -> None:
    reading: list[list[Step]] = [[*step, Prefilled(B, 1, 9)] for step in words(3)]
    stage = quick(0.001, *words(2), *reading)
    stage.work(A)
    stage.turns(2)
    assert frames(stage) == [1]
    stage.work(B)
    stage.loop._take_items()
    assert len(stage.loop._posted) == 2
    stage.turns(3)
    assert frames(stage) == [1, 1, 1, 1, 1]


def test_what_waits_leaves_with_every_end() -> None:
    stage = quick(0.001, *words(3), [])
    stage.work()
    stage.turns(3)
    stage.link.inbox.put(Halt(1, A, 1))
    stage.turns()
    assert frames(stage) == [1, 2] and isinstance(stage.link.sent[-1][1], Done)
    stage = Stage(*words(3), RuntimeError())  # type: ignore[arg-type]
    stage.work()
    stage.turns(4)
    assert stage.text() == "0 1 2 " and stage.sent(Done)[0].completion_tokens == 3  # type: ignore[attr-defined]


# --- Release ----------------------------------------------------------------------------------------------------------


def test_a_row_is_released_once_on_every_way_out() -> None:
    stage = Stage([Committed(A, 5, "aEND")], [Committed(A, 5, "a")], [Ended(A, "stop")])
    stage.work(stop=["END"])
    stage.turns()
    stage.link.inbox.put(Halt(1, A, 1))
    stage.link.inbox.put(SessionOver(1))
    stage.turns()
    assert stage.engine.cancelled == [A]
    stage.work(session=2)
    stage.turns(2)
    stage.link.inbox.put(Halt(2, A, 1))
    stage.turns()
    assert stage.engine.cancelled == [A] and len(stage.sent(Done)) == 2
    stage.engine.steps.append([])
    stage.work(session=2)
    stage.turns()
    (seat,) = stage.loop._running.values()
    assert [stage.loop._release(seat), stage.loop._release(seat)] == ["", ""] and stage.engine.cancelled == [A, A]


def test_an_error_while_releasing_is_told_beside_the_end_and_the_engine_is_rebuilt() -> None:
    stage = Stage([Committed(A, 5, "x")], [Committed(A, 5, "y")])
    stage.work(A)
    stage.work(B)
    stage.turns()
    stage.engine.cancel_error = KeyError("secret")
    stage.link.inbox.put(Halt(1, A, 1))
    stage.turns()
    ends = {m.request: (m.outcome, unpack_summary(p).error) for _, m, p in stage.link.sent if isinstance(m, Done)}
    assert ends == {
        A: (Outcome.CANCELLED, "KeyError while releasing"), B: (Outcome.ENGINE_FAILED, "KeyError"),
    }  # fmt: skip
    assert stage.engine.rebuilt == 1 and stage.engine.cancelled == [A]


def test_an_engine_that_cannot_be_rebuilt_ends_the_process_after_all_were_told() -> None:
    stage = Stage([Committed(A, 5, "x")], ValueError())
    stage.engine.rebuild_error = MemoryError()
    stage.work()
    stage.turns()
    with pytest.raises(MemoryError) as caught:
        stage.turns()
    assert isinstance(caught.value.__cause__, ValueError)
    assert stage.sent(Done) == [Done(A, 1, Outcome.ENGINE_FAILED, 2, 0, 1)] and stage.link.closed
    assert unpack_summary(stage.link.sent[-1][2]).error == "ValueError, then MemoryError while rebuilding"
