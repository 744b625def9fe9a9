"""File < environment < command line, each setting under one name."""

import argparse
from pathlib import Path

import pytest

from common.errors import ConfigError
from scripts import options


def resolve(*flags: str, **environment: str) -> dict[str, str]:
    parser = argparse.ArgumentParser()
    options.add_flags(parser)
    return options.resolved(parser.parse_args(flags), environment)


def test_the_order_of_sources(tmp_path: Path) -> None:
    file = tmp_path / "m.toml"
    file.write_text('slots = 2\nmax-queue = 3\nport = 4000\nstrict_fields = true\nmodel = ["a=/x", "b=/y"]\n')
    got = resolve("--config", str(file), "--port", "6000", MILLPOND_MAX_QUEUE="5", MILLPOND_PORT="5000")
    assert got["MILLPOND_SLOTS"] == "2" and got["MILLPOND_MAX_QUEUE"] == "5" and got["MILLPOND_PORT"] == "6000"
    assert got["MILLPOND_STRICT_FIELDS"] == "1" and got["MILLPOND_MODEL"] == "a=/x,b=/y"


def test_repeatable_flags_are_lists_and_others_are_not() -> None:
    assert resolve("--model", "a=/x", "--model", "b=/y")["MILLPOND_MODEL"] == "a=/x,b=/y"
    with pytest.raises(ConfigError, match="--port was given 2 times"):
        resolve("--port", "1", "--port", "2")


@pytest.mark.parametrize(
    ("content", "said"),
    [("[", "--config"), ("nonsense = 1", "no setting 'nonsense'"), ("worker_name = 'x'", "no setting 'worker_name'")],
)
def test_a_file_that_cannot_be(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "m.toml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=said):
        resolve("--config", str(file))


def test_every_value_is_checked_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="MILLPOND_SLOTS='many'"):
        resolve(MILLPOND_SLOTS="many")
