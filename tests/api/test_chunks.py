"""The bytes of replies, whole and streamed."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.chunks import ChatFormat, Choice, usage_object
from api.sse import json_text
from api.text_chunks import TextFormat
from common.generation import CONTENT, REASONING, TOOL_CALL, Piece, Summary, TokenLogprob, TopLogprob


def form() -> ChatFormat:
    return ChatFormat("chatcmpl-0123456789abcdef01234567", 1790000000, 'a "model"', "fp_0011223344556677")


HEAD = (
    b'data: {"id":"chatcmpl-0123456789abcdef01234567","object":"chat.completion.chunk","created":1790000000,'
    b'"model":"a \\"model\\"","choices":['
)
TAIL = b',"system_fingerprint":"fp_0011223344556677"}\n\n'


def test_a_stream_byte_for_byte() -> None:
    chunks = form()
    assert chunks.opening(0) == (
        HEAD + b'{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null,"logprobs":null}]' + TAIL
    )
    assert chunks.pieces(1, [Piece(CONTENT, 'é"\n')]) == (
        HEAD + '{"index":1,"delta":{"content":"é\\"\\n"},"finish_reason":null,"logprobs":null}]'.encode() + TAIL
    )
    assert chunks.pieces(0, [Piece(REASONING, "hm")]) == (
        HEAD + b'{"index":0,"delta":{"reasoning_content":"hm"},"finish_reason":null,"logprobs":null}]' + TAIL
    )
    assert chunks.finish(2, "length") == (
        HEAD + b'{"index":2,"delta":{},"finish_reason":"length","logprobs":null}]' + TAIL
    )
    usage = (
        b'],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5,"prompt_tokens_details":{"cached_tokens":1},'
        b'"completion_tokens_details":{"reasoning_tokens":0}}'
    )
    assert chunks.usage([Summary(3, 2, 1)]) == HEAD + usage + TAIL + b"data: [DONE]\n\n"


def test_a_whole_reply_byte_for_byte() -> None:
    chunks = form()
    choice = Choice(0)
    choice.add([Piece(REASONING, "hm"), Piece(CONTENT, "Hé"), Piece(CONTENT, "llo")], chunks.call_ids)
    choice.finish_reason = "stop"
    assert chunks.whole([choice], [Summary(3, 2)]).decode() == (
        '{"id":"chatcmpl-0123456789abcdef01234567","object":"chat.completion","created":1790000000,"model":"a \\"model\\"",'
        '"choices":[{"index":0,"message":{"role":"assistant","content":"Héllo","reasoning_content":"hm"},'
        '"finish_reason":"stop","logprobs":null}],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5,'
        '"prompt_tokens_details":{"cached_tokens":0},"completion_tokens_details":{"reasoning_tokens":0}},'
        '"system_fingerprint":"fp_0011223344556677"}'
    )


def parsed(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in data.split(b"\n\n") if line]


def test_a_tool_call_is_streamed_as_name_then_arguments_with_one_id() -> None:
    chunks = form()
    pieces = [
        Piece(TOOL_CALL, "", call=0, name="look"),
        Piece(TOOL_CALL, '{"a":', call=0),
        Piece(TOOL_CALL, "1}", call=0),
        Piece(TOOL_CALL, "{}", call=1, name="see"),
    ]
    deltas = [chunk["choices"][0]["delta"]["tool_calls"][0] for chunk in parsed(chunks.pieces(0, pieces))]
    first, second = deltas[0]["id"], deltas[3]["id"]
    assert first.startswith("call_") and second.startswith("call_") and first != second
    assert deltas == [
        {"index": 0, "id": first, "type": "function", "function": {"name": "look", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"a":'}},
        {"index": 0, "function": {"arguments": "1}"}},
        {"index": 1, "id": second, "type": "function", "function": {"name": "see", "arguments": "{}"}},
    ]
    choice = Choice(0)
    choice.add(pieces, chunks.call_ids)
    message = json.loads(chunks.whole([choice], []))["choices"][0]["message"]
    assert message == {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": first, "type": "function", "function": {"name": "look", "arguments": '{"a":1}'}},
            {"id": second, "type": "function", "function": {"name": "see", "arguments": "{}"}},
        ],
    }


def test_content_is_null_only_beside_tool_calls() -> None:
    empty, spoken = Choice(0), Choice(0)
    spoken.add([Piece(CONTENT, "Look:"), Piece(TOOL_CALL, "{}", call=0, name="f")], form().call_ids)
    replies = [json.loads(form().whole([choice], []))["choices"][0]["message"] for choice in (empty, spoken)]
    assert replies[0] == {"role": "assistant", "content": ""}
    assert replies[1]["content"] == "Look:"


def test_logprobs_have_openais_shape_in_both_forms() -> None:
    rival = TopLogprob("\u2028", -2.0, [226, 128, 168])
    piece = Piece(CONTENT, "a", [TokenLogprob("a", -0.5, [97], [rival])])
    shape = {
        "content": [
            {
                "token": "a",
                "logprob": -0.5,
                "bytes": [97],
                "top_logprobs": [{"token": "\u2028", "logprob": -2.0, "bytes": [226, 128, 168]}],
            }
        ],
        "refusal": None,
    }
    chunk = form().pieces(0, [piece])
    assert parsed(chunk)[0]["choices"][0]["logprobs"] == shape
    assert len(chunk.decode().splitlines()) == 2
    choice = Choice(0)
    choice.add([piece], form().call_ids)
    assert json.loads(form().whole([choice], []))["choices"][0]["logprobs"] == shape


def test_no_empty_content_chunks() -> None:
    assert form().pieces(0, [Piece(CONTENT, ""), Piece(REASONING, "")]) == b""


LATE = TokenLogprob("", -0.25, [], [])


def test_logprobs_that_come_after_their_text_leave_with_the_next_event_that_is_one() -> None:
    chat = form()
    reasoning = Piece(REASONING, "hm")
    assert chat.pieces(0, [Piece(CONTENT, "", [LATE]), reasoning]) == form().pieces(0, [reasoning])
    (content,) = parsed(chat.pieces(0, [Piece(CONTENT, "a", [TokenLogprob("a", -0.5, [97], [])])]))
    assert [one["logprob"] for one in content["choices"][0]["logprobs"]["content"]] == [-0.25, -0.5]
    assert chat.pieces(1, [Piece(CONTENT, "", [LATE])]) == b""
    assert parsed(chat.finish(0, "stop"))[0]["choices"][0]["logprobs"] is None, "of another choice"
    (finish,) = parsed(chat.finish(1, "stop"))
    assert finish["choices"][0]["delta"] == {}
    assert [one["logprob"] for one in finish["choices"][0]["logprobs"]["content"]] == [-0.25]


def test_a_completions_late_logprobs_leave_with_its_last_chunk() -> None:
    text = TextFormat("cmpl-1", 1, "m", "fp", ["", ""], 2)
    assert text.pieces(1, [Piece(CONTENT, "", [LATE])]) == b""
    assert parsed(text.finish(0, "stop"))[0]["choices"][0]["logprobs"] is None
    (finish,) = parsed(text.finish(1, "length"))
    assert finish["choices"][0]["logprobs"]["token_logprobs"] == [-0.25]


def test_usage_adds_up_over_choices_and_shows_drafts_when_there_were_any() -> None:
    usage = usage_object([Summary(7, 3, 2, 1), Summary(7, 4, 0, 0, 5, 6)])
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (7, 7, 14)
    assert usage["completion_tokens_details"] == {
        "reasoning_tokens": 1,
        "accepted_prediction_tokens": 5,
        "rejected_prediction_tokens": 6,
    }


@settings(max_examples=40)
@given(st.lists(st.text(min_size=1), min_size=1))
def test_the_concatenated_stream_equals_the_whole_reply(texts: list[str]) -> None:
    chunks, choice = form(), Choice(0)
    pieces = [Piece(CONTENT, text) for text in texts]
    choice.add(pieces, chunks.call_ids)
    streamed = "".join(chunk["choices"][0]["delta"]["content"] for chunk in parsed(chunks.pieces(0, pieces)))
    assert streamed == json.loads(chunks.whole([choice], []))["choices"][0]["message"]["content"] == "".join(texts)


def test_json_text_is_that_of_json_dumps_but_for_three_line_breaks() -> None:
    for start in range(0, 0x110000, 256):
        if not 0xD800 <= start < 0xE000:
            text = "".join(map(chr, range(start, start + 256)))
            expected = json.dumps(text, ensure_ascii=False)
            for line_break in "\x85\u2028\u2029":
                expected = expected.replace(line_break, json.dumps(line_break)[1:-1])
            assert json_text(text) == expected.encode(), hex(start)


@pytest.mark.parametrize("text", ["\x85", "\u2028", "\u2029", "\x0b", "\x1c", "\r", "\n"])
def test_no_text_can_break_a_line(text: str) -> None:
    assert len(form().pieces(0, [Piece(CONTENT, f"a{text}b")]).decode().splitlines()) == 2


def test_a_completions_stream_opens_with_its_echo_or_a_comment() -> None:
    form = TextFormat("cmpl-1", 1, "m", "fp", ["", "", "One "], 1)
    assert (form.opening(0), form.opening(1)) == (b": keep-alive\n\n", b"")
    assert parsed(form.opening(2))[0]["choices"] == [
        {"text": "One ", "index": 2, "logprobs": None, "finish_reason": None}
    ]
