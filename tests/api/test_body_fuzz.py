"""Whatever bytes come as a body: an error of our own or a request that packs, on every route that takes one."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from api import normalize, normalize_completion
from api.normalize import NormalizedChat, normalize_chat
from api.normalize_completion import (
    NormalizedCompletion,
    NormalizedDetokenization,
    NormalizedTokenization,
    normalize_detokenization,
    normalize_tokenization,
)
from api.read_json import BadBody, read_object
from api.responses import RequestError
from common.generation import GenerationRequest, Sampling, pack_request, unpack_request

USER = {"role": "user", "content": "hello"}
# What normalizes a body, and the least body that it takes.
ROUTES: list[tuple[Callable[[dict[str, Any]], Any], dict[str, Any]]] = [
    (lambda body: normalize_chat(body, 8192), {"model": "m", "messages": [USER]}),
    (lambda body: normalize_chat(body, 1, True), {"model": "m", "messages": [USER]}),
    (lambda body: normalize_completion.normalize_completion(body, 8192), {"model": "m", "prompt": "hello"}),
    (normalize_tokenization, {"messages": [USER]}),
    (normalize_detokenization, {"tokens": [1]}),
]
FIELDS = sorted(normalize.KNOWN | normalize_completion.KNOWN | normalize.EXEMPT | {"tokens"})
# Numbers at the edges of what fields, floats and 64 bits take.
EDGES = [0, -0.0, 1, 1.0, -1, 16, 17, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 10**40, 1e308, 5e-324, 1e30, 0.1]
ODD = ["\ud83d", "", "none"]
SCALARS = st.none() | st.booleans() | st.sampled_from(EDGES) | st.sampled_from(ODD) | st.text(max_size=4)
NAMES = st.sampled_from("role content type text function name arguments schema strict id 5".split())
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "tool"])}, optional={"content": VALUES}),
    max_size=2,
)
# A few fields anything, the rest as it should be: what is wrong all over is refused for the first thing alone.
BODIES = st.tuples(
    st.sampled_from(ROUTES), st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=2), st.none() | MESSAGES
)
Case = tuple[tuple[Callable[[dict[str, Any]], Any], dict[str, Any]], dict[str, Any], Any]


def body_of(case: Case) -> bytes:
    """The bytes of a drawn case."""
    (_, least), fields, messages = case
    return json.dumps(least | ({} if messages is None else {"messages": messages}) | fields).encode()


def checked(body: bytes) -> None:
    """Read and normalize as each route does; what comes out is text throughout, and packs."""
    try:
        value = read_object(body)
    except BadBody as error:
        assert str(error)
        return
    before = json.dumps(value)
    for normalized, _ in ROUTES:
        try:
            found = normalized(value)
        except RequestError as error:
            assert error.status == 400 and json.loads(error.body())["error"]["message"]
            continue
        json.dumps(found, ensure_ascii=False, default=dataclasses.asdict).encode()
        for request in requests(found):
            assert unpack_request(pack_request(request)) == request
    assert json.dumps(value) == before


def requests(found: object) -> list[GenerationRequest]:
    """What would go to a worker."""
    if isinstance(found, NormalizedChat):
        return [
            GenerationRequest(
                [1],
                found.max_tokens,
                Sampling(**found.sampling),
                found.stop,
                found.top_logprobs,
                thinking=bool(found.template_kwargs["enable_thinking"]),
                grammar=json.dumps(found.response_format.schema, ensure_ascii=False),
                tools=found.tools.packed(),
            )
        ]
    if isinstance(found, NormalizedCompletion):
        prompts = [prompt for prompt in found.prompts if isinstance(prompt, list) and prompt] or [[1]]
        sampling = Sampling(**found.sampling)
        return [GenerationRequest(ids, found.max_tokens, sampling, found.stop, found.logprobs) for ids in prompts]
    if isinstance(found, NormalizedTokenization):
        return [GenerationRequest([1], 1, tools=found.tools.packed())]
    assert isinstance(found, NormalizedDetokenization)
    return [GenerationRequest(found.tokens or [1], 1)]


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(BODIES)
def test_any_object_is_taken_or_refused(case: Case) -> None:
    checked(body_of(case))


@pytest.mark.slow
@pytest.mark.parametrize("field", FIELDS)
def test_every_field_at_its_edges_is_taken_or_refused(field: str) -> None:
    containers = [[], {}, [[]], [{}], {"type": []}, ["\ud83d"], {"\ud83d": 1}, [1, 2**31], [2**63]]
    for value in [*EDGES, *ODD, *containers]:
        for _, least in ROUTES:
            checked(json.dumps(least | {field: value}).encode())


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(BODIES, st.data())
def test_any_damaged_body_is_taken_or_refused(case: Case, data: st.DataObject) -> None:
    whole = bytearray(body_of(case))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(whole)))
        put = st.binary(max_size=2) | st.sampled_from([b'"', b"\\", b"["])
        whole[at : at + data.draw(st.integers(0, 2))] = data.draw(put)
    checked(bytes(whole))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig", "latin-1"])
def test_any_encoding_is_taken_or_refused(encoding: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "é"}]}
    checked(json.dumps(body, ensure_ascii=False).encode(encoding))


@given(st.binary(max_size=64))
@example(b'{"messages":[{"role":"user","content":"\\ud800"}],"model":"m"}')
def test_any_bytes_are_taken_or_refused(body: bytes) -> None:
    checked(body)
