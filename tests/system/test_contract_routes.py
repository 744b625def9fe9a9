"""The recorded exchanges of fixtures/chat/routes.json, replayed: every byte that a client gets is as it was.

`scripts/fixtures` records them again when an answer changes on purpose, `scripts/fixtures --check` says which would.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import jsonschema
import pytest

from api import openapi
from fixtures import exchanges, route_samples, tiny_model
from scripts.harness import Harness
from scripts.record_fixtures import scripted

ROWS = json.loads(exchanges.GOLDEN.read_text(encoding="utf-8"))
SAMPLES = {sample.name: sample for sample in route_samples.samples()}
SECTIONS = [f"§{number}" for number in range(1, 9)]


@pytest.fixture(scope="module")
def instance_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Harness]]:
    """The instances by name, each started when it is first asked for."""
    folder = tmp_path_factory.mktemp("contract") / "tiny"
    model: Path = tiny_model.build(folder, chat_template=route_samples.TEMPLATE)
    running: dict[str, Harness] = {}
    with ExitStack() as stack:

        def give(name: str) -> Harness:
            if name not in running:
                running[name] = stack.enter_context(scripted(model, *route_samples.SERVERS[name]))
            return running[name]

        yield give


def test_what_is_recorded_is_what_is_asked() -> None:
    assert [row["name"] for row in ROWS] == list(SAMPLES)
    assert [row["request"] for row in ROWS] == [exchanges.described(sample) for sample in SAMPLES.values()]
    assert len(ROWS) >= 80 and sorted({row["contract"] for row in ROWS}) == SECTIONS


@pytest.mark.system
@pytest.mark.slow
def test_the_pool_has_the_keys_of_the_contract(instance_of: Callable[[str], Harness]) -> None:
    pool = instance_of("open").get("/v1/pool")[1]
    worker = (
        "name pid host model state lanes slots running kv_tokens kv_tokens_used memory step_age_ms restarts".split()
    )
    assert {*"workers queue limits refused finished epoch version".split()} <= set(pool)
    assert {*"waiting reserved oldest_ms".split()} <= set(pool["queue"])
    assert set(pool["limits"]) == {"max_inflight", "max_queue"}
    assert {*worker} <= set(pool["workers"][0])
    assert {*"active cache peak budget".split()} <= set(pool["workers"][0]["memory"])
    document = openapi.document(strict=False, keys_needed=False)
    described = document["components"]["schemas"]["Pool"] | {"components": document["components"]}
    jsonschema.Draft202012Validator(described).validate(pool)


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"].replace(" ", "-"))
def test_an_exchange_is_as_it_was_recorded(row: dict, instance_of: Callable[[str], Harness]) -> None:
    sample = SAMPLES[row["name"]]
    assert exchanges.answer(instance_of(sample.server).port, sample) == row["answer"]
