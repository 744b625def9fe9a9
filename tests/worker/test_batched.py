"""The batched engine on the tiny model: what a row gives does not depend on what else is in the batch."""

import os
import random
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mlx.core as mx

from tokenizers import Tokenizer

from common.errors import ConfigError
from common.generation import GenerationRequest, Sampling
from common.ids import RequestId
from tests.worker.driving import Reply, collect, drain, run, rid
from worker.engine import Committed, Prefilled, Unsupported
from worker.engines import sampling as sampling_module
from worker.engines.batched import BatchedEngine, read_well_together
from worker.engines.company import Company

GREEDY = Sampling(temperature=0.0)
WARM = Sampling(temperature=0.9, top_p=0.95)


@pytest.fixture(scope="module")
def loaded(tiny_model: Path) -> BatchedEngine:
    engine = BatchedEngine(tiny_model, slots=8, prefill_step=32, decode_stall_s=60.0)
    engine.load(lambda words: None)
    return engine


@pytest.fixture
def engine(loaded: BatchedEngine) -> Iterator[BatchedEngine]:
    """The loaded engine, left idle and unbroken by each test."""
    yield loaded
    loaded.rebuild()


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_model / "tokenizer.json"))


def prompt(number: int, length: int = 0) -> list[int]:
    """A prompt of its own for each number, of mixed lengths."""
    chooser = random.Random(number)
    return [chooser.randrange(3, 250) for _ in range(length or chooser.choice([1, 3, 17, 40, 80]))]


def request(number: int, length: int = 0, *, max_tokens: int = 24, **options: object) -> GenerationRequest:
    asked: dict[str, Any] = {"sampling": GREEDY, **options}
    return GenerationRequest(prompt(number, length), max_tokens, **asked)


def solo(engine: BatchedEngine, wanted: GenerationRequest) -> Reply:
    return run(engine, {rid(0): wanted})[rid(0)]


# --- A row is the same alone and among others -------------------------------------------------------------------------


def test_greedy_rows_give_in_a_batch_what_they_give_alone(engine: BatchedEngine) -> None:
    requests = {rid(n): request(n) for n in range(8)}
    alone = {id: solo(engine, wanted).tokens for id, wanted in requests.items()}
    together = run(engine, requests)
    assert {id: reply.tokens for id, reply in together.items()} == alone
    assert all(len(tokens) > 1 for tokens in alone.values())


def test_rows_that_join_leave_and_are_cancelled_change_no_other_row(engine: BatchedEngine) -> None:
    requests = {rid(n): request(n, max_tokens=5 + 7 * (n % 4)) for n in range(14)}
    alone = {id: solo(engine, wanted).tokens for id, wanted in requests.items()}
    chooser = random.Random(5)
    replies: dict[RequestId, Reply] = {}
    cancelled = set()
    waiting = list(requests)
    while waiting or engine.busy:
        if waiting and chooser.random() < 0.4:
            id = waiting.pop(0)
            engine.start(id, requests[id])
            replies[id] = Reply()
        running = [id for id, reply in replies.items() if not reply.reason]
        if running and chooser.random() < 0.13:
            id = chooser.choice(running)
            engine.cancel(id)
            cancelled.add(id)
            replies[id].reason = "cancelled"
        collect(replies, engine.step())
    assert 1 < len(cancelled) < 12
    for id, reply in replies.items():
        assert reply.tokens == (alone[id][: len(reply.tokens)] if id in cancelled else alone[id])


def test_more_rows_than_slots_wait_their_turn(engine: BatchedEngine) -> None:
    replies = run(engine, {rid(n): request(n, 3, max_tokens=4) for n in range(20)})
    assert {reply.reason for reply in replies.values()} == {"length"}


def test_prompts_that_come_together_wait_for_each_other_and_no_longer(
    engine: BatchedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_company", Company(30.0))
    monkeypatch.setattr(engine._pace, "seconds", lambda tokens: 1000.0)
    for number in range(8):
        # The last one fills the slots: there is nobody to wait for.
        assert number == 0 or (engine.due_in() > 20 and engine.step() == [] and engine.busy)
        engine.start(rid(number), request(number, 5))
    assert engine.due_in() == 0.0
    assert len({step.request for step in engine.step() if isinstance(step, Prefilled)}) == 8
    # Whoever waited and left is no beginning of the next company.
    for number in range(8):
        engine.cancel(rid(number))
    monkeypatch.setattr(engine, "_company", Company(0.2))
    monkeypatch.setattr(engine._pace, "seconds", lambda tokens: 1.0)
    for leave in (lambda: engine.cancel(rid(0)), engine.rebuild):
        engine.start(rid(0), request(0, 5))
        leave()
        time.sleep(0.15)
        engine.start(rid(0), request(0, 5))
        assert engine.due_in() > 0
        engine.cancel(rid(0))
    # Rows that run never wait for those that come.
    monkeypatch.setattr(engine, "_company", Company(0.0))
    engine.start(rid(8), request(8, 5))
    engine.step()
    monkeypatch.setattr(engine, "_company", Company(30.0))
    engine.start(rid(9), request(9, 5))
    assert engine.due_in() == 0.0 and any(isinstance(step, Committed) for step in engine.step())


def test_a_long_prompt_is_read_in_steps_while_others_decode(engine: BatchedEngine) -> None:
    replies = {rid(0): Reply(), rid(1): Reply()}
    engine.start(rid(0), request(0, 5, max_tokens=40))
    while not replies[rid(0)].tokens:
        collect(replies, engine.step())
    engine.start(rid(1), request(1, 200, max_tokens=2))
    before = len(replies[rid(0)].tokens)
    drain_until = replies[rid(1)]
    while not drain_until.tokens:
        collect(replies, engine.step())
    assert len(replies[rid(0)].tokens) - before >= 200 // 32
    assert [done for done, _ in replies[rid(1)].reads] == [32, 64, 96, 128, 160, 192, 200]
    assert {total for _, total in replies[rid(1)].reads} == {200}


def test_prompts_that_were_read_leave_room_for_others_to_be_read_together(engine: BatchedEngine) -> None:
    replies = {rid(n): Reply() for n in range(3)}
    engine.start(rid(0), request(0, 100, max_tokens=60))
    while not replies[rid(0)].tokens:
        collect(replies, engine.step())
    engine.start(rid(1), request(1, 90))
    engine.start(rid(2), request(2, 90))
    collect(replies, engine.step())
    assert replies[rid(1)].reads == replies[rid(2)].reads == [(16, 90)]


def test_only_prompts_of_like_length_are_read_in_one_rectangle() -> None:
    assert read_well_together([3000], 256)
    assert read_well_together([40, 44, 41, 39, 50, 44, 60], 256)
    assert read_well_together([3000, 30], 256)
    assert not read_well_together([3000, 30, 30], 256)
    assert not read_well_together([3000, 3000, 3000], 256)


# --- Sampling ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        Sampling(temperature=1.0, seed=7),
        Sampling(temperature=0.8, top_p=0.9, seed=-3),
        Sampling(temperature=1.5, top_k=40, min_p=0.02, seed=2**70),
        Sampling(temperature=1.0, seed=1, repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=0.4),
    ],
)
def test_a_seed_gives_the_same_reply_whatever_else_is_in_the_batch(engine: BatchedEngine, settings: Sampling) -> None:
    wanted = request(3, sampling=settings)
    alone = solo(engine, wanted).tokens
    others = {rid(n): request(n, sampling=[GREEDY, WARM, Sampling(seed=n)][n % 3]) for n in range(1, 7)}
    # The thread's own random state has moved on too.
    mx.eval(mx.random.uniform())
    assert run(engine, {**others, rid(0): wanted})[rid(0)].tokens == alone
    assert solo(engine, wanted).tokens == alone


def test_seeds_and_choices_differ(engine: BatchedEngine) -> None:
    replies = run(
        engine,
        {
            rid(n): request(3, sampling=Sampling(temperature=1.0, seed=n // 2), choice=n % 2) for n in range(4)
        },
    )
    assert len({tuple(reply.tokens) for reply in replies.values()}) == 4


def test_rows_without_a_seed_differ_from_each_other_and_from_the_last_run(engine: BatchedEngine) -> None:
    wanted = {rid(n): request(3, sampling=WARM) for n in range(4)}
    first, second = run(engine, wanted), run(engine, wanted)
    assert len({tuple(reply.tokens) for replies in (first, second) for reply in replies.values()}) == 8


def test_an_engine_loaded_anew_does_not_repeat_the_unseeded_replies_of_another(tiny_model: Path) -> None:
    replies = []
    for _ in range(2):
        engine = BatchedEngine(tiny_model, slots=2)
        engine.load(lambda words: None)
        replies.append(solo(engine, request(3, sampling=WARM)).tokens)
        engine.close()
    assert replies[0] != replies[1]


def test_logit_bias_and_penalties_are_honoured(engine: BatchedEngine) -> None:
    forced = solo(engine, request(1, sampling=Sampling(temperature=0.0, logit_bias={77: 100.0})))
    assert set(forced.tokens) == {77}
    # 77 is taken once, and its penalty then outweighs its bias.
    for penalty in ({"presence_penalty": 100.0}, {"frequency_penalty": 100.0}):
        once = Sampling(temperature=0.0, logit_bias={77: 60.0}, **penalty)
        assert solo(engine, request(1, sampling=once)).tokens.count(77) == 1
        # What the prompt says costs nothing.
        asked = replace_prompt(request(1, sampling=once), [77] * 9)
        assert solo(engine, asked).tokens.count(77) == 1
    plain = solo(engine, request(2)).tokens
    assert solo(engine, request(2, sampling=Sampling(temperature=0.0, repetition_penalty=50.0))).tokens != plain


def replace_prompt(wanted: GenerationRequest, tokens: list[int]) -> GenerationRequest:
    return GenerationRequest(tokens, wanted.max_tokens, wanted.sampling)


def test_top_k_of_one_is_greedy(engine: BatchedEngine) -> None:
    assert solo(engine, request(4, sampling=Sampling(top_k=1))).tokens == solo(engine, request(4)).tokens


# --- Ends -------------------------------------------------------------------------------------------------------------


def test_the_end_of_sequence_stops_and_is_not_committed(engine: BatchedEngine) -> None:
    (stop,) = engine._stop_ids
    reply = solo(engine, request(1, sampling=Sampling(temperature=0.0, logit_bias={stop: 100.0})))
    assert (reply.tokens, reply.text, reply.reason) == ([], "", "stop")


def test_at_the_cap_a_reply_ends_with_length_and_an_end_of_sequence_there_with_stop(engine: BatchedEngine) -> None:
    plain = solo(engine, request(1, max_tokens=24))
    assert (len(plain.tokens), plain.reason) == (24, "length")
    # A token that comes late and for the first time, taken for the end of sequence.
    at = next(index for index in range(5, 24) if plain.tokens[index] not in plain.tokens[:index])
    own = engine._stop_ids
    engine._stop_ids = (plain.tokens[at],)
    engine.rebuild()
    try:
        at_the_cap = solo(engine, request(1, max_tokens=at + 1))
        behind_it = solo(engine, request(1, max_tokens=at))
    finally:
        engine._stop_ids = own
    assert (at_the_cap.tokens, at_the_cap.reason) == (plain.tokens[:at], "stop")
    assert (behind_it.tokens, behind_it.reason) == (plain.tokens[:at], "length")


# --- Text -------------------------------------------------------------------------------------------------------------


def test_text_is_what_the_tokenizer_decodes(engine: BatchedEngine, tokenizer: Tokenizer) -> None:
    requests = {rid(n): request(n, max_tokens=60, sampling=Sampling(temperature=2.0)) for n in range(12)}
    for reply in run(engine, requests).values():
        assert reply.text == tokenizer.decode(reply.tokens, skip_special_tokens=True)


@pytest.mark.parametrize("text", [" hello world", "日本語 🙂 é — ß", "👩‍👩‍👧‍👦 tab\t\x00 end", "naïve ☃"])
def test_characters_of_many_tokens_leave_whole(engine: BatchedEngine, tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    reply = solo(engine, spoken(tokens))
    assert reply.tokens == tokens
    assert reply.text == tokenizer.decode(tokens) == text
    assert not any("\ufffd" in piece for piece in reply.texts)


def spoken(tokens: list[int]) -> GenerationRequest:
    """A request whose reply is exactly `tokens`: see the patched sampler."""
    return GenerationRequest([5], len(tokens), Sampling(temperature=0.5, seed=12345), raw=True, stop=[str(tokens)])


@pytest.fixture(autouse=True)
def _speak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows made by spoken() draw the tokens that they were given."""
    original = BatchedEngine._sampler

    def sampler(self: BatchedEngine, wanted: GenerationRequest) -> object:
        if wanted.sampling.seed != 12345:
            return original(self, wanted)
        tokens = iter([*map(int, wanted.stop[0].strip("[]").split(",")), 0, 0])
        drawn = sampling_module.Draw(wanted.sampling, 4)
        speak = {"__call__": lambda self, logprobs: mx.array([next(tokens)])}
        drawn.__class__ = type("Spoken", (sampling_module.Draw,), speak)
        return drawn

    monkeypatch.setattr(BatchedEngine, "_sampler", sampler)


def test_a_character_that_is_never_completed_comes_out_at_the_end(engine: BatchedEngine, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("ok☃", add_special_tokens=False).ids[:-1]
    reply = solo(engine, spoken(tokens))
    assert reply.text == tokenizer.decode(tokens) == "ok\ufffd"
    assert reply.texts[-1] == "\ufffd"


def test_special_tokens_are_counted_and_not_shown(engine: BatchedEngine, tokenizer: Tokenizer) -> None:
    start = tokenizer.token_to_id("<|im_start|>")
    tokens = [start, *tokenizer.encode(" hello", add_special_tokens=False).ids, start]
    reply = solo(engine, spoken(tokens))
    assert (reply.tokens, reply.text) == (tokens, " hello")


# --- Log-probabilities ------------------------------------------------------------------------------------------------


def test_logprobs_come_from_the_raw_distribution_whatever_is_done_to_it(engine: BatchedEngine) -> None:
    plain = solo(engine, request(6, top_logprobs=3, max_tokens=5))
    for token, entry in zip(plain.tokens, plain.logprobs, strict=True):
        assert entry is not None and entry.logprob == entry.top[0].logprob and len(entry.top) == 3
        assert bytes(entry.bytes) == engine._texts.raw(token)
        assert entry.top[0].logprob >= entry.top[1].logprob >= entry.top[2].logprob
    # A bias that decides the draw leaves the numbers as they were.
    biased = Sampling(temperature=0.7, seed=1, logit_bias={plain.tokens[0]: 100.0})
    with_others = run(
        engine, {rid(0): request(6, sampling=biased, top_logprobs=3, max_tokens=1), rid(1): request(7, top_logprobs=0)}
    )
    first = with_others[rid(0)].logprobs[0]
    assert first is not None and plain.logprobs[0] is not None
    assert first.logprob == pytest.approx(plain.logprobs[0].logprob, abs=1e-4)
    assert [rival.token for rival in first.top] == [rival.token for rival in plain.logprobs[0].top]
    assert all(entry is not None and entry.top == [] for entry in with_others[rid(1)].logprobs)


def test_impossible_tokens_get_a_number_that_json_can_hold(engine: BatchedEngine) -> None:
    from worker.engines.logprobs import IMPOSSIBLE, token_logprobs

    row = mx.array([[0.0, -float("inf"), -float("inf")]])
    (entry,) = token_logprobs(engine._texts, row, [1], [3])
    assert entry.logprob == IMPOSSIBLE and entry.top[-1].logprob == IMPOSSIBLE


# --- Refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "named"),
    [
        (request(1, grammar="{"), "grammar: not a JSON schema"),
        (request(1, grammar='{"type":"wrong"}'), "grammar: Invalid type: wrong"),
        (request(1, grammar="lark:start: nothing"), "grammar: "),
        (GenerationRequest([], 5), "prompt"),
        (GenerationRequest([3, 10**6], 5), "prompt"),
        (GenerationRequest([-1], 5), "prompt"),
        (request(1, sampling=Sampling(logit_bias={10**6: 1.0})), "logit_bias"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name_and_nothing_kept(
    engine: BatchedEngine, wanted: GenerationRequest, named: str
) -> None:
    with pytest.raises(Unsupported, match=named):
        engine.start(rid(1), wanted)
    assert not engine.busy


# --- Cancelling -------------------------------------------------------------------------------------------------------


def test_cancel_works_in_every_phase(engine: BatchedEngine) -> None:
    alone = solo(engine, request(0, 5)).tokens
    for steps_before in (0, 1, 3, 9):
        replies = {rid(0): Reply(), rid(1): Reply()}
        engine.start(rid(0), request(0, 5))
        engine.start(rid(1), request(1, 150))
        for _ in range(steps_before):
            collect(replies, engine.step())
        engine.cancel(rid(1))
        engine.cancel(rid(1))
        engine.cancel(rid(99))
        replies[rid(1)].reason = "cancelled"
        drain(engine, replies)
        assert replies[rid(0)].tokens == alone
    assert [bool(replies[rid(1)].tokens), not engine.busy] == [True, True]


def test_cancelling_the_only_row_leaves_an_idle_engine(engine: BatchedEngine) -> None:
    engine.start(rid(0), request(0))
    engine.step()
    engine.cancel(rid(0))
    assert not engine.busy and engine.step() == []
    assert solo(engine, request(0)).reason == "length"


# --- Faults -----------------------------------------------------------------------------------------------------------


def test_a_row_whose_callable_fails_ends_alone(engine: BatchedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = {n: solo(engine, request(n)).tokens for n in (0, 2)}
    calls = []

    def broken(*arguments: object) -> None:
        calls.append(arguments)
        if len(calls) == 4:
            raise ZeroDivisionError
        return sampling_module.greedy(arguments[0])  # type: ignore[arg-type]

    monkeypatch.setattr(sampling_module, "draw", broken)
    requests = {rid(n): request(n, sampling=GREEDY if n != 1 else Sampling(seed=1)) for n in range(3)}
    replies = run(engine, requests)
    assert (replies[rid(1)].reason, replies[rid(1)].error) == ("failed", "ZeroDivisionError")
    assert len(replies[rid(1)].tokens) == 3
    assert {n: replies[rid(n)].tokens for n in (0, 2)} == alone


def test_a_row_whose_logits_fail_ends_alone(engine: BatchedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = {n: solo(engine, request(n)).tokens for n in (0, 2)}

    def broken(tokens: object, logits: object) -> object:
        raise KeyError

    monkeypatch.setattr(sampling_module, "make_logits_processors", lambda **_: [broken])
    requests = {rid(n): request(n, sampling=GREEDY if n != 1 else Sampling(logit_bias={1: 1.0})) for n in range(3)}
    replies = run(engine, requests)
    assert (replies[rid(1)].reason, replies[rid(1)].error) == ("failed", "KeyError")
    assert {n: replies[rid(n)].tokens for n in (0, 2)} == alone


@pytest.mark.parametrize("bad", [float("nan"), -float("inf"), float("inf")])
def test_logits_that_are_not_finite_end_their_row_alone(
    engine: BatchedEngine, monkeypatch: pytest.MonkeyPatch, bad: float
) -> None:
    alone = {n: solo(engine, request(n)).tokens for n in (0, 2)}
    monkeypatch.setattr(
        sampling_module, "make_logits_processors", lambda **_: [lambda tokens, logits: mx.full(logits.shape, bad)]
    )
    requests = {rid(n): request(n, sampling=GREEDY if n != 1 else Sampling(logit_bias={1: 1.0})) for n in range(3)}
    replies = run(engine, requests)
    assert (replies[rid(1)].reason, replies[rid(1)].error, replies[rid(1)].tokens) == ("failed", "NonFiniteLogits", [])
    assert {n: replies[rid(n)].tokens for n in (0, 2)} == alone


def test_a_single_logit_that_is_no_number_ends_its_row(engine: BatchedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even when it is not the one that is drawn."""

    def spoil(tokens: object, logits: Any) -> Any:
        return mx.where(mx.arange(logits.shape[-1]) == 7, float("nan"), logits)

    monkeypatch.setattr(sampling_module, "make_logits_processors", lambda **_: [spoil])
    monkeypatch.setattr(sampling_module, "greedy", lambda logits: mx.full((logits.shape[0],), 40))
    reply = solo(engine, request(1, sampling=Sampling(temperature=0.0, logit_bias={1: 1.0})))
    assert (reply.reason, reply.error, reply.tokens) == ("failed", "NonFiniteLogits", [])


def test_after_an_exception_in_a_step_the_engine_can_be_rebuilt(
    engine: BatchedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = solo(engine, request(0)).tokens
    engine.start(rid(0), request(0))
    engine.start(rid(1), request(1, 100))
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(type(engine._model), "__call__", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            for _ in range(3):
                engine.step()
    engine.rebuild()
    assert not engine.busy and engine.step() == []
    assert solo(engine, request(0)).tokens == alone


# --- Loading ----------------------------------------------------------------------------------------------------------


def test_facts_say_what_was_loaded(engine: BatchedEngine) -> None:
    facts = engine.facts
    assert (facts.slots, facts.kv_tokens, facts.block, facts.context) == (8, 8 * 4096, 1, 4096)
    assert list(facts.lanes) == ["batched"]
    assert engine.due_in() == 0.0
    assert set(engine.memory()) == {"active", "cache", "peak"} and engine.memory()["active"] > 100_000


def test_a_folder_that_is_no_model_is_a_config_error(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="config.json"):
        BatchedEngine(tmp_path).load(lambda words: None)
    for name in os.listdir(tiny_model):
        (tmp_path / name).write_bytes((tiny_model / name).read_bytes())
    (tmp_path / "config.json").write_text(
        (tmp_path / "config.json").read_text().replace('"llama"', '"no_such_architecture"')
    )
    with pytest.raises(ConfigError, match="no_such_architecture"):
        BatchedEngine(tmp_path).load(lambda words: None)


def test_weights_that_are_missing_are_a_config_error(tiny_model: Path, tmp_path: Path) -> None:
    for name in os.listdir(tiny_model):
        (tmp_path / name).write_bytes((tiny_model / name).read_bytes())
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    with pytest.raises(ConfigError, match="cannot load"):
        BatchedEngine(tmp_path).load(lambda words: None)


@pytest.mark.parametrize(("stored", "mode"), [("float32", "affine"), ("bfloat16", "affine"), ("bfloat16", "mxfp4")])
def test_quantized_weights_held_as_float32_give_the_same_logits(
    tiny_model: Path, tmp_path: Path, stored: str, mode: str
) -> None:
    import mlx.nn as nn
    from mlx_lm.utils import load_model, quantize_model, save_config, save_model

    from worker.engines.weights import load_weights

    model, config = load_model(tiny_model)
    model.set_dtype(getattr(mx, stored))
    _, config = quantize_model(model, config, group_size=32, bits=4, mode=mode)
    save_model(tmp_path, model)
    save_config(config, tmp_path / "config.json")
    kept, unpacked = (load_weights(tmp_path, precision, lambda words: None) for precision in ("keep", "float32"))
    assert any(isinstance(module, nn.QuantizedLinear) for _, module in kept.named_modules())
    assert not any(isinstance(module, nn.QuantizedLinear) for _, module in unpacked.named_modules())
    assert {weight.dtype for _, weight in _weights(unpacked)} == {mx.float32}
    # With activations in float32 both compute the same, whatever the scales are stored in.
    kept.set_dtype(mx.float32)
    tokens = mx.array([prompt(1, 20)])
    assert mx.allclose(kept(tokens), unpacked(tokens), atol=1e-3).item()


def _weights(model: object) -> list[tuple[str, object]]:
    from mlx.utils import tree_flatten

    return tree_flatten(model.parameters())  # type: ignore[attr-defined]
