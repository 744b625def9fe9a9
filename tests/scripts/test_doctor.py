"""What the doctor finds wrong, and what it would change."""

import resource
import socket
import sys
from pathlib import Path

import pytest

from common import runtime
from scripts import doctor
from scripts.doctor import OK, WARNING, WRONG
from scripts.millpond import main
from tests.broker.test_switchboard import API, WORKER, Board
from worker import device
from worker.settings import WorkerSettings


def test_an_old_python_is_wrong() -> None:
    assert doctor.python((3, 11, 0)).level == OK and doctor.python((3, 10, 9)).level == WRONG


def test_too_few_files_for_the_clients_that_are_admitted_are_wrong() -> None:
    assert doctor.files((1024, 4096), 100).level == OK
    assert doctor.files((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 10**6).level == OK
    found = doctor.files((256, 4096), 100)
    assert found.level == WRONG and found.change == "ulimit -n 300 (at most 4096)"


def test_a_runtime_folder_must_be_short_private_and_ours(tmp_path: Path) -> None:
    place, found = doctor.runtime_folder(8080, "/tmp/" + "x" * 100)
    assert place is None and found.level == WRONG and "107" in found.found or "103" in found.found
    made = runtime.runtime(8080, str(tmp_path / "r"))
    assert doctor.runtime_folder(8080, str(tmp_path / "r"))[1].level == OK and not made.folder.exists()
    runtime.create(made)
    assert doctor.runtime_folder(8080, str(tmp_path / "r"))[1].level == OK
    made.folder.chmod(0o755)
    assert doctor.runtime_folder(8080, str(tmp_path / "r"))[1].level == WARNING


def test_no_compiler_and_little_memory_are_worth_a_word() -> None:
    assert doctor.compiler(None).level == WARNING and doctor.compiler("/usr/bin/c++").level == OK
    assert doctor.memory(100, 5).level == WARNING and doctor.memory(100, 50).level == OK


@pytest.mark.slow
def test_what_computes_is_named(tmp_path: Path) -> None:
    found = list(doctor.computing(WorkerSettings(home=str(tmp_path))))
    assert all(one.level == OK for one in found), found
    words = {one.what: one.found for one in found}
    assert set(words) >= {"device"} and device.probe()["devices"][0]["name"] in words["device"]
    if device.probe()["backend"] == device.CPU and sys.platform == "linux":
        assert "openblas" in words["blas"]


def test_each_of_several_devices_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [{"name": "one", "memory": 8 << 30}, {"name": "other", "memory": 0}]
    monkeypatch.setattr(device, "probe", lambda: {"backend": device.CUDA, "devices": cards})
    found = [(one.what, one.found) for one in doctor.computing(WorkerSettings())]
    assert found == [("device", "cuda (one), 8.00 GiB"), ("device 1", "cuda (other)")]


def test_a_port_that_somebody_else_has_is_wrong_and_ours_is_not() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        assert doctor.port("127.0.0.1", number, False).level == WRONG
        assert doctor.port("127.0.0.1", number, True).level == OK
    assert doctor.port("127.0.0.1", number, True).level == WRONG
    assert doctor.port("127.0.0.1", number, False).level == OK


def test_a_running_instance_is_looked_at() -> None:
    board = Board()
    board.join(API, WORKER)
    found = list(doctor.instance(board.core.snapshot(1.0) | {"malformed": 1}))
    assert [(one.what, one.level) for one in found] == [("worker", OK), ("broker", WARNING), ("pool", WRONG)]
    failed = board.core.snapshot(1.0) | {"malformed": 0, "pools": 1}
    failed["workers"] = [{"name": "m-0", "state": "failed", "restarts": 3, "log": ["out of memory"]}]
    (one,) = doctor.instance(failed)
    assert one.level == WRONG and one.change == "out of memory; then millpond restart m-0"


@pytest.mark.slow
def test_the_command_says_what_is_wrong_by_its_status(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["doctor", "--engine", "scripted", "--runtime", str(tmp_path / "r"), "--port", "18999"]
    assert main([*flags, "--model", f"m={tiny_model}"]) == 0
    said = capsys.readouterr().out
    assert "everything is as it should be" in said and "m: 1 worker of 16 slots" in said
    assert main([*flags, "--model", f"m={tmp_path}"]) == 1
    said = capsys.readouterr().out
    assert "wrong    model" in said and "has no config.json" in said and "something is wrong" in said
    assert main([*flags, "--slots", "many"]) == 2
    assert not (tmp_path / "r").exists()
