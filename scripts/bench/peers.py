"""peers: the same work against mlx_lm.server of the installed mlx-lm, alternating in one run, with the demo model.

The peer runs twice: as pip installs it (the model's own 4-bit weights, the BLAS that mlx-cpu links), and with the
float32 weights and the OpenBLAS that Millpond's workers have, which leaves the servers and what they make of mlx: our
multiplication and kernels are ours alone. All
get the same prompts, greedy, and every reply is checked to be whole.
"""

import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from common.processes import DeathPipe, kill_session, python, spawn
from scripts.bench.children import plain_environment
from scripts.bench.goals import Figure, Report, table
from scripts.bench.instances import demo, demo_folder, worker_environment
from scripts.bench.load import drive, stories, tokens_per_s
from scripts.bench.meter import alternating
from scripts.loadtest.figures import percentile
from scripts.loadtest.stage import Stage

# streams at once -> the goal, of tokens/s through HTTP over the peer's
GOALS = {1: 1.0, 8: 1.15, 16: 1.2, 32: 1.3}
TOGETHER = 16
START_S = 120.0


def run(quick: bool) -> Report:
    """Measure; `quick` shortens it to a check that it works."""
    rounds, tokens = (1, 8) if quick else (3, 48)
    with demo("--slots", str(max(GOALS))) as ours, Peer("alike") as alike, Peer("installed") as installed:
        load = Load(tokens)
        ways = {"ours": partial(load, ours.url, "m"), "alike": partial(load, alike.url, "default_model")}
        for way in ways.values():
            way(2)
        figures = []
        for count, least in GOALS.items():
            mine, theirs = alternating(rounds, *(partial(way, count) for way in ways.values()))
            figures += compared(count, mine, theirs, least)
            if count == TOGETHER:
                firsts = [(_p99(a), _p99(b)) for a, b in zip(mine, theirs, strict=True)]
        short = Load(max(2, tokens // 6))
        plain, mine = alternating(
            1, partial(short, installed.url, "default_model", TOGETHER), partial(short, ours.url, "m", TOGETHER)
        )
    first = [
        Figure("ours, s", [a for a, _ in firsts], "{:.2f}"),
        Figure("mlx_lm.server, s", [b for _, b in firsts], "{:.2f}"),
        Figure("ours / mlx_lm.server", [a / b for a, b in firsts], "{:.2f}", most=0.7),
    ]
    as_installed = compared(TOGETHER, mine, plain, 10.0)
    return Report(
        "peers",
        [
            table(f"Tokens/s, both with float32 weights and OpenBLAS, {tokens} tokens a reply", figures),
            table(f"99th percentile of the time to the first token, {TOGETHER} streams arriving together", first),
            table(f"Tokens/s against mlx_lm.server as installed, {short.tokens} tokens a reply", as_installed),
        ],
        [*figures, *first, *as_installed],
    )


def compared(streams: int, mine: list[Stage], theirs: list[Stage], least: float) -> list[Figure]:
    """Tokens per second of both with so many streams, and their ratio with its goal."""
    name = f"{streams} streams" if streams > 1 else "one stream"
    a, b = ([tokens_per_s(stage) for stage in stages] for stages in (mine, theirs))
    return [
        Figure(f"{name}, ours", a, "{:.1f}"),
        Figure(f"{name}, mlx_lm.server", b, "{:.1f}"),
        Figure(f"{name}, ours / mlx_lm.server", [x / y for x, y in zip(a, b, strict=True)], "{:.2f}", least=least),
    ]


def _p99(stage: Stage) -> float:
    return percentile(sorted(reply.first_s for reply in stage.replies), 99)


class Load:
    """Requests that no server sees twice."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self._asked: dict[str, int] = {}

    def __call__(self, url: str, model: str, streams: int) -> Stage:
        """So many at once."""
        asked = self._asked.get(url, 0)
        self._asked[url] = asked + streams
        return drive(url, stories(asked, streams, self.tokens), streams, model, temperature=0)


class Peer:
    """One mlx_lm.server. Use as a context manager."""

    def __init__(self, kind: str, model: Path | None = None) -> None:
        """kind: installed or alike. model: which, as it is; None: the demo model, alike with float32 weights."""
        self._alike = kind == "alike"
        self._model = model
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> "Peer":
        self._folder = Path(tempfile.mkdtemp(prefix="millpond-peer-"))
        environment: Mapping[str, str] = plain_environment()
        model = self._model or demo_folder()
        if self._alike:
            environment = {**environment, **worker_environment(kernels=False)}
            if self._model is None:
                model = float32_copy(model, self._folder / "float32")
        self._pipe = DeathPipe()
        command = python(
            "-m", "mlx_lm", "server", "--model", str(model), "--port", str(self._port), "--log-level", "ERROR"
        )
        self._process = spawn(command, environment, self._pipe)
        deadline = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("mlx_lm.server did not start")
            time.sleep(0.2)
        return self

    def __exit__(self, *_: object) -> None:
        kill_session(self._process)
        self._process.wait()
        self._pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/v1/models", timeout=5) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False


def float32_copy(model: Path, folder: Path) -> Path:
    """The model with plain float32 weights, as our workers hold them."""
    folder.mkdir()
    for path in model.iterdir():
        if path.suffix in (".json", ".jinja"):
            shutil.copy(path, folder)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    for name in ("quantization", "quantization_config"):
        config.pop(name, None)
    (folder / "config.json").write_text(json.dumps(config))
    program = (
        "import sys, mlx.core as mx; from pathlib import Path; from mlx.utils import tree_flatten\n"
        "from worker.engines.weights import load_weights; from worker.plan import FLOAT32\n"
        "model = load_weights(Path(sys.argv[1]), FLOAT32, lambda words: None)\n"
        "mx.save_safetensors(sys.argv[2], dict(tree_flatten(model.parameters())), metadata={'format': 'mlx'})\n"
    )
    command = [*python("-c", program), str(model), str(folder / "model.safetensors")]
    subprocess.run(command, check=True, env={**os.environ, **worker_environment()})
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    return folder
