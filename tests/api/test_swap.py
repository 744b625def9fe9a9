"""A model is swapped while requests wait: what was rendered for the old one is rendered again for the new one."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from api.prompt import PromptSource
from common.envelope import Message, Release, Reserve, Stale, Submit
from common.models import fingerprint
from tests.api.conftest import Server, events
from tests.api.fake_broker import FakeBroker, ready_snapshot, words

pytestmark = pytest.mark.slow

NO_KWARGS = {"enable_thinking": False}
# Both count 40 of these as 40 tokens, and the template's own words as some more: 60 for the first, 63 for the second.
LONG = " ".join(["hello"] * 40)
BETWEEN = 61


class Swapped:
    """A server, its broker, and the two folders that its model goes back and forth between."""

    def __init__(self, first: Path, second: Path) -> None:
        self.server = Server(first, max_prompt=BETWEEN)
        assert self.server.broker is not None
        self.broker: FakeBroker = self.server.broker
        self.folders = {fingerprint(folder): folder for folder in (first, second)}
        self.put(*self.folders)

    def put(self, *prints: str) -> None:
        """What the broker's snapshot says of workers now."""
        snapshot = ready_snapshot()
        snapshot["models"][0]["folders"] = {name: str(self.folders[name]) for name in prints}  # type: ignore[index]
        self.broker.snapshot = snapshot

    def send_back(self, *, started: bool = False, to: str = "") -> None:
        """From now on every request is sent back the first time, to the other model, and answered the second."""
        self.broker.forget()
        seen: set[bytes] = set()

        def script(broker: FakeBroker, message: Message, payload: bytes) -> None:
            if isinstance(message, Reserve):
                broker.reserve_all(message)
            elif isinstance(message, Submit) and message.request not in seen:
                seen.add(message.request)
                if started:
                    broker.start(message.request)
                (other,) = self.folders.keys() - {message.fingerprint}
                broker.send(Stale(message.request, to or other))
            elif isinstance(message, Submit):
                attempt = 2 if started else 1
                broker.start(message.request, attempt)
                broker.tokens(message.request, 0, words("Hello"), attempt)
                broker.done(message.request, attempt=attempt)

        self.broker.script = script


@pytest.fixture(scope="module")
def swapped(tiny_model: Path, tiny_sentencepiece_model: Path) -> Iterator[Swapped]:
    made = Swapped(tiny_model, tiny_sentencepiece_model)
    yield made
    made.server.close()


def test_what_cannot_be_rendered_for_the_new_model_is_its_own_answer_and_gives_the_place_back(swapped: Swapped) -> None:
    # First of all: while the server still has the model whose template is the shorter one.
    swapped.send_back()
    status, _, reply = swapped.server.chat(messages=[{"role": "user", "content": LONG}])
    assert (status, reply["error"]["code"]) == (400, "context_length_exceeded"), reply
    swapped.broker.wait_for(Release)


@pytest.mark.parametrize("started", [False, True])
def test_what_is_sent_back_is_rendered_for_the_new_model(swapped: Swapped, started: bool) -> None:
    swapped.send_back(started=started)
    status, _, reply = swapped.server.chat()
    assert status == 200 and reply["choices"][0]["message"]["content"] == "Hello"
    first, second = swapped.broker.wait_for(Submit, 2)
    assert isinstance(first, Submit) and isinstance(second, Submit)
    assert first.request == second.request and first.fingerprint != second.fingerprint
    assert started or reply["system_fingerprint"] == f"fp_{second.fingerprint}"
    source = PromptSource(swapped.folders[second.fingerprint])
    expected = source.chat([{"role": "user", "content": "hello world"}], NO_KWARGS, [], 99)
    assert swapped.broker.requests[second.request].prompt == expected.ids
    assert second.prompt_tokens == len(expected.ids)


def test_a_stream_that_has_begun_goes_on_after_it_was_sent_back(swapped: Swapped) -> None:
    swapped.send_back(started=True)
    status, _, body = swapped.server.chat(stream=True, n=2)
    assert status == 200 and events(body)[-1] == "[DONE]"
    assert swapped.broker.count(Submit) == 4


def test_text_is_tokenized_again_too(swapped: Swapped) -> None:
    swapped.send_back()
    body = json.dumps({"model": "tiny", "prompt": ["hello", "world"]}).encode()
    assert swapped.server.request("POST", "/v1/completions", body)[0] == 200
    later = swapped.broker.wait_for(Submit, 4)[2:]
    for message, text in zip(later, ("hello", "world"), strict=True):
        assert isinstance(message, Submit)
        expected = PromptSource(swapped.folders[message.fingerprint]).text(text, 99)
        assert swapped.broker.requests[message.request].prompt == expected


def test_a_model_that_nobody_knows_is_said_to_be_in_replacement(swapped: Swapped) -> None:
    swapped.send_back(to="unknown")
    status, headers, reply = swapped.server.chat()
    assert status == 503 and "being replaced" in reply["error"]["message"] and headers["retry-after"], reply
    swapped.broker.wait_for(Release)
    swapped.broker.script = lambda broker, message, payload: (
        broker.reserve_all(message, "unknown") if isinstance(message, Reserve) else None
    )
    assert swapped.server.chat()[0] == 503


def test_models_and_tokenize_follow_the_swap(swapped: Swapped) -> None:
    for name, folder in swapped.folders.items():
        swapped.put(name)
        assert json.loads(swapped.server.get("/v1/models/tiny")[2])["system_fingerprint"] == f"fp_{name}"
        status, _, body = swapped.server.request("POST", "/tokenize", b'{"prompt": "hello world"}')
        assert status == 200 and json.loads(body)["tokens"] == PromptSource(folder).text("hello world", 99)
    assert b"folders" not in swapped.server.get("/v1/pool")[2]
