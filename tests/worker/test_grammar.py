"""Structured output: what a grammar allows is what a row says, and its neighbours do not notice."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jsonschema
import mlx.core as mx
import msgspec
import pytest

from common.generation import GenerationRequest, Sampling
from common.ids import RequestId
from common.json_schema import LARK, check_schema, enforceable
from tests.worker.driving import Reply, run, rid
from worker.call_syntax import SYNTAXES
from worker.engine import Markup
from worker.engines import grammar as grammar_module
from worker.engines.batched import BatchedEngine
from worker.engines.grammar import KEPT, BadGrammar, Grammars, RowGrammar, masked

GREEDY = Sampling(temperature=0.0)
CHOICE = '{"enum":["the","of","and"]}'
PERSON = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 5},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    }
)


@pytest.fixture(scope="module")
def loaded(tiny_model: Path) -> BatchedEngine:
    engine = BatchedEngine(tiny_model, slots=8, prefill_step=32)
    engine.load(lambda words: None)
    return engine


@pytest.fixture
def engine(loaded: BatchedEngine) -> Iterator[BatchedEngine]:
    yield loaded
    loaded.rebuild()


@pytest.fixture(scope="module")
def grammars(tiny_model: Path, loaded: BatchedEngine) -> Grammars:
    return loaded._grammars


def asked(grammar: str, sampling: Sampling = GREEDY, max_tokens: int = 80, number: int = 0) -> GenerationRequest:
    return GenerationRequest([9, 30 + number, 40], max_tokens, sampling, grammar=grammar)


def solo(engine: BatchedEngine, wanted: GenerationRequest) -> Reply:
    return run(engine, {rid(0): wanted})[rid(0)]


# --- What a row says --------------------------------------------------------------------------------------------------


FLAGS = '{"type":"array","items":{"type":"boolean"},"minItems":2,"maxItems":3}'


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("schema", [PERSON, CHOICE, FLAGS])
def test_a_reply_is_json_of_the_schema_and_ends_by_itself(engine: BatchedEngine, schema: str, seed: int) -> None:
    reply = solo(engine, asked(schema, Sampling(temperature=1.0, seed=seed)))
    assert reply.reason == "stop"
    jsonschema.validate(json.loads(reply.text), json.loads(schema))
    assert json.dumps(json.loads(reply.text), separators=(",", ":"), ensure_ascii=False) == reply.text


def test_a_grammar_that_is_complete_with_the_last_allowed_token_ends_with_stop(engine: BatchedEngine) -> None:
    whole = solo(engine, asked(CHOICE))
    at_the_cap = solo(engine, asked(CHOICE, max_tokens=len(whole.tokens)))
    assert (at_the_cap.text, at_the_cap.reason) == (whole.text, "stop")
    assert solo(engine, asked(CHOICE, max_tokens=len(whole.tokens) - 1)).reason == "length"


def test_what_may_go_on_ends_with_the_end_of_sequence(engine: BatchedEngine) -> None:
    (end,) = engine._stop_ids
    likes_to_end = Sampling(temperature=0.0, logit_bias={end: 100.0})
    reply = solo(engine, asked('{"type":"integer","minimum":1}', likes_to_end))
    assert reply.reason == "stop" and int(reply.text) >= 1


def test_a_forced_call_is_a_call_at_any_temperature(tiny_model: Path, engine: BatchedEngine) -> None:
    markup = Markup(
        tool_start="<tool_call>", tool_end="</tool_call>", parse=lambda text, tools: json.loads(text),
        syntax=SYNTAXES["json_tools"],
    )  # fmt: skip
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {
            "type": "object", "properties": {"n": {"enum": [1, 2, 3, 4, 5]}}, "required": ["n"]}}}
        for name in ("look", "go")
    ]  # fmt: skip
    before, engine.facts = engine.facts, replace(engine.facts, markup=markup)
    wanted = json.dumps({"tools": tools, "choice": "required", "named": False, "parallel": False})
    texts = set()
    for seed in range(6):
        reply = solo(engine, msgspec.structs.replace(asked("", Sampling(temperature=1.0, seed=seed)), tools=wanted))
        assert reply.reason == "stop"
        inner = reply.text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
        assert inner != reply.text and json.loads(inner)["name"] in ("look", "go")
        texts.add(reply.text)
    engine.facts = before
    assert len(texts) > 1


# --- Its neighbours ---------------------------------------------------------------------------------------------------


def test_rows_with_a_grammar_and_rows_without_are_in_a_batch_what_they_are_alone(engine: BatchedEngine) -> None:
    requests = {
        rid(n): asked(["", PERSON, "", CHOICE][n % 4], [GREEDY, Sampling(seed=n)][n // 4], 30, number=n)
        for n in range(8)
    }
    alone = {id: solo(engine, wanted).tokens for id, wanted in requests.items()}
    assert {id: reply.tokens for id, reply in run(engine, requests).items()} == alone


def test_a_row_without_a_grammar_keeps_its_logits_bit_by_bit(grammars: Grammars, engine: BatchedEngine) -> None:
    logits = mx.random.normal((3, engine._vocabulary))
    out = masked(logits, [None, grammars.row(CHOICE), None])
    assert mx.array_equal(out[0], logits[0]) and mx.array_equal(out[2], logits[2])
    allowed = [token for token, value in enumerate(out[1].tolist()) if value > -float("inf")]
    assert allowed and all(engine._texts.raw(token).startswith(b'"') for token in allowed)
    assert [out[1][token].item() for token in allowed] == [logits[1][token].item() for token in allowed]


def test_a_vocabulary_that_is_larger_than_the_tokenizers_is_masked_to_its_end(tiny_model: Path) -> None:
    wider = Grammars((tiny_model / "tokenizer.json").read_text(), 2000, [2])
    out = masked(mx.zeros((1, 2000)), [wider.row('{"type":"object"}')])
    assert 0 < mx.isfinite(out).sum().item() < 5
    assert not mx.isfinite(out[0, 700:]).any().item()


def test_log_probabilities_are_those_without_the_grammar(engine: BatchedEngine) -> None:
    free = GenerationRequest([9, 30, 40], 1, GREEDY, top_logprobs=5)
    bound = GenerationRequest([9, 30, 40], 1, GREEDY, top_logprobs=5, grammar=PERSON)
    first, second = (solo(engine, wanted).logprobs[0] for wanted in (free, bound))
    assert first is not None and second is not None
    assert [rival.token for rival in first.top] == [rival.token for rival in second.top]
    assert second.token == "{" and second.logprob < first.logprob


# --- Faults -----------------------------------------------------------------------------------------------------------


def test_a_matcher_in_a_bad_state_ends_its_row_alone(engine: BatchedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    neighbour = asked("", number=1, max_tokens=12)
    alone = solo(engine, neighbour).tokens
    taken: list[int] = []
    original = RowGrammar.take

    def derail(self: RowGrammar, token: int) -> None:
        taken.append(token)
        # A token that the grammar never allows here.
        original(self, 5 if len(taken) == 3 else token)

    monkeypatch.setattr(RowGrammar, "take", derail)
    replies = run(engine, {rid(0): asked(PERSON), rid(1): neighbour})
    assert (replies[rid(0)].reason, replies[rid(0)].error) == ("failed", "GrammarError")
    assert len(replies[rid(0)].tokens) == 3
    assert replies[rid(1)].tokens == alone


def test_a_mask_that_raises_ends_its_row_alone(engine: BatchedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    neighbour = asked("", number=1, max_tokens=12)
    alone = solo(engine, neighbour).tokens
    monkeypatch.setattr(grammar_module, "fill_next_token_bitmask", lambda *_: 1 / 0)
    replies = run(engine, {rid(0): asked(PERSON), rid(1): neighbour})
    assert (replies[rid(0)].reason, replies[rid(0)].error) == ("failed", "GrammarError")
    assert replies[rid(1)].tokens == alone


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not a JSON schema"),
        ("[1]", "not a JSON schema"),
        ("false", "not a JSON schema"),
        ('{"type":"wrong"}', "Invalid type"),
        ('{"$ref":"#/nowhere"}', "does not exist"),
        ('{"type":"string","pattern":"(?=a)b"}', "look-around"),
        ('{"type":"object","required":["x"],"additionalProperties":false}', "unsatisfiable"),
        ("[" * 100_000, "not a JSON schema"),
        (LARK + "start: nothing", "nothing"),
        (LARK, "."),
    ],
)
def test_what_is_no_grammar_is_refused_with_a_reason(grammars: Grammars, text: str, said: str) -> None:
    with pytest.raises(BadGrammar, match=said) as refused:
        grammars.row(text)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400


def test_compiled_grammars_are_kept_but_not_for_ever(grammars: Grammars) -> None:
    first = '{"const":"first"}'
    grammars.row(first)
    compiled = grammars._kept[first]
    for number in range(KEPT - 1):
        grammars.row(json.dumps({"const": number}))
        grammars.row(first)
    assert grammars._kept[first] is compiled and len(grammars._kept) == KEPT
    for number in range(KEPT):
        grammars.row(json.dumps({"const": -number}))
    assert first not in grammars._kept and len(grammars._kept) == KEPT


def test_rows_of_one_grammar_go_their_own_ways(grammars: Grammars, engine: BatchedEngine) -> None:
    one, other = grammars.row(CHOICE), grammars.row(CHOICE)
    for token in engine._texts.tokenizer.encode('"the"', add_special_tokens=False).ids:
        one.take(token)
    assert one.complete and not other.complete and not one.error
    one.take(5)
    assert not one.error


# --- Checking before queueing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "left_out"),
    [
        (True, []),
        ({}, []),
        ({"type": "object"}, []),
        ({"title": "t", "$defs": {"a": {"type": "null"}}, "$ref": "#/$defs/a"}, []),
        ({"type": "array", "uniqueItems": True, "items": {"not": {}}}, ["not", "uniqueItems"]),
        ({"properties": {"a": {"type": "string", "format": "no-such"}}}, ["format"]),
        ({"properties": {"minItem": {"minItem": 3}}}, ["minItem"]),
        ({"oneOf": [{"type": "string"}, {"minLength": 2}]}, ["oneOf"]),
        ({"oneOf": [{"type": "string"}, {"type": "null"}]}, []),
        ({"anyOf": [{"type": "string", "lookLike": 1}]}, ["lookLike"]),
        ({"x-guidance": {"lenient": False}, "type": "object"}, ["x-guidance"]),
    ],
)
def test_keywords_that_are_not_enforced_are_named(schema: object, left_out: list[str]) -> None:
    assert check_schema(json.dumps(schema)) == (True, "", left_out)


@pytest.mark.parametrize("schema", ["", "null", '"x"', "false", '{"type":"wrong"}', '{"enum":[]}', '{"minimum":"x"}'])
def test_what_no_reply_could_satisfy_is_refused_before_queueing(schema: str) -> None:
    ok, message, left_out = check_schema(schema)
    assert not ok and message and not left_out


def test_hidden_options_of_the_compiler_do_not_reach_it(grammars: Grammars, engine: BatchedEngine) -> None:
    hidden = json.dumps(json.loads(PERSON) | {"x-guidance": {"item_separator": ", +", "whitespace_pattern": " *"}})
    text = solo(engine, asked(hidden)).text
    assert json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False) == text


@pytest.mark.parametrize(
    ("schema", "left_out"),
    [
        ({"type": "string", "pattern": "^(?=.*[A-Z]).{8,}$"}, ("pattern",)),
        ({"type": "integer", "maximum": 2**64}, ("maximum",)),
        ({"type": "number", "minimum": 1e308}, ("minimum",)),
        ({"type": "integer", "default": 2**64, "$schema": "foo"}, ("$schema",)),
        ({"properties": {"pattern": {"type": "string", "pattern": "\\b", "not": {}}}}, ("not", "pattern")),
        ({"type": "object", "patternProperties": {"a": {"type": "string"}, "^a": {"type": "number"}}}, ("patternProperties",)),
        ({"enum": [{"pattern": "x"}]}, ()),
        ({"type": "string", "discriminator": {"propertyName": "x"}}, ()),
    ],
)
def test_what_cannot_be_enforced_is_left_out_of_a_schema_that_is_one(schema: object, left_out: tuple[str, ...]) -> None:
    found = enforceable(json.dumps(schema))
    assert found.text and found.left_out == left_out
    assert check_schema(found.text)[0]
    if left_out == ("not", "pattern"):
        assert json.loads(found.text)["properties"]["pattern"]["type"] == "string"


@pytest.mark.parametrize("schema", [{"type": "wrong"}, {"$ref": "#/nowhere"}, {"pattern": "(?=a)b", "minimum": "x"}])
def test_what_is_no_schema_stays_refused(schema: object) -> None:
    found = enforceable(json.dumps(schema))
    assert not found.text and found.why
