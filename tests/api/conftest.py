"""A real gunicorn with the API in it, and a scripted broker."""

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from api.prompt import PromptSource
from common.runtime import Runtime, create, runtime
from fixtures.template_styles import STYLES, text_of
from fixtures.tiny_model import build
from fixtures.tiny_tokenizer import Family
from tests.api.fake_broker import FakeBroker, answer, ready_snapshot

REPOSITORY = Path(__file__).resolve().parents[2]
DEADLINE_S = 15.0
FAMILIES: tuple[Family, ...] = ("byte_level", "sentencepiece")


def wait_until(condition: Callable[[], Any], what: str = "") -> Any:
    """What `condition` gives once it is true."""
    deadline = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {DEADLINE_S} s: {what or condition}"
        time.sleep(0.005)
    return value


class Server:
    """One API server (one worker process) and its broker."""

    def __init__(self, model: Path, *, app: str = "api.app", wait: bool = True, **settings: object) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mp-"))
        self.port = free_port()
        self.runtime: Runtime = runtime(self.port, str(self.folder))
        create(self.runtime)
        self.broker: FakeBroker | None = FakeBroker(self.runtime.front)
        self.log_path = self.folder / "log"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MILLPOND_")}
        chosen = {"port": self.port, "runtime": self.folder, "model": f"tiny={model}", "api_processes": 1, **settings}
        environment |= {f"MILLPOND_{name.upper()}": str(value) for name, value in chosen.items()}
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "error", "-m", "gunicorn", "-c", "api/gunicorn_conf.py", f"{app}:create_app()"],
                cwd=REPOSITORY,
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        if not wait:
            return
        try:
            wait_until(self._joined, "the API joined the broker")
        except BaseException:
            self.close()
            raise

    def _joined(self) -> bool:
        assert self.process.poll() is None, self.log()
        try:
            return self.get("/health")[0] == 200
        except OSError:
            return False

    def close(self) -> None:
        # Its whole session at once: how it ends by itself is what test_life is about.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)
        if self.broker is not None:
            self.broker.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def log(self) -> str:
        return self.log_path.read_text()

    def lines(self, **fields: object) -> list[str]:
        """Request lines of the log with these fields."""
        wanted = [f" {name}={value} " for name, value in fields.items()]
        return [
            line for line in self.log().splitlines() if " request " in line and all(w in line + " " for w in wanted)
        ]

    def wait_for_line(self, **fields: object) -> str:
        return wait_until(lambda: self.lines(**fields), f"a request line with {fields}")[0]

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        try:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
        finally:
            connection.close()

    def get(self, path: str) -> tuple[int, dict[str, str], bytes]:
        return self.request("GET", path)

    def chat(self, _headers: dict[str, str] | None = None, **fields: object) -> tuple[int, dict[str, str], Any]:
        status, headers, body = self.request("POST", "/v1/chat/completions", chat_body(**fields), _headers)
        return status, headers, json.loads(body) if headers["content-type"] == "application/json" else body

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=DEADLINE_S)

    def open_chat(self, **fields: object) -> socket.socket:
        """A connection on which a chat has been sent."""
        connection = self.connect()
        connection.sendall(http_request("POST", "/v1/chat/completions", chat_body(**fields)))
        return connection


def chat_body(**fields: object) -> bytes:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello world"}]} | fields
    return json.dumps({name: value for name, value in body.items() if value is not ...}).encode()


def http_request(method: str, path: str, body: bytes = b"", *headers: str, version: str = "1.1") -> bytes:
    lines = [f"{method} {path} HTTP/{version}", "Host: test", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def read_until(connection: socket.socket, end: bytes) -> bytes:
    """What comes until `end` has come."""
    found = b""
    while end not in found:
        part = connection.recv(65536)
        assert part, f"the connection ended without {end!r}: {found!r}"
        found += part
    return found


def read_all(connection: socket.socket) -> bytes:
    """What comes until the connection ends."""
    found = b""
    while part := connection.recv(65536):
        found += part
    return found


def events(body: bytes) -> list[Any]:
    """The events of a stream's body; [DONE] as itself."""
    assert body.endswith(b"\n\n")
    lines = [line.removeprefix(b"data: ") for line in body[:-2].split(b"\n\n") if line.startswith(b"data: ")]
    return [line.decode() if line == b"[DONE]" else json.loads(line) for line in lines]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="session")
def shared_server(tiny_model: Path) -> Iterator[Server]:
    server = Server(tiny_model, max_body_bytes=100_000, body_timeout=1, header_timeout=1, keep_alive_comment=0.3)
    yield server
    server.close()


@pytest.fixture
def server(shared_server: Server) -> Server:
    """The shared server with its broker's ways and memory as new."""
    assert shared_server.broker is not None
    shared_server.broker.script = answer("Hello", " there")
    shared_server.broker.snapshot = ready_snapshot()
    shared_server.broker.forget()
    return shared_server


@pytest.fixture
def broker(server: Server) -> FakeBroker:
    assert server.broker is not None
    return server.broker


@pytest.fixture
def own_server(tiny_model: Path) -> Iterator[Callable[..., Server]]:
    """Makes servers of a test's own."""
    made: list[Server] = []

    def make(**settings: Any) -> Server:
        made.append(Server(tiny_model, **settings))
        return made[-1]

    yield make
    for server in made:
        server.close()


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Family], Path]:
    made: dict[tuple[str, Family], Path] = {}

    def make(style: str, family: Family) -> Path:
        if (style, family) not in made:
            folder = tmp_path_factory.mktemp("styles") / f"{style}-{family}"
            made[style, family] = build(folder, family=family, extra_tokens=STYLES[style], chat_template=text_of(style))
        return made[style, family]

    return make


@pytest.fixture(scope="session")
def source_of(folder_of: Callable[[str, Family], Path]) -> Callable[..., PromptSource]:
    made: dict[tuple[str, Family], PromptSource] = {}

    def make(style: str = "chatml", family: Family = "byte_level") -> PromptSource:
        if (style, family) not in made:
            made[style, family] = PromptSource(folder_of(style, family))
        return made[style, family]

    return make
