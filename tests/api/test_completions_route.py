"""POST /v1/completions, /tokenize and /detokenize over real gunicorn."""

import json
from typing import Any

import pytest

from api.normalize_completion import normalize_detokenization, normalize_tokenization
from api.responses import RequestError
from common.envelope import Cancel, Message, Release, Reserve, Submit
from common.generation import CONTENT, Piece, TokenLogprob, TopLogprob
from common.outcomes import Outcome
from tests.api.conftest import Server, events, http_request, read_until
from tests.api.fake_broker import FakeBroker, only_reserve, reject, start_and_wait

pytestmark = pytest.mark.system


def complete(server: Server, **fields: Any) -> tuple[int, dict[str, str], Any]:
    body = json.dumps({"model": "tiny", "prompt": "hello world"} | fields).encode()
    status, headers, reply = server.request("POST", "/v1/completions", body)
    return status, headers, json.loads(reply) if headers["content-type"] == "application/json" else events(reply)


def test_a_whole_completion(server: Server, broker: FakeBroker) -> None:
    status, headers, reply = complete(server)
    assert status == 200 and headers["x-millpond-lane"] == "batched" and "server-timing" in headers
    assert list(reply) == ["id", "object", "created", "model", "choices", "usage", "system_fingerprint"]
    assert reply["id"].startswith("cmpl-") and reply["object"] == "text_completion"
    assert reply["choices"] == [{"text": "Hello there", "index": 0, "logprobs": None, "finish_reason": "stop"}]
    assert reply["usage"]["total_tokens"] == 9
    (request,) = broker.requests.values()
    assert request.raw and request.max_tokens == 1024


def test_a_streamed_completion_has_text_finish_usage_and_done(server: Server) -> None:
    _, headers, (*chunks, usage, done) = complete(server, stream=True)
    assert headers["content-type"] == "text/event-stream; charset=utf-8" and done == "[DONE]"
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["Hello", " there", ""]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "stop"]
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 2
    assert len({chunk["id"] for chunk in [*chunks, usage]}) == 1


def test_the_status_comes_with_the_acceptance(server: Server, broker: FakeBroker) -> None:
    broker.script = start_and_wait()
    with server.connect() as connection:
        body = json.dumps({"model": "tiny", "prompt": "x", "stream": True}).encode()
        connection.sendall(http_request("POST", "/v1/completions", body))
        assert read_until(connection, b": keep-alive\n\n").startswith(b"HTTP/1.1 200 ")
        connection.close()
        broker.wait_for(Cancel)


@pytest.mark.parametrize(
    ("prompt", "count"), [(["a", "b"], 2), ([5, 6, 7], 1), ([[5], [6, 7], [8]], 3), ("", 1), ([""], 1)]
)
def test_prompts_come_in_four_forms(server: Server, broker: FakeBroker, prompt: Any, count: int) -> None:
    _, _, reply = complete(server, prompt=prompt, n=2)
    assert [choice["index"] for choice in reply["choices"]] == list(range(2 * count))
    assert reply["usage"]["prompt_tokens"] == 7 * count and reply["usage"]["completion_tokens"] == 4 * count
    requests = [broker.requests[submit.request] for submit in broker.wait_for(Submit)]
    assert [request.choice for request in requests] == [0, 1] * count
    assert all(request.prompt for request in requests)
    if isinstance(prompt[0:1], list) and not isinstance(prompt[0], str):
        given = prompt if isinstance(prompt[0], list) else [prompt]
        assert [request.prompt for request in requests[::2]] == given


def test_special_tokens_in_a_raw_prompt_count(server: Server, broker: FakeBroker) -> None:
    complete(server, prompt="<|im_start|>user\nhi<|im_end|>")
    (request,) = broker.requests.values()
    ids = json.loads(server.request("POST", "/tokenize", b'{"prompt": "<|im_end|>"}')[2])["tokens"]
    assert len(ids) == 1 and request.prompt[-1] == ids[0]


def test_echo_gives_the_prompt_back_before_the_text(server: Server) -> None:
    _, _, reply = complete(server, prompt=["One ", "Two "], echo=True, n=2)
    assert [choice["text"] for choice in reply["choices"]] == ["One Hello there"] * 2 + ["Two Hello there"] * 2
    _, _, (*chunks, _, _) = complete(server, prompt=["One "], echo=True, stream=True)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "One Hello there"
    ids = json.loads(server.request("POST", "/tokenize", b'{"prompt": "hello world"}')[2])["tokens"]
    assert complete(server, prompt=ids, echo=True)[2]["choices"][0]["text"] == "hello worldHello there"


def test_logprobs_come_in_the_text_shape(server: Server, broker: FakeBroker) -> None:
    def script(broker: FakeBroker, message: Message, payload: bytes) -> None:
        only_reserve(broker, message, payload)
        if isinstance(message, Submit):
            broker.start(message.request)
            for seq, text in enumerate(("ab", "c")):
                rival = TopLogprob("x", -3.0, [120])
                one = TokenLogprob(text, -1.0, list(text.encode()), [rival])
                broker.tokens(message.request, seq, [Piece(CONTENT, text, [one])])
            broker.done(message.request)

    broker.script = script
    expected = {
        "tokens": ["ab", "c"],
        "token_logprobs": [-1.0, -1.0],
        "top_logprobs": [{"x": -3.0}, {"x": -3.0}],
        "text_offset": [0, 2],
    }
    _, _, reply = complete(server, logprobs=1)
    assert reply["choices"][0]["logprobs"] == expected
    assert broker.requests.popitem()[1].top_logprobs == 1
    _, _, (*chunks, _, _) = complete(server, logprobs=1, stream=True)
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    assert {name: sum((part[name] for part in parts), []) for name in expected} == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": ["a"] * 4097}, "prompt"),
        ({"prompt": "word " * 5000}, "prompt"),
        ({"prompt": [5] * 5000}, "prompt"),
        ({"model": None}, "model"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 6}, "logprobs"),
        ({"echo": 1}, "echo"),
        ({"echo": True, "logprobs": 0}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"tools": []}, "tools"),
        ({"messages": []}, "messages"),
        ({"response_format": {"type": "text"}}, "response_format"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"n": 17}, "n"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ],
)
def test_a_wrong_field_is_named(server: Server, fields: dict[str, Any], param: str) -> None:
    status, _, reply = complete(server, **fields)
    assert (status, reply["error"]["param"]) == (400, param)


def test_refusals_are_the_chats(server: Server, broker: FakeBroker) -> None:
    assert complete(server, model="other")[0] == 404
    status, _, _ = complete(server, prompt="word " * 5000)
    assert status == 400
    broker.wait_for(Release)
    broker.script = reject(Outcome.QUEUE_FULL, 1000)
    status, headers, _ = complete(server, stream=True)
    assert (status, headers["retry-after"]) == (529, "1")
    assert complete(server, surprise=1, user="u")[0] == 529


def ask(server: Server, path: str, **fields: Any) -> tuple[int, Any]:
    status, _, body = server.request("POST", path, json.dumps(fields).encode())
    return status, json.loads(body)


def test_tokenize_and_detokenize_undo_each_other(server: Server, broker: FakeBroker) -> None:
    status, reply = ask(server, "/tokenize", model="tiny", prompt="hello wörld 🙂")
    assert status == 200 and reply["count"] == len(reply["tokens"]) and reply["max_model_len"] == 4096
    assert ask(server, "/detokenize", tokens=reply["tokens"]) == (200, {"prompt": "hello wörld 🙂"})
    assert ask(server, "/detokenize", tokens=[]) == (200, {"prompt": ""})
    assert broker.count(Reserve) == 0


def test_tokenized_messages_are_what_a_chat_sends(server: Server, broker: FakeBroker) -> None:
    messages = [{"role": "user", "content": "hello <|im_end|>"}]
    _, reply = ask(server, "/tokenize", messages=messages)
    server.chat(messages=messages)
    (request,) = broker.requests.values()
    assert request.prompt == reply["tokens"]


@pytest.mark.parametrize(
    ("path", "fields", "status"),
    [
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user"}]}, 400),
        ("/tokenize", {"prompt": 5}, 400),
        ("/tokenize", {"messages": []}, 400),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404),
        ("/tokenize", {"prompt": "word " * 19_000}, 400),
        ("/detokenize", {}, 400),
        ("/detokenize", {"tokens": ["x"]}, 400),
        ("/detokenize", {"tokens": [999_999]}, 400),
        ("/detokenize", {"tokens": [1], "model": 5}, 400),
    ],
)
def test_wrong_tokenizations_are_refused(server: Server, path: str, fields: dict[str, Any], status: int) -> None:
    assert ask(server, path, **fields)[0] == status


@pytest.mark.parametrize(
    ("path", "body", "ignored"),
    [
        ("/tokenize", {"prompt": "x", "special": True, "tools": [], "user": "u"}, "special, tools, user"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "temperature": 0, "tools": []}, "temperature"),
        ("/detokenize", {"tokens": [1], "prompt": "x", "model": None}, "prompt"),
    ],
)
def test_what_tokenizing_has_no_use_for_is_listed(
    server: Server, path: str, body: dict[str, Any], ignored: str
) -> None:
    status, headers, _ = server.request("POST", path, json.dumps(body).encode())
    assert (status, headers["x-millpond-ignored"]) == (200, ignored)


def test_strict_mode_refuses_what_tokenizing_has_no_use_for() -> None:
    bodies = [
        (normalize_tokenization, {"prompt": "x"}),
        (normalize_tokenization, {"messages": [{"role": "user", "content": "x"}]}),
        (normalize_detokenization, {"tokens": [1]}),
    ]
    for normalize, body in bodies:
        with pytest.raises(RequestError) as caught:
            normalize({**body, "typo": 1}, True)
        assert (caught.value.status, caught.value.param) == (400, "typo")
        assert normalize({**body, "user": "u"}, True).ignored == ("user",)
