"""Starting our own processes so that none outlives its parent, however the parent ends.

A child runs in a session of its own (the terminal's Ctrl-C reaches only the top process) and inherits the read end of a pipe
whose write end only its parent holds: end of file means that the parent is gone. On Linux the kernel's parent-death signal
is asked for as well, since a stopped or wedged child reads no pipe. Children are spawned, never forked: MLX and ZeroMQ keep
threads and devices that do not survive a fork.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO

DEATH_PIPE = "MILLPOND_DEATH_PIPE"
_PR_SET_PDEATHSIG = 1


class DeathPipe:
    """The parent's side: keep it open while children may live."""

    def __init__(self) -> None:
        self._ends: tuple[int, ...] = os.pipe()
        self.read_end = self._ends[0]

    def close(self) -> None:
        """Tell all children to end. Again is fine."""
        ends, self._ends = self._ends, ()
        for end in ends:
            os.close(end)


def spawn(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    pipe: DeathPipe,
    *,
    stderr: int | IO[bytes] | None = None,
    stdout: int | IO[bytes] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a child in its own session with the death pipe. Raises OSError."""
    return subprocess.Popen(
        list(arguments),
        env={**environment, DEATH_PIPE: str(pipe.read_end), "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        pass_fds=(pipe.read_end,),
    )


def python(*arguments: str) -> list[str]:
    """Command line that runs one of our modules with this interpreter."""
    return [sys.executable, *arguments]


def end_with_parent(on_death: Callable[[], None] | None = None) -> None:
    """In a child, first thing: end when the parent is gone. Without a death pipe in the environment nothing happens.

    on_death replaces the default, an immediate exit. Call again after a fork (a gunicorn worker): threads do not survive it.
    """
    text = os.environ.get(DEATH_PIPE)
    if not text:
        return
    descriptor = int(text)

    def watch() -> None:
        try:
            while os.read(descriptor, 1):
                pass
        except OSError:
            # The descriptor is not ours any more: the same as end of file.
            pass
        (on_death or _exit)()

    threading.Thread(target=watch, name="death-pipe", daemon=True).start()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _exit() -> None:
    os._exit(1)


def kill_session(process: subprocess.Popen[bytes], number: int = signal.SIGKILL) -> None:
    """Signal a child and whatever it started in its session; a process that is gone already is fine."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return
    except PermissionError:
        # macOS answers so for a group whose members are all zombies.
        return
