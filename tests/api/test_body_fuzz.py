"""Whatever bytes come as a body: an error of our own or a request that packs, on every route that takes one."""

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
    NormalizedTokenization,
    normalize_detokenization,
    normalize_tokenization,
)
from api.read_json import BadBody, read_object
from api.responses import RequestError
from common.generation import GenerationRequest, Sampling, pack_request, unpack_request

NORMALIZERS: list[Callable[[dict[str, Any]], Any]] = [
    lambda body: normalize_chat(body, 8192),
    lambda body: normalize_completion.normalize_completion(body, 8192),
    lambda body: normalize_chat(body, 1, True),
    normalize_tokenization,
    normalize_detokenization,
]
FIELDS = sorted(normalize.KNOWN | normalize_completion.KNOWN | normalize.EXEMPT | {"tokens"})
# Numbers at the edges of what fields, floats and 64 bits take.
EDGES = [0, -0.0, 1, 1.0, -1, 16, 17, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 10**40, 1e308, 5e-324, 1e30, 0.1]
SCALARS = st.none() | st.booleans() | st.sampled_from(EDGES) | st.integers() | st.text(max_size=4)
NAMES = st.sampled_from("role content type text function name arguments schema strict id 5".split())
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "tool"])}, optional={"content": VALUES}), max_size=2
)
BODIES = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=5).flatmap(
    lambda fields: st.builds(
        lambda messages, model: {"model": model, "messages": messages} | fields, MESSAGES | VALUES, st.just("m") | SCALARS
    )
)


def checked(body: bytes) -> None:
    """Read and normalize as each route does; what comes out packs."""
    try:
        value = read_object(body)
    except BadBody as error:
        assert str(error)
        return
    before = json.dumps(value)
    for normalize_ in NORMALIZERS:
        try:
            found = normalize_(value)
        except RequestError as error:
            assert error.status == 400 and json.loads(error.body())["error"]["message"]
            continue
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
    return [GenerationRequest(found[1] or [1], 1)]  # type: ignore[index]


@settings(max_examples=200, deadline=None)
@given(BODIES)
def test_any_object_is_taken_or_refused(body: dict[str, Any]) -> None:
    try:
        checked(json.dumps(body, ensure_ascii=False).encode())
    except UnicodeEncodeError:
        checked(json.dumps(body).encode())


@settings(max_examples=200, deadline=None)
@given(BODIES, st.data())
def test_any_damaged_body_is_taken_or_refused(body: dict[str, Any], data: st.DataObject) -> None:
    whole = bytearray(json.dumps(body).encode())
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
