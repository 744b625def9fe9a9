"""The outer ASGI application: everything that happens to a request before and after Falcon.

Owns receive(): request ids, routes and methods, keys, draining, the body, the client's departure, the last word on
errors and the log line. Knows nothing of what a resource does. Invariant: every request ends in exactly one log line,
and its exchange is closed then.
"""

import asyncio
import logging
import re
import time
import traceback
from collections.abc import Callable
from typing import Any

from api import routes
from api.answer import Answer
from api.body import Body, ClientGone, Receive
from api.cors import Cors
from api.disconnect import CLIENT, App, Client, Departure, Send
from api.keys import read_keys
from api.malformed import coded
from api.request_line import RequestLine, new_label
from api.responses import (
    RequestError,
    internal_error,
    method_not_allowed,
    not_found,
    request_error,
    unauthorized,
)
from api.settings import ApiSettings
from common import logs
from common.errors import ServingError
from common.outcomes import Outcome

# Where the inner scope has its Answer, for what is written past Falcon.
ANSWER = "millpond.answer"
LABEL = re.compile(rb"[\x20-\x7e]{1,128}")
_OF_BROKER = {outcome.value for outcome in Outcome}


class Lifecycle:
    """What the process does at its start and end; `draining` is set from outside. Hooks are plain calls on the loop."""

    def __init__(self, start: Callable[[], None], stop: Callable[[], None]) -> None:
        self.start = start
        self.stop = stop
        self.draining = False


class Edge:
    """Wraps Falcon's application."""

    def __init__(
        self, app: App, settings: ApiSettings, lifecycle: Lifecycle, count_refusal: Callable[[RequestError], None]
    ) -> None:
        self._app = app
        self._settings = settings
        self._keys = read_keys(settings)
        self._cors = Cors(settings.cors_origins)
        self._lifecycle = lifecycle
        self._count_refusal = count_refusal

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        else:
            # http: api/connections lets no upgrade to anything else through.
            await self._answer(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        self._lifecycle.start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        self._lifecycle.stop()
        await send({"type": "lifespan.shutdown.complete"})

    async def _answer(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        line = RequestLine(label_of(scope["headers"]), scope["method"])
        client: Client = scope[CLIENT]
        answer = Answer(send, line.label, scope["method"], scope["http_version"], client)
        departure = Departure(client, lambda: answer.complete)
        body = Body(receive, scope["headers"], client.has_whole_body)
        try:
            await self._serve(scope, body, line, answer, departure)
        except ClientGone:
            line.gone = True
            raise asyncio.CancelledError from None
        except Exception as error:
            await self._refuse(_as_request_error(error, line), body, line, answer)
        finally:
            if line.exchange is not None:
                line.exchange.close([("received", line.began_at), *line.marks, ("last write", time.monotonic())])
            line.gone = line.gone or departure.gone
            line.status = answer.status
            line.write()

    async def _serve(
        self, scope: dict[str, Any], body: Body, line: RequestLine, answer: Answer, departure: Departure
    ) -> None:
        path, method = routes.normal_path(routes.origin_form(scope["path"])), scope["method"]
        route = routes.find(path)
        answer.headers += self._cors.allowed(scope["headers"])
        if (refused := coded(scope["headers"])) is not None:
            raise refused
        if route is None:
            raise not_found()
        line.route = route.path
        if method == "OPTIONS" and (preflight := self._cors.preflight(scope["headers"], route)) is not None:
            await answer.empty(204, preflight)
            return
        verb = "GET" if method == "HEAD" else method
        if verb not in route.methods:
            raise method_not_allowed(method, route.allowed)
        self._check_key(scope, route, line)
        if self._lifecycle.draining:
            # Served all the same: at a reload the broker goes on, and at the end of everything it is the broker that
            # refuses. The connection is closed when it is idle.
            answer.headers.append((b"connection", b"close"))
        content = b""
        if verb != "GET":
            content = await body.read(self._settings.max_body_bytes, self._settings.body_timeout)
        inner = {**scope, "path": path, "method": verb, "millpond": line, ANSWER: answer}
        await departure.run(self._app, inner, content, answer.send)

    def _check_key(self, scope: dict[str, Any], route: routes.Route, line: RequestLine) -> None:
        if route.open or route.path.rpartition("/")[2] in self._settings.open_routes:
            return
        holder = self._keys.holder(scope["headers"])
        if holder is None:
            raise unauthorized()
        line.key = holder

    async def _refuse(self, error: RequestError, body: Body, line: RequestLine, answer: Answer) -> None:
        line.outcome = error.outcome
        if answer.complete:
            return
        if answer.started:
            await answer.cut(error)
        if error.status < 500 and error.outcome not in _OF_BROKER:
            self._count_refusal(error)
        if not body.leaves_connection_usable:
            error.headers["connection"] = "close"
        await answer.error(error)
        await body.settle()
        if error.headers.get("connection") == "close":
            # Once the body has been read away the server would keep the connection, whatever the header says.
            raise asyncio.CancelledError


def label_of(headers: list[tuple[bytes, bytes]]) -> str:
    """The client's x-request-id if it is 1-128 printable ASCII characters, otherwise a new one."""
    for name, value in headers:
        if name == b"x-request-id" and LABEL.fullmatch(value):
            return value.decode("ascii")
    return new_label()


def _as_request_error(error: Exception, line: RequestLine) -> RequestError:
    if isinstance(error, RequestError):
        return error
    if isinstance(error, ServingError):
        return request_error(error)
    # Frames only: an exception's own text may hold what the client sent.
    frames = "".join(traceback.format_tb(error.__traceback__)[-6:])
    logs.event("internal error", logging.ERROR, id=line.label, error=type(error).__name__, frames=frames)
    return internal_error(type(error).__name__)
