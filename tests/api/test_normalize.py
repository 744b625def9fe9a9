"""The chat route's fields, one by one: what is taken, what is refused and by which name."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.normalize import KNOWN, ONE_OBJECT, NormalizedChat, ResponseFormat, normalize_chat
from api.responses import RequestError
from common.generation import GenerationRequest, Sampling, pack_request, unpack_request

USER = {"role": "user", "content": "hi"}


def normalized(strict: bool = False, **fields: Any) -> NormalizedChat:
    body = {"model": "m", "messages": [USER]} | fields
    return normalize_chat({name: value for name, value in body.items() if value is not ...}, 8192, strict)


def refused(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        normalized(**fields)
    assert (caught.value.status, caught.value.kind) == (400, "invalid_request_error")
    return caught.value


def test_the_least_request() -> None:
    chat = normalized()
    assert chat == NormalizedChat("m", [USER], 1024, template_kwargs={"enable_thinking": False}, said=[USER])


@pytest.mark.parametrize("name", sorted(KNOWN - {"messages", "model"}))
def test_null_is_absent_for_every_optional_field(name: str) -> None:
    assert normalized(**{name: None}) == normalized()


MAX_TOKENS = [
    ({"max_tokens": 1}, 1),
    ({"max_tokens": 8192}, 8192),
    ({"max_tokens": 8193}, 8192),
    ({"max_tokens": 10**30}, 8192),
    ({"max_completion_tokens": 7}, 7),
    ({"max_tokens": None, "max_completion_tokens": 7}, 7),
    ({"max_tokens": 5, "max_completion_tokens": 7}, 5),
    ({}, 1024),
]


@pytest.mark.parametrize(("fields", "value"), MAX_TOKENS)
def test_max_tokens_is_clamped_never_refused(fields: dict[str, Any], value: int) -> None:
    assert normalized(**fields).max_tokens == value


def test_the_default_is_capped_likewise() -> None:
    assert normalize_chat({"model": "m", "messages": [USER]}, 100).max_tokens == 100


WRONG: list[tuple[str, Any]] = [
    *[("max_tokens", value) for value in (0, -1, 1.5, 50.0, "5", True, False, [], {}, -(10**30))],
    *[("max_completion_tokens", value) for value in (0, "x", True)],
    *[("model", value) for value in (None, ..., 5, ["m"], True)],
    *[("stream", value) for value in (1, 0, "true", [])],
    *[("stream_options", value) for value in ("yes", [], True)],
    *[("stop", value) for value in (5, "", [""], ["a", 5], ["x"] * 17, {}, True, [None])],
    ("stop", ["x" * 2**20, "y"]),
    ("tools", [{"type": "function", "function": {"name": "f", "description": "x" * 2**22}}]),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": {"title": "x" * 2**22}}}),
    *[("temperature", value) for value in (-0.1, 2.1, "1", True, [])],
    *[("top_p", value) for value in (0, -1, 1.1, "1", False)],
    *[("top_k", value) for value in (-2, 1.0, "5", True)],
    *[("min_p", value) for value in (-0.1, 1.1, "0")],
    *[("seed", value) for value in (1.0, "1", True)],
    *[("repetition_penalty", value) for value in (0, -1, "1", True)],
    *[("presence_penalty", value) for value in (-2.1, 2.1, "0")],
    *[("frequency_penalty", value) for value in (-2.1, 2.1, True)],
    *[
        ("logit_bias", value)
        for value in ([], {"a": 1}, {"1": 101}, {"1": "2"}, {"-1": 1}, {"1": True}, {"1.5": 1}, {"": 1})
    ],
    *[("logit_bias", {"9" * 11: 1}), ("logit_bias", {"4294967296": 1}), ("logit_bias", {"٣": 1})],
    *[("n", value) for value in (0, 17, 1.0, "1", True, 10**30)],
    *[("logprobs", value) for value in (1, "true", 0)],
    *[("top_logprobs", value) for value in (21, -1, "1", True, 5)],
    *[("parallel_tool_calls", value) for value in (1, "x")],
    *[("chat_template_kwargs", value) for value in ([], [1], "x", 1, {"messages": []}, {"chat_template": "x"})],
    *[("reasoning_effort", value) for value in ("max", 1, True, "", [])],
    *[("priority", value) for value in (-11, 11, 1.0, "1", True)],
    *[("functions", []), ("function_call", "auto"), ("best_of", 1), ("suffix", ""), ("modalities", ["text"])],
    *[("audio", {}), ("prediction", {}), ("web_search_options", {})],
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_wrong_value_is_a_400_naming_its_field(name: str, value: Any) -> None:
    error = refused(**{name: value})
    assert error.param == name
    assert name in error.message


RIGHT: list[tuple[str, Any, str, Any]] = [
    ("stop", "x", "stop", ["x"]),
    ("stop", [], "stop", []),
    ("stop", ["a"] * 16, "stop", ["a"] * 16),
    ("n", 16, "n", 16),
    ("stream", True, "stream", True),
    ("priority", -10, "priority", -10),
    ("temperature", 0, "sampling", {"temperature": 0.0}),
    ("temperature", 2, "sampling", {"temperature": 2.0}),
    ("top_p", 1, "sampling", {"top_p": 1.0}),
    ("top_k", -1, "sampling", {"top_k": 0}),
    ("top_k", 10**30, "sampling", {"top_k": 2**31 - 1}),
    ("seed", -1, "sampling", {"seed": 2**63 - 1}),
    ("seed", 2**63 + 5, "sampling", {"seed": 5}),
    ("logit_bias", {"7": -100, "007": 1}, "sampling", {"logit_bias": {7: 1.0}}),
    ("logprobs", True, "top_logprobs", 0),
    ("logprobs", False, "top_logprobs", -1),
    ("top_logprobs", 0, "top_logprobs", -1),
    ("chat_template_kwargs", {"enable_thinking": True, "x": 1}, "template_kwargs", {"enable_thinking": True, "x": 1}),
    ("chat_template_kwargs", {"enable_thinking": None}, "template_kwargs", {"enable_thinking": False}),
    ("reasoning_effort", "none", "template_kwargs", {"enable_thinking": False, "reasoning_effort": "none"}),
    ("reasoning_effort", "low", "template_kwargs", {"enable_thinking": True, "reasoning_effort": "low"}),
]


@pytest.mark.parametrize(("name", "value", "attribute", "expected"), RIGHT)
def test_a_right_value_is_honoured(name: str, value: Any, attribute: str, expected: Any) -> None:
    assert getattr(normalized(**{name: value}), attribute) == expected


def test_enable_thinking_comes_first_and_the_client_has_the_last_word() -> None:
    kwargs = normalized(
        chat_template_kwargs={"b": 1, "enable_thinking": False}, reasoning_effort="high"
    ).template_kwargs
    assert list(kwargs) == ["enable_thinking", "b", "reasoning_effort"]
    assert kwargs["enable_thinking"] is False


def test_top_logprobs_need_logprobs() -> None:
    assert normalized(logprobs=True, top_logprobs=20).top_logprobs == 20
    assert refused(logprobs=False, top_logprobs=1).param == "top_logprobs"


# Messages

WRONG_MESSAGES: list[tuple[Any, str]] = [
    (None, "messages must be"),
    ([], "messages must be"),
    ("hi", "messages must be"),
    ({"role": "user"}, "messages must be"),
    (["hi"], r"messages\[0\]"),
    ([USER, 7], r"messages\[1\]"),
    ([{"content": "hi"}], r"messages\[0\]\.role"),
    ([{"role": 5, "content": "hi"}], r"messages\[0\]\.role"),
    ([{"role": "user", "content": 7}], r"messages\[0\]\.content"),
    ([{"role": "user", "content": {"type": "text", "text": "x"}}], r"messages\[0\]\.content"),
    ([{"role": "user", "content": ["hello"]}], r"content\[0\]"),
    ([{"role": "user", "content": [{"type": "text", "text": 5}]}], r"content\[0\]\.text"),
    ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\]\.text"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "image input"),
    ([{"role": "user", "content": [{"type": "input_audio"}]}], "audio input"),
    ([{"role": "user", "content": [{"type": "file"}]}], "file input"),
    ([{"role": "user", "content": [{"type": ["text"]}]}], r"content\[0\]"),
    ([{"role": "assistant", "function_call": {"name": "f"}}], "function_call"),
    ([{"role": "assistant", "tool_calls": {}}], "tool_calls"),
    ([{"role": "assistant", "tool_calls": [{}]}], r"tool_calls\[0\]"),
    ([{"role": "assistant", "tool_calls": [{"type": "custom", "function": {"name": "f"}}]}], r"tool_calls\[0\]"),
    ([{"role": "assistant", "tool_calls": [{"function": {"name": 1}}]}], "name"),
    ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}], "arguments"),
    ([{"role": "assistant", "tool_calls": [{"id": 5, "function": {"name": "f"}}]}], r"\.id"),
    ([{"role": "tool", "tool_call_id": 5}], "tool_call_id"),
    ([{"role": "user", "name": 5}], "name"),
    ([{"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}], r"\[0\]\.content\[0\] must be .* text"),
    ([{"role": "assistant", "content": [{"type": "refusal", "text": "x"}]}], r"content\[0\]\.refusal"),
    ([{"role": "assistant", "refusal": 5}], r"\[0\]\.refusal"),
]


@pytest.mark.parametrize(("messages", "words"), WRONG_MESSAGES)
def test_a_wrong_message_is_named_by_its_index(messages: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        normalized(messages=messages)
    assert caught.value.param == "messages"


def test_messages_keep_what_they_have_and_lose_what_is_null() -> None:
    echoed = {"role": "assistant", "content": None, "refusal": None, "tool_calls": None, "x": [None], "name": "n"}
    chat = normalized(messages=[echoed, {"role": "narrator"}])
    assert chat.messages == [
        {"role": "assistant", "content": None, "x": [None], "name": "n"},
        {"role": "narrator", "content": None},
    ]


def test_what_an_assistant_refused_is_what_it_said() -> None:
    parts = [{"type": "text", "text": "No."}, {"type": "refusal", "refusal": "I may not."}]
    given = [{"role": "assistant", "content": parts}, {"role": "assistant", "content": None, "refusal": "Never."}]
    in_parts, as_field = normalized(messages=given).messages
    assert in_parts["content"] == [{"type": "text", "text": "No."}, {"type": "text", "text": "I may not."}]
    assert as_field["content"] == "Never."
    assert parts[1] == {"type": "refusal", "refusal": "I may not."}, "the client's objects are never changed"


# Tools

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def test_tools_and_their_choice() -> None:
    assert not normalized(tools=[]).tools.offered
    assert not normalized(tools=[TOOL], tool_choice="none").tools.offered
    assert normalized(tool_choice="auto").tools.packed() == ""
    given = normalized(
        tools=[TOOL], tool_choice={"type": "function", "function": {"name": "look"}}, parallel_tool_calls=False
    )
    assert given.tools.offered == [TOOL]
    assert json.loads(given.tools.packed()) == {"tools": [TOOL], "choice": "look", "named": True, "parallel": False}
    assert normalized(tools=[TOOL]).tools.choice == "auto"


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ({}, None, "tools"),
        ([5], None, "tools"),
        ([{"type": "retrieval"}], None, "tools"),
        ([{"type": "function"}], None, "tools"),
        ([{"type": "function", "function": {"name": ""}}], None, "tools"),
        ([{"type": "function", "function": {"name": "a b"}}], None, "tools"),
        ([{"type": "function", "function": {"name": "x" * 65}}], None, "tools"),
        ([{"type": "function", "function": {"name": "f", "parameters": []}}], None, "tools"),
        ([{"type": "function", "function": {"name": "f", "description": 5}}], None, "tools"),
        ([{"type": "function", "function": {"name": "f", "strict": 1}}], None, "tools"),
        ([TOOL, TOOL], None, "tools"),
        ([TOOL], "always", "tool_choice"),
        ([TOOL], 5, "tool_choice"),
        ([TOOL], {"type": "function", "function": {"name": "other"}}, "tool_choice"),
        ([TOOL], {"type": "function"}, "tool_choice"),
        (None, "required", "tool_choice"),
        (None, {"type": "function", "function": {"name": "look"}}, "tool_choice"),
    ],
)
def test_wrong_tools_are_refused_by_name(tools: Any, choice: Any, param: str) -> None:
    assert refused(tools=tools, tool_choice=choice).param == param


# JSON mode


def test_json_mode_adds_its_sentence_and_changes_nothing_of_the_clients() -> None:
    system = {"role": "system", "content": "Be brief. \u3000\n", "name": "s"}
    messages = [system, USER]
    chat = normalized(messages=messages, response_format={"type": "json_object"})
    assert chat.messages == [{**system, "content": f"Be brief.\n\n{ONE_OBJECT}"}, USER]
    assert system["content"] == "Be brief. \u3000\n"
    chat = normalized(response_format={"type": "json_object"})
    assert chat.messages == [{"role": "system", "content": ONE_OBJECT}, USER]
    parts = {"role": "system", "content": [{"type": "text", "text": "x"}]}
    assert (
        normalized(messages=[parts, USER], response_format={"type": "json_object"}).messages[0]["content"] == ONE_OBJECT
    )


def test_a_schema_follows_as_json_text() -> None:
    schema = {"type": "object", "title": "Ville ✨"}
    chat = normalized(response_format={"type": "json_schema", "json_schema": {"schema": schema, "strict": True}})
    assert chat.messages[0]["content"] == (
        f'{ONE_OBJECT} It must match this JSON schema: {{"type": "object", "title": "Ville ✨"}}'
    )
    assert chat.response_format == ResponseFormat("json_schema", schema, True)
    for spec in ({}, {"schema": {}}, {"name": "c"}):
        wanted = normalized(response_format={"type": "json_schema", "json_schema": spec})
        assert wanted.messages[0]["content"] == ONE_OBJECT and wanted.response_format.json_mode


@pytest.mark.parametrize(
    "value",
    [
        "json_object",
        [],
        {},
        {"type": "JSON_OBJECT"},
        {"type": 5},
        {"type": ["text"]},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": None},
        {"type": "json_schema", "json_schema": "s"},
        {"type": "json_schema", "json_schema": {"schema": [1]}},
        {"type": "json_schema", "json_schema": {"schema": "any"}},
        {"type": "json_schema", "json_schema": {"strict": 1}},
    ],
)
def test_a_wrong_response_format_is_refused(value: Any) -> None:
    assert refused(response_format=value).param == "response_format"


def test_plain_text_asks_for_nothing() -> None:
    assert normalized(response_format={"type": "text"}).messages == [USER]


# Ignored fields


def test_unknown_fields_are_listed_in_the_bodys_order() -> None:
    assert normalized(zeta=1, user="u", alpha=None, metadata={}, beta=0).ignored == ("zeta", "user", "metadata", "beta")


def test_strict_mode_refuses_unknown_fields_but_not_the_exempt() -> None:
    assert normalized(strict=True, user="u", metadata={}, store=True, service_tier="auto").ignored
    error = refused(strict=True, surprise=1)
    assert error.param == "surprise"


# Whatever comes

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.slow
@given(st.dictionaries(st.sampled_from(sorted(KNOWN)), JSON, max_size=6))
def test_anything_is_normalized_and_packs_or_is_a_400(fields: dict[str, Any]) -> None:
    try:
        chat = normalized(**fields)
    except RequestError as error:
        assert error.status == 400 and error.body()
        return
    request = GenerationRequest(
        prompt=[1],
        max_tokens=chat.max_tokens,
        sampling=Sampling(**chat.sampling),
        stop=chat.stop,
        top_logprobs=chat.top_logprobs,
        tools=chat.tools.packed(),
    )
    assert unpack_request(pack_request(request)) == request


def test_a_template_without_system_messages_finds_the_sentence_of_json_mode_in_place() -> None:
    asks = {"response_format": {"type": "json_object"}}
    assert normalized().otherwise is None
    (user,) = normalized(**asks).otherwise or []
    assert user["role"] == "user" and user["content"].endswith(f"\n\n{ONE_OBJECT}")
    parts = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "x"}]}]
    system, user = normalized(messages=parts, **asks).otherwise or []
    assert system == parts[0] and [part["text"] for part in user["content"]] == ["x", f"\n\n{ONE_OBJECT}"]
    assert parts[1]["content"] == [{"type": "text", "text": "x"}]
    developer, _ = normalized(messages=[{"role": "developer", "content": "d"}, *parts[1:]], **asks).otherwise or []
    assert developer == {"role": "developer", "content": f"d\n\n{ONE_OBJECT}"}
    assert normalized(messages=[{"role": "assistant", "content": "x"}], **asks).otherwise is None


def test_the_sentence_in_place_is_made_for_those_templates_alone() -> None:
    chat = normalized(response_format={"type": "json_object"})
    assert "otherwise" not in vars(chat)
    assert chat.otherwise is chat.otherwise


def test_calls_in_a_history_may_leave_out_what_they_lack() -> None:
    call = {"id": None, "type": None, "function": {"name": "f", "arguments": None}}
    (first, second) = normalized(
        messages=[
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "assistant", "content": "x", "tool_calls": []},
        ]
    ).messages
    assert first["tool_calls"] == [{"function": {"name": "f"}}]
    assert second == {"role": "assistant", "content": "x"}
