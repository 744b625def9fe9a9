"""Where the processes of one port meet: a private folder with the two sockets, the broker's lock and the logs.

The folder is mode 0700, ours, and short: an ipc path is limited to 107 bytes on Linux and 103 on macOS, and a too long one
is cut silently by some libraries. It is never under the cache folder, whose path the operator chooses freely.
"""

import fcntl
import os
import stat
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from common.errors import ConfigError

MAX_PATH_BYTES = 103 if sys.platform == "darwin" else 107


@dataclass(frozen=True)
class Runtime:
    """Paths and endpoints of the instance on one port."""

    folder: Path

    @property
    def front(self) -> str:
        """Endpoint of api processes and commands."""
        return f"ipc://{self.folder}/front"

    @property
    def back(self) -> str:
        """Endpoint of workers and the pool."""
        return f"ipc://{self.folder}/back"

    @property
    def broker_lock(self) -> Path:
        """Held by the broker for its life: a second bind on a live ipc path would succeed and steal it."""
        return self.folder / "broker.lock"

    @property
    def serve_lock(self) -> Path:
        """Held by `serve`, so that a second instance stops before its parts meet the first one's."""
        return self.folder / "serve.lock"

    @property
    def changes(self) -> Path:
        """What commands changed since `serve` started (common/changes)."""
        return self.folder / "changes.json"

    @property
    def logs(self) -> Path:
        """Log files, one per process."""
        return self.folder / "logs"


def runtime(port: int, base: str = "") -> Runtime:
    """The runtime of the instance on `port`; nothing is created.

    base "": $XDG_RUNTIME_DIR/millpond, or millpond-<uid> in the system's temporary folder. Raises ConfigError when an
    endpoint's path would be too long.
    """
    if base:
        parent = Path(base).expanduser().absolute()
    elif os.environ.get("XDG_RUNTIME_DIR"):
        parent = Path(os.environ["XDG_RUNTIME_DIR"]) / "millpond"
    else:
        # The real /tmp and not $TMPDIR, which is 49 bytes of hash on macOS.
        short = Path("/tmp") if os.path.isdir("/tmp") else Path(tempfile.gettempdir())
        parent = short / f"millpond-{os.getuid()}"
    made = Runtime(parent / str(port))
    length = len(os.fsencode(made.front.removeprefix("ipc://")))
    if length > MAX_PATH_BYTES:
        raise ConfigError(
            f"MILLPOND_RUNTIME={str(parent)!r}: the socket path would be {length} bytes long, "
            f"{MAX_PATH_BYTES} are allowed; choose a shorter folder"
        )
    return made


def create(made: Runtime) -> None:
    """Make the folder, private and ours. Raises ConfigError when it cannot be, or when somebody else's lies there."""
    for folder in (made.folder.parent, made.folder, made.logs):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = folder.lstat()
        except OSError as error:
            raise ConfigError(f"cannot make the runtime folder {folder}: {error.strerror}; set MILLPOND_RUNTIME") from None
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise ConfigError(f"the runtime folder {folder} is not a folder of ours; remove it or set MILLPOND_RUNTIME")
    if stat.S_IMODE(made.folder.stat().st_mode) & 0o077:
        made.folder.chmod(0o700)


def hold(path: Path) -> IO[str]:
    """Lock a file of the runtime folder until the process ends or the result is closed. Raises ConfigError when it is held."""
    try:
        file = path.open("a")
    except OSError as error:
        raise ConfigError(f"cannot open {path}: {error.strerror}; set MILLPOND_RUNTIME") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigError(
            f"another millpond holds {path.parent}; stop it, or choose another --port or MILLPOND_RUNTIME"
        ) from None
    return file
