"""Reading responses: framing and events cut anywhere, and what counts as a whole reply."""

import json
import random

import pytest

from scripts.loadtest.events import EventReader
from scripts.loadtest.http_reply import HttpReply, Malformed
from scripts.loadtest.plan import Ask
from scripts.loadtest.reply import Reply

CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5\r\nhello\r\n7;x=y\r\n, world\r\n0\r\n\r\n"
)


def in_pieces(data: bytes, seed: int) -> list[bytes]:
    chance = random.Random(seed)
    pieces, at = [], 0
    while at < len(data):
        size = chance.randint(1, 9)
        pieces.append(data[at : at + size])
        at += size
    return pieces


@pytest.mark.parametrize("seed", range(50))
def test_a_chunked_body_is_the_same_however_it_is_cut(seed: int) -> None:
    reply = HttpReply()
    body = b""
    for piece in in_pieces(CHUNKED, seed):
        assert not reply.whole
        body += reply.feed(piece)
    assert body == b"hello, world" and reply.whole and reply.reusable
    assert reply.status == 200 and reply.headers["content-type"] == "text/event-stream"


@pytest.mark.parametrize("cut", range(1, len(CHUNKED)))
def test_a_chunked_response_that_ends_early_is_never_whole(cut: int) -> None:
    reply = HttpReply()
    reply.feed(CHUNKED[:cut])
    assert not reply.ended() and not reply.whole


def test_other_framings() -> None:
    sized = HttpReply()
    assert sized.feed(b"HTTP/1.1 529 Unknown\r\ncontent-length: 3\r\nretry-after: 2\r\n\r\nab") == b"ab"
    assert not sized.whole and not sized.reusable
    assert sized.feed(b"c") == b"c" and sized.whole and sized.reusable and sized.status == 529
    empty = HttpReply()
    empty.feed(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: Close\r\n\r\n")
    assert empty.whole and empty.status == 200 and not empty.reusable
    until_close = HttpReply()
    assert until_close.feed(b"HTTP/1.0 200 OK\r\n\r\nab") + until_close.feed(b"c") == b"abc"
    assert not until_close.whole and until_close.ended()
    trailers = HttpReply()
    trailers.feed(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx: y\r\n")
    assert not trailers.whole
    trailers.feed(b"\r\n")
    assert trailers.whole


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nnonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nab\r\n",
        b"x" * 70_000,
    ],
)
def test_what_is_no_response_is_said_to_be_none(data: bytes) -> None:
    with pytest.raises(Malformed):
        HttpReply().feed(data)


@pytest.mark.parametrize("seed", range(50))
def test_events_are_the_same_however_they_are_cut(seed: int) -> None:
    first = 'data: {"a":1}\n\n: keep-alive\n\nevent: x\r\ndata:two\r\ndata: lines\r\n\r\n'
    body = (first + "data: é\r\rid: 4\n\ndata: [DONE]\n\n").encode()
    reader = EventReader()
    events = [event for piece in in_pieces(body, seed) for event in reader.feed(piece)]
    assert events == [b'{"a":1}', b"two\nlines", "é".encode(), b"[DONE]"]
    assert not reader.unfinished
    assert reader.feed(b"data: half") == [] and reader.unfinished


# --- whole replies and others


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def delta(finish: str | None = None, index: int = 0, **fields: object) -> bytes:
    return event(choices=[{"index": index, "delta": fields, "finish_reason": finish}])


USAGE = event(choices=[], usage={"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13})
DONE = b"data: [DONE]\n\n"
GOOD = [
    delta(role="assistant", content=""),
    delta(content="a"),
    delta(reasoning_content="b"),
    delta("stop"),
    USAGE,
    DONE,
]


def streamed(parts: list[bytes], *, ended: bool = True, read_per_s: int | None = None) -> Reply:
    """A reply to a stream of these events, each at its own second."""
    reply = Reply(Ask(0, "", 8, read_per_s=read_per_s), due_at=100.0, sent_at=100.5)
    reply.feed(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n",
        101.0,
    )
    for number, part in enumerate(parts):
        reply.feed(b"%x\r\n%s\r\n" % (len(part), part), 102.0 + number)
    if ended:
        reply.feed(b"0\r\n\r\n", 110.0)
    reply.end(110.0)
    return reply


def test_a_whole_stream_is_complete_and_timed_from_its_due_time() -> None:
    reply = streamed(GOOD)
    assert reply.outcome == "complete" and reply.problem == ""
    assert reply.tokens == 4 and reply.prompt_tokens == 9 and reply.finishes == {0: "stop"}
    assert reply.first_s == 3.0 and reply.total_s == 10.0 and reply.gaps == [1.0]
    assert reply.token_s == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("parts", "ended", "problem"),
    [
        (GOOD, False, "the connection was cut"),
        (GOOD[:-1], True, "the stream ended without [DONE]"),
        ([*GOOD[:3], USAGE, DONE], True, "no finish reason"),
        ([*GOOD[:4], delta("stop"), USAGE, DONE], True, "a second finish"),
        (
            [*GOOD[:2], event(error={"message": "worker lost", "type": "api_error"})],
            False,
            "an error event: worker lost",
        ),
        ([*GOOD[:2], b"data: {nonsense\n\n", *GOOD[2:]], True, "an event is no chunk"),
        ([*GOOD, b"data: half"], True, "the stream ended inside an event"),
        ([], True, "the stream ended without [DONE]"),
    ],
)
def test_anything_less_has_failed_and_says_why(parts: list[bytes], ended: bool, problem: str) -> None:
    reply = streamed(parts, ended=ended)
    assert reply.outcome == "failed" and reply.problem.startswith(problem)


def test_a_slow_reader_may_be_cut_off_but_not_lied_to() -> None:
    assert streamed(GOOD, read_per_s=1).outcome == "complete"
    assert streamed(GOOD[:3], ended=False, read_per_s=1).outcome == "slow"
    assert streamed([*GOOD[:-2], DONE], ended=False, read_per_s=1).outcome == "failed"


def test_one_who_hangs_up_has_left_whatever_came() -> None:
    reply = Reply(Ask(0, "", 8), 0.0, 0.0)
    reply.left = True
    reply.end(1.0)
    assert reply.outcome == "left"


def whole(status: int, body: object, *headers: str) -> Reply:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    reply = Reply(Ask(0, "", 8), 0.0, 0.0)
    head = [f"HTTP/1.1 {status} X", "content-type: application/json", f"content-length: {len(data)}", *headers]
    reply.feed("\r\n".join([*head, "", ""]).encode() + data, 1.0)
    reply.end(1.0)
    return reply


def test_refusals_carry_their_code_and_advice() -> None:
    reply = whole(
        529, {"error": {"message": "full", "type": "overloaded_error", "code": "queue_full"}}, "retry-after: 3"
    )
    assert reply.outcome == "refused" and reply.code == "queue_full" and reply.retry_after_s == 3.0
    bare = whole(503, b"<html>busy</html>")
    assert bare.outcome == "refused" and bare.retry_after_s is None
    assert whole(429, {"error": {"type": "rate_limit"}}, "retry-after: Wed, 21 Oct").retry_after_s is None
    assert whole(500, {"error": {"message": "no", "code": None, "type": "api_error"}}).problem == "status 500 api_error"
    assert whole(400, b"no json").outcome == "failed"


def test_a_whole_reply_is_one_piece() -> None:
    choice = {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "length"}
    reply = whole(200, {"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 5}})
    assert reply.outcome == "complete" and reply.tokens == 5 and len(reply.pieces) == 1
    assert whole(200, {"choices": []}).problem == "no finish reason"
