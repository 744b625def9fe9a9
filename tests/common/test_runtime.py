"""The runtime folder is private, short and held by one instance."""

import os
import stat
from pathlib import Path

import pytest

from common import runtime
from common.errors import ConfigError


def test_the_folder_is_private_even_if_it_was_not(tmp_path: Path) -> None:
    place = runtime.runtime(8080, str(tmp_path))
    place.folder.mkdir(mode=0o755)
    runtime.create(place)
    assert stat.S_IMODE(place.folder.stat().st_mode) == 0o700
    assert place.front == f"ipc://{tmp_path}/8080/front"


def test_one_folder_per_port(tmp_path: Path) -> None:
    assert runtime.runtime(1, str(tmp_path)).folder != runtime.runtime(2, str(tmp_path)).folder


def test_a_path_that_a_socket_cannot_have_is_refused() -> None:
    fits = "/" + "x" * (runtime.MAX_PATH_BYTES - len("/") - len("/8080/front"))
    runtime.runtime(8080, fits)
    with pytest.raises(ConfigError, match="choose a shorter folder"):
        runtime.runtime(8080, fits + "x")
    with pytest.raises(ConfigError, match="choose a shorter folder"):
        # Bytes count, not characters.
        runtime.runtime(8080, fits[:-1] + "é")


def test_a_file_in_the_way_and_a_link_to_elsewhere_are_refused(tmp_path: Path) -> None:
    place = runtime.runtime(8080, str(tmp_path))
    place.folder.write_text("")
    with pytest.raises(ConfigError):
        runtime.create(place)
    place.folder.unlink()
    (tmp_path / "elsewhere").mkdir()
    place.folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="not a folder of ours"):
        runtime.create(place)


def test_it_is_held_by_one(tmp_path: Path) -> None:
    place = runtime.runtime(8080, str(tmp_path))
    runtime.create(place)
    with runtime.hold(place.serve_lock):
        with pytest.raises(ConfigError, match="another millpond holds"):
            runtime.hold(place.serve_lock)
    runtime.hold(place.serve_lock).close()


def test_the_default_is_short_and_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert str(os.getuid()) in str(runtime.runtime(8080).folder)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert runtime.runtime(8080).folder == Path("/run/user/7/millpond/8080")
