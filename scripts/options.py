"""From command line, environment and TOML file to the one mapping that all processes read.

Every operator setting is declared once, in the settings class of the process that uses it; here they become flags. Rising
order: file < environment < command line. The result is checked by loading every class from it.
"""

import argparse
import dataclasses
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from api.settings import ApiSettings
from broker.settings import BrokerSettings
from common import settings
from common.errors import ConfigError
from worker.settings import WorkerSettings

CLASSES = (ApiSettings, BrokerSettings, WorkerSettings)
# Lists that may be given by repeating the flag.
REPEATABLE = frozenset({"model", "workers", "share", "draft_model"})


def declared() -> Iterator[dataclasses.Field[Any]]:
    """Every operator setting once, in the order of the classes."""
    seen: set[str] = set()
    for kind in CLASSES:
        for field in dataclasses.fields(kind):
            if field.name not in seen and not field.metadata["internal"]:
                seen.add(field.name)
                yield field


def add_flags(parser: argparse.ArgumentParser) -> None:
    """--config and one flag per setting."""
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings, one NAME = value a line")
    for field in declared():
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            dest="setting_" + field.name,
            action="append",
            metavar=field.name.rpartition("_")[2].upper(),
            help=f"{field.metadata['help']} (allowed: {field.metadata['parser'].allowed})".replace("%", "%%"),
        )


def resolved(arguments: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for our processes: everything inherited, with each setting's effective value. Raises ConfigError."""
    result = dict(environment)
    names = {field.name for field in declared()}
    if arguments.config:
        for name, value in _file(Path(arguments.config), names).items():
            result.setdefault(settings.environment_name(name), value)
    for name in names:
        given = getattr(arguments, "setting_" + name)
        if given is None:
            continue
        if len(given) > 1 and name not in REPEATABLE:
            raise ConfigError(f"--{name.replace('_', '-')} was given {len(given)} times")
        result[settings.environment_name(name)] = ",".join(given)
    for kind in CLASSES:
        settings.load(kind, result)
    return result


def _file(path: Path, names: set[str]) -> dict[str, str]:
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: {error}") from None
    result = {}
    for key, value in table.items():
        name = key.lower().replace("-", "_").removeprefix("millpond_")
        if name not in names:
            raise ConfigError(f"--config {path}: there is no setting {key!r}")
        result[name] = _text(value)
    return result


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, list):
        return ",".join(_text(item) for item in value)
    return str(value)
