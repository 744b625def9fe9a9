"""Levels of steady streams and floods: what is counted, what passes."""

import asyncio
import json
from collections.abc import Callable

import pytest

from scripts.bench import overload
from scripts.bench.capacity import LATEST_MS, hopeless, passed, search
from scripts.bench.stamped import Level, StampedReply, Stream, judged
from scripts.loadtest.plan import Ask
from scripts.loadtest.reply import Reply

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: str) -> bytes:
    body = f"data: {data}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(body), body)


def content(text: str) -> bytes:
    return chunk('{"choices":[{"index":0,"delta":{"content":' + json.dumps(text) + "}}]}")


def ending(tokens: int) -> bytes:
    finish = chunk('{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}')
    usage = chunk('{"choices":[],"usage":{"completion_tokens":' + str(tokens) + "}}")
    return finish + usage + chunk("[DONE]") + b"0\r\n\r\n"


def stamped(tokens: int, *reads: tuple[float, bytes]) -> StampedReply:
    """A reply to a request for so many tokens, of what was read when."""
    reply = StampedReply(Ask(0, "", tokens), 0.0)
    for at, data in reads:
        reply.feed(data, at)
    reply.end(reads[-1][0])
    return reply


# --- Streams ----------------------------------------------------------------------------------------------------------


def test_a_tokens_lateness_is_counted_from_its_due_time() -> None:
    reply = stamped(
        3,
        (1.0, HEAD + content(" 900000:950000")),
        (1.1, content(" 1000000:1050000") + content(" 1050000:1060000")),
        (1.2, ending(3)),
    )
    assert reply.fault() == ""
    level = judged(Level(1, 0.1), [reply], 1.0, 1.1)
    assert (level.late, level.made_late, level.carried) == ([50_000, 100_000], [10_000, 50_000], [40_000, 50_000])
    assert level.tokens_per_s == pytest.approx(20) and level.late_ms(100) == 100 and level.carried_ms(0) == 40
    assert passed(level)


@pytest.mark.parametrize(
    ("tokens", "body"),
    [
        (2, content(" 1:2") + ending(1)),
        (2, content(" 1:2") + content(" 1:2") + ending(2)),
        (2, content(" 3:4") + content(" 1:2") + ending(2)),
        (2, content(" 1:2") + content(" 3:4") + ending(3)),
        (2, content(" 1:2") + content(" 3:4")),
        (2, content(" 1:2") + content(" 3:4") + ending(2)[:-1]),
    ],
)
def test_a_stream_that_is_not_whole_fails_its_level(tokens: int, body: bytes) -> None:
    level = judged(Level(1, 1.0), [stamped(tokens, (0.0, HEAD + body))], 0.0, 1.0)
    assert len(level.problems) == 1 and level.late and not passed(level)


def test_a_level_passes_up_to_its_latest_token() -> None:
    most = int(LATEST_MS * 1000)
    assert passed(Level(1, 1.0, late=[0, most])) and not passed(Level(1, 1.0, late=[0, most + 1]))
    assert not passed(Level(1, 1.0)) and not passed(Level(1, 1.0, late=[0], problems=["cut"]))
    # One late token may be an accident, half of them are not.
    assert not hopeless(Level(1, 1.0, late=[0, 0, most + 1])) and hopeless(Level(1, 1.0, late=[0, most + 1, most + 1]))


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_a_stream_is_over_with_its_last_chunk_however_it_is_cut(size: int) -> None:
    data = HEAD + content(" 1:2") + content(" 3:4") + ending(2)
    stream = Stream(b"", asyncio.Semaphore(0))
    for at in range(0, len(data), size):
        assert not stream.over
        stream.data_received(data[at : at + size])
    assert stream.over and stream.read(Ask(0, "", 2)).fault() == ""


def test_the_search_doubles_and_bisects() -> None:
    for most in (64, 100, 511, 640, 700, 2048, 5000):
        tried: list[int] = []
        found = search(asking(tried, most), 64, 2048)
        assert found <= most and found in tried and len(tried) == len(set(tried)) <= 10
        assert found == 2048 or any(found < other <= found * 1.125 and other > most for other in tried)
    assert search(lambda streams: False, 64, 2048) == 0


def asking(tried: list[int], most: int) -> Callable[[int], bool]:
    def passes(streams: int) -> bool:
        tried.append(streams)
        return streams <= most

    return passes


# --- Floods -----------------------------------------------------------------------------------------------------------


def answered(tokens: int, *reads: tuple[float, bytes]) -> Reply:
    reply = Reply(Ask(0, "", tokens), 0.0, 0.0)
    for at, data in reads:
        reply.feed(data, at)
    reply.end(reads[-1][0])
    return reply


def test_goodput_counts_the_windows_tokens_of_whole_replies() -> None:
    whole = answered(3, (1.0, HEAD + content("a")), (2.0, content("b") + content("c")), (3.0, ending(3)))
    cut = answered(3, (1.5, HEAD + content("a")))
    assert overload.goodput([whole, cut], 1.0, 1.0) == 1 and overload.goodput([whole, cut], 1.0, 2.0) == 1.5
    assert overload.proper(whole) and not overload.proper(cut)


def test_only_a_refusal_with_its_advice_is_proper() -> None:
    later = "retry-after: 1\r\n"
    for status, advice, proper in ((529, later, True), (529, "", False), (503, later, False)):
        head = f"HTTP/1.1 {status} X\r\ncontent-length: 2\r\n{advice}\r\n{{}}"
        assert overload.proper(answered(1, (0.0, head.encode()))) is proper


# --- Real runs --------------------------------------------------------------------------------------------------------
