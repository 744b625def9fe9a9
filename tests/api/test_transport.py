"""HTTP itself over real gunicorn: paths, methods, ids, bodies, connections, departures."""

import contextlib
import json
import socket
import time
from collections.abc import Callable

import pytest

from common.envelope import Cancel, Message, Release, Reserve, Submit
from tests.api.conftest import Server, chat_body, http_request, read_all, read_until
from tests.api.fake_broker import FakeBroker, only_reserve, start_and_wait

pytestmark = pytest.mark.system


def error_of(body: bytes) -> dict[str, object]:
    found = json.loads(body)["error"]
    assert list(found) == ["message", "type", "code", "param"]
    return found


@pytest.mark.parametrize(
    "path", ["/", "/nope", "/v1", "/v1/chat", "/v1/chat/completions/x", "//v1/models", "/v1/models//"]
)
def test_other_paths_are_404_in_the_error_shape(server: Server, path: str) -> None:
    status, headers, body = server.get(path)
    assert (status, headers["content-type"]) == (404, "application/json")
    assert error_of(body)["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("HEAD", "/v1/chat/completions", "POST"),
        ("OPTIONS", "/v1/chat/completions", "POST"),
        ("POST", "/health", "GET, HEAD"),
        ("DELETE", "/v1/models/tiny", "GET, HEAD"),
        ("BREW", "/v1/models", "GET, HEAD"),
    ],
)
def test_other_methods_are_405_with_allow(server: Server, method: str, path: str, allow: str) -> None:
    status, headers, body = server.request(method, path)
    assert (status, headers["allow"]) == (405, allow)
    assert method == "HEAD" or error_of(body)["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "path", ["/health", "/health/", "/health/ready", "/v1/models", "/v1/models/tiny/", "/v1/pool/"]
)
def test_head_and_a_trailing_slash_work_where_get_does(server: Server, path: str) -> None:
    status, headers, body = server.get(path)
    head_status, head_headers, head_body = server.request("HEAD", path)
    assert status == head_status == 200
    assert "no-body response" not in server.log(), "the server was not even given one"
    assert head_body == b"" and head_headers["content-length"] == headers["content-length"] == str(len(body))


def test_a_request_id_is_the_clients_or_new_on_every_response(server: Server) -> None:
    for path in ("/health", "/nope"):
        assert server.request("GET", path, headers={"X-Request-Id": "my id 1~"})[1]["x-request-id"] == "my id 1~"
        for bad in ("", "x" * 129, "caf\xe9", "tab\tbed"):
            given = server.request("GET", path, headers={"X-Request-Id": bad})[1]["x-request-id"]
            assert given.startswith("req_") and len(given) == 36
    assert server.chat({"x-request-id": "x" * 128})[1]["x-request-id"] == "x" * 128
    assert server.chat({"x-request-id": "of-an-error"}, n=0)[1]["x-request-id"] == "of-an-error"


def test_the_request_id_is_the_label_that_the_broker_hears(server: Server, broker: FakeBroker) -> None:
    server.chat({"x-request-id": "label-7"})
    (reserve,) = broker.wait_for(Reserve)
    assert reserve.label == "label-7"


def test_a_model_in_a_path_may_be_percent_encoded(server: Server) -> None:
    assert server.get("/v1/models/tin%79")[0] == 200


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"what is this\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nno colon here\r\n\r\n", 400),
        (b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 100 + b"\r\n", 431),
    ],
)
def test_what_is_not_http_gets_the_error_shape_too(server: Server, request_bytes: bytes, status: int) -> None:
    with server.connect() as connection:
        connection.sendall(request_bytes)
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status) and b"x-request-id: req_" in head
    assert error_of(body)["type"] == "invalid_request_error"
    server.wait_for_line(outcome="malformed", status=status)


OF_THE_PARSER = [
    (b"get /health HTTP/1.1\r\n\r\n", 400, "'get' is not a valid request method."),
    (b"GET /health HTTP/9.9\r\n\r\n", 400, "'HTTP/9.9' is not a supported version of HTTP; use HTTP/1.1."),
    (b"GET /health HTTP/1.1\r\nna me: x\r\n\r\n", 400, "'na me' is not a valid header name."),
    (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400, "A request header is not valid: Duplicate host header."),
    (b"GET /health HTTP/1.1\nHost: a\n\n", 400, "The request is not valid HTTP: Bare LF as line terminator"),
    (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", 400, "The chunked request body is not valid: "),
]


@pytest.mark.parametrize(("request_bytes", "status", "words"), OF_THE_PARSER)
def test_the_servers_own_refusals_say_what_is_wrong(
    server: Server, request_bytes: bytes, status: int, words: str
) -> None:
    with server.connect() as connection:
        connection.sendall(request_bytes)
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert str(error_of(body)["message"]).startswith(words)


CODINGS = ["gzip, chunked", "deflate,chunked", "identity, chunked", "gzip\r\nTransfer-Encoding: chunked", "br"]


@pytest.mark.parametrize("coding", CODINGS)
def test_a_coded_body_is_refused_and_not_taken_for_its_text(server: Server, broker: FakeBroker, coding: str) -> None:
    body = chat_body()
    framing = f"Transfer-Encoding: {coding}".encode()
    head = http_request("POST", "/v1/chat/completions").replace(b"Content-Length: 0", framing)
    with server.connect() as connection:
        connection.sendall(head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        head, _, answer = read_all(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 501 ") and b"connection: close" in head.lower() and b"x-request-id: req_" in head
    first = coding.partition("\r")[0].partition(",")[0]
    assert str(error_of(answer)["message"]).startswith(f"The transfer coding '{first}' is not supported")
    assert broker.count(Reserve) == 0


def test_the_refusal_of_a_large_coded_body_arrives(server: Server) -> None:
    head = http_request("POST", "/v1/chat/completions").replace(b"Content-Length: 0", b"Transfer-Encoding: gzip, chunked")
    with server.connect() as connection:
        connection.settimeout(10)
        # More than the sockets hold: closed upon at once, the client would have a reset in place of the answer.
        connection.sendall(head + b"10000\r\n%b\r\n" % bytes(0x10000) * 40)
        time.sleep(0.3)
        assert connection.recv(1000).startswith(b"HTTP/1.1 501 ")


@pytest.mark.parametrize(
    ("path", "status"), [("/v1/chat/completions", 405), ("/v1/realtime", 404), ("/v1/models", 200)]
)
def test_an_upgrade_is_passed_over_and_the_request_answered(server: Server, path: str, status: int) -> None:
    key = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="
    wanted = ("Upgrade: websocket", "Connection: Upgrade", key, "Sec-WebSocket-Version: 13", "X-Request-Id: socket")
    with server.connect() as connection:
        connection.sendall(http_request("GET", path, b"", *wanted))
        reply = read_until(connection, b"}")
    assert reply.startswith(b"HTTP/1.1 %d " % status) and b"x-request-id: socket" in reply
    server.wait_for_line(id="socket", status=status)


def test_a_client_of_http_1_0_is_told_whether_its_connection_goes_on(server: Server) -> None:
    with server.connect() as connection:
        for _ in range(2):
            connection.sendall(http_request("GET", "/health", b"", "Connection: keep-alive", version="1.0"))
            assert b"connection: keep-alive" in read_until(connection, b'"ok"}').lower()
        connection.sendall(http_request("GET", "/health", version="1.0"))
        assert b"connection: close" in read_all(connection).lower()
    with server.connect() as connection:
        connection.sendall(
            http_request("POST", "/v1/chat/completions", chat_body(stream=True), "Connection: keep-alive", version="1.0")
        )
        head = read_all(connection).partition(b"\r\n\r\n")[0].lower()
        assert b"connection: close" in head and b"keep-alive" not in head


def test_an_empty_line_before_a_request_is_passed_over(server: Server) -> None:
    with server.connect() as connection:
        for line in (b"\r\n", b"", b"\r\n"):
            connection.sendall(line + http_request("POST", "/nope", b"{}"))
            assert read_until(connection, b"}}").startswith(b"HTTP/1.1 404 ")
        # What old clients send after a body, which is before the next request.
        connection.sendall(b"\r\n")
        connection.sendall(http_request("GET", "/health"))
        assert read_until(connection, b'"ok"}').startswith(b"HTTP/1.1 200 ")


def padded_chat(size: int) -> bytes:
    body = chat_body()
    return body + b" " * (size - len(body))


def test_a_body_of_exactly_the_cap_is_taken_and_one_byte_more_is_not(server: Server) -> None:
    assert server.request("POST", "/v1/chat/completions", padded_chat(100_000))[0] == 200
    status, headers, body = server.request("POST", "/v1/chat/completions", padded_chat(100_001))
    assert (status, headers["connection"]) == (413, "close")
    assert "100000" in str(error_of(body)["message"])


def test_a_body_over_the_cap_is_refused_before_it_is_sent(server: Server) -> None:
    with server.connect() as connection:
        head = http_request("POST", "/v1/chat/completions", b"", "Expect: 100-continue")
        connection.sendall(head.replace(b"Content-Length: 0", b"Content-Length: 9999999999999999999999"))
        assert read_all(connection).startswith(b"HTTP/1.1 413 ")


def test_a_chunked_body_is_capped_while_it_is_read(server: Server) -> None:
    with server.connect() as connection:
        head = http_request("POST", "/v1/chat/completions").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
        connection.sendall(head)
        for _ in range(3):
            connection.sendall(b"c350\r\n" + b" " * 50_000 + b"\r\n")
        reply = read_until(connection, b"}}")
        assert reply.startswith(b"HTTP/1.1 413 ")


def test_a_chunked_body_is_read(server: Server) -> None:
    body = chat_body()
    with server.connect() as connection:
        head = http_request("POST", "/v1/chat/completions").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
        connection.sendall(head + b"%x\r\n%b\r\n" % (len(body), body))
        connection.sendall(b"0\r\n\r\n")
        assert read_until(connection, b"system_fingerprint").startswith(b"HTTP/1.1 200 ")


@pytest.mark.slow
def test_a_body_that_does_not_come_is_a_408_and_the_end_of_the_connection(server: Server) -> None:
    head = http_request("POST", "/v1/chat/completions").replace(b"gth: 0", b"gth: 10")
    with server.connect() as nothing, server.connect() as a_part:
        nothing.sendall(head)
        a_part.sendall(head + b"{")
        for connection in (nothing, a_part):
            reply = read_all(connection)
            assert reply.startswith(b"HTTP/1.1 408 ") and b"connection: close" in reply.lower()


@pytest.mark.slow
def test_a_body_that_drips_is_a_408_too(server: Server) -> None:
    with server.connect() as connection:
        connection.sendall(http_request("POST", "/v1/chat/completions").replace(b"gth: 0", b"gth: 100"))
        began = time.monotonic()
        connection.settimeout(0.2)
        reply = b""
        while not reply:
            connection.sendall(b" ")
            try:
                reply = connection.recv(1000)
            except TimeoutError:
                assert time.monotonic() - began < 5
        assert reply.startswith(b"HTTP/1.1 408 ")


def test_expect_100_continue_gets_its_100_when_the_body_is_wanted(server: Server) -> None:
    body = chat_body()
    with server.connect() as connection:
        head = http_request("POST", "/v1/chat/completions", body, "Expect: 100-continue")[: -len(body)]
        connection.sendall(head)
        assert read_until(connection, b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert read_until(connection, b"system_fingerprint").startswith(b"HTTP/1.1 200 ")


def test_a_refused_request_with_a_held_back_body_gets_no_100(server: Server) -> None:
    with server.connect() as connection:
        connection.sendall(http_request("POST", "/nope", b"x" * 10, "Expect: 100-continue")[:-10])
        reply = read_all(connection)
        assert reply.startswith(b"HTTP/1.1 404 ") and b"connection: close" in reply.lower()


def test_the_connection_goes_on_after_an_early_refusal(server: Server) -> None:
    with server.connect() as connection:
        for _ in range(2):
            connection.sendall(http_request("POST", "/nope", b'{"a": 1}'))
            reply = read_until(connection, b"}}")
            assert reply.startswith(b"HTTP/1.1 404 ") and b"connection: close" not in reply.lower()
        # The body comes later than the answer.
        connection.sendall(http_request("POST", "/nope", b"x" * 100)[:-60])
        read_until(connection, b"}}")
        connection.sendall(b"x" * 60 + http_request("GET", "/health"))
        assert read_until(connection, b'"ok"}').startswith(b"HTTP/1.1 200 ")


def test_a_large_unread_body_ends_the_connection_with_the_answer_intact(server: Server) -> None:
    with server.connect() as connection:
        connection.sendall(http_request("POST", "/nope", b"x" * 30_000_000))
        reply = read_all(connection)
        assert reply.startswith(b"HTTP/1.1 404 ") and reply.endswith(b"}}") and b"connection: close" in reply.lower()


def test_get_with_a_body_leaves_the_connection_usable(server: Server) -> None:
    with server.connect() as connection:
        connection.sendall(http_request("GET", "/health", b"unasked") + http_request("GET", "/health"))
        assert read_until(connection, b'"ok"}').startswith(b"HTTP/1.1 200 ")


def test_pipelined_requests_are_answered_in_order(server: Server) -> None:
    with server.connect() as connection:
        chat = http_request("POST", "/v1/chat/completions", chat_body(), "X-Request-Id: first")
        second = http_request("GET", "/health", b"", "X-Request-Id: second", "Connection: close")
        connection.sendall(chat + second)
        reply = read_all(connection)
    assert reply.index(b"first") < reply.index(b"second")
    assert reply.count(b"HTTP/1.1 200 ") == 2


def test_a_packet_full_of_requests_leaves_others_their_turn(server: Server) -> None:
    flood, answers, line = 2000, bytearray(), b"HTTP/1.1 404 "
    with server.connect() as greedy, server.connect() as other:
        greedy.sendall(b"GET /nope HTTP/1.1\r\nHost: x\r\n\r\n" * flood)
        answers += greedy.recv(1000)
        other.sendall(http_request("GET", "/health"))
        assert read_until(other, b'"ok"}').startswith(b"HTTP/1.1 200 ")
        greedy.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                answers += greedy.recv(1 << 20)
        assert 0 < answers.count(line) < flood // 4
        greedy.settimeout(20)
        while answers.count(line) < flood:
            answers += greedy.recv(1 << 20)


@pytest.mark.slow
def test_a_connection_without_a_request_is_closed(server: Server) -> None:
    with server.connect() as silent, server.connect() as slow, server.connect() as slower:
        slow.sendall(b"POST /v1/chat/comple")
        slower.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
        began = time.monotonic()
        for connection in (silent, slow, slower):
            assert connection.recv(100) == b""
        assert 0.5 < time.monotonic() - began < 5


def test_no_log_line_holds_a_body_a_header_value_or_a_query_string(server: Server) -> None:
    secrets = ["s3cret-header", "s3cret-query", "s3cret-body", "s3cret-path", "s3cret-field"]
    header, query, body, path, field = secrets
    server.request("POST", f"/v1/chat/completions?key={query}", chat_body(stop=[body]), {"x-api-key": header})
    server.chat(**{field: 1, "temperature": body})
    server.get(f"/{path}")
    server.wait_for_line(route="-", status=404)
    assert not [word for word in secrets if word in server.log()]


# Departures

Leave = Callable[[socket.socket], None]


def close(connection: socket.socket) -> None:
    connection.close()


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()


def half_close(connection: socket.socket) -> None:
    connection.shutdown(socket.SHUT_WR)


WAYS = pytest.mark.parametrize("leave", [close, reset, half_close])


@WAYS
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_its_place_is_asked_for_releases_it(
    server: Server, broker: FakeBroker, leave: Leave, stream: bool
) -> None:
    broker.script = lambda *_: None
    with server.open_chat(stream=stream) as connection:
        (reserve,) = broker.wait_for(Reserve)
        leave(connection)
        (release,) = broker.wait_for(Release)
        assert release.requests == reserve.requests


def test_what_is_rendered_for_a_client_that_has_left_is_not_submitted(server: Server, broker: FakeBroker) -> None:
    def reserve_and_leave(broker: FakeBroker, message: Message, payload: bytes) -> None:
        if isinstance(message, Reserve):
            connection.close()
            only_reserve(broker, message, payload)

    broker.script = reserve_and_leave
    with server.connect() as connection:
        words = "word " * 1500
        body = chat_body(messages=[{"role": "user", "content": words}])
        connection.sendall(http_request("POST", "/v1/chat/completions", body, "X-Request-Id: gone"))
        (release,) = broker.wait_for(Release)
    server.wait_for_line(id="gone", status=499)
    # What may still be rendered in the thread is done when as much has been rendered after it.
    assert server.request("POST", "/tokenize", json.dumps({"prompt": words * 2}).encode())[0] == 200
    assert (broker.count(Reserve), broker.count(Submit), len(release.requests)) == (1, 0, 1)


@WAYS
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_the_queue_is_cancelled(
    server: Server, broker: FakeBroker, leave: Leave, stream: bool
) -> None:
    broker.script = only_reserve
    with server.open_chat(stream=stream, n=2) as connection:
        submits = broker.wait_for(Submit, 2)
        leave(connection)
        cancels = broker.wait_for(Cancel, 2)
    assert {cancel.request for cancel in cancels} == {submit.request for submit in submits}


@WAYS
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_its_reply_is_decoded_is_cancelled(
    server: Server, broker: FakeBroker, leave: Leave, stream: bool
) -> None:
    broker.script = start_and_wait("Hel")
    label = f"leaving-{leave.__name__}-{stream}"
    with server.connect() as connection:
        body = chat_body(stream=stream)
        connection.sendall(http_request("POST", "/v1/chat/completions", body, f"X-Request-Id: {label}"))
        (submit,) = broker.wait_for(Submit)
        if stream:
            read_until(connection, b'"Hel"')
        leave(connection)
        (cancel,) = broker.wait_for(Cancel)
    assert cancel.request == submit.request
    assert " info " in server.wait_for_line(id=label, status=499, outcome="client_gone")


def test_a_departure_is_told_to_the_broker_at_once(server: Server, broker: FakeBroker) -> None:
    broker.script = start_and_wait("Hel")
    waits = []
    for stream in (False, True):
        broker.forget()
        with server.open_chat(stream=stream) as connection:
            broker.wait_for(Submit)
            connection.close()
            began = time.monotonic()
            broker.wait_for(Cancel)
            waits.append(time.monotonic() - began)
    assert min(waits) < 0.1


def test_a_client_that_leaves_in_the_middle_of_its_body_reserves_nothing(server: Server, broker: FakeBroker) -> None:
    with server.connect() as connection:
        connection.sendall(http_request("POST", "/v1/chat/completions", chat_body(), "X-Request-Id: half")[:-5])
    server.wait_for_line(id="half", status=499)
    assert broker.count(Reserve) == 0


def test_a_done_after_the_departure_hurts_nobody(server: Server, broker: FakeBroker) -> None:
    broker.script = start_and_wait("Hel")
    with server.open_chat() as connection:
        (submit,) = broker.wait_for(Submit)
        connection.close()
        broker.wait_for(Cancel)
    broker.done(submit.request)
    broker.tokens(submit.request, 7, [])
    broker.script = start_and_finish
    assert server.chat()[0] == 200


def start_and_finish(broker: FakeBroker, message: Message, payload: bytes) -> None:
    only_reserve(broker, message, payload)
    if isinstance(message, Submit):
        broker.start(message.request)
        broker.done(message.request)
