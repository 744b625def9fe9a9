"""The instances that benchmarks measure: real ones, started as a user starts them.

The scripted one generates without computing, so that what is measured is the rest; the demo one is what a user gets.
Both serve their model under the name m.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.harness import Harness
from worker import device
from worker.settings import WorkerSettings


@contextmanager
def scripted(*flags: str, api_processes: int = 1) -> Iterator[Harness]:
    """The scripted engine behind one API process or more, with the tiny model's tokenizer."""
    from fixtures.tiny_model import build

    with tempfile.TemporaryDirectory() as folder:
        model = build(Path(folder) / "tiny")
        own = ("--engine", "scripted", "--api-processes", str(api_processes), "--log-level", "error")
        with Harness(*own, *flags, model=model) as harness:
            yield harness


@contextmanager
def demo(*flags: str, model: Path | None = None) -> Iterator[Harness]:
    """The demo model, or another, behind one API process."""
    harness = Harness("--api-processes", "1", "--log-level", "warning", *flags, model=model or demo_folder())
    try:
        harness.start()
        # Seconds on a quiet machine; a busy one makes the figures doubtful and not impossible.
        harness.wait_ready(300.0)
        yield harness
    finally:
        harness.__exit__()


def demo_folder() -> Path:
    """The demo model's files, fetched when they are not there."""
    from scripts.demo_model import fetch

    return fetch(home())


def home() -> Path:
    """MILLPOND_HOME."""
    return Path(os.environ.get("MILLPOND_HOME") or "~/.cache/millpond").expanduser().absolute()


def worker_environment(*, kernels: bool = True) -> dict[str, str]:
    """What an only worker is given to compute with. kernels: with ours and our compiler for mlx's, not as mlx comes."""
    return device.cpu_environment(WorkerSettings().threads_for(1), home(), own_kernels=kernels)
