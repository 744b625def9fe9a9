"""end_to_end: how much of the engine's own speed arrives at the clients of HTTP, at sixteen streams of the demo model.

Three ways to generate the same prompts on the same float32 weights and OpenBLAS, alternating in one run: mlx-lm's
BatchGenerator in a bare process, our engine in a bare process, and the whole pool through HTTP. Also what the pool's
other processes use meanwhile, per token, where all sixteen tokens of a step come together as they do in real use.
"""

from pathlib import Path

from scripts.bench.bare_pair import BarePair
from scripts.bench.goals import Figure, Report, table
from scripts.bench.instances import demo, demo_folder
from scripts.bench.load import drive, stories, tokens_per_s
from scripts.bench.meter import CpuMeter, Span, alternating
from scripts.harness import Harness

ROWS = 16


def run(quick: bool) -> Report:
    """Measure; `quick` shortens it to a check that it works."""
    rounds, tokens = (1, 8) if quick else (5, 64)
    with demo() as harness, BarePair(demo_folder(), ROWS) as bare:
        blas = (bare.blas(), harness.snapshot()["workers"][0]["blas"])
        if blas[0] != blas[1]:
            raise RuntimeError(f"the bare process has {blas[0]} and the worker {blas[1]}")
        bench = EndToEnd(harness, bare, tokens, demo_folder())
        for way in (bench.generator, bench.engine, bench.http):
            way()
        bench.used.clear()
        generator, engine, http = alternating(rounds, bench.generator, bench.engine, bench.http)
    figures = [
        Figure("bare BatchGenerator, tokens/s", generator, "{:.1f}"),
        Figure("our engine in a bare process, tokens/s", engine, "{:.1f}"),
        Figure("through HTTP, tokens/s", http, "{:.1f}"),
        Figure("our engine / BatchGenerator", [b / a for a, b in zip(generator, engine, strict=True)], "{:.3f}"),
        Figure("HTTP / BatchGenerator", [b / a for a, b in zip(generator, http, strict=True)], "{:.3f}", least=0.95),
        *(
            Figure(f"CPU of {part} per token, µs", [used[part] for used in bench.used], "{:.0f}")
            for part in ("api", "broker", "client")
        ),
    ]
    notes = (f"Worker and bare processes on {blas[0]}; the client of HTTP shares the cores with them.",)
    title = f"Tokens per second of {ROWS} streams arriving together, {tokens} tokens a reply"
    return Report("end_to_end", [table(title, figures, notes)], figures)


class EndToEnd:
    """The three ways. Each takes prompts of its own, of the same kind; none is sent twice."""

    def __init__(self, harness: Harness, bare: BarePair, tokens: int, model: Path, rows: int = ROWS) -> None:
        from api.prompt import PromptSource

        self._harness, self._bare, self._tokens, self._rows = harness, bare, tokens, rows
        self._source = PromptSource(model)
        self._asked = 0
        self.used: list[dict[str, float]] = []

    def generator(self) -> float:
        """mlx-lm alone."""
        return self._bare_way("generator")

    def engine(self) -> float:
        """Our engine alone."""
        return self._bare_way("engine")

    def http(self) -> float:
        """The pool."""
        asks = stories(self._next(), self._rows, self._tokens)
        meters = {part: CpuMeter(*self._harness.processes(part)) for part in ("api", "broker")}
        stage = drive(self._harness.url, asks, self._rows, temperature=0)
        spans = {part: meter.read() for part, meter in meters.items()}
        spans["client"] = Span(stage.client_cpu_s, stage.wall_s)
        tokens = sum(reply.tokens for reply in stage.replies)
        self.used.append({part: span.cpu_s / tokens * 1e6 for part, span in spans.items()})
        prompt = self._ids(asks[0].text)
        told = next(reply.prompt_tokens for reply in stage.replies if reply.ask is asks[0])
        if told != len(prompt):
            raise RuntimeError(f"a prompt of {told} tokens through HTTP has {len(prompt)} in the bare process")
        return tokens_per_s(stage)

    def _bare_way(self, way: str) -> float:
        prompts = [self._ids(ask.text) for ask in stories(self._next(), self._rows, self._tokens)]
        done = self._bare.ask(do=way, prompts=prompts, tokens=self._tokens)
        return float(done["tokens"] / done["wall_s"])

    def _next(self) -> int:
        self._asked += self._rows
        return self._asked

    def _ids(self, text: str) -> list[int]:
        message = {"role": "user", "content": text}
        return self._source.chat([message], {"enable_thinking": False}, [], 8192).ids
