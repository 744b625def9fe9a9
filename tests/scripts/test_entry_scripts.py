"""scripts/serve and scripts/test: install once, notice what changed, and get out of the way.

The scripts are real, in a copy of the repository's few files that they read; Python and pip in it are stand-ins that
note their calls, so nothing is installed. Only the stand-in for `-c` is this Python itself.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

# Makes an environment whose python is this same stand-in, as `python -m venv` would.
PYTHON_STANDIN = """#!/usr/bin/env bash
here="$(cd "$(dirname "$0")" && pwd -P)"
case "$*" in
    "-m venv --clear "*)
        echo venv >>"$CALLS"
        rm -rf "$4"; mkdir -p "$4/bin" "$4/lib/pythonX"
        echo "version = 3.11.0" >"$4/pyvenv.cfg"; echo "command = $0 -m venv $4" >>"$4/pyvenv.cfg"
        cp "$0" "$4/bin/python"
        printf '#!/usr/bin/env bash\\necho "pid=$$ folder=$PWD arguments=$*"\\n' >"$4/bin/millpond"
        chmod +x "$4/bin/millpond" ;;
    "-m pip --version") [ -d "$here/../lib" ] ;;
    "-m pip install "*)
        echo "pip ${*: -1}" >>"$CALLS"
        sleep "${PIP_TAKES:-0}"
        exit "${PIP_STATUS:-0}" ;;
    "-P -m scripts.demo_model") echo "fetch in $PWD" >>"$CALLS" ;;
    "-m pytest"*) echo "pid=$$ folder=$PWD arguments=${*:3}" ;;
    "-c import sys; print"*) echo X ;;
    *) exec "$REAL_PYTHON" "$@" ;;
esac
"""


class Checkout:
    """A small copy of the repository, and the scripts run in it."""

    def __init__(self, folder: Path) -> None:
        self.repo = folder / "repo"
        self.calls_file = folder / "calls"
        self.tools = folder / "tools"
        (self.repo / "scripts" / "lib").mkdir(parents=True)
        for name in ("setup.cfg", "pyproject.toml", "scripts/serve", "scripts/test", "scripts/lib/venv.sh"):
            shutil.copy(REPOSITORY / name, self.repo / name)
        self.tools.mkdir()
        self.tool("python", PYTHON_STANDIN)
        # A machine without a GPU, whatever this one is.
        self.tool("uname", "#!/bin/sh\necho Linux\n")
        self.tool("nvidia-smi", "#!/bin/sh\nexit 9\n")

    def tool(self, name: str, text: str) -> None:
        path = self.tools / name
        path.write_text(text)
        path.chmod(0o755)

    def start(self, script: Path | str, *arguments: str, cwd: Path | None = None, **env: str) -> subprocess.Popen[str]:
        """Run a script by its name, or by any path to it."""
        environment = {
            **os.environ,
            "PATH": f"{self.tools}{os.pathsep}{os.environ['PATH']}",
            "PYTHON": str(self.tools / "python"),
            "REAL_PYTHON": sys.executable,
            "CALLS": str(self.calls_file),
            **env,
        }
        return subprocess.Popen(
            [str(script) if os.sep in str(script) else str(self.repo / "scripts" / script), *arguments],
            cwd=cwd or self.repo,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, script: Path | str, *arguments: str, cwd: Path | None = None, **env: str) -> tuple[int, str, str]:
        process = self.start(script, *arguments, cwd=cwd, **env)
        stdout, stderr = process.communicate(timeout=60)
        return process.returncode, stdout, stderr

    def calls(self) -> list[str]:
        """What was called since the last look."""
        lines = self.calls_file.read_text().splitlines() if self.calls_file.exists() else []
        self.calls_file.unlink(missing_ok=True)
        return lines

    def installs(self, extras: str) -> str:
        return f"pip {self.repo}[{extras}]"


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.fixture
def installed(checkout: Checkout) -> Checkout:
    assert checkout.run("serve")[0] == 0
    checkout.calls()
    return checkout


def test_the_first_start_installs_and_says_so_and_the_second_goes_on_at_once(checkout: Checkout) -> None:
    status, stdout, stderr = checkout.run("serve", "--port", "1")
    assert status == 0 and stdout.endswith("arguments=serve --port 1\n")
    where = checkout.repo / ".venv"
    assert stderr == f"millpond: installing Millpond into {where} with cpu; the first time takes minutes\n"
    assert checkout.calls() == ["venv", checkout.installs("cpu")]

    status, stdout, stderr = checkout.run("serve", "a b", "c")
    assert (status, stderr) == (0, "") and stdout.endswith("arguments=serve a b c\n")
    assert checkout.calls() == []


def test_the_server_takes_the_scripts_place_so_signals_reach_it(installed: Checkout) -> None:
    process = installed.start("serve")
    stdout, _ = process.communicate(timeout=60)
    assert stdout.startswith(f"pid={process.pid} ")


def test_it_works_from_any_folder_and_through_links_and_keeps_the_users_folder(
    installed: Checkout, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "absolute").symlink_to(installed.repo / "scripts" / "serve")
    (tmp_path / "elsewhere" / "relative").symlink_to("../absolute")
    for path in (tmp_path / "elsewhere" / "relative", "elsewhere/relative", "repo/scripts/serve"):
        status, stdout, _ = installed.run(path, cwd=tmp_path)
        assert status == 0 and f" folder={tmp_path} " in stdout
    assert installed.calls() == []


def test_the_test_script_installs_its_extras_fetches_the_model_and_runs_pytest_in_the_repository(
    checkout: Checkout, tmp_path: Path
) -> None:
    process = checkout.start("test", "-k", "a or b", cwd=tmp_path)
    stdout, _ = process.communicate(timeout=60)
    assert stdout == f"pid={process.pid} folder={checkout.repo} arguments=-k a or b\n"
    assert checkout.calls() == ["venv", checkout.installs("cpu,test,diffusion"), f"fetch in {checkout.repo}"]


@pytest.mark.slow
def test_the_test_extras_are_added_to_an_installation_without_them_and_kept_by_serve(installed: Checkout) -> None:
    installed.run("test")
    assert installed.calls()[0] == installed.installs("cpu,test,diffusion")
    installed.run("serve")
    assert installed.calls() == []
    (installed.repo / "setup.cfg").write_text("changed")
    installed.run("serve")
    assert installed.calls() == [installed.installs("cpu,test,diffusion")]


@pytest.mark.parametrize("name", ["setup.cfg", "pyproject.toml"])
def test_changed_packaging_installs_again_into_the_same_environment(installed: Checkout, name: str) -> None:
    with (installed.repo / name).open("a") as file:
        file.write("# changed\n")
    installed.run("serve")
    assert installed.calls() == [installed.installs("cpu")]
    installed.run("serve")
    assert installed.calls() == []


@pytest.mark.slow
def test_a_failed_installation_is_said_and_tried_again(checkout: Checkout) -> None:
    status, stdout, stderr = checkout.run("serve", PIP_STATUS="1")
    assert (status, stdout) == (1, "")
    assert stderr.splitlines()[-1] == "millpond: installation failed: see pip's message above"
    assert checkout.calls() == ["venv", checkout.installs("cpu")]
    assert checkout.run("serve")[0] == 0
    assert checkout.calls() == [checkout.installs("cpu")]


@pytest.mark.slow
def test_a_failed_installation_is_not_forgotten_when_its_cause_is_taken_back(installed: Checkout) -> None:
    packaging = (installed.repo / "setup.cfg").read_text()
    (installed.repo / "setup.cfg").write_text("changed")
    installed.run("serve", PIP_STATUS="1")
    (installed.repo / "setup.cfg").write_text(packaging)
    installed.run("serve")
    assert installed.calls() == [installed.installs("cpu")] * 2


@pytest.mark.slow
def test_a_killed_installation_leaves_no_stamp_and_no_lock(checkout: Checkout) -> None:
    process = checkout.start("serve", PIP_TAKES="0.5")
    deadline = time.monotonic() + 30
    while not checkout.calls_file.exists() or "pip" not in checkout.calls_file.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.communicate(timeout=60)
    checkout.calls()
    assert checkout.run("serve")[0] == 0
    assert checkout.calls() == [checkout.installs("cpu")]


@pytest.mark.slow
def test_two_first_starts_at_once_install_once(checkout: Checkout) -> None:
    both = [checkout.start("serve", PIP_TAKES="0.3") for _ in "ab"]
    for process in both:
        process.communicate(timeout=60)
    assert [process.returncode for process in both] == [0, 0]
    assert checkout.calls() == ["venv", checkout.installs("cpu")]


def test_a_start_waits_for_another_ones_installation_and_says_so(checkout: Checkout) -> None:
    with (checkout.repo / ".venv.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = checkout.start("serve")
        assert process.stderr is not None
        assert process.stderr.readline() == "millpond: waiting for another installation to finish\n"
        assert checkout.calls() == []
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert checkout.calls() == ["venv", checkout.installs("cpu")]


def test_a_moved_repository_gets_a_new_environment(installed: Checkout, tmp_path: Path) -> None:
    installed.repo = installed.repo.rename(tmp_path / "moved")
    installed.run("serve")
    assert installed.calls() == ["venv", installed.installs("cpu")]


def test_a_python_of_another_version_asked_for_gets_a_new_environment(installed: Checkout, tmp_path: Path) -> None:
    installed.tool("python", PYTHON_STANDIN.replace("echo X", "echo Y").replace("pythonX", "pythonY"))
    installed.run("serve")
    assert installed.calls() == ["venv", installed.installs("cpu")]


def test_a_machine_with_a_working_nvidia_gpu_gets_the_cuda_extra(checkout: Checkout) -> None:
    checkout.tool("nvidia-smi", "#!/bin/sh\nexit 0\n")
    checkout.run("test")
    assert checkout.installs("cuda,test,diffusion") in checkout.calls()


@pytest.mark.slow
def test_a_mac_needs_no_extra(checkout: Checkout) -> None:
    checkout.tool("uname", "#!/bin/sh\necho Darwin\n")
    assert "with" not in checkout.run("serve")[2]
    assert checkout.calls() == ["venv", f"pip {checkout.repo}"]
    checkout.run("test")
    assert checkout.calls()[0] == checkout.installs("test,diffusion")


def test_without_a_usable_python_it_says_what_is_needed(checkout: Checkout) -> None:
    status, stdout, stderr = checkout.run("serve", PYTHON="/nowhere/python")
    assert (status, stdout) == (1, "")
    assert stderr == "millpond: PYTHON=/nowhere/python is no Python 3.11 or newer with venv and ensurepip\n"
    for name in ("python3.13", "python3.12", "python3.11", "python3"):
        checkout.tool(name, "#!/bin/sh\nexit 1\n")
    assert checkout.run("serve", PYTHON="")[2] == (
        "millpond: no Python 3.11 or newer with venv and ensurepip found; install one or set PYTHON to its path\n"
    )
    checkout.tool("python3.12", PYTHON_STANDIN)
    assert checkout.run("serve", PYTHON="")[0] == 0
