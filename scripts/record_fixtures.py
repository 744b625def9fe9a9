"""`scripts/fixtures [--check]`: records the golden files again, or says which would change (exit status 1).

Recording HTTP exchanges starts instances of the scripted engine, as a user would start them. Invariant: with --check no
file is written.
"""

import difflib
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fixtures import exchanges, route_samples, tiny_model, wire_samples
from scripts.harness import Harness


def recorded_routes() -> list[dict[str, Any]]:
    """Every exchange of route_samples, made now, in order."""
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model.build(Path(folder) / "tiny", chat_template=route_samples.TEMPLATE)
        answers: dict[str, dict[str, Any]] = {}
        for server, flags in route_samples.SERVERS.items():
            with scripted(model, *flags) as instance:
                for sample in route_samples.samples():
                    if sample.server == server:
                        answers[sample.name] = exchanges.answer(instance.port, sample)
    return [
        {
            "name": sample.name,
            "contract": sample.shows,
            "request": exchanges.described(sample),
            "answer": answers[sample.name],
        }
        for sample in route_samples.samples()
    ]


def scripted(model: Path, *flags: str) -> Harness:
    """An instance of the scripted engine with one API process: two would take turns at answering."""
    return Harness(
        *flags, model=model, environment={"MILLPOND_ENGINE": "scripted", "MILLPOND_API_PROCESSES": "1"}
    )


def dumped(value: object) -> str:
    """A golden file's text."""
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def main(arguments: list[str]) -> int:
    """Write or check every golden file."""
    golden: list[tuple[Path, Callable[[], object]]] = [
        (wire_samples.GOLDEN, wire_samples.recorded),
        (exchanges.GOLDEN, recorded_routes),
    ]
    changed = 0
    for path, recorded in golden:
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        now = dumped(recorded())
        same = now == before
        changed += not same
        print(f"{path.name}: {'as recorded' if same else 'differs'}")
        if not same:
            sys.stdout.writelines(list(difflib.unified_diff(before.splitlines(True), now.splitlines(True), n=1))[:40])
        if "--check" not in arguments and not same:
            path.parent.mkdir(exist_ok=True)
            path.write_text(now, encoding="utf-8")
    return 1 if changed and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
