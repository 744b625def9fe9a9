"""The scripted engine against a settable clock: what a script says is what comes, when it says."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from common.generation import GenerationRequest
from common.ids import RequestId
from tests.worker.driving import Reply, collect, run
from worker.engine import Committed, Unsupported
from worker.engines.scripted import MAX_LATE_TOKENS, ScriptedEngine, ScriptedError

ONE, TWO = RequestId(b"1" * 16), RequestId(b"2" * 16)

Make = Callable[..., ScriptedEngine]
Ask = Callable[..., GenerationRequest]


class Clock:
    """A clock that only moves when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(tiny_model: Path, clock: Clock) -> Make:
    def made(**options: object) -> ScriptedEngine:
        chosen: dict[str, Any] = {"clock": clock, "sleep": clock.sleep, "rate": 0, **options}
        engine = ScriptedEngine(tiny_model, **chosen)
        engine.load(lambda words: None)
        return engine

    return made


@pytest.fixture
def ask(tiny_model: Path) -> Ask:
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))

    def asked(text: str, *, max_tokens: int = 100, chat: bool = True, **options: object) -> GenerationRequest:
        if chat:
            turns = (("system", "Be kind."), ("user", text))
            said = [f"<|im_start|>{role}\n{words}<|im_end|>\n" for role, words in turns]
            text = "".join(said) + "<|im_start|>assistant\n"
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        return GenerationRequest(ids, max_tokens, **options)  # type: ignore[arg-type]

    return asked


def scripted(**script: object) -> str:
    return f"please @script {json.dumps(script)}"


def only(engine: ScriptedEngine, request: GenerationRequest) -> Reply:
    return run(engine, {ONE: request})[ONE]


# --- What comes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "pieces"),
    [
        ({"text": "Hi  there.\n You \n"}, ["Hi", "  there.", "\n You", " \n"]),
        ({"text": ""}, []),
        ({"tokens": ["a", "", "🙂"]}, ["a", "", "🙂"]),
        ({"tokens": ["a", "b"], "count": 5}, ["a", "b", "a", "b", "a"]),
        ({"count": 3}, ["word1", " word2", " word3"]),
        ({"count": 0}, []),
        ({"echo": True}, ["please"]),
    ],
)
def test_the_script_says_what_comes(
    make: Make, ask: Ask, script: dict[str, object], pieces: list[str]
) -> None:
    reply = only(make(), ask(scripted(**script)))
    assert (reply.texts[:-1], reply.reason) == (pieces, "stop")
    assert reply.reads and reply.reads[0][0] == reply.reads[0][1] > 5


def test_a_prompt_without_a_script_gets_words_of_its_own(
    make: Make, ask: Ask
) -> None:
    prompts = (("a", True), ("a", True), ("b", True), ("a", False))
    replies = [only(make(), ask(text, chat=chat)).text for text, chat in prompts]
    assert replies[0] == replies[1] and len(set(replies)) == 3
    assert replies[0].startswith("word") and replies[0].endswith(" word15 word16")


def test_echo_repeats_a_raw_prompt_without_its_script(
    make: Make, ask: Ask
) -> None:
    assert only(make(), ask('say é @script {"echo": true} twice', chat=False)).text == "say é  twice"


def test_max_tokens_ends_with_length(make: Make, ask: Ask) -> None:
    for cap, reason, count in ((4, "length", 4), (5, "length", 5), (6, "stop", 5)):
        reply = only(make(), ask(scripted(count=5), max_tokens=cap))
        assert (reply.reason, len(reply.tokens)) == (reason, count)
    assert only(make(), ask(scripted(count=2, end="length"))).reason == "length"


def test_tokens_of_the_vocabulary_keep_their_ids(
    make: Make, ask: Ask, tiny_model: Path
) -> None:
    end = Tokenizer.from_file(str(tiny_model / "tokenizer.json")).token_to_id("<|im_end|>")
    # Escaped: written out it would be a turn marker in the prompt.
    script = scripted(tokens=["zz~", "<|im_end|>"]).replace("<", "\\u003c")
    assert only(make(), ask(script)).tokens == [0, end]


def test_logprobs_have_as_many_rivals_as_were_asked_for(
    make: Make, ask: Ask
) -> None:
    for top in (-1, 0, 1, 4):
        entry = only(make(), ask(scripted(text="é"), top_logprobs=top)).logprobs[0]
        if top < 0:
            assert entry is None
        else:
            assert entry is not None and (entry.token, bytes(entry.bytes).decode()) == ("é", "é")
            values = [rival.logprob for rival in entry.top]
            assert len(values) == top and values == sorted(set(values), reverse=True)


# --- When it comes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_default", [True, False])
def test_tokens_come_at_their_rate_after_their_delay(
    make: Make, ask: Ask, clock: Clock, by_default: bool
) -> None:
    engine = make(rate=10, delay_s=0.5) if by_default else make(rate=7, delay_s=3)
    engine.start(ONE, ask(scripted(count=5) if by_default else scripted(count=5, rate=10, delay_s=0.5)))
    replies = {ONE: Reply()}
    begun = clock.now
    assert engine.due_in() == 0.0
    collect(replies, engine.step())
    times = []
    while engine.busy:
        assert engine.due_in() > 0 and engine.step() == []
        clock.sleep(engine.due_in())
        before = len(replies[ONE].tokens)
        collect(replies, engine.step())
        assert len(replies[ONE].tokens) == before + 1
        times.append(clock.now - begun)
    assert times == pytest.approx([0.5, 0.6, 0.7, 0.8, 0.9])


def test_rows_that_go_together_give_their_tokens_in_the_same_steps(make: Make, ask: Ask, clock: Clock) -> None:
    engine = make(rate=10)
    clock.sleep(0.33)
    for row in (ONE, TWO):
        engine.start(row, ask(scripted(count=3, together=True)))
        engine.step()
        clock.sleep(0.02)
    steps = []
    while engine.busy:
        clock.sleep(engine.due_in())
        steps.append((clock.now - 1000.0, [step.request for step in engine.step() if isinstance(step, Committed)]))
    assert [rows for _, rows in steps if rows] == [[ONE, TWO]] * 3
    assert [at for at, rows in steps if rows] == pytest.approx([0.4, 0.5, 0.6])


def test_a_late_step_gives_what_is_due_and_no_more(
    make: Make, ask: Ask, clock: Clock
) -> None:
    engine = make(rate=1000)
    engine.start(ONE, ask(scripted(count=5000), max_tokens=9000))
    replies = {ONE: Reply()}
    collect(replies, engine.step())
    for seconds, expected in ((0.0995, 100), (0.01, 110), (5.0, 110 + MAX_LATE_TOKENS)):
        clock.sleep(seconds)
        collect(replies, engine.step())
        assert len(replies[ONE].tokens) == expected


def test_stamped_tokens_say_when_they_were_due_and_made(make: Make, ask: Ask, clock: Clock) -> None:
    for block, dues in ((1, (0, 100, 200, 300)), (2, (0, 0, 200, 200))):
        engine = make(rate=10, delay_s=0.5)
        engine.start(ONE, ask(scripted(count=4, stamp=True, block=block)))
        replies, first = {ONE: Reply()}, round((clock.now + 0.5) * 1000)
        while engine.busy:
            clock.sleep(engine.due_in() + 0.25)
            collect(replies, engine.step())
        stamps = [[int(part) for part in text.split(":")] for text in replies[ONE].texts[:-1]]
        assert [due // 1000 - first for due, _ in stamps] == list(dues)
        assert all(made >= due + 50_000 for due, made in stamps) and stamps[-1][1] == round(clock.now * 1e6)
    engine = make(rate=0)
    engine.start(ONE, ask(scripted(count=2, stamp=True)))
    now = f" {clock.now * 1e6:.0f}"
    assert run_on(engine) == [f"{now}:{now.strip()}"] * 2


def run_on(engine: ScriptedEngine) -> list[str]:
    replies = {ONE: Reply()}
    while engine.busy:
        collect(replies, engine.step())
    return replies[ONE].texts[:-1]


def test_blocks_come_whole(make: Make, ask: Ask, clock: Clock) -> None:
    engine = make(block=16)
    assert (engine.facts.block, list(engine.facts.lanes)) == (16, ["serial"])
    engine.start(ONE, ask(scripted(count=40, rate=100)))
    sizes = []
    while engine.busy:
        replies = {ONE: Reply()}
        collect(replies, engine.step())
        sizes.append(len(replies[ONE].tokens))
        clock.sleep(engine.due_in() if engine.busy else 0)
    assert [size for size in sizes if size] == [16, 16, 8]


def test_64_rows_of_thousands_of_tokens_keep_pace_in_real_time(
    tiny_model: Path, ask: Ask
) -> None:
    import time

    engine = ScriptedEngine(tiny_model, slots=64, rate=100)
    engine.load(lambda words: None)
    request = ask(scripted(count=1000), max_tokens=2000)
    for number in range(64):
        engine.start(RequestId(bytes([number]) * 16), request)
    begun, used, tokens = time.monotonic(), time.process_time(), 0
    while time.monotonic() - begun < 0.15:
        tokens += len(engine.step())
        time.sleep(engine.due_in())
    assert tokens > 64 * 10
    assert time.process_time() - used < 0.1


# --- Faults -----------------------------------------------------------------------------------------------------------


def test_fail_at_ends_one_row_and_no_other(make: Make, ask: Ask) -> None:
    two = RequestId(b"2" * 16)
    replies = run(make(), {ONE: ask(scripted(count=9, fail_at=3)), two: ask(scripted(count=9))})
    assert (replies[ONE].reason, replies[ONE].error, len(replies[ONE].tokens)) == ("failed", "ScriptedFailure", 3)
    assert (replies[two].reason, len(replies[two].tokens)) == ("stop", 9)


def test_raise_at_breaks_the_engine_until_it_is_rebuilt(
    make: Make, ask: Ask
) -> None:
    engine = make()
    engine.start(ONE, ask(scripted(count=9, raise_at=1)))
    engine.step()
    with pytest.raises(ScriptedError):
        engine.step()
    engine.rebuild()
    assert not engine.busy
    assert only(engine, ask("again")).reason == "stop"


def test_crashes_kill_this_process(make: Make, ask: Ask) -> None:
    killed: list[tuple[int, int]] = []
    engine = make(kill=lambda pid, number: killed.append((pid, number)))
    only(engine, ask(scripted(count=4, crash_at=1, segv_at=2)))
    assert killed == [(os.getpid(), signal.SIGKILL), (os.getpid(), signal.SIGSEGV)]


def test_hang_at_sleeps_for_ever(make: Make, ask: Ask) -> None:
    naps = iter(range(5))
    engine = make(sleep=lambda seconds: next(naps))
    engine.start(ONE, ask(scripted(count=4, hang_at=0)))
    with pytest.raises(StopIteration):
        engine.step()


def test_spin_at_computes_for_ever(make: Make, ask: Ask) -> None:
    def ring(number: int, frame: object) -> None:
        raise InterruptedError

    engine = make()
    engine.start(ONE, ask(scripted(count=4, spin_at=0)))
    before = signal.signal(signal.SIGVTALRM, ring)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.05)
    try:
        with pytest.raises(InterruptedError):
            engine.step()
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def test_cancel_is_silent_and_may_be_slow(
    make: Make, ask: Ask, clock: Clock
) -> None:
    engine = make()
    for script, seconds in (({}, 0.0), ({"slow_cancel_s": 1.5}, 1.5)):
        engine.start(ONE, ask(scripted(count=9, **script)))
        engine.step()
        before = clock.now
        engine.cancel(ONE)
        engine.cancel(ONE)
        assert (engine.step(), engine.busy, clock.now - before) == ([], False, seconds)


def test_the_process_holds_what_the_last_script_says(make: Make, ask: Ask) -> None:
    engine = make()
    only(engine, ask(scripted(count=1, memory=7)))
    only(engine, ask(scripted(count=1)))
    assert engine.memory() == {"active": 7, "cache": 0, "peak": 7}


# --- Refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "@script {",
        "@script",
        '@script ["a"]',
        '@script {"wat": 1}',
        '@script {"rate": -1}',
        '@script {"block": 257}',
        '@script {"tokens": [1]}',
        '@script {"refuse": true}',
    ],
)
def test_a_script_that_makes_no_sense_is_refused(
    make: Make, ask: Ask, text: str
) -> None:
    engine = make()
    with pytest.raises(Unsupported):
        engine.start(ONE, ask(text))
    assert not engine.busy


def test_grammar_is_refused_and_tools_are_taken(
    make: Make, ask: Ask
) -> None:
    with pytest.raises(Unsupported, match="grammar"):
        make().start(ONE, ask("x", grammar="{}"))
    assert only(make(), ask("x", tools="[]")).reason == "stop"


def test_no_mlx_is_imported() -> None:
    program = "import sys, worker.engines.scripted; print({'mlx', 'mlx_lm', 'transformers'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", program], check=True, capture_output=True).stdout == b"set()\n"


def test_a_tokenizer_with_a_thought_channel_writes_thoughts_in_it(tmp_path: Path) -> None:
    from fixtures.tiny_model import build

    engine = ScriptedEngine(build(tmp_path / "m", extra_tokens=("<|channel>", "<channel|>")), block=256)
    engine.load(lambda words: None)
    assert engine.facts.markup and engine.facts.markup.think_start == "<|channel>thought\n"
    assert (engine.facts.lanes, engine.facts.block) == (("serial",), 256)
