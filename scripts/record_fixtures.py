"""`scripts/fixtures [--check]`: records the golden files again, or says which would change (exit status 1)."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

from fixtures import wire_samples


def main(arguments: list[str]) -> int:
    """Write or check every golden file."""
    golden: list[tuple[Path, Callable[[], object], Callable[[], None]]] = [
        (wire_samples.GOLDEN, wire_samples.recorded, wire_samples.write),
    ]
    changed = 0
    for path, recorded, write in golden:
        same = path.exists() and json.loads(path.read_text()) == recorded()
        changed += not same
        if "--check" not in arguments:
            write()
        print(f"{path.name}: {'as recorded' if same else 'differs'}")
    return 1 if changed and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
