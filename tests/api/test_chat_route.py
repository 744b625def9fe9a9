"""POST /v1/chat/completions over real gunicorn, whole and streamed."""

import json
import socket
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from api.exchange import prefix_hashes
from api.generate import MOST_SCHEMA_CHARACTERS, _enforceable
from common.envelope import Cancel, Message, Rejected, Release, Reserve, Submit, TraceMarks
from common.generation import CONTENT, REASONING, Piece, Sampling
from common.outcomes import Outcome
from tests.api.conftest import Server, chat_body, events, http_request, read_all, read_until, wait_until
from tests.api.fake_broker import FakeBroker, answer, end_at_once, only_reserve, reject, start_and_wait, words

pytestmark = pytest.mark.system


def test_a_whole_reply_is_the_contracts_object(server: Server) -> None:
    status, headers, reply = server.chat()
    assert status == 200
    assert headers["content-type"] == "application/json"
    assert headers["x-millpond-worker"] == "demo-0" and headers["x-millpond-lane"] == "batched"
    assert headers["server-timing"].startswith("queue;dur=")
    assert list(reply) == ["id", "object", "created", "model", "choices", "usage", "system_fingerprint"]
    assert reply["id"].startswith("chatcmpl-") and reply["object"] == "chat.completion" and reply["model"] == "tiny"
    assert reply["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello there"},
            "finish_reason": "stop",
            "logprobs": None,
        }
    ]
    assert reply["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 2,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_a_stream_has_role_content_finish_usage_and_done(server: Server) -> None:
    status, headers, body = server.request("POST", "/v1/chat/completions", chat_body(stream=True))
    assert status == 200
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache" and headers["x-accel-buffering"] == "no"
    *chunks, usage, done = events(body)
    assert done == "[DONE]"
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "Hello"},
        {"content": " there"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
    assert usage["choices"] == [] and usage["usage"]["total_tokens"] == 9
    assert len({(chunk["id"], chunk["created"]) for chunk in [*chunks, usage]}) == 1


def test_the_request_reaches_the_worker_as_the_client_meant_it(server: Server, broker: FakeBroker) -> None:
    long = [{"role": "user", "content": "hello " * 100}]
    server.chat(messages=long, max_tokens=5, temperature=0.5, seed=11, stop=["x"], priority=3, n=2)
    (reserve,) = broker.wait_for(Reserve)
    assert (reserve.model, reserve.priority, len(reserve.requests)) == ("tiny", 3, 2)
    submits = broker.wait_for(Submit, 2)
    requests = [broker.requests[submit.request] for submit in submits]
    assert [request.choice for request in requests] == [0, 1]
    assert requests[0].max_tokens == 5 and requests[0].stop == ["x"]
    assert (requests[0].sampling.temperature, requests[0].sampling.seed) == (0.5, 11)
    assert submits[0].prompt_tokens == len(requests[0].prompt) > 0
    assert submits[0].prefix == submits[1].prefix == prefix_hashes(requests[0].prompt) != b""


def test_max_tokens_are_clamped_to_the_room_in_the_context(server: Server, broker: FakeBroker) -> None:
    status, _, _ = server.chat(messages=[{"role": "user", "content": "word " * 3900}], max_tokens=8192)
    assert status == 200
    (request,) = broker.requests.values()
    assert 0 < request.max_tokens == 4096 - len(request.prompt) < 200


def test_choices_come_indexed_and_the_prompt_counts_once(server: Server) -> None:
    _, _, reply = server.chat(n=3)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert reply["usage"]["prompt_tokens"] == 7 and reply["usage"]["completion_tokens"] == 6
    _, _, body = server.request("POST", "/v1/chat/completions", chat_body(stream=True, n=3))
    *chunks, _, _ = events(body)
    for index in range(3):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(c["delta"].get("content", "") for c in mine) == "Hello there"
        assert [c["finish_reason"] for c in mine] == [None, None, None, "stop"]


def test_reasoning_is_kept_apart(server: Server, broker: FakeBroker) -> None:
    def script(broker: FakeBroker, message: Message, payload: bytes) -> None:
        only_reserve(broker, message, payload)
        if isinstance(message, Submit):
            broker.start(message.request)
            broker.tokens(message.request, 0, [Piece(REASONING, "Hm."), Piece(CONTENT, "Yes.")])
            broker.done(message.request)

    broker.script = script
    _, _, reply = server.chat()
    assert reply["choices"][0]["message"] == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}


@pytest.mark.parametrize(
    ("outcome", "status", "kind", "code"),
    [
        (Outcome.QUEUE_FULL, 529, "overloaded_error", "queue_full"),
        (Outcome.NO_WORKER, 503, "api_error", "no_worker"),
        (Outcome.MODEL_FAILED, 503, "api_error", "no_worker"),
        (Outcome.DRAINING, 503, "api_error", "draining"),
        (Outcome.TOO_MANY_PLACES, 400, "invalid_request_error", None),
    ],
)
def test_a_refused_place_is_a_real_status_for_streams_too(
    server: Server, broker: FakeBroker, outcome: Outcome, status: int, kind: str, code: str | None
) -> None:
    broker.script = reject(outcome, 3400)
    for stream in (False, True):
        got, headers, reply = server.chat(stream=stream)
        assert got == status
        assert (reply["error"]["type"], reply["error"]["code"]) == (kind, code)
        assert headers.get("retry-after") == ("4" if status >= 500 else None)


@pytest.mark.parametrize("while_rendering", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_a_place_given_to_another_key_is_a_529_with_advice(
    server: Server, broker: FakeBroker, while_rendering: bool, stream: bool
) -> None:
    def script(broker: FakeBroker, message: Message, payload: bytes) -> None:
        only_reserve(broker, message, payload)
        if isinstance(message, Reserve if while_rendering else Submit):
            # The second of two: all of the request goes.
            id = message.requests[1] if isinstance(message, Reserve) else message.request
            broker.send(Rejected(id, Outcome.QUEUE_FULL, 3400))

    broker.script = script
    status, headers, reply = server.chat(stream=stream, n=2)
    assert (status, reply["error"]["code"], headers["retry-after"]) == (529, "queue_full", "4")
    # What the broker still holds of it is given back.
    if while_rendering:
        broker.wait_for(Release)


@pytest.mark.parametrize(
    ("outcome", "status", "code"),
    [
        (Outcome.QUEUE_TIMEOUT, 503, "queue_timeout"),
        (Outcome.REQUEST_TIMEOUT, 504, None),
        (Outcome.POISONED, 503, None),
        (Outcome.ENGINE_FAILED, 503, None),
        (Outcome.TOO_LONG, 400, "context_length_exceeded"),
    ],
)
def test_an_end_before_the_first_byte_is_a_real_status(
    server: Server, broker: FakeBroker, outcome: Outcome, status: int, code: str | None
) -> None:
    broker.script = end_at_once(outcome, error="NotAFinite" if outcome is Outcome.ENGINE_FAILED else "")
    for stream in (False, True):
        got, _, reply = server.chat(stream=stream)
        assert (got, reply["error"]["code"]) == (status, code)
        if outcome is Outcome.ENGINE_FAILED:
            assert "NotAFinite" in reply["error"]["message"]


def test_what_no_lane_can_honour_is_a_400_naming_the_field(server: Server, broker: FakeBroker) -> None:
    broker.script = end_at_once(Outcome.UNSUPPORTED, error="logprobs")
    status, _, reply = server.chat(logprobs=True)
    assert (status, reply["error"]["param"]) == (400, "logprobs")


def test_an_invalid_field_is_refused_without_asking_for_a_place(server: Server, broker: FakeBroker) -> None:
    status, _, reply = server.chat(temperature=3)
    assert (status, reply["error"]["param"]) == (400, "temperature")
    status, _, reply = server.chat(model="other")
    assert (status, reply["error"]["code"]) == (404, "model_not_found") and "tiny" in reply["error"]["message"]
    assert broker.count(Reserve) == 0


def test_a_place_is_given_back_when_a_later_check_fails(server: Server, broker: FakeBroker) -> None:
    broker.script = only_reserve
    status, _, reply = server.chat(messages=[{"role": "user", "content": "word " * 5000}], n=2)
    assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")
    assert "4095" in reply["error"]["message"]
    (release,) = broker.wait_for(Release)
    (reserve,) = broker.wait_for(Reserve)
    assert release.requests == reserve.requests


def test_a_model_that_was_replaced_is_refused(server: Server, broker: FakeBroker) -> None:
    def script(broker: FakeBroker, message: Message, payload: bytes) -> None:
        if isinstance(message, Reserve):
            broker.reserve_all(message, "another")

    broker.script = script
    status, _, _ = server.chat()
    assert status == 503
    broker.wait_for(Release)


@pytest.mark.slow
def test_nothing_is_sent_while_a_request_is_queued(server: Server, broker: FakeBroker) -> None:
    broker.script = only_reserve
    with server.open_chat(stream=True) as connection:
        (submit,) = broker.wait_for(Submit)
        connection.settimeout(0.5)  # longer than the comments of a started stream
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.settimeout(10)
        broker.start(submit.request)
        head = read_until(connection, b'"role":"assistant"')
        assert head.startswith(b"HTTP/1.1 200 OK")
        broker.done(submit.request)
        read_until(connection, b"[DONE]\n\n\r\n0\r\n\r\n")


@pytest.mark.slow
def test_a_silent_stream_gets_comments(server: Server, broker: FakeBroker) -> None:
    broker.script = start_and_wait()
    with server.open_chat(stream=True) as connection:
        read_until(connection, b": keep-alive\n\n")


def test_only_what_got_a_place_leaves_marks_with_the_broker(server: Server, broker: FakeBroker) -> None:
    broker.script = reject(Outcome.QUEUE_FULL, 1000)
    assert server.chat()[0] == 529
    (refused,) = broker.wait_for(Reserve)
    broker.script = answer("yes")
    assert server.chat()[0] == 200
    (submitted,) = broker.wait_for(Submit)
    # Those of an earlier test's request may come as late.
    wait_until(lambda: any(m.request == submitted.request for m in broker.heard if isinstance(m, TraceMarks)))
    assert not [m for m in broker.heard if isinstance(m, TraceMarks) and m.request in refused.requests]


def test_a_retried_attempt_starts_again_without_a_trace(server: Server, broker: FakeBroker) -> None:
    def script(broker: FakeBroker, message: Message, payload: bytes) -> None:
        only_reserve(broker, message, payload)
        if isinstance(message, Submit):
            broker.start(message.request)
            broker.start(message.request, attempt=2, worker="demo-1")
            broker.tokens(message.request, 0, words("once"), attempt=2)
            broker.done(message.request, attempt=2)

    broker.script = script
    _, headers, reply = server.chat()
    assert reply["choices"][0]["message"]["content"] == "once"
    assert headers["x-millpond-worker"] == "demo-1"


def test_a_failure_after_the_first_byte_is_an_error_event_and_a_cut(server: Server, broker: FakeBroker) -> None:
    broker.script = start_and_wait("Hel")
    with server.open_chat(stream=True) as connection:
        (submit,) = broker.wait_for(Submit)
        start = read_until(connection, b'"Hel"')
        broker.done(submit.request, Outcome.WORKER_LOST)
        rest = read_all(connection)
    body = start + rest
    assert b'data: {"error":{"message":"Generation failed (worker_lost)' in body
    assert b"[DONE]" not in body and b'"finish_reason":"' not in body and not body.endswith(b"0\r\n\r\n")
    assert "status=200" in server.wait_for_line(outcome="worker_lost")


def test_a_gap_in_the_sequence_breaks_the_stream_and_tells_the_broker(server: Server, broker: FakeBroker) -> None:
    broker.script = start_and_wait("Hel")
    with server.open_chat(stream=True) as connection:
        (submit,) = broker.wait_for(Submit)
        read_until(connection, b'"Hel"')
        broker.tokens(submit.request, 2, words("lo"))
        assert b"stream_broken" in read_all(connection)
    (cancel,) = broker.wait_for(Cancel)
    assert cancel.request == submit.request


def test_json_mode_asks_for_an_object_and_reduces_the_reply(server: Server, broker: FakeBroker) -> None:
    broker.script = answer("Sure: ```json\n", '{"a":1}', "\n```")
    _, _, reply = server.chat(response_format={"type": "json_object"})
    assert reply["choices"][0]["message"]["content"] == '{"a": 1}'
    assert broker.requests.popitem()[1].grammar == ""


@pytest.mark.slow
def test_json_mode_is_left_to_the_grammar_where_there_is_one(server: Server, broker: FakeBroker) -> None:
    broker.snapshot["models"][0]["abilities"] = ["grammar"]  # type: ignore[index]
    broker.script = answer('{"a":1}')

    def enforced() -> bool:
        # What workers can do is remembered for some seconds.
        _, _, reply = server.chat(response_format={"type": "json_object"})
        return reply["choices"][0]["message"]["content"] == '{"a":1}'

    wait_until(enforced)
    assert broker.requests.popitem()[1].grammar == '{"type":"object"}'


SCHEMA = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}


def json_schema(schema: object, **more: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **more}}


@pytest.mark.slow
def test_what_of_a_schema_no_grammar_enforces_is_listed_or_refused(server: Server, broker: FakeBroker) -> None:
    broker.snapshot["models"][0]["abilities"] = ["grammar"]  # type: ignore[index]
    broker.script = answer("[1]")
    wait_until(lambda: "x-millpond-ignored" in server.chat(response_format=json_schema(SCHEMA))[1])
    _, headers, _ = server.chat(response_format=json_schema(SCHEMA), surprise=1)
    assert headers["x-millpond-ignored"] == "surprise, response_format.uniqueItems"
    assert json.loads(broker.requests.popitem()[1].grammar) == SCHEMA
    status, _, reply = server.chat(response_format=json_schema(SCHEMA, strict=True))
    assert (status, reply["error"]["param"]) == (400, "response_format") and "uniqueItems" in reply["error"]["message"]
    assert server.chat(response_format=json_schema({"type": "integer"}, strict=True))[0] == 200
    broker.wait_for(Release)


@pytest.mark.parametrize("schema", [{"type": "wrong"}, {"$ref": "#/nowhere"}])
def test_a_schema_that_is_none_is_refused_by_every_model(server: Server, broker: FakeBroker, schema: object) -> None:
    status, _, reply = server.chat(response_format=json_schema(schema))
    assert (status, reply["error"]["param"], reply["error"]["type"]) == (
        400, "response_format", "invalid_request_error",
    )  # fmt: skip
    broker.wait_for(Release)


def test_a_schema_that_llguidance_cannot_read_is_no_reason_to_refuse_unless_strict(server: Server, broker: FakeBroker) -> None:
    broker.script = answer("x")
    schema = {"type": "string", "pattern": "(?=a)b"}
    assert server.chat(response_format=json_schema(schema))[0] == 200
    assert server.chat(response_format=json_schema(schema, strict=True))[0] == 400


def test_a_schema_longer_than_any_prompt_is_refused_uncompiled() -> None:
    found = _enforceable({"type": "object", "title": "x" * MOST_SCHEMA_CHARACTERS})
    assert not found.text and str(MOST_SCHEMA_CHARACTERS) in found.why


def test_an_absolute_target_is_the_same_route(server: Server) -> None:
    for target in ("http://proxy.example/v1/models", "HTTPS://x:1/v1/models/", "http://x/nowhere"):
        with server.connect() as connection:
            connection.sendall(http_request("GET", target, b"", "Connection: close"))
            status = read_all(connection).split(b" ", 2)[1]
            assert status == (b"404" if "nowhere" in target else b"200"), target


def test_unknown_fields_are_listed_and_known_ones_refused(server: Server) -> None:
    status, headers, _ = server.chat(user="me", surprise=1, **{"naïve": 2})
    assert (status, headers["x-millpond-ignored"]) == (200, "user, surprise, na%C3%AFve")
    status, _, reply = server.chat(best_of=2)
    assert (status, reply["error"]["param"]) == (400, "best_of")


@pytest.mark.slow
def test_sampling_that_no_lane_can_honour_is_listed_and_left_out(server: Server, broker: FakeBroker) -> None:
    broker.snapshot["models"][0]["abilities"] = ["seed"]  # type: ignore[index]
    broker.script = answer("x")

    def listed() -> bool:
        # What workers can do is remembered for some seconds.
        _, headers, _ = server.chat(temperature=0.5, seed=7, user="me")
        return headers["x-millpond-ignored"] == "user, temperature"

    wait_until(listed)
    assert broker.requests.popitem()[1].sampling == Sampling(seed=7)


def test_every_kind_of_text_streams_as_the_whole_reply_has_it(server: Server, broker: FakeBroker) -> None:
    texts = ['"quoted"\\', "\x00\x1f\x7f", "line\nbreak\r\u2028\u2029\x85", "héllo 日本語 🙂", "</script>"]
    broker.script = answer(*texts)
    _, _, reply = server.chat()
    _, _, body = server.request("POST", "/v1/chat/completions", chat_body(stream=True))
    *chunks, _, _ = events(body)
    streamed = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert streamed == reply["choices"][0]["message"]["content"] == "".join(texts)
    assert len(body.decode().splitlines()) == 2 * body.count(b"\n\n")


def test_http_1_0_gets_a_stream_that_ends_with_the_connection(server: Server) -> None:
    with server.connect() as connection:
        request = http_request(
            "POST", "/v1/chat/completions", chat_body(stream=True), "Connection: keep-alive", version="1.0"
        )
        connection.sendall(request)
        reply = read_all(connection)
    head, _, body = reply.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower() and b"chunked" not in head.lower()
    assert events(body)[-1] == "[DONE]"
    assert "without completing" not in server.log()
    assert "outcome=stop" in server.wait_for_line(stream=1, status=200, outcome="stop")


def stalled(server: Server) -> socket.socket:
    """A client that has asked for a stream and takes next to nothing of it."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(10)
    connection.connect(("127.0.0.1", server.port))
    connection.sendall(http_request("POST", "/v1/chat/completions", chat_body(stream=True)))
    return connection


def flood(broker: FakeBroker) -> int:
    """Send the one request pieces until the API has had enough; how many were sent."""
    (submit,) = broker.wait_for(Submit)
    for seq in range(5000):
        if broker.count(Cancel):
            return seq
        broker.tokens(submit.request, seq, words(f"{seq:06d}" + "x" * 4000))
        time.sleep(0.001)
    raise AssertionError("a client that reads nothing was never too slow")


def test_a_stalled_reader_gets_a_prefix_and_its_place_returns(server: Server, broker: FakeBroker) -> None:
    broker.script = start_and_wait()
    with stalled(server) as connection:
        sent = flood(broker)
        body = read_all(connection)
    found = [part[:6] for part in body.split(b'"content":"')[2:]]
    assert 64 < len(found) <= sent
    assert found == [b"%06d" % seq for seq in range(len(found))]
    assert b"[DONE]" not in body and b"error" not in body
    server.wait_for_line(outcome="slow_reader")


def test_a_reader_that_pauses_gets_every_piece_once_and_in_order(server: Server, broker: FakeBroker) -> None:
    """Its connection is full for most of them; the last few come when it takes them at once again."""
    broker.script = start_and_wait()
    with stalled(server) as connection:
        (submit,) = broker.wait_for(Submit)
        body = read_until(connection, b"\r\n\r\n").partition(b"\r\n\r\n")[2]
        # More than socket buffers and the server's high-water mark together, in fewer pieces than make a reader too slow.
        for seq in range(50):
            broker.tokens(submit.request, seq, words(f"{seq:06d}" + "x" * 100_000))
        time.sleep(0.5)
        assert not broker.count(Cancel)
        body += read_until(connection, b"000049xxx")
        for seq in range(50, 60):
            broker.tokens(submit.request, seq, words(f"{seq:06d}"))
        broker.done(submit.request)
        body += read_until(connection, b"[DONE]")
    found = [part[:6] for part in body.split(b'"content":"')[2:]]
    assert found == [b"%06d" % seq for seq in range(60)]
    server.wait_for_line(outcome="stop")


@pytest.mark.slow
def test_a_connection_that_takes_nothing_is_closed_in_the_end(own_server: Callable[..., Server]) -> None:
    server = own_server(stall_timeout=0.5)
    assert server.broker is not None
    server.broker.script = start_and_wait()
    with stalled(server):
        flood(server.broker)
        server.wait_for_line(status=499)


def test_a_burst_is_no_fault_of_a_client_that_reads(server: Server, broker: FakeBroker) -> None:
    broker.script = answer(*[f"{seq} " for seq in range(1000)])
    _, _, body = server.request("POST", "/v1/chat/completions", chat_body(stream=True))
    *chunks, _, done = events(body)
    assert done == "[DONE]" and len(chunks) == 1002


def test_json_bodies_are_read_whatever_the_content_type_says(server: Server) -> None:
    body = b"\xef\xbb\xbf" + chat_body()
    for content_type in ("text/plain", "application/x-www-form-urlencoded", ""):
        status, _, _ = server.request("POST", "/v1/chat/completions", body, {"content-type": content_type})
        assert status == 200
    status, _, reply = server.request("POST", "/v1/chat/completions", b"{")
    assert status == 400 and json.loads(reply)["error"]["type"] == "invalid_request_error"


def tool(parameters: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    schema = parameters or {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    return {"type": "function", "function": {"name": "look", "parameters": schema} | more}


# The grammar of a call does not know `not`.
PARTLY = {"type": "object", "properties": {"n": {"type": "integer", "not": {"const": 3}}}}
STRICTNESS = [
    ("auto", tool(strict=True), "tools.function.strict"),
    ("auto", tool(), None),
    ("none", tool(strict=True), None),
    ("required", tool(strict=True), None),
    ("required", tool(PARTLY, strict=True), "tools.function.strict"),
]


def test_strict_tools_that_nothing_holds_the_model_to_are_listed(folder_of: Callable[..., Path]) -> None:
    abilities = ["sampling", "tools", "tool_choice", "grammar"]
    for strict_fields in (0, 1):
        with closing(Server(folder_of("qwen3", "byte_level"), strict_fields=strict_fields)) as server:
            assert server.broker is not None
            server.broker.snapshot["models"][0]["abilities"] = abilities  # type: ignore[index]
            for choice, offered, listed in STRICTNESS:
                status, headers, reply = server.chat(tools=[offered], tool_choice=choice)
                if strict_fields and listed:
                    assert (status, reply["error"]["param"]) == (400, "tools")
                else:
                    assert (status, headers.get("x-millpond-ignored")) == (200, listed), (choice, offered)
