"""API keys: who may call, under which name, with what priority and weight.

Reads them from the setting or from a TOML file and compares them in constant time. Invariant: a key's text never leaves
this module; everything else knows its name. Without any key everyone may call.
"""

import hashlib
import hmac
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from api.settings import ApiSettings
from common.errors import ConfigError

HIGHEST_PRIORITY = 10
# A key with a thousandth of another's weight hardly gets a turn; beyond that a weight is a slip of the hand.
LEAST_WEIGHT, MOST_WEIGHT = 0.001, 1000


@dataclass(frozen=True)
class Key:
    """digest: SHA-256 of the key's bytes."""

    name: str
    digest: bytes
    max_priority: int = HIGHEST_PRIORITY
    weight: float = 1.0


NOBODY = Key("", b"")


class Keys:
    """All keys of this process; read again when the server reloads, which makes new processes."""

    def __init__(self, keys: Iterable[Key]) -> None:
        self._keys = list(keys)

    @property
    def needed(self) -> bool:
        """Whether calls need a key."""
        return bool(self._keys)

    def holder(self, headers: Iterable[tuple[bytes, bytes]]) -> Key | None:
        """The key that a request shows, NOBODY when none is needed, None when it shows no valid one."""
        if not self._keys:
            return NOBODY
        found = None
        for shown in presented(headers):
            digest = hashlib.sha256(shown).digest()
            # Every key is compared whatever the earlier ones said, so that time tells nothing.
            for key in self._keys:
                if hmac.compare_digest(digest, key.digest):
                    found = key
        return found


def presented(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    """The keys in a request's headers."""
    found = []
    for name, value in headers:
        if name == b"x-api-key":
            found.append(value.strip())
        elif name == b"authorization":
            scheme, *credentials = value.split(None, 1) or [b""]
            if scheme.lower() == b"bearer":
                found.append(credentials[0].strip() if credentials else b"")
    return found


def read_keys(settings: ApiSettings) -> Keys:
    """The keys that the settings name. Raises ConfigError."""
    keys = [
        Key(f"key-{number}", hashlib.sha256(text.encode()).digest()) for number, text in enumerate(settings.api_keys, 1)
    ]
    if settings.keys_file is not None:
        keys += _read_file(settings.keys_file)
    names = [key.name for key in keys]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"MILLPOND_API_KEYS_FILE: two keys are named {name!r}")
    return Keys(keys)


def _read_file(path: Path) -> list[Key]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"MILLPOND_API_KEYS_FILE={str(path)!r}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ConfigError(f"MILLPOND_API_KEYS_FILE={str(path)!r}: is not valid TOML ({error})") from None
    entries = content.get("keys")
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"MILLPOND_API_KEYS_FILE={str(path)!r}: needs at least one [[keys]] with name and sha256")
    return [_key(path, entry) for entry in entries]


def _key(path: Path, entry: Any) -> Key:
    where = f"MILLPOND_API_KEYS_FILE={str(path)!r}"
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or not entry["name"].isprintable():
        raise ConfigError(f"{where}: each of [[keys]] needs a printable name")
    name = entry["name"]
    try:
        digest = bytes.fromhex(entry.get("sha256", ""))
    except (ValueError, TypeError):
        digest = b""
    if not name or len(name) > 256 or len(digest) != 32:
        raise ConfigError(f"{where}: key {name!r} needs a sha256 of 64 hex digits and a name of 1 to 256 characters")
    highest = entry.get("max_priority", 0)
    if not isinstance(highest, int) or isinstance(highest, bool) or not -10 <= highest <= HIGHEST_PRIORITY:
        raise ConfigError(f"{where}: max_priority of key {name!r} must be from -10 to 10")
    weight = entry.get("weight", 1)
    if not isinstance(weight, (int, float)) or isinstance(weight, bool) or not LEAST_WEIGHT <= weight <= MOST_WEIGHT:
        raise ConfigError(f"{where}: weight of key {name!r} must be a number from {LEAST_WEIGHT} to {MOST_WEIGHT}")
    return Key(name, digest, highest, float(weight))
