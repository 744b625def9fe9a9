"""What we start ends with us, however we end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from common.processes import DeathPipe, kill_session, spawn
from scripts.harness import wait_for

pytestmark = pytest.mark.slow

CHILD = "from common.processes import end_with_parent; end_with_parent(); import time; print('up', flush=True); time.sleep(60)"
PARENT = f"""
import os, sys, time
from common.processes import DeathPipe, spawn, python
pipe = DeathPipe()
child = spawn(python("-c", {CHILD!r}), os.environ, pipe, stdout=1)
print(child.pid, flush=True)
time.sleep(60)
"""


def child_of(parent: subprocess.Popen[str]) -> psutil.Process:
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert parent.stdout.readline() == "up\n"
    return psutil.Process(pid)


def gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("frozen", [False, True])
def test_a_child_ends_when_its_parent_is_killed(frozen: bool) -> None:
    if frozen and sys.platform != "linux":
        # Only Linux's kernel ends a stopped child; elsewhere it ends when it is continued.
        return
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        child = child_of(parent)
        if frozen:
            child.send_signal(signal.SIGSTOP)
        parent.kill()
        parent.wait()
        wait_for(lambda: gone(child), 10, "the child's end")


def test_a_child_ends_when_the_pipe_is_closed_and_leads_its_own_session() -> None:
    pipe = DeathPipe()
    child = spawn([sys.executable, "-c", CHILD], os.environ, pipe, stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"up\n"
    assert os.getsid(child.pid) == child.pid
    pipe.close()
    assert child.wait(10) == 1
    child.stdout.close()


def test_killing_a_session_ends_what_the_child_started(tmp_path: Path) -> None:
    pipe = DeathPipe()
    program = "import subprocess, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"
    child = spawn([sys.executable, "-c", program], os.environ, pipe, stdout=subprocess.PIPE)
    assert child.stdout is not None
    grandchild = psutil.Process(int(child.stdout.readline()))
    kill_session(child)
    assert child.wait(10) == -signal.SIGKILL
    wait_for(lambda: gone(grandchild), 10, "the grandchild's end")
    kill_session(child)
    child.stdout.close()
    pipe.close()


def test_without_a_death_pipe_a_process_lives_alone() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "MILLPOND_DEATH_PIPE"}
    program = "from common.processes import end_with_parent; end_with_parent(); print('fine')"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "fine\n" and time.monotonic() > 0
