"""Every outcome has an answer, in one shape."""

import json

import pytest

from api import responses
from api.responses import RequestError, request_error, retry_after, stream_error
from common.errors import ServingError
from common.outcomes import Outcome

TYPES = {
    400: "invalid_request_error",
    404: "invalid_request_error",
    529: "overloaded_error",
    503: "api_error",
    504: "api_error",
}


@pytest.mark.parametrize("outcome", [outcome for outcome in Outcome if outcome.kind != "finished"])
def test_every_outcome_that_is_no_reply_has_a_status(outcome: Outcome) -> None:
    error = request_error(ServingError(outcome))
    body = json.loads(error.body())
    assert list(body) == ["error"] and list(body["error"]) == ["message", "type", "code", "param"]
    expected = "overloaded_error" if outcome is Outcome.QUEUE_TIMEOUT else TYPES[error.status]
    assert body["error"]["type"] == expected
    assert body["error"]["message"] and "{" not in body["error"]["message"]
    assert error.outcome == outcome.value
    assert ("retry-after" in error.headers) == (error.status in (503, 529) and outcome is not Outcome.CANCELLED)


def test_the_body_byte_for_byte() -> None:
    error = RequestError(400, 'é "quoted"', code="c", param="p")
    assert error.body().decode() == (
        '{"error":{"message":"é \\"quoted\\"","type":"invalid_request_error","code":"c","param":"p"}}'
    )
    assert (
        responses.error_body("m", "api_error")
        == b'{"error":{"message":"m","type":"api_error","code":null,"param":null}}'
    )


@pytest.mark.parametrize(("seconds", "header"), [(None, "2"), (0, "2"), (0.2, "1"), (3.0, "3"), (3.1, "4"), (60, "60")])
def test_retry_after_is_whole_seconds(seconds: float | None, header: str) -> None:
    assert retry_after(seconds) == header
    assert request_error(ServingError(Outcome.QUEUE_FULL, retry_after_s=seconds)).headers["retry-after"] == header


def test_a_failure_names_its_type_only() -> None:
    error = request_error(ServingError(Outcome.ENGINE_FAILED, "NotFinite"))
    assert (error.status, error.kind, error.headers) == (503, "api_error", {"retry-after": "2"})
    assert "NotFinite" in error.message
    assert "engine_failed" in request_error(ServingError(Outcome.ENGINE_FAILED)).message


@pytest.mark.parametrize(
    ("need", "param"),
    [("grammar", "response_format"), ("tools", "tools"), ("logprobs", "logprobs"), ("seed", "seed"), ("", None)],
)
def test_what_is_unsupported_is_named_by_its_field(need: str, param: str | None) -> None:
    error = request_error(ServingError(Outcome.UNSUPPORTED, need))
    assert (error.status, error.param) == (400, param)
    assert param is None or param in error.message


def test_a_streams_error_is_the_same_object() -> None:
    assert stream_error(Outcome.WORKER_LOST) == request_error(ServingError(Outcome.WORKER_LOST)).body()


def test_refusals_of_the_transport() -> None:
    cases = {
        responses.not_found(): 404,
        responses.method_not_allowed("GET", "POST"): 405,
        responses.body_too_large(5): 413,
        responses.body_timeout(60): 408,
        responses.model_not_found("x", ["a", "b"]): 404,
        responses.internal_error("KeyError"): 500,
    }
    assert [error.status for error in cases] == list(cases.values())
    assert responses.method_not_allowed("GET", "POST").headers == {"allow": "POST"}
    assert responses.model_not_found("x", ["a", "b"]).message == "Model 'x' not found. Available: a, b."
