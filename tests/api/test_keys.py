"""Who may call: keys, their names, what stays open; and pages of other origins."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from api.keys import NOBODY, Keys, presented, read_keys
from api.settings import ApiSettings
from common.envelope import Reserve
from common.errors import ConfigError
from tests.api.conftest import Server, chat_body

MakeServer = Callable[..., Server]


def keys_file(folder: Path, *entries: str) -> str:
    path = folder / "keys.toml"
    path.write_text("\n".join(f"[[keys]]\n{entry}" for entry in entries))
    return str(path)


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize(
    ("header", "value", "name"),
    [
        (b"authorization", b"Bearer one", "key-1"),
        (b"authorization", b"bEARER   two ", "key-2"),
        (b"x-api-key", b"one", "key-1"),
        (b"x-api-key", b"on", None),
        (b"x-api-key", b"", None),
        (b"authorization", b"one", None),
        (b"authorization", b"Basic one", None),
        (b"authorization", b"Bearer", None),
        (b"authorization", b"Bearer \xff\xfe", None),
        (b"cookie", b"one", None),
    ],
)
def test_a_key_is_known_by_its_bytes(header: bytes, value: bytes, name: str | None) -> None:
    holder = read_keys(ApiSettings(api_keys=["one", "two"])).holder([(header, value)])
    assert (holder and holder.name) == name


def test_without_keys_everybody_may_call() -> None:
    assert Keys([]).holder([]) is NOBODY and not Keys([]).needed
    assert presented([(b"x-api-key", b"a"), (b"authorization", b"Bearer b")]) == [b"a", b"b"]


def test_a_file_gives_names_and_priorities(tmp_path: Path) -> None:
    first = f'name = "team"\nsha256 = "{sha("é key")}"\nweight = 2\nmax_priority = 5'
    second = f'name = "guest"\nsha256 = "{sha("g")}"'
    keys = read_keys(ApiSettings(api_keys_file=keys_file(tmp_path, first, second)))
    team = keys.holder([(b"x-api-key", "é key".encode())])
    guest = keys.holder([(b"x-api-key", b"g")])
    assert team and guest
    assert (team.name, team.max_priority, guest.name, guest.max_priority) == ("team", 5, "guest", 0)
    assert (team.weight, guest.weight) == (2.0, 1.0)


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ('sha256 = "00"', "name"),
        ('name = "a"\nsha256 = "00"', "64 hex"),
        ('name = "a"\nsha256 = 5', "64 hex"),
        (f'name = ""\nsha256 = "{sha("x")}"', "characters"),
        (f'name = "a"\nsha256 = "{sha("x")}"\nmax_priority = 11', "max_priority"),
        (f'name = "a"\nsha256 = "{sha("x")}"\nweight = 0', "weight"),
        (f'name = "key-1"\nsha256 = "{sha("x")}"', "two keys"),
        ("name = ", "not valid TOML"),
    ],
)
def test_a_bad_keys_file_is_a_config_error(tmp_path: Path, entry: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        read_keys(ApiSettings(api_keys=["plain"], api_keys_file=keys_file(tmp_path, entry)))


def test_a_missing_or_empty_keys_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(ApiSettings(api_keys_file=str(tmp_path / "none")))
    with pytest.raises(ConfigError, match="at least one"):
        read_keys(ApiSettings(api_keys_file=keys_file(tmp_path)))


@pytest.mark.slow
@pytest.mark.system
def test_keys_and_origins_over_http(own_server: MakeServer, tmp_path: Path) -> None:
    path = keys_file(tmp_path, f'name = "team"\nsha256 = "{sha("s3cret")}"\nmax_priority = 1\nweight = 3')
    with open(path, "a") as file:
        file.write(f'\n[[keys]]\nname = "batch"\nsha256 = "{sha("low")}"\nmax_priority = -2\n')
    server = own_server(api_keys_file=path, cors_origins="http://page.test", open_routes="pool")
    mine = {"authorization": "Bearer s3cret"}
    for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": "s3cre"}):
        status, answer, body = server.request("POST", "/v1/chat/completions", chat_body(), headers)
        assert (status, answer["www-authenticate"]) == (401, "Bearer")
        assert json.loads(body)["error"]["type"] == "authentication_error"
        assert server.request("GET", "/v1/models", headers=headers)[0] == 401
    assert server.get("/nope")[0] == 404 and server.get("/v1/chat/completions")[0] == 405
    for open_path in ("/health", "/health/ready", "/v1/pool"):
        assert server.get(open_path)[0] == 200
    assert server.chat(mine, priority=1)[0] == 200
    status, _, reply = server.chat(mine, priority=2)
    assert (status, reply["error"]["param"]) == (400, "priority")
    assert server.broker is not None
    assert {(reserve.key, reserve.weight) for reserve in server.broker.wait_for(Reserve)} == {("team", 3.0)}
    # A key that may ask for less than the usual priority gets what it may without asking.
    assert server.chat({"x-api-key": "low"})[0] == 200 and server.chat({"x-api-key": "low"}, priority=0)[0] == 400
    assert {(r.key, r.priority) for r in server.broker.wait_for(Reserve, 2)[1:]} == {("batch", -2)}
    server.wait_for_line(key="team", status=200)
    assert "s3cret" not in server.log()
    check_origins(server, mine)


def check_origins(server: Server, mine: dict[str, str]) -> None:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, content-type"}
    status, answer, body = server.request(
        "OPTIONS", "/v1/chat/completions", headers={"origin": "http://page.test", **asked}
    )
    assert (status, body) == (204, b"")
    assert answer["access-control-allow-origin"] == "http://page.test"
    assert answer["access-control-allow-methods"] == "POST"
    assert answer["access-control-allow-headers"] == "authorization, content-type"
    for headers in ({"origin": "http://other.test", **asked}, {"origin": "http://page.test"}, asked):
        assert server.request("OPTIONS", "/v1/chat/completions", headers=headers)[0] == 405
    status, answer, _ = server.chat({**mine, "origin": "http://page.test"})
    assert (status, answer["access-control-allow-origin"], answer["vary"]) == (200, "http://page.test", "origin")
    assert "x-request-id" in answer["access-control-expose-headers"]
    refused = server.request("GET", "/v1/models", headers={"origin": "http://page.test"})
    assert (refused[0], refused[1]["access-control-allow-origin"]) == (401, "http://page.test")
    assert "access-control-allow-origin" not in server.request("GET", "/health", headers={"origin": "http://x"})[1]


@pytest.mark.system
def test_without_listed_origins_nothing_of_cors_is_said(server: Server) -> None:
    headers = {"origin": "http://page.test", "access-control-request-method": "POST"}
    assert server.request("OPTIONS", "/v1/chat/completions", headers=headers)[0] == 405
    answer = server.request("GET", "/health", headers=headers)[1]
    assert not [name for name in answer if name.startswith("access-control") or name == "vary"]
