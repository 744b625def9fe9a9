"""The outer application by itself, with a hand-made server side."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from api.disconnect import CLIENT, Departure
from api.middleware import Edge, Lifecycle, label_of
from api.responses import RequestError
from api.settings import ApiSettings

Message = dict[str, Any]


class Exchange:
    """One request as the server sees it: what it gives, what it was sent."""

    def __init__(self, *events: Message) -> None:
        self._events = list(events) or [{"type": "http.request", "body": b"", "more_body": False}]
        self.left: Callable[[], None] | None = None
        self.sent: list[Message] = []

    async def receive(self) -> Message:
        assert self._events, "the body has been read, and nobody waits for more"
        return self._events.pop(0)

    def tell_of_departure(self, left: Callable[[], None] | None) -> None:
        self.left = left

    def has_whole_body(self) -> bool:
        return False

    def is_full(self) -> bool:
        return False

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int:
        return self.sent[0]["status"]

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent[1:])


class Lost(Exchange):
    """A connection that was lost before the application was called."""

    def tell_of_departure(self, left: Callable[[], None] | None) -> None:
        if left is not None:
            left()


def scope(method: str = "POST", path: str = "/v1/chat/completions", **more: Any) -> Message:
    return {"type": "http", "method": method, "path": path, "http_version": "1.1", "headers": []} | more


def edge(app: Callable[..., Awaitable[None]], counted: list[RequestError] | None = None, **settings: Any) -> Edge:
    lifecycle = Lifecycle(lambda: None, lambda: None)
    return Edge(app, ApiSettings(**settings), lifecycle, (counted if counted is not None else []).append)


async def answering(scope: Message, receive: Any, send: Any) -> None:
    event = await receive()
    assert not event["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": event["body"] or b"ok", "more_body": False})


async def serve(app: Edge, exchange: Exchange, given: Message) -> None:
    try:
        await app(given | {CLIENT: exchange}, exchange.receive, exchange.send)
    except asyncio.CancelledError:
        return


def run(app: Edge, given: Message, *events: Message) -> Exchange:
    async def once() -> Exchange:
        exchange = Exchange(*events)
        await serve(app, exchange, given)
        assert exchange.left is None, "the connection tells nobody of what comes after its request"
        return exchange

    return asyncio.run(once())


def test_the_body_reaches_the_application_as_one_event() -> None:
    parts = [{"type": "http.request", "body": body, "more_body": body != b"c"} for body in (b"a", b"b", b"c")]
    assert run(edge(answering), scope(), *parts).body == b"abc"


def test_while_draining_what_still_comes_is_served_and_its_connection_closed() -> None:
    app = edge(answering)
    app._lifecycle.draining = True
    served = run(app, scope())
    assert (served.status, served.headers[b"connection"]) == (200, b"close")
    assert run(app, scope("GET", "/health")).status == 200


def test_an_error_of_ours_is_a_500_that_names_its_type_only() -> None:
    async def failing(scope: Message, receive: Any, send: Any) -> None:
        raise KeyError("a secret of the client's")

    failed = run(edge(failing), scope("GET", "/health"))
    assert failed.status == 500
    assert json.loads(failed.body)["error"] == {
        "message": "Internal error (KeyError).",
        "type": "api_error",
        "code": None,
        "param": None,
    }


def test_an_error_of_ours_after_the_start_is_an_event_and_a_cut() -> None:
    async def failing(scope: Message, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"data: x\n\n", "more_body": True})
        raise ValueError

    failed = run(edge(failing), scope("GET", "/health"))
    assert failed.body.startswith(b'data: x\n\ndata: {"error":{"message":"Internal error (ValueError)."')
    assert failed.sent[-1]["more_body"] is True


def test_a_departure_cancels_the_application_at_once() -> None:
    seen = []

    async def waiting(scope: Message, receive: Any, send: Any) -> None:
        seen.append("began")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    async def once() -> None:
        exchange = Exchange()
        given = scope("GET", "/health") | {CLIENT: exchange}
        task = asyncio.ensure_future(edge(waiting)(given, exchange.receive, exchange.send))
        while exchange.left is None:
            await asyncio.sleep(0)
        exchange.left()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert exchange.sent == [] and exchange.left is None

    asyncio.run(once())
    assert seen == ["began", "cancelled"]


def test_a_departure_after_the_last_byte_is_none() -> None:
    async def once() -> None:
        exchange = Exchange()

        async def app(scope: Message, receive: Any, send: Any) -> None:
            assert exchange.left is not None
            exchange.left()
            await asyncio.sleep(0)

        departure = Departure(exchange, lambda: True)
        await departure.run(app, {}, b"", lambda message: asyncio.sleep(0))
        assert not departure.gone

    asyncio.run(once())


def test_a_client_that_has_left_already_is_served_nothing() -> None:
    served = []

    async def app(scope: Message, receive: Any, send: Any) -> None:
        await asyncio.sleep(0)
        served.append(scope)

    async def once() -> None:
        departure = Departure(Lost(), lambda: False)
        with pytest.raises(asyncio.CancelledError):
            await departure.run(app, {}, b"", lambda message: asyncio.sleep(0))
        assert departure.gone and not served

    asyncio.run(once())


def test_only_the_apis_own_refusals_are_counted() -> None:
    counted: list[RequestError] = []
    app = edge(answering, counted)
    run(app, scope("GET", "/nope"))
    run(app, scope("GET", "/v1/chat/completions"))
    run(app, scope())
    assert [error.status for error in counted] == [404, 405]


def test_a_label_is_taken_if_it_is_printable_ascii() -> None:
    assert label_of([(b"x-request-id", b"a b~")]) == "a b~"
    for bad in (b"", b"x" * 129, b"\x7f", b"\xe9", b"a\nb"):
        assert label_of([(b"x-request-id", bad)]).startswith("req_")


def test_the_lifespan_starts_and_stops_what_it_was_given() -> None:
    done = []
    app = Edge(answering, ApiSettings(), Lifecycle(lambda: done.append("start"), lambda: done.append("stop")), print)
    exchange = Exchange({"type": "lifespan.startup"}, {"type": "lifespan.shutdown"})
    asyncio.run(app({"type": "lifespan"}, exchange.receive, exchange.send))
    assert done == ["start", "stop"]
    assert [message["type"] for message in exchange.sent] == [
        "lifespan.startup.complete",
        "lifespan.shutdown.complete",
    ]
