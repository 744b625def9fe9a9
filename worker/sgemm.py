"""The compiled multiplication of matrices (sgemm.cpp), preloaded into workers before OpenBLAS.

Owns how it is compiled and kept, and whether this process has it. Must never know what it speeds up. Invariant: what
library() returns is whole and compiled from this source, with these flags, for this kind of CPU. That it computes here as
well is for the caller to try (worker/device.py), as with any library that is preloaded.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

SOURCE = Path(__file__).with_name("sgemm.cpp")
NAME = "sgemm"

# The two freedoms change no result; an order of additions that is the compiler's own choice would.
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-std=c++17", "-pthread", "-shared", "-fPIC")
COMPILE_TIMEOUT_S = 60.0


def library(folder: Path, environment: Mapping[str, str]) -> Path | None:
    """The library in `folder`, which is for this kind of CPU only, compiled now if it is not there; None when it cannot
    be: no compiler in the PATH, a CPU it was not written for, a folder that LD_PRELOAD cannot name.
    Raises OSError for a folder that cannot be written."""
    if set(str(folder)) & set(" :"):
        return None
    try:
        source = SOURCE.read_bytes()
    except OSError:
        return None
    made = folder / f"{NAME}-{hashlib.blake2b(source + repr(FLAGS).encode(), digest_size=6).hexdigest()}.so"
    if made.is_file():
        return made
    compiler = shutil.which("g++", path=environment.get("PATH", os.defpath))
    if compiler is None:
        return None
    # Aside first: another instance may be starting from the same folder.
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=folder) as aside:
        fresh = Path(aside) / made.name
        try:
            done = subprocess.run(
                [compiler, *FLAGS, "-o", str(fresh), str(SOURCE), "-ldl"], env={**environment, "TMPDIR": aside},
                capture_output=True, check=False, timeout=COMPILE_TIMEOUT_S,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired):
            # A compiler that cannot even be started.
            return None
        if done.returncode or not fresh.is_file():
            return None
        with fresh.open("rb") as file:
            os.fsync(file.fileno())
        fresh.replace(made)
    return made


def in_use() -> bool:
    """Whether this process multiplies by it."""
    return any(path.name.startswith(f"{NAME}-") for path in preloaded())


def preloaded() -> list[Path]:
    """What LD_PRELOAD names and the loader found: this process's own libraries."""
    named = [Path(name).resolve() for name in os.environ.get("LD_PRELOAD", "").replace(" ", ":").split(":") if name]
    if not named:
        return []
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    return [path for path in named if str(path) in maps]
