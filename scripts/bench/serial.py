"""serial: what the serial lane adds to its generator, and how often a perfect draft is accepted.

The worker's main loop over the tiny diffusion model with blocks of 256 tokens, in a process as the pool starts workers.
A tiny model's block takes a fraction of a second and a real one's seconds, so this is the worst case. Speculation is the
tiny llama's with a copy of itself for a draft.
"""

import tempfile
from pathlib import Path

from fixtures import tiny_diffusion, tiny_model
from scripts.bench.children import Child
from scripts.bench.goals import Figure, Report, table
from scripts.bench.instances import worker_environment

CANVAS, BLOCKS, STEPS = 256, 4, 6
GOAL_PERCENT, GOAL_ACCEPTED = 3.0, 0.9


def run(quick: bool) -> Report:
    """Measure; `quick` shortens it to a check that it works."""
    with tempfile.TemporaryDirectory() as folder:
        diffusion = tiny_diffusion.build(Path(folder) / "d", canvas=CANVAS, steps=STEPS)
        llama = tiny_model.build(Path(folder) / "t")
        with Child("scripts.bench.serial_worker", str(diffusion), str(llama), environment=worker_environment()) as worker:
            # The first one of each kind compiles kernels.
            worker.ask(do="reply", seed=0, tokens=BLOCKS * CANVAS)
            replies = [
                worker.ask(do="reply", seed=seed, tokens=BLOCKS * CANVAS) for seed in range(1, 2 if quick else 6)
            ]
            drafted = [worker.ask(do="speculate", number=number) for number in range(2 if quick else 20)]
            blas = worker.ask(do="facts")["blas"]
    figures = [
        Figure(
            "share of a reply outside the generator, %",
            [100 * (1 - reply["generator_s"] / reply["whole_s"]) for reply in replies],
            "{:.2f}",
            most=GOAL_PERCENT,
        ),
        Figure("a block of the generator, ms", [reply["generator_s"] / BLOCKS * 1000 for reply in replies], "{:.0f}"),
        Figure(
            "drafted tokens accepted, the draft being a copy of the model",
            [one["accepted"] / (one["accepted"] + one["rejected"]) for one in drafted],
            "{:.3f}",
            least=GOAL_ACCEPTED,
        ),
    ]
    notes = (
        f"Replies of {BLOCKS} blocks of {CANVAS} tokens, at most {STEPS} denoising steps each, on {blas}; outside the "
        "generator are text machines, pieces, packing and the loop.",
    )
    return Report("serial", [table("The serial lanes", figures, notes)], figures)
