"""Settings are read once, typed, and a bad one is named with its value and what is allowed."""

from dataclasses import dataclass, fields

import pytest

from common import settings
from common.errors import ConfigError
from common.models import MODEL, ModelChoice
from common.settings import setting
from scripts.options import CLASSES, declared


@dataclass(frozen=True)
class Sample:
    max_queue: int = setting(settings.integer(0, 10), 5, "a number")
    share: float | int = setting(settings.share_or_size(), 0.8, "a share")
    strict: bool = setting(settings.boolean(), False, "a switch")
    names: list[str] = setting(settings.listing(settings.text()), [], "names")
    limit: int | str = setting(settings.auto_or(settings.integer(1, 9)), "auto", "auto or a number")
    wait: float = setting(settings.seconds(0, 60), 1.0, "a time")
    form: str = setting(settings.choice("text", "json"), "text", "a word")
    size: int = setting(settings.byte_size(), 1, "a size")


def one(**values: str) -> Sample:
    return settings.load(Sample, {settings.environment_name(name): value for name, value in values.items()})


def test_defaults_and_foreign_variables() -> None:
    assert settings.load(Sample, {"PATH": "x", "MILLPOND_OTHER": "y"}) == Sample()


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("max_queue", " 7 ", 7),
        ("share", "0.5", 0.5),
        ("share", "1.0", 1.0),
        ("share", "24GiB", 24 * 2**30),
        ("share", "24GB", 24 * 10**9),
        ("share", "1.5 gib", 3 * 2**29),
        ("strict", "Yes", True),
        ("strict", "0", False),
        ("names", "a, b,,c", ["a", "b", "c"]),
        ("names", "", []),
        ("limit", "AUTO", "auto"),
        ("limit", "9", 9),
        ("wait", "0.5", 0.5),
        ("form", "JSON", "json"),
        ("size", "64MiB", 64 * 2**20),
        ("size", "1048576", 2**20),
    ],
)
def test_good_values(name: str, text: str, value: object) -> None:
    assert getattr(one(**{name: text}), name) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("max_queue", "11"),
        ("max_queue", "-1"),
        ("max_queue", "5.0"),
        ("max_queue", "1_0"),
        ("max_queue", "9" * 5000),
        ("max_queue", ""),
        ("share", "0"),
        ("share", "1.5"),
        ("share", "-0.5"),
        ("share", "24 XB"),
        ("strict", "maybe"),
        ("limit", "0"),
        ("limit", "automatic"),
        ("wait", "nan"),
        ("wait", "inf"),
        ("wait", "61"),
        ("wait", "soon"),
        ("form", "xml"),
        ("size", "MiB"),
    ],
)
def test_bad_values_are_named(name: str, text: str) -> None:
    if (name, text) in (("share", "0"), ("share", "1.5")):
        # Not fractions: sizes of so many bytes. Refused where a budget of nothing is planned.
        assert getattr(one(**{name: text}), name) == int(float(text))
        return
    with pytest.raises(ConfigError) as caught:
        one(**{name: text})
    message = str(caught.value)
    assert settings.environment_name(name) in message and repr(text) in message and "allowed is" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("name=/a/b", ModelChoice("name", "/a/b")),
        ("org/model-4bit", ModelChoice("org/model-4bit", "org/model-4bit")),
        ("x=org/model=1", ModelChoice("x", "org/model=1")),
    ],
)
def test_models(text: str, choice: ModelChoice) -> None:
    assert MODEL.parse(text) == choice


@pytest.mark.parametrize("text", ["", "=", "name=", "a\nb=/x"])
def test_models_that_are_none(text: str) -> None:
    with pytest.raises(ValueError):
        MODEL.parse(text)


def test_a_setting_that_two_processes_read_means_the_same_in_both() -> None:
    seen: dict[str, tuple[object, str]] = {}
    for kind in CLASSES:
        for field in fields(kind):
            default = field.default_factory() if callable(field.default_factory) else field.default
            known = seen.setdefault(field.name, (default, kind.__name__))
            assert known[0] == default, f"{field.name} of {kind.__name__} and {known[1]}"


def test_every_setting_has_a_help_text() -> None:
    for field in declared():
        assert len(field.metadata["help"]) > 10, field.name
