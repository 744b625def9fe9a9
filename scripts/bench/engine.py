"""engine: what the worker's engine and pipeline make of mlx-lm's own speed, in bare processes, with the demo model.

The base is mlx-lm's BatchGenerator driven by nothing but a loop over the same float32 weights with the same BLAS, on mlx
as it comes. Against it, alternating in one run with sixteen rows: our engine; the engine with all that the worker does
with its tokens; with a grammar on every row; with log-probabilities on every row. Then what a prefix that was read
before saves, and how long a long prompt holds up rows that decode.
"""

import random
from functools import partial

from scripts.bench.bare_pair import BarePair
from scripts.bench.goals import Figure, Report, table
from scripts.bench.instances import demo_folder
from scripts.bench.load import stories
from scripts.bench.meter import alternating

ROWS = 16
# Any text that is a JSON string, and long enough never to end.
GRAMMAR = '{"type":"string","minLength":4000}'
SHARED, OWN, LONG, STREAMS = 2000, 20, 6000, 8
# MILLPOND_DECODE_STALL_MS as it comes.
STALL_S = 0.5


def run(quick: bool) -> Report:
    """Measure; `quick` shortens it to a check that it works."""
    rounds, tokens, scale = (1, 8, 20) if quick else (3, 32, 1)
    folder = demo_folder()
    with BarePair(folder, ROWS) as bare:
        blas = bare.blas()
        bench = Bench(bare, tokens)
        ways = {
            "generator": partial(bench.rate, "generator"),
            "engine": partial(bench.rate, "engine"),
            "pipeline": partial(bench.rate, "pipeline"),
            "grammar": partial(bench.rate, "engine", grammar=GRAMMAR),
            "logprobs": partial(bench.rate, "engine", top_logprobs=5),
        }
        for way in ways.values():
            way()
        found = dict(zip(ways, alternating(rounds, *ways.values()), strict=True))
        prefix = [bench.prefix(SHARED // scale) for _ in range(rounds)]
        stall = [bench.stall(LONG // scale)]
    base = found["generator"]

    def against_base(way: str) -> list[float]:
        return [b / a for a, b in zip(base, found[way], strict=True)]

    figures = [
        Figure("BatchGenerator, tokens/s", base, "{:.1f}"),
        Figure("our engine / BatchGenerator", against_base("engine"), "{:.3f}"),
        Figure("engine and pipeline / BatchGenerator", against_base("pipeline"), "{:.3f}", least=0.95),
        Figure("grammar on every row / BatchGenerator", against_base("grammar"), "{:.3f}", least=0.85),
        Figure("5 logprobs on every row / BatchGenerator", against_base("logprobs"), "{:.3f}", least=0.90),
    ]
    reading = [
        Figure(f"first token, {SHARED + OWN} tokens, cold, s", [cold for cold, _ in prefix], "{:.2f}"),
        Figure(f"the same with {SHARED} of them read before, s", [warm for _, warm in prefix], "{:.2f}"),
        Figure("warm / cold", [warm / cold for cold, warm in prefix], "{:.3f}", most=0.15),
        Figure(
            f"longest gap of {STREAMS} streams while {LONG} tokens are read / stall target",
            [gap / STALL_S for gap in stall], "{:.2f}", most=2.0,
        ),
    ]  # fmt: skip
    title = f"Tokens per second of {ROWS} rows, {tokens} tokens each, in bare processes on {blas}"
    return Report("engine", [table(title, figures), table("Reading prompts", reading)], [*figures, *reading])


class Bench:
    """The bare processes, with prompts that they never saw."""

    def __init__(self, bare: BarePair, tokens: int) -> None:
        from api.prompt import PromptSource

        self._bare, self._tokens = bare, tokens
        self._source = PromptSource(demo_folder())
        self._asked = 0
        self._draw = random.Random(0)

    def rate(self, way: str, **wanted: object) -> float:
        """Tokens per second."""
        done = self._bare.ask(do=way, prompts=self._prompts(ROWS), tokens=self._tokens, **wanted)
        return float(done["tokens"] / done["wall_s"])

    def prefix(self, length: int) -> tuple[float, float]:
        """Seconds to the first token of a prompt, and of another that begins alike."""
        head = self._tokens_of(length)
        cold = self._bare.ask(do="first", prompt=head + self._tokens_of(OWN))["first_s"]
        warm = self._bare.ask(do="first", prompt=head + self._tokens_of(OWN))["first_s"]
        return cold, warm

    def stall(self, length: int) -> float:
        """Seconds of the longest gap."""
        done = self._bare.ask(do="stall", prompts=self._prompts(STREAMS), long=self._tokens_of(length))
        return float(done["gap_s"])

    def _prompts(self, count: int) -> list[list[int]]:
        self._asked += count
        asks = stories(self._asked, count, self._tokens)
        return [
            self._source.chat([{"role": "user", "content": ask.text}], {"enable_thinking": False}, [], 8192).ids
            for ask in asks
        ]

    def _tokens_of(self, count: int) -> list[int]:
        return [self._draw.randrange(1000, 40_000) for _ in range(count)]
