"""startup: from ./scripts/serve to the first moment at which a chat can be answered, and what the processes then hold.

Everything is installed, the demo model is there, kernels are compiled: what a user waits for every time. The API's own
start is counted from the birth of gunicorn's master to its first answer of any kind.
"""

import http.client
import os
import sys
import time
from pathlib import Path

import psutil

from scripts.bench.goals import Figure, Report, table
from scripts.bench.instances import demo_folder
from scripts.bench.meter import rss_mb
from scripts.harness import Harness

SERVE = Path(__file__).resolve().parents[1] / "serve"
PARTS = ("api", "gunicorn", "broker", "pool", "worker")
MOST_MB = {"api": 120.0, "broker": 60.0}
WORDS = {"gunicorn": "gunicorn's master", "worker": "worker (demo model in float32)"}


def run(quick: bool) -> Report:
    """Measure; `quick` does it once."""
    folder = demo_folder()
    starts = [Start(folder) for _ in range(1 if quick else 3)]
    figures = [
        Figure("./scripts/serve to /health/ready, s", [start.ready_s for start in starts], "{:.2f}", most=12.0),
        Figure("API: its start to its first answer, s", [start.api_s for start in starts], "{:.2f}", most=2.0),
        *(
            Figure(
                f"memory of {WORDS.get(part, part)}, MB",
                [start.rss[part] for start in starts],
                "{:.0f}",
                most=MOST_MB.get(part),
            )
            for part in ("serve", *PARTS)
        ),
    ]
    notes = ("Memory is resident, each process alone with its share of common pages counted in full, after one chat.",)
    return Report("startup", [table("Start with everything warm", figures, notes)], figures)


class Start:
    """One start, measured."""

    def __init__(self, folder: Path) -> None:
        harness = Harness("--api-processes", "1", model=folder, program=[str(SERVE)])
        self.api_s = 0.0
        began = time.monotonic()
        try:
            harness.start()
            while not self._ready(harness):
                if time.monotonic() - began > 120 or (
                    harness.process is not None and harness.process.poll() is not None
                ):
                    raise RuntimeError(f"it did not become ready:\n{harness.output}")
                time.sleep(0.01)
            self.ready_s = time.monotonic() - began
            harness.wait_ready()
            harness.chat("What is the capital of France?", max_tokens=8)
            assert harness.process is not None
            self.rss = {"serve": rss_mb(psutil.Process(harness.process.pid))}
            for part in PARTS:
                self.rss[part] = rss_mb(harness.processes(part)[0])
        finally:
            harness.__exit__()

    def _ready(self, harness: Harness) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", harness.port, timeout=2)
        try:
            connection.request("GET", "/health/ready")
            status = connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return False  # not listening yet
        finally:
            connection.close()
        if not self.api_s:
            self.api_s = age_s(harness.processes("gunicorn")[0])
        return status == 200


def age_s(process: psutil.Process) -> float:
    """How long a process has lived."""
    if sys.platform != "linux":
        return time.time() - process.create_time()
    # psutil's create_time is only as exact as the boot time in /proc/stat, which is whole seconds.
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
