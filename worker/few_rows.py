"""The compiled multiplication for a decode step's few rows (few_rows.cpp), preloaded into workers before OpenBLAS.

Owns how it is compiled and kept, and whether this process has it. Must never know what it speeds up. Invariant: what
library() returns is whole and compiled from this source, with these flags, for this kind of CPU. That it computes here as
well is for the caller to try (worker/device.py), as with any library that is preloaded.
"""

import hashlib
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

SOURCE = Path(__file__).with_name("few_rows.cpp")
NAME = "few_rows"

# The two freedoms change no result; an order of additions that is the compiler's own choice would.
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-shared", "-fPIC")
COMPILE_TIMEOUT_S = 60.0


def library(folder: Path, environment: Mapping[str, str]) -> Path | None:
    """The library in `folder`, which is for this kind of CPU only, compiled now if it is not there; None when it cannot
    be: no compiler in the PATH, one without OpenMP, a CPU it was not written for. Raises OSError for the folder."""
    digest = hashlib.blake2b(SOURCE.read_bytes() + repr(FLAGS).encode(), digest_size=6).hexdigest()
    made = folder / f"{NAME}-{digest}.so"
    if made.is_file():
        return made
    compiler = shutil.which("g++", path=environment.get("PATH", os.defpath))
    if compiler is None:
        return None
    # Under a name of its own first: another instance may be starting from the same folder.
    fresh = folder / f".{made.name}.{os.getpid()}"
    try:
        done = subprocess.run(
            [compiler, *FLAGS, "-o", str(fresh), str(SOURCE), "-ldl"], env={**environment, "TMPDIR": str(folder)},
            capture_output=True, check=False, timeout=COMPILE_TIMEOUT_S,
        )  # fmt: skip
        if done.returncode or not fresh.is_file():
            return None
        fresh.replace(made)
    except subprocess.TimeoutExpired:
        return None
    finally:
        fresh.unlink(missing_ok=True)
    return made


def in_use() -> bool:
    """Whether this process multiplies by it."""
    preloaded = os.environ.get("LD_PRELOAD", "").replace(" ", ":").split(":")
    if not any(Path(name).name.startswith(f"{NAME}-") for name in preloaded):
        return False
    return f"/{NAME}-" in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
