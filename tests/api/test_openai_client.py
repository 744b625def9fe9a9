"""The official client against the API: what it makes of replies, streams, refusals and cuts."""

import asyncio
import time

import openai
import pytest

from common.envelope import Message, Reserve, Submit
from common.outcomes import Outcome
from tests.api.conftest import Server
from tests.api.fake_broker import FakeBroker, answer, only_reserve, reject

pytestmark = pytest.mark.system
MESSAGES = [{"role": "user", "content": "hello"}]


def client(server: Server, **settings: object) -> openai.OpenAI:
    given = {"base_url": f"http://127.0.0.1:{server.port}/v1", "api_key": "x", "max_retries": 0} | settings
    return openai.OpenAI(**given)  # type: ignore[arg-type]


def test_whole_and_streamed_replies_agree(server: Server) -> None:
    with client(server) as ai:
        whole = ai.chat.completions.create(model="tiny", messages=MESSAGES)  # type: ignore[call-overload]
        assert whole.choices[0].message.content == "Hello there"
        assert whole._request_id.startswith("req_")
        with ai.chat.completions.create(model="tiny", messages=MESSAGES, stream=True) as stream:  # type: ignore[call-overload]
            chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage and chunks[-1].choices == []
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"


def test_the_streaming_helper_gathers_the_reply(server: Server) -> None:
    with client(server) as ai, ai.chat.completions.stream(model="tiny", messages=MESSAGES) as stream:  # type: ignore[arg-type]
        stream.until_done()
        assert stream.get_final_completion().choices[0].message.content == "Hello there"


def test_the_async_client(server: Server) -> None:
    async def ask() -> str:
        base = f"http://127.0.0.1:{server.port}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key="x", max_retries=0) as ai:
            stream = await ai.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)  # type: ignore[call-overload]
            return "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])

    assert asyncio.run(ask()) == "Hello there"


def test_the_async_clients_streaming_helper_and_whole_reply_agree(server: Server) -> None:
    async def ask() -> tuple[str | None, str | None]:
        base = f"http://127.0.0.1:{server.port}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key="x", max_retries=0) as ai:
            whole = await ai.chat.completions.create(model="tiny", messages=MESSAGES)  # type: ignore[call-overload]
            async with ai.chat.completions.stream(model="tiny", messages=MESSAGES) as stream:  # type: ignore[arg-type]
                helped = await stream.get_final_completion()
        return whole.choices[0].message.content, helped.choices[0].message.content

    assert asyncio.run(ask()) == ("Hello there", "Hello there")


def test_text_completions_whole_and_streamed(server: Server) -> None:
    with client(server) as ai:
        whole = ai.completions.create(model="tiny", prompt=["a", "b"])
        assert [choice.text for choice in whole.choices] == ["Hello there", "Hello there"]
        with ai.completions.create(model="tiny", prompt="a", stream=True) as stream:
            assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == "Hello there"


def test_models_can_be_listed(server: Server) -> None:
    with client(server) as ai:
        assert [model.id for model in ai.models.list()] == ["tiny"]
        assert ai.models.retrieve("tiny").owned_by == "millpond"
        with pytest.raises(openai.NotFoundError):
            ai.models.retrieve("other")


def test_refusals_are_the_clients_own_errors(server: Server, broker: FakeBroker) -> None:
    with client(server) as ai:
        with pytest.raises(openai.BadRequestError) as bad:
            ai.chat.completions.create(model="tiny", messages=[])
        assert bad.value.param == "messages"
        with pytest.raises(openai.NotFoundError) as missing:
            ai.chat.completions.create(model="gpt-4", messages=MESSAGES)  # type: ignore[call-overload]
        assert missing.value.code == "model_not_found"


@pytest.mark.slow
def test_the_async_client_tries_a_full_server_again(server: Server, broker: FakeBroker) -> None:
    def full_once(broker: FakeBroker, message: Message, payload: bytes) -> None:
        first = isinstance(message, Reserve) and not broker.count(Reserve)
        (reject(Outcome.QUEUE_FULL, 400) if first else answer("late"))(broker, message, payload)

    async def ask() -> str:
        base = f"http://127.0.0.1:{server.port}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key="x", max_retries=2) as ai:
            asked = {"model": "tiny", "messages": MESSAGES, "stream": True}
            stream = await ai.chat.completions.create(**asked)  # type: ignore[call-overload]
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])

    broker.script = full_once
    assert asyncio.run(ask()) == "late"
    assert broker.count(Reserve) == 2


@pytest.mark.slow
def test_a_full_server_is_tried_again_when_it_says(server: Server, broker: FakeBroker) -> None:
    tries = []

    def full_once(broker: FakeBroker, message: Message, payload: bytes) -> None:
        if isinstance(message, Reserve):
            tries.append(message)
        script = reject(Outcome.QUEUE_FULL, 400) if len(tries) == 1 else answer("late")
        script(broker, message, payload)

    broker.script = full_once
    began = time.monotonic()
    with client(server, max_retries=2) as ai:
        reply = ai.chat.completions.create(model="tiny", messages=MESSAGES)  # type: ignore[call-overload]
    assert reply.choices[0].message.content == "late" and len(tries) == 2
    assert time.monotonic() - began >= 0.9


def test_a_cut_stream_is_an_error_with_its_cause(server: Server, broker: FakeBroker) -> None:
    def fail(broker: FakeBroker, message: Message, payload: bytes) -> None:
        only_reserve(broker, message, payload)
        if isinstance(message, Submit):
            broker.start(message.request)
            broker.done(message.request, Outcome.ENGINE_FAILED, error="Broken")

    broker.script = fail
    with client(server) as ai:
        # Whether the end comes before or after the first byte, it is never taken for a reply.
        with pytest.raises(openai.APIError) as caught:
            list(ai.chat.completions.create(model="tiny", messages=MESSAGES, stream=True))  # type: ignore[call-overload]
    assert "Broken" in str(caught.value)
