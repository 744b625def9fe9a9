"""mlx-lm's generator and our engine, each in a bare process, for benchmarks to ask by turns.

Owns what each process is given. Must never load mlx itself. Invariant: both have the same OpenBLAS and as many threads
(what our own multiplication leaves it, in the engine's).
"""

from pathlib import Path
from typing import Any

from scripts.bench.children import Child
from scripts.bench.instances import worker_environment


class BarePair:
    """Both kinds, each in a process with the BLAS that workers get. Use as a context manager.

    The generator's has mlx's own kernels: those of our workers are what we make faster.
    """

    def __init__(self, folder: Path, slots: int) -> None:
        self._children = {
            kind: Child(
                "scripts.bench.bare", str(folder), str(slots), kind, environment=worker_environment(kernels=ours)
            )
            for kind, ours in (("generator", False), ("engine", True))
        }

    def __enter__(self) -> "BarePair":
        return self

    def __exit__(self, *error: object) -> None:
        for child in self._children.values():
            child.__exit__(*error)

    def blas(self) -> str:
        """What both compute with. Raises RuntimeError when they differ."""
        found = {child.ask(do="facts")["blas"] for child in self._children.values()}
        if len(found) > 1:
            raise RuntimeError(f"the bare processes compute with {' and '.join(found)}")
        return str(found.pop())

    def ask(self, do: str, **wanted: Any) -> dict[str, Any]:
        """Have the process that can do it do it."""
        return self._children["generator" if do == "generator" else "engine"].ask(do=do, **wanted)
