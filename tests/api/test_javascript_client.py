"""The official JavaScript client against the API, where node and npm are present; elsewhere there are no such tests.

The client is installed once, by npm, into a folder under MILLPOND_HOME.
"""

import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.envelope import Cancel, Message, Reserve, Submit
from common.outcomes import Outcome
from tests.api.conftest import Server
from tests.api.fake_broker import FakeBroker, answer, only_reserve, reject, start_and_wait

pytestmark = [pytest.mark.system, pytest.mark.slow]

NODE, NPM = shutil.which("node"), shutil.which("npm")
CLIENT = "openai@^6"
SCRIPT = Path(__file__).with_name("javascript_client.cjs")
Play = Callable[[str], dict[str, Any]]


def test_models_can_be_listed(play: Play) -> None:
    assert play("models") == {"names": ["tiny"], "one": "millpond"}


def test_a_whole_reply(play: Play) -> None:
    seen = play("whole")
    assert (seen["content"], seen["usage"]) == ("Hello there", 9)
    assert seen["request_id"].startswith("req_")


def test_a_stream_is_the_whole_reply(play: Play) -> None:
    assert play("stream") == {"content": "Hello there", "finish": "stop", "usage": 9, "chunks": 5}


def test_the_streaming_helper(play: Play) -> None:
    assert play("helper") == {"content": "Hello there", "finish": "stop"}


def test_completions(play: Play) -> None:
    assert play("completion") == {"texts": ["Hello there", "Hello there"]}


def test_refusals_are_the_clients_own_errors(play: Play) -> None:
    assert play("refusals")["found"] == [
        ["BadRequestError", 400, "messages", None, "invalid_request_error"],
        ["NotFoundError", 404, "model", "model_not_found", "invalid_request_error"],
        ["BadRequestError", 400, "temperature", None, "invalid_request_error"],
    ]


def test_a_full_server_is_tried_again(play: Play, broker: FakeBroker) -> None:
    def full_once(broker: FakeBroker, message: Message, payload: bytes) -> None:
        first = isinstance(message, Reserve) and not broker.count(Reserve)
        (reject(Outcome.QUEUE_FULL, 400) if first else answer("late"))(broker, message, payload)

    broker.script = full_once
    assert play("retry") == {"content": "late"}
    assert broker.count(Reserve) == 2


def test_a_cut_stream_is_an_error_with_its_cause(play: Play, broker: FakeBroker) -> None:
    def fail(broker: FakeBroker, message: Message, payload: bytes) -> None:
        only_reserve(broker, message, payload)
        if isinstance(message, Submit):
            start_and_wait("Hel")(broker, message, payload)
            broker.done(message.request, Outcome.ENGINE_FAILED, error="Broken")

    broker.script = fail
    seen = play("cut")
    assert seen["error"] is not None and "Broken" in seen["error"]


def test_leaving_the_loop_cancels_the_request(play: Play, broker: FakeBroker) -> None:
    broker.script = start_and_wait("Hel")
    assert play("abort") == {"aborted": True}
    broker.wait_for(Cancel)


@pytest.fixture(scope="module")
def client_folder() -> Path:
    """Where the client is, installed if it is not there."""
    home = Path(os.environ.get("MILLPOND_HOME") or "~/.cache/millpond").expanduser()
    folder = home / "javascript" / CLIENT.replace("@^", "-")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "node_modules" / "openai" / "package.json").is_file():
            command = [NPM or "npm", "install", CLIENT, "--prefix", str(folder)]
            quietly = ["--ignore-scripts", "--no-audit", "--no-fund"]
            subprocess.run([*command, *quietly], cwd=folder, check=True, timeout=110, capture_output=True)
    return folder


@pytest.fixture
def play(client_folder: Path, server: Server) -> Play:
    """Plays one scene against the server."""

    def run(scene: str) -> dict[str, Any]:
        command = [NODE or "node", str(SCRIPT), str(client_folder), f"http://127.0.0.1:{server.port}/v1", scene]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


if NODE is None or NPM is None:
    # Not skipped: there is nothing here that this machine could do.
    for _name in [name for name in globals() if name.startswith("test_")]:
        del globals()[_name]
