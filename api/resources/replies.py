"""What the generating resources share: reading their body, and the headers of what they answer.

Knows Falcon's objects and a request's line; nothing of chats or completions. Invariant: a header value made here is
printable ASCII, whatever a client or worker put into it.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import quote

import falcon.asgi

from api.exchange import Exchange
from api.generate import Generation
from api.middleware import ANSWER
from api.read_json import BadBody, read_object
from api.request_line import RequestLine
from api.responses import RequestError
from api.settings import ApiSettings
from api.stream import Format, ReplyStream
from common.generation import Summary

T = TypeVar("T")

# Reading JSON takes up to a millisecond per 100 KB, looking for it in text ten times that: more is done in threads.
BESIDE_THE_LOOP_BYTES = 32768
# Header values have to stay far below the 8 KB that servers and proxies take.
IGNORED_BYTES = 1024
MOST_NAME = 64


async def read_body(req: falcon.asgi.Request, generation: Generation, normalize: Callable[[dict[str, Any]], T]) -> T:
    """The request's body, read and checked. Raises RequestError."""
    body = await req.stream.read()
    if len(body) > BESIDE_THE_LOOP_BYTES:
        return await generation.in_thread(_read, body, normalize)
    return _read(body, normalize)


def _read(body: bytes, normalize: Callable[[dict[str, Any]], T]) -> T:
    try:
        read = read_object(body)
    except BadBody as error:
        raise RequestError(400, str(error)) from None
    return normalize(read)


def answer_stream(
    req: falcon.asgi.Request, resp: falcon.asgi.Response, form: Format, exchange: Exchange, settings: ApiSettings
) -> None:
    """Answer with a stream of events in this form."""
    line: RequestLine = req.scope["millpond"]
    name_worker(resp, exchange, line)
    resp.content_type = "text/event-stream; charset=utf-8"
    resp.set_header("cache-control", "no-cache")
    resp.set_header("x-accel-buffering", "no")
    resp.stream = ReplyStream(
        exchange,
        form,
        line,
        req.scope[ANSWER],
        buffer=settings.stream_buffer,
        comment_s=settings.keep_alive_comment,
    )


def answer_whole(resp: falcon.asgi.Response, body: bytes, exchange: Exchange, line: RequestLine) -> None:
    """Answer with one object, and say in headers and log line how long what took."""
    resp.data = body
    resp.content_type = "application/json"
    name_worker(resp, exchange, line)
    tickets = exchange.tickets
    summaries = [ticket.summary for ticket in tickets]
    line.outcome = tickets[0].outcome.value if tickets[0].outcome else ""
    line.completion_tokens = sum(summary.completion_tokens for summary in summaries)
    line.ttft_ms = line.queue_ms + summaries[0].first_token_ms
    resp.set_header("server-timing", server_timing(line, summaries))


def server_timing(line: RequestLine, summaries: Sequence[Summary]) -> str:
    """Queue, prefill, decode and total in milliseconds."""
    times = {
        "queue": line.queue_ms,
        "prefill": max(summary.prefill_ms for summary in summaries),
        "decode": max(summary.decode_ms for summary in summaries),
        "total": line.elapsed_ms(),
    }
    return ", ".join(f"{name};dur={value:.1f}" for name, value in times.items())


def name_worker(resp: falcon.asgi.Response, exchange: Exchange, line: RequestLine) -> None:
    """Say who generates, in headers and log line."""
    line.worker, line.lane = exchange.tickets[0].worker, exchange.tickets[0].lane
    resp.set_header("x-millpond-worker", header_text(line.worker))
    resp.set_header("x-millpond-lane", header_text(line.lane))


def list_ignored(resp: falcon.asgi.Response, names: Sequence[str]) -> None:
    """Say which fields nobody honoured."""
    if names:
        resp.set_header("x-millpond-ignored", ignored_header(names))


def header_text(text: str) -> str:
    """`text` as a header value: printable ASCII as it is, the rest percent-encoded."""
    return quote(text, safe=" !#$&'()*+,/:;=?@[]-._~|")


def ignored_header(names: Sequence[str]) -> str:
    """The names, comma-separated; what would make the header too long is only counted."""
    value = ""
    for count, name in enumerate(names):
        encoded = quote(name[:MOST_NAME], safe="!#$&'*+-.^_`|~")
        if len(value) + len(encoded) > IGNORED_BYTES:
            return f"{value}, and {len(names) - count} more"
        value = f"{value}, {encoded}" if value else encoded
    return value


def now() -> int:
    """`created`: seconds of the wall clock."""
    return int(time.time())
