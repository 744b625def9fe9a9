"""One form of log, for people and for machines, in which every field has its name."""

import json
import logging
from collections.abc import Iterator

import pytest

from common import logs


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_text_quotes_what_would_run_together(capsys: pytest.CaptureFixture[str]) -> None:
    logs.start("broker")
    logs.event("worker lost", logging.WARNING, name="demo 0", reason="", pid=7, age_s=1.23456, eq="a=b")
    line = capsys.readouterr().err.strip()
    assert line.endswith('broker   warning worker lost name="demo 0" reason="" pid=7 age_s=1.23 eq="a=b"')


def test_a_field_cannot_forge_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.start("api")
    logs.event("request", id="x\n2026-01-01 forged")
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_json_is_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.start("api", form="json")
    logs.event("request", id="é", status=200, name="n")
    entry = json.loads(capsys.readouterr().err)
    assert (entry["process"], entry["event"], entry["id"], entry["status"], entry["name"]) == ("api", "request", "é", 200, "n")


def test_levels(capsys: pytest.CaptureFixture[str]) -> None:
    logs.start("api", "warning")
    logs.event("quiet")
    logs.event("loud", logging.ERROR)
    assert "quiet" not in (said := capsys.readouterr().err) and "loud" in said


def test_a_traceback_travels_with_its_event(capsys: pytest.CaptureFixture[str]) -> None:
    logs.start("worker", form="json")
    try:
        raise ValueError("odd")
    except ValueError:
        logging.getLogger("millpond").exception("a step failed")
    assert "ValueError: odd" in json.loads(capsys.readouterr().err)["traceback"]
