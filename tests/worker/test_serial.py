"""The serial engine over a generator that is told what to say: one block a step, and no block after a cancel."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from common.generation import REASONING, GenerationRequest, Piece, Sampling
from common.ids import RequestId
from tests.worker.driving import Reply, collect, drain, rid, run
from worker import placement
from worker.engine import Committed, Ended, Unsupported
from worker.engines.serial import NoEnd, SerialEngine
from worker.engines.text import Texts, TextStream
from worker.generators import Block, TextGeneration
from worker.running import Running

ONE, TWO = rid(1), rid(2)
CHANNEL = ("<|channel>", "<channel|>")


class Told:
    """A TextGenerator that says `text` in blocks of so many tokens, and notes what it computed."""

    max_prompt_tokens = 99
    vocabulary = 10_000
    abilities = ("seed",)
    details: dict[str, str] = {}

    def __init__(self, texts: Texts, block: int) -> None:
        self.block = block
        self.text = "the end"
        self.computed: list[int] = []
        self.asked: list[tuple[Sequence[int], Sequence[int], Sequence[int], int | None]] = []
        self.closed = 0
        self.fails_at = -1
        # Whether the end comes with the last tokens or after them.
        self.end_within = False
        self._texts = texts
        opens, closes = (self._ids(marker) for marker in ("<|channel>thought\n", "<channel|>"))
        self.thought_channel_marker_ids = (opens, closes)

    def _ids(self, text: str) -> list[int]:
        return self._texts.tokenizer.encode(text, add_special_tokens=False).ids

    @staticmethod
    def _end(ids: list[int], max_tokens: int, stream: TextStream) -> TextGeneration:
        return TextGeneration("length" if len(ids) >= max_tokens else "stop", stream.finish())

    def generate(
        self, prompt: Sequence[int], max_tokens: int, stop_ids: Sequence[int], skip: Sequence[int], seed: int | None
    ) -> Iterator[Block]:
        self.asked.append((prompt, stop_ids, skip, seed))
        stream = self._texts.stream()
        ids = self._ids(self.text)
        try:
            for number, start in enumerate(range(0, min(len(ids), max_tokens), self.block)):
                if number == self.fails_at:
                    raise ZeroDivisionError
                self.computed.append(number)
                tokens = []
                for token in ids[start : min(start + self.block, max_tokens)]:
                    if token in stop_ids:
                        yield Block(tokens)
                        yield Block([], TextGeneration("stop", stream.finish()))
                        return
                    tokens.append((token, stream.add(token)))
                last = min(start + self.block, max_tokens) >= min(len(ids), max_tokens)
                yield Block(tokens, self._end(ids, max_tokens, stream) if last and self.end_within else None)
            if self.fails_at != len(self.computed) and not self.end_within:
                yield Block([], self._end(ids, max_tokens, stream))
        finally:
            self.closed += 1


class Engine(SerialEngine):
    """With its generator in reach."""

    told: Told


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    from fixtures.tiny_model import build

    folder = build(tmp_path / "m", extra_tokens=CHANNEL)

    def make(texts: Texts, progress: object) -> Told:
        made.told = Told(texts, 4)
        return made.told

    made = Engine(folder, make)
    made.load(lambda words: None)
    made.told.asked.clear()
    made.told.computed.clear()
    made.told.closed = 0
    return made


def ask(max_tokens: int = 50, **fields: object) -> GenerationRequest:
    return GenerationRequest([5, 6, 7], max_tokens, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("end_within", [False, True])
def test_a_step_is_a_block_and_the_end_is_a_step_of_its_own(engine: Engine, end_within: bool) -> None:
    engine.told.end_within = end_within
    engine.told.text = " ".join(["the"] * 5)
    engine.start(ONE, ask())
    replies = {ONE: Reply()}
    sizes = []
    while engine.busy:
        steps = engine.step()
        sizes.append(sum(isinstance(step, Committed) for step in steps))
        collect(replies, steps)
    whole = len(engine.told._ids(engine.told.text))
    assert sizes == [4] * (whole // 4) + ([whole % 4] if whole % 4 else []) + [0]
    assert (replies[ONE].text, replies[ONE].reason, replies[ONE].reads) == (engine.told.text, "stop", [(3, 3)])
    assert engine.facts.block == 4 and engine.facts.lanes == ("serial",) and engine.facts.slots == 1


def test_a_cancel_before_between_and_after_the_blocks_computes_nothing_more(engine: Engine) -> None:
    engine.told.text = "the of and to " * 3
    engine.start(ONE, ask())
    engine.cancel(ONE)
    assert not engine.busy and engine.told.asked == []
    engine.start(ONE, ask())
    engine.step()
    engine.cancel(ONE)
    assert not engine.busy and (engine.told.computed, engine.told.closed) == ([0], 1)
    # After the last block, before its end was told.
    engine.start(ONE, ask(max_tokens=4))
    engine.step()
    assert engine.busy
    engine.cancel(ONE)
    assert not engine.busy and engine.step() == [] and engine.told.closed == 2


def test_requests_wait_for_each_other_in_order(engine: Engine) -> None:
    order: list[RequestId] = []
    replies = {rid(number): Reply() for number in range(3)}
    for id in replies:
        engine.start(id, ask())
    engine.cancel(rid(1))
    while engine.busy:
        steps = engine.step()
        order += [step.request for step in steps if isinstance(step, Ended)]
        collect(replies, steps)
    assert order == [rid(0), rid(2)] and replies[rid(1)].tokens == []


def test_a_generator_that_fails_is_left_to_the_caller_and_serves_on(engine: Engine) -> None:
    engine.told.fails_at = 1
    engine.told.text = "the of and to " * 3
    engine.start(ONE, ask())
    engine.start(TWO, ask())
    engine.step()
    with pytest.raises(ZeroDivisionError):
        engine.step()
    engine.rebuild()
    assert not engine.busy
    engine.told.fails_at = -1
    assert run(engine, {ONE: ask()})[ONE].reason == "stop"


def test_blocks_that_run_out_without_an_end_are_a_fault(engine: Engine) -> None:
    engine.told.text = "the"
    engine.told.computed = []
    engine.told.fails_at = 1
    engine.start(ONE, ask(max_tokens=1))
    with pytest.raises(NoEnd, match="Told"):
        drain(engine, {ONE: Reply()})


def test_a_stop_string_that_is_one_token_becomes_a_stop_id(engine: Engine) -> None:
    token = engine._texts.tokenizer.token_to_id
    ids = {text: token(text.replace(" ", "Ġ")) for text in (" the", " of")}
    cases: list[tuple[dict[str, object], list[int]]] = [
        ({"stop": [" the", "two words", " of"]}, list(ids.values())),
        # A token that only contains it is found in the text.
        ({"stop": ["he"]}, []),
        ({"stop": [" the"], "thinking": True}, []),
        ({"stop": [" the"], "thinking": True, "stop_in_reasoning": True}, [ids[" the"]]),
        ({"stop": [" the"], "thinking": True, "raw": True}, [ids[" the"]]),
    ]
    for fields, wanted in cases:
        run(engine, {ONE: ask(**fields)})
        assert engine.told.asked[-1][1][1:] == tuple(wanted), fields


def test_seeds_differ_by_choice_and_special_tokens_are_skipped(engine: Engine) -> None:
    for seed, choice in ((5, 0), (5, 0), (5, 1), (6, 0), (None, 0)):
        run(engine, {ONE: ask(sampling=Sampling(seed=seed), choice=choice)})
    seeds = [asked[3] for asked in engine.told.asked]
    assert seeds[0] == seeds[1] and len(set(seeds)) == 4 and seeds[4] is None
    assert set(engine.told.asked[0][2]) == {engine._texts.tokenizer.token_to_id(t) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")}


def test_what_it_cannot_do_is_refused_by_name(engine: Engine) -> None:
    for prompt, reason in (([], "no token"), ([10_000], "not one of"), ([-1], "not one of"), ([5] * 100, "99 are possible")):
        with pytest.raises(Unsupported, match=f"^prompt: .*{reason}"):
            engine.start(ONE, GenerationRequest(prompt, 5))
    for fields, need in (
        ({"sampling": Sampling(temperature=0.0)}, "sampling"),
        ({"top_logprobs": 0}, "logprobs"),
        ({"grammar": "{}"}, "grammar"),
    ):
        with pytest.raises(Unsupported, match=f"^{need}: serial: lacks"):
            placement.plan(ask(**fields), engine.facts, False)
    assert placement.plan(ask(sampling=Sampling(seed=1)), engine.facts, False).lane == "serial"


@pytest.mark.parametrize("block", range(1, 13))
def test_a_thought_is_a_sequence_of_tokens_wherever_a_block_ends(engine: Engine, block: int) -> None:
    """Open marker, channel name and line end; the word and the line ends elsewhere are text."""
    engine.told.block = block
    engine.told.text = "a thought\n<|channel>thought\nof thought\n\nmore<channel|>\nthe thought\n"
    request = ask(max_tokens=200)
    running = Running(ONE, 1, "", request, "serial", 0.0, engine.facts.markup)
    pieces: list[Piece] = []
    engine.start(ONE, request)
    while engine.busy:
        for step in engine.step():
            if isinstance(step, Committed):
                pieces += running.committed(step, 0.0)
            elif isinstance(step, Ended):
                pieces += running.ended(step, 0.0)[0]
    said = {channel: "".join(piece.text for piece in pieces if piece.channel == channel) for channel in (0, REASONING)}
    assert said == {0: "a thought\n\nthe thought\n", REASONING: "of thought\n\nmore"}
