"""The hand-written rows of fixtures/chat: bodies and what they mean, replies and what JSON mode makes of them."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import fixtures
from api.extract_json import extract_json
from api.normalize import normalize_chat
from api.read_json import read_object
from api.responses import RequestError

FOLDER = Path(fixtures.__file__).parent / "chat"


def rows(name: str) -> list[Any]:
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


def shown(body: dict[str, Any]) -> dict[str, Any]:
    """The normalized request as JSON has it."""
    found = json.loads(json.dumps(dataclasses.asdict(normalize_chat(body, 8192))))
    # The client's own words, for templates that want the sentence of JSON mode elsewhere (tests/api/test_normalize.py).
    del found["said"]
    return found


# Rows name only what differs from this.
LEAST = shown({"model": "m", "messages": [{"role": "user", "content": "hello"}]})
BODIES, REPLIES = rows("normalize.json"), rows("extract_json.json")


def test_there_are_enough_of_them() -> None:
    for found in (BODIES, REPLIES):
        assert len({row["name"] for row in found}) == len(found) >= 60


@pytest.mark.parametrize("row", BODIES, ids=lambda row: row["name"])
def test_a_body_means_what_it_meant(row: dict[str, Any]) -> None:
    body = read_object(json.dumps(row["body"], ensure_ascii=False).encode())
    if "refused" in row:
        with pytest.raises(RequestError) as caught:
            normalize_chat(body, 8192)
        assert (caught.value.status, caught.value.param) == (400, row["refused"])
    else:
        found = shown(body)
        assert {name: value for name, value in found.items() if value != LEAST[name]} == row["normalized"]
        kwargs = row["normalized"].get("template_kwargs", LEAST["template_kwargs"])
        assert list(found["template_kwargs"]) == list(kwargs), "their order is the template's"
    assert body == row["body"], "the client's objects are never changed"


@pytest.mark.parametrize("row", REPLIES, ids=lambda row: row["name"])
def test_a_reply_is_reduced_as_it_was(row: dict[str, str]) -> None:
    assert extract_json(row["text"]) == row["result"]
