"""/openapi.json: true to the routes and to normalization, and a bounded schemathesis run without a server error."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from api import normalize, normalize_completion, openapi, routes
from api.resources.pool import complete
from api.responses import RequestError
from tests.api.conftest import Server

DOCUMENT = openapi.document(strict=False, keys_needed=False)
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
# What no schema says: fields that need each other, and names that may stand only once.
CROSSING = {"tool_choice", "top_logprobs", "tools", "echo"}
NORMALIZERS: dict[routes.Route, Callable[[dict[str, Any]], object]] = {
    routes.CHAT: lambda body: normalize.normalize_chat(body, 8192),
    routes.COMPLETIONS: lambda body: normalize_completion.normalize_completion(body, 8192),
    routes.TOKENIZE: normalize_completion.normalize_tokenization,
    routes.DETOKENIZE: normalize_completion.normalize_detokenization,
}


# Fewer would not reach every field, more take longer than they are worth in each run.
EXAMPLES = 10


def bounded(examples: int) -> settings:
    # What is tried is the same at every run: a suite that fails now and then for the same code helps nobody.
    return settings(
        max_examples=examples, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )


def with_whole_numbers(value: Any) -> Any:
    """1.0 is an integer to JSON Schema and a float to this API, which says so in its description."""
    if isinstance(value, dict):
        return {name: with_whole_numbers(item) for name, item in value.items()}
    if isinstance(value, list):
        return [with_whole_numbers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


@pytest.mark.system
def test_it_is_served(server: Server) -> None:
    status, headers, body = server.get("/openapi.json")
    assert (status, headers["content-type"]) == (200, "application/json")
    assert json.loads(body) == json.loads(json.dumps(DOCUMENT))
    assert DOCUMENT["openapi"].startswith("3.1.")


def test_every_route_is_described_with_exactly_its_methods() -> None:
    found = {path: {method.upper() for method in operations} for path, operations in DOCUMENT["paths"].items()}
    assert found == {
        route.path.replace("{name:path}", "{name}"): {*route.allowed.split(", ")} for route in routes.ALL
    }
    names = [operation["operationId"] for operations in DOCUMENT["paths"].values() for operation in operations.values()]
    assert len(names) == len(set(names))


def test_every_field_that_normalization_knows_is_described() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    assert set(schemas["ChatRequest"]["properties"]) == normalize.KNOWN | normalize.EXEMPT
    assert set(schemas["CompletionRequest"]["properties"]) == normalize_completion.KNOWN | normalize.EXEMPT
    of_prompt, of_messages = schemas["TokenizeRequest"]["oneOf"]
    for schema, known in (
        (of_prompt, normalize_completion.KNOWN_OF_PROMPT),
        (of_messages, normalize_completion.KNOWN_OF_MESSAGES),
        (schemas["DetokenizeRequest"], normalize_completion.KNOWN_OF_TOKENS),
    ):
        assert set(schema["properties"]) == known | normalize.EXEMPT


def test_a_worker_that_has_not_reported_has_every_kind_of_memory_in_the_pool() -> None:
    silent, told = {"name": "a", "memory": {}}, {"name": "b", "memory": {"active": 5, "wired": 1}}
    made = complete({"workers": [silent, told], "models": [{"name": "m", "folders": {"f": "/models/m"}}]})
    workers = made["workers"]
    assert made["models"] == [{"name": "m"}], "paths are not for clients"
    assert workers[0] == {"name": "a", "memory": {"active": 0, "cache": 0, "peak": 0, "budget": 0}}
    assert workers[1]["memory"] == {"active": 5, "cache": 0, "peak": 0, "budget": 0, "wired": 1}


def test_keys_and_strictness_are_described_where_they_are_set() -> None:
    guarded = openapi.document(strict=True, keys_needed=True)
    schemas = guarded["components"]["schemas"]
    named = [schemas[name] for name in ("ChatRequest", "CompletionRequest", "DetokenizeRequest")]
    for schema in (*named, *schemas["TokenizeRequest"]["oneOf"]):
        assert schema["additionalProperties"] is False
    assert guarded["security"] and guarded["paths"]["/health"]["get"]["security"] == []
    assert "401" in guarded["paths"]["/v1/pool"]["get"]["responses"]
    assert "security" not in DOCUMENT and "401" not in DOCUMENT["paths"]["/v1/pool"]["get"]["responses"]


BOUNDED = [
    (route, name, schema)
    for route, request in ((routes.CHAT, "ChatRequest"), (routes.COMPLETIONS, "CompletionRequest"))
    for name, schema in DOCUMENT["components"]["schemas"][request]["properties"].items()
    if isinstance(schema.get("type"), list) and {"integer", "number"} & {*schema["type"]}
]


@pytest.mark.parametrize(("route", "name", "schema"), BOUNDED, ids=lambda value: getattr(value, "path", None))
def test_numbers_are_bounded_as_described(route: routes.Route, name: str, schema: dict[str, Any]) -> None:
    step = 1 if "integer" in schema["type"] else 1e-6
    least = {"model": "m", "logprobs": True, "messages": [{"role": "user", "content": "x"}]}
    if route is routes.COMPLETIONS:
        least = {"model": "m", "prompt": "x"}

    def taken(value: float) -> bool:
        try:
            NORMALIZERS[route](least | {name: value})
        except RequestError as error:
            assert error.param == name
            return False
        return True

    if "minimum" in schema:
        assert taken(schema["minimum"]) and not taken(schema["minimum"] - step)
    elif "exclusiveMinimum" in schema:
        assert taken(schema["exclusiveMinimum"] + step) and not taken(schema["exclusiveMinimum"])
    else:
        assert taken(-(10**30))
    if "maximum" in schema:
        past = schema["maximum"] + 1 if step == 1 else schema["maximum"] * (1 + step)
        assert taken(schema["maximum"]) and not taken(past)
    else:
        assert taken(10**30)


@pytest.mark.slow
@pytest.mark.parametrize("route", NORMALIZERS, ids=lambda route: route.path)
def test_what_the_description_allows_is_taken(route: routes.Route) -> None:
    operation = schemathesis.openapi.from_dict(DOCUMENT)[route.path]["POST"]

    @bounded(EXAMPLES)
    @given(operation.as_strategy(generation_mode=GenerationMode.POSITIVE))
    def holds(case: schemathesis.Case) -> None:
        try:
            NORMALIZERS[route](with_whole_numbers(json.loads(json.dumps(case.body))))
        except RequestError as error:
            assert error.param in CROSSING, (str(error), case.body)

    holds()


POSITIVE, NEGATIVE = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
# A request without body and parameters cannot be wrong.
OPERATIONS = [
    (path, method, mode)
    for path, operations in DOCUMENT["paths"].items()
    for method, operation in operations.items()
    for mode in ((POSITIVE, NEGATIVE) if "requestBody" in operation else (POSITIVE,))
]


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.parametrize(("path", "method", "mode"), OPERATIONS)
def test_no_answer_is_a_server_error_or_an_undescribed_one(
    shared_server: Server, path: str, method: str, mode: GenerationMode
) -> None:
    operation = schemathesis.openapi.from_dict(DOCUMENT)[path][method.upper()]

    @bounded(EXAMPLES if method == "post" else 3)
    @given(operation.as_strategy(generation_mode=mode))
    def holds(case: schemathesis.Case) -> None:
        case.call_and_validate(base_url=f"http://127.0.0.1:{shared_server.port}", checks=CHECKS)

    holds()
