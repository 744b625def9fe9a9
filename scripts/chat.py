"""`millpond chat`: a conversation in the terminal with any OpenAI-compatible endpoint.

The reply streams as it comes; Ctrl-C ends the reply and not the program; an empty line or Ctrl-D leaves.
"""

import argparse
import http.client
import json
import os
import sys
import urllib.parse
from collections.abc import Iterator
from typing import Any

from common.errors import ConfigError, MillpondError


def register(commands: Any) -> None:
    """Add the subcommand."""
    port = os.environ.get("MILLPOND_PORT", "8080")
    command = commands.add_parser("chat", help="talk to a running instance")
    command.add_argument("message", nargs="*", help="one message; without it a conversation begins")
    command.add_argument("--url", default=f"http://127.0.0.1:{port}", help="where the instance answers (default: %(default)s)")
    command.add_argument("--model", default="", help="model id (default: the first one served)")
    command.add_argument("--system", default="", help="system message")
    command.add_argument("--temperature", type=float, default=None)
    command.add_argument("--max-tokens", type=int, default=None)
    command.add_argument("--key", default=os.environ.get("MILLPOND_API_KEY", ""), help="API key (MILLPOND_API_KEY)")
    command.set_defaults(run=run)


class Endpoint:
    """One HTTP endpoint; a connection per call, so that ending a reply is closing it."""

    def __init__(self, url: str, key: str) -> None:
        parts = urllib.parse.urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url {url!r}: allowed is http://HOST:PORT or https://HOST:PORT")
        self._secure = parts.scheme == "https"
        self._host, self._port, self._path = parts.hostname, parts.port, parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}

    def models(self) -> list[str]:
        """Ids that are served. Raises MillpondError."""
        with _closing(self._connection()) as connection:
            response = self._send(connection, "GET", "/v1/models", None)
            return [entry["id"] for entry in json.loads(response.read())["data"]]

    def stream(self, body: dict[str, Any]) -> Iterator[str]:
        """The reply's text as it comes. Raises MillpondError for every end that is not one."""
        with _closing(self._connection()) as connection:
            response = self._send(connection, "POST", "/v1/chat/completions", {**body, "stream": True})
            try:
                for line in response:
                    if not line.startswith(b"data: "):
                        continue
                    if line.strip() == b"data: [DONE]":
                        return
                    yield from _text(json.loads(line[6:]))
            except (OSError, http.client.HTTPException) as error:
                raise MillpondError(f"the reply was cut: {error}") from None
            raise MillpondError("the reply was cut")

    def _connection(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=600)

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: dict[str, Any] | None
    ) -> http.client.HTTPResponse:
        try:
            connection.request(method, self._path + path, json.dumps(body) if body else None, self._headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise MillpondError(f"no answer from {self._host}:{self._port}: {error}; is `millpond serve` running?") from None
        if response.status != 200:
            raise MillpondError(_complaint(response.status, response.read()))
        return response


class _closing:
    """contextlib.closing without hiding the type."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self._connection = connection

    def __enter__(self) -> http.client.HTTPConnection:
        return self._connection

    def __exit__(self, *_: object) -> None:
        self._connection.close()


def _text(event: dict[str, Any]) -> Iterator[str]:
    if "error" in event:
        raise MillpondError(f"the reply failed: {event['error'].get('message', event['error'])}")
    for choice in event.get("choices", ()):
        if choice["delta"].get("content"):
            yield choice["delta"]["content"]


def _complaint(status: int, body: bytes) -> str:
    try:
        return f"{status}: {json.loads(body)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"{status}: {body[:200].decode('utf-8', 'replace')}"


def run(arguments: argparse.Namespace) -> int:
    """One message, or a conversation."""
    endpoint = Endpoint(arguments.url, arguments.key)
    model = arguments.model
    if not model:
        served = endpoint.models()
        if not served:
            raise MillpondError("no model is served there")
        model = served[0]
    history = [{"role": "system", "content": arguments.system}] if arguments.system else []
    options = {"model": model}
    if arguments.temperature is not None:
        options["temperature"] = arguments.temperature
    if arguments.max_tokens is not None:
        options["max_tokens"] = arguments.max_tokens
    if arguments.message:
        history.append({"role": "user", "content": " ".join(arguments.message)})
        _answer(endpoint, options, history)
        return 0
    return _converse(endpoint, options, history)


def _converse(endpoint: Endpoint, options: dict[str, Any], history: list[dict[str, str]]) -> int:
    if sys.stdin.isatty():
        import readline  # noqa: F401  (gives input() its history and line editing)

        print(f"{options['model']}. Ctrl-C stops a reply; an empty line or Ctrl-D leaves.")
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except (EOFError, KeyboardInterrupt):
            print()
            return 0
        if not line.strip():
            return 0
        history.append({"role": "user", "content": line})
        try:
            _answer(endpoint, options, history)
        except MillpondError as error:
            # The conversation goes on without the exchange that failed.
            print(f"\nmillpond: {error}", file=sys.stderr)
            while history and history[-1]["role"] != "system":
                if history.pop()["role"] == "user":
                    break


def _answer(endpoint: Endpoint, options: dict[str, Any], history: list[dict[str, str]]) -> None:
    reply = ""
    stream = endpoint.stream({**options, "messages": history})
    try:
        for text in stream:
            reply += text
            print(text, end="", flush=True)
    except KeyboardInterrupt:
        stream.close()  # type: ignore[attr-defined]
        print(" [stopped]", end="")
    print()
    history.append({"role": "assistant", "content": reply})
