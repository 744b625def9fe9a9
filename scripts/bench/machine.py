"""What a benchmark ran on: cores, versions, date, and how quiet the machine was."""

import datetime
import importlib.metadata
import os
import platform
from collections.abc import Sequence
from pathlib import Path

PACKAGES = ("mlx", "mlx-lm", "pyzmq", "falcon", "gunicorn", "uvloop")
# Above this something else was running, and absolute figures are not to be trusted.
QUIET = 0.5


def about(command: str) -> Sequence[str]:
    """Lines for the head of a table. To be called before the measurement, while the machine is as it was found."""
    load = os.getloadavg()[0]
    quiet = "" if load <= QUIET else ": not quiet, absolute figures are too high"
    return (
        f"`{command}`, {datetime.date.today().isoformat()}",
        f"{os.cpu_count()} cores ({_processor()}), {platform.system()}, {_versions()}",
        f"load average at the start {load:.1f}{quiet}",
    )


def _versions() -> str:
    found = [f"Python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
