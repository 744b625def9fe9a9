"""sized: the end-to-end and the peer comparison once more, with a llama built to size from random weights, on whatever device
mlx computes on here.

For a machine with a GPU and no network: nothing is fetched. On a GPU the model has a billion parameters in half precision,
on a CPU 127 million in float32. What it says is nonsense, of the fixtures' small vocabulary, and never ends by itself;
what it costs is a model's of its size.
"""

import tempfile
from functools import partial
from pathlib import Path

import numpy as np

from scripts.bench.bare_pair import BarePair
from scripts.bench.end_to_end import EndToEnd
from scripts.bench.goals import Figure, Report, table
from scripts.bench.instances import demo
from scripts.bench.meter import alternating
from scripts.bench.peers import GOALS, Load, Peer, compared
from worker import device

BILLION = {"layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 8, "intermediate": 8192}
SMALL = {"layers": 20, "hidden": 768, "heads": 12, "kv_heads": 4, "intermediate": 2048}


def run(quick: bool) -> Report:
    """Measure; `quick` shortens it to a check that it works, with the tiny model."""
    from fixtures.tiny_model import TINY, Size, build

    found = device.probe()
    on_cpu = found["backend"] == device.CPU
    counts = (1, 16) if on_cpu or quick else (1, 16, 64)
    rounds, tokens = (1, 8) if quick else (3, 48)
    size = TINY if quick else Size(**(SMALL if on_cpu else BILLION))
    with tempfile.TemporaryDirectory(prefix="millpond-sized-") as folder:
        model = build(Path(folder) / "model", size=size, dtype=np.float32 if on_cpu else np.float16)
        stored = (model / "model.safetensors").stat().st_size
        figures = _end_to_end(model, counts[1:], rounds, tokens)
        peers = _peers(model, counts, rounds, tokens)
    about = (f"On {found['devices'][0]['name']} ({found['backend']}): {size.layers} layers of {size.hidden}, {stored / 1e6:.0f} MB.",)
    return Report(
        "sized",
        [
            table(f"Tokens per second of rows arriving together, {tokens} tokens a reply", figures, about),
            table(f"Tokens/s against mlx_lm.server with the same model, {tokens} tokens a reply", peers),
        ],
        [*figures, *peers],
    )


def _end_to_end(model: Path, counts: tuple[int, ...], rounds: int, tokens: int) -> list[Figure]:
    figures = []
    for rows in counts:
        with demo("--slots", str(rows), model=model) as harness, BarePair(model, rows) as bare:
            bench = EndToEnd(harness, bare, tokens, model, rows)
            for way in (bench.generator, bench.http):
                way()
            generator, http = alternating(rounds, bench.generator, bench.http)
        ratio = [b / a for a, b in zip(generator, http, strict=True)]
        figures += [
            Figure(f"bare BatchGenerator, {rows} rows", generator, "{:.1f}"),
            Figure(f"through HTTP, {rows} streams", http, "{:.1f}"),
            Figure(f"HTTP / BatchGenerator, {rows}", ratio, "{:.3f}", least=0.95),
        ]
    return figures


def _peers(model: Path, counts: tuple[int, ...], rounds: int, tokens: int) -> list[Figure]:
    figures = []
    with demo("--slots", str(max(counts)), model=model) as ours, Peer("alike", model) as peer:
        load = Load(tokens)
        ways = (partial(load, ours.url, "m"), partial(load, peer.url, "default_model"))
        for way in ways:
            way(2)
        for count in counts:
            mine, theirs = alternating(rounds, *(partial(way, count) for way in ways))
            figures += compared(count, mine, theirs, GOALS.get(count, GOALS[max(GOALS)]))
    return figures
