"""Forced calls read back as calls in every format of mlx-lm, and what reasoning and JSON mode add to a grammar."""

import importlib
import json
import random
import re
from typing import Any

import jsonschema
import pytest
from tokenizers import AddedToken, Tokenizer

from common.generation import CONTENT, TOOL_CALL, GenerationRequest
from common.json_schema import LARK
from fixtures.tiny_tokenizer import build
from tests.worker.grammar_walk import Walker
from worker import reply_grammar as module
from worker.call_syntax import SYNTAXES
from worker.engine import Markup, Unsupported
from worker.engines import markup as markups
from worker.reply_grammar import MOST_CALLS
from worker.router import Router
from worker.tool_calls import Offer, ToolCalls, read_offer

# Special tokens of the formats' families; in each some markers are special and some are letters.
SPECIAL = ["<|im_end|>", "[TOOL_CALLS]", "[ARGS]", "<start_function_call>", "<end_function_call>", "<escape>",
           "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|open|>", "<|close|>",
           "<|sep|>", "<|tool_call_start|>", '<|"|>', "<channel|>"]  # fmt: skip
# Added, and no special tokens to their tokenizer: Qwen has such.
PLAIN = ["<tool_call>", "</tool_call>", "<think>"]
CITY = {"type": "string"}
PARAMETERS: dict[str, dict[str, Any]] = {
    "plain": {"type": "object", "properties": {"city": CITY, "days": {"type": "integer"}}, "required": ["city"]},
    "none": {},
    "all optional": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "string"}, "c": {"type": "number", "minimum": -9}},
    },
    "referred": {"$ref": "#/$defs/all", "$defs": {"all": {
        "type": "object", "properties": {"q": {"type": "integer"}}, "required": ["q"]}}},
    "one part": {"allOf": [{"type": "object", "properties": {"q": {"type": "integer"}}, "required": ["q"]}]},
    "choices": {
        "type": "object",
        "properties": {"unit": {"type": "string", "enum": ["c", "f"]}, "level": {"enum": ["low", "high"]},
                       "kind": {"const": "x"}},
        "required": ["unit", "level", "kind"],
    },
}  # fmt: skip
NESTED: dict[str, dict[str, Any]] = {
    "nested": {
        "type": "object",
        "properties": {
            "where": {"$ref": "#/$defs/place"},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
        },
        "required": ["where", "tags"],
        "$defs": {"place": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"],
                            "additionalProperties": False}},
    },
}  # fmt: skip


def tokenizer() -> Tokenizer:
    found = build("byte_level", PLAIN)
    found.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return found


@pytest.fixture(scope="module")
def tokens() -> Tokenizer:
    return tokenizer()


def reply_grammar(request: GenerationRequest, offer: Offer, markup: Markup) -> str:
    """With the special tokens of tokenizer(), of which llguidance also knows the plain ones that look so."""
    known = tokenizer()
    return module.reply_grammar(request, offer, markup, {text: known.token_to_id(text) for text in (*SPECIAL, *PLAIN)})


def markup_of(parser: str, tokens: Tokenizer, **more: Any) -> Markup:
    """As worker/engines/markup makes it of a model whose parser it is."""
    theirs = importlib.import_module(f"mlx_lm.tool_parsers.{parser}")
    parse = markups._strict(theirs.parse_tool_call) if parser in markups.LENIENT else theirs.parse_tool_call
    return Markup(
        tool_start=theirs.tool_call_start, tool_end=theirs.tool_call_end, parse=parse, form=markups.FORMS.get(parser),
        syntax=SYNTAXES[parser], router=Router({tokens.token_to_id(text): text for text in SPECIAL}), **more,
    )  # fmt: skip


def tool(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def offered(*tools: dict[str, Any], choice: str = "required", named: bool = False, parallel: bool = True) -> Offer:
    return read_offer(json.dumps({"tools": tools, "choice": choice, "named": named, "parallel": parallel}))


def asked(**fields: Any) -> GenerationRequest:
    return GenerationRequest([1], 10, **fields)


def walks(grammar: str, tokens: Tokenizer, closers: list[str], seed: int) -> str:
    """A reply drawn at random from all that the grammar allows, with special tokens spelled."""
    return Walker(tokens, grammar, closers).text(random.Random(seed))


def calls_in(text: str, markup: Markup, offer: Offer) -> list[tuple[str, Any]]:
    """The calls of a reply that consists of blocks of calls."""
    found: dict[int, list[str]] = {}
    collected = ToolCalls(markup, offer)
    while text:
        assert text.startswith(markup.tool_start), text
        text = text[len(markup.tool_start) :]
        end = re.search(re.escape(markup.tool_end or markup.tool_start) if markup.tool_end else r"\Z", text)
        assert end is not None, text
        block, text = text[: end.start()], text[end.end() :]
        collected.open(markup.tool_start, CONTENT)
        for event in [*collected.feed(block), *collected.close(markup.tool_end)]:
            if event.channel == TOOL_CALL:
                one = found.setdefault(event.call, [event.name, ""])
                one[1] += event.text
            else:
                assert not event.text, f"{event.text!r} is content"
    return [(name, json.loads(arguments)) for name, arguments in found.values()]


@pytest.mark.slow
@pytest.mark.parametrize("parser", SYNTAXES)
def test_a_forced_call_is_read_back_with_every_argument_in_its_schema(parser: str, tokens: Tokenizer) -> None:
    markup = markup_of(parser, tokens)
    schemas = PARAMETERS if parser == "function_gemma" else PARAMETERS | NESTED
    form = SYNTAXES[parser].arguments
    marks = [markup.tool_end, *([form.quote + form.end, form.end + form.between] if form else [])]
    for index, (about, parameters) in enumerate(schemas.items()):
        # A JSON string may spell the format's own markers, and then nothing helps.
        closers = ['"', "]", "}", *(marks if form and about not in NESTED and form.is_text({"type": "string"}, frozenset({"string"})) else [])]
        for seed in range(4):
            offer = offered(tool("look", parameters), tool("other", {}), choice="look", named=True)
            text = walks(reply_grammar(asked(), offer, markup), tokens, closers, 10 * index + seed)
            ((name, arguments),) = calls_in(text, markup, offer)
            assert name == "look", about
            closed = {} if about in ("referred", "one part") else {"additionalProperties": False}
            jsonschema.validate(arguments, {**parameters, **closed})


def test_every_format_of_mlx_lm_can_be_forced() -> None:
    import pkgutil

    import mlx_lm.tool_parsers

    assert {one.name for one in pkgutil.iter_modules(mlx_lm.tool_parsers.__path__)} == set(SYNTAXES)


def test_required_takes_any_function_and_more_than_one_call(tokens: Tokenizer) -> None:
    markup = markup_of("json_tools", tokens)
    offer = offered(tool("look", PARAMETERS["choices"]), tool("go", {}))
    grammar = reply_grammar(asked(), offer, markup)
    replies = [calls_in(walks(grammar, tokens, [], seed), markup, offer) for seed in range(12)]
    assert {name for calls in replies for name, _ in calls} == {"look", "go"}
    assert max(map(len, replies)) > 1 and min(map(len, replies)) >= 1 and max(map(len, replies)) <= MOST_CALLS
    alone = reply_grammar(asked(), offered(tool("go", {}), parallel=False), markup)
    assert {len(calls_in(walks(alone, tokens, [], seed), markup, offer)) for seed in range(6)} == {1}


def test_no_other_text_is_allowed_beside_a_forced_call(tokens: Tokenizer) -> None:
    markup = markup_of("json_tools", tokens)
    grammar = reply_grammar(asked(), offered(tool("go", {})), markup)
    for text in ("Sure.", "{", "<tool_call>\n{\"name\": \"stay\""):
        assert not Walker(tokens, grammar, []).allows(text), text
    assert Walker(tokens, grammar, []).allows("<tool_call>\n{\"name\": \"go\", \"arguments\": {}")


@pytest.mark.parametrize(
    ("parser", "name", "parameters", "said"),
    [
        ("pythonic", "look-up", {}, "look-up"),
        ("pythonic", "look", {"properties": {"two words": {}}}, "two words"),
        ("qwen3_coder", "look", {"properties": {"a>b": {}}}, "a>b"),
        ("qwen3_coder", "look", {"anyOf": [{"type": "object"}]}, "at the root"),
        ("function_gemma", "look", {"properties": {"x": {"type": "array"}}}, "arrays or objects"),
    ],
)
def test_what_a_format_cannot_write_is_refused(
    parser: str, name: str, parameters: dict[str, Any], said: str, tokens: Tokenizer
) -> None:
    with pytest.raises(Unsupported, match=f"^tool_choice: .*{said}"):
        reply_grammar(asked(), offered(tool(name, parameters)), markup_of(parser, tokens))


def test_a_model_without_a_format_cannot_be_forced(tokens: Tokenizer) -> None:
    with pytest.raises(Unsupported, match="^tool_choice: "):
        reply_grammar(asked(), offered(tool("go", {})), Markup(tool_start="["))


# --- Reasoning, and JSON beside tools ---------------------------------------------------------------------------------

SCHEMA = '{"type":"object","properties":{"n":{"type":"integer"}},"required":["n"],"additionalProperties":false}'
THINKS = {"think_start": "<think>", "think_end": "</think>"}


def test_a_schema_alone_stays_as_it_is_and_a_free_reply_has_no_grammar() -> None:
    assert reply_grammar(asked(), Offer(), Markup(**THINKS)) == ""
    assert reply_grammar(asked(thinking=True), Offer(), Markup(**THINKS)) == ""
    assert reply_grammar(asked(grammar=SCHEMA), Offer(), Markup(**THINKS)) == SCHEMA
    assert reply_grammar(asked(grammar=SCHEMA, thinking=True), Offer(), Markup()) == SCHEMA
    assert reply_grammar(asked(grammar=LARK + "start: x"), Offer(), Markup(**THINKS)) == LARK + "start: x"


@pytest.mark.parametrize("end", ["</think>", "<channel|>"])
def test_reasoning_comes_before_json_and_is_free(end: str, tokens: Tokenizer) -> None:
    markup = Markup(
        think_start="<think>", think_end=end, router=Router({tokens.token_to_id(text): text for text in SPECIAL})
    )
    opened = reply_grammar(asked(grammar=SCHEMA, thinking=True, reasoning_open=True), Offer(), markup)
    maybe = reply_grammar(asked(grammar=SCHEMA, thinking=True), Offer(), markup)
    answer = '{"n":5}'
    for grammar, text, allowed in (
        (opened, f'hm {{"n": "x"}}\n{end}{answer}', True),
        (opened, f"{end}{answer}", True),
        (opened, f"hm{end} so", False),
        (maybe, answer, True),
        (maybe, f"<think>hm{end}{answer}", True),
        (maybe, f"hm{end}{answer}", False),
    ):
        assert Walker(tokens, grammar, []).allows(text) == allowed, text
    # It has to answer before it may end.
    assert not Walker(tokens, opened, []).may_end("hm")
    assert not Walker(tokens, opened, []).may_end(f"hm{end}")
    assert Walker(tokens, opened, []).may_end(f"hm{end}{answer}")


def test_json_mode_leaves_the_choice_of_a_call(tokens: Tokenizer) -> None:
    markup = markup_of("json_tools", tokens)
    grammar = reply_grammar(asked(grammar=SCHEMA), offered(tool("go", {}), choice="auto"), markup)
    for text, allowed in (
        ('{"n":5}', True),
        ('<tool_call>\n{"name": "go", "arguments": {}}\n</tool_call>', True),
        ("Hello", False),
    ):
        assert Walker(tokens, grammar, []).allows(text) == allowed, text


def test_an_answer_is_announced_where_every_part_is(tokens: Tokenizer) -> None:
    theirs = importlib.import_module("mlx_lm.chat_templates.muse_spark")
    shape = theirs.RESPONSE_FORMAT
    markup = Markup(states=shape["transitions"], opening=shape["initial_state"])
    grammar = reply_grammar(asked(grammar=SCHEMA), Offer(), markup)
    assert Walker(tokens, grammar, []).allows('to=user<|message|>{"n":5}')
    assert not Walker(tokens, grammar, []).allows('{"n":5}')
