"""What cannot work is said in one line with status 2, before or instead of anything else, and leaves nothing behind."""

import os
import shutil
import socket
from pathlib import Path

import pytest

from scripts.harness import Harness
from tests.system.conftest import scripted

pytestmark = [pytest.mark.system, pytest.mark.slow]


def refused(harness: Harness, status: int = 2, timeout_s: float = 60) -> str:
    """Start, expect the end; the last line that it said."""
    try:
        harness.start()
        assert harness.wait_end(timeout_s) == status, harness.output
        assert "Traceback" not in harness.output
        assert harness.all_processes() == []
        return [line for line in harness.lines if line.startswith("millpond")][-1].strip()
    finally:
        harness.kill()
        shutil.rmtree(harness.folder, ignore_errors=True)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--port", "http"), "MILLPOND_PORT='http': allowed is a whole number"),
        (("--slots", "0"), "MILLPOND_SLOTS='0': allowed is"),
        (("--queue-timeout", "soon"), "MILLPOND_QUEUE_TIMEOUT='soon': allowed is"),
        (("--memory-budget", "lots"), "MILLPOND_MEMORY_BUDGET='lots': allowed is"),
        (("--workers", "other=2"), "MILLPOND_WORKERS: no model is called 'other'"),
        (("--config", "/nowhere/millpond.toml"), "No such file"),
        (("--host", "203.0.113.1"), "cannot listen on 203.0.113.1"),
    ],
)
def test_settings_that_cannot_be(tiny_model: Path, flags: tuple[str, ...], said: str) -> None:
    harness = Harness("--engine", "scripted", model=tiny_model)
    if flags[0] == "--port":
        harness.flags = harness.flags[2:]
    harness.flags += flags
    assert said in refused(harness)


def test_a_setting_in_a_file_is_named_too(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "millpond.toml"
    file.write_text("slots = 8\nmax_quue = 3\n")
    assert "there is no setting 'max_quue'" in refused(Harness("--config", str(file), model=tiny_model))
    file.write_text("slots = eight\n")
    assert "--config" in refused(Harness("--config", str(file), model=tiny_model))


def test_a_missing_model_folder() -> None:
    assert "there is no folder /nowhere/model" in refused(Harness("--model", "m=/nowhere/model"))


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    assert "has no config.json" in refused(Harness("--model", str(tmp_path)))


@pytest.mark.parametrize("engine", ["batched", "scripted"])
def test_damaged_weights(tiny_model: Path, tmp_path: Path, engine: str) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert "is damaged" in refused(Harness("--engine", engine, model=model))


def test_damaged_config(tiny_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    (model / "config.json").write_text("{")
    assert "is damaged" in refused(Harness(model=model))


def test_an_unknown_architecture(tiny_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    config = (model / "config.json").read_text().replace('"llama"', '"no_such_architecture"')
    (model / "config.json").write_text(config)
    line = refused(Harness(model=model), status=1)
    assert "no_such_architecture" in line and "failed to start" in line


def test_a_budget_that_holds_no_worker(tiny_model: Path) -> None:
    line = refused(Harness("--memory-budget", "64MiB", model=tiny_model))
    assert "too little" in line and "MILLPOND_MEMORY_BUDGET" in line


def test_a_port_that_is_taken(tiny_model: Path) -> None:
    harness = Harness("--engine", "scripted", model=tiny_model)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", harness.port))
        taken.listen()
        assert f"cannot listen on 127.0.0.1:{harness.port}" in refused(harness)


def test_a_second_instance_in_the_same_runtime_folder(tiny_model: Path) -> None:
    with scripted(tiny_model) as first:
        second = Harness("--engine", "scripted", "--host", "127.0.0.2", model=tiny_model)
        shutil.rmtree(second.folder)
        second.folder = first.folder
        second.environment["MILLPOND_RUNTIME"] = first.folder
        second.flags[second.flags.index("--port") + 1] = str(first.port)
        second.start()
        assert second.wait_end(60) == 2, second.output
        assert "another millpond holds" in second.output and "Traceback" not in second.output
        assert first.chat("hello")[0] == 200


def test_a_runtime_path_that_is_too_long(tiny_model: Path) -> None:
    harness = Harness("--engine", "scripted", model=tiny_model, environment={"MILLPOND_RUNTIME": "/tmp/" + "x" * 100})
    assert "choose a shorter folder" in refused(harness)


def test_a_runtime_folder_that_is_not_ours(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    harness = Harness("--engine", "scripted", model=tiny_model, environment={"MILLPOND_RUNTIME": str(file)})
    assert "runtime folder" in refused(harness)


def test_a_home_that_cannot_be_written(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    line = refused(Harness(model=tiny_model, environment={"MILLPOND_HOME": str(file)}))
    assert "MILLPOND_HOME" in line


def test_without_a_compiler_it_serves_all_the_same(tiny_model: Path, tmp_path: Path) -> None:
    # A PATH without a C++ compiler, and a home without compiled kernels.
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("env", "sh", "uname"):
        found = shutil.which(name)
        if found:
            (tools / name).symlink_to(found)
    environment = {"PATH": str(tools), "MILLPOND_HOME": str(tmp_path / "home")}
    with Harness("--api-processes", "1", model=tiny_model, environment=environment) as harness:
        status, reply = harness.chat("hello", max_tokens=5)
        assert status == 200 and reply["usage"]["completion_tokens"] == 5
        assert os.listdir(tmp_path / "home")
