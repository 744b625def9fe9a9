"""`python -m scripts.bench NAME…|all [--quick] [--write]`: runs benchmarks one after the other and prints their tables.

`all` runs every one and writes docs/benchmarks.md; named ones write it only with --write. Exit status 1 when one could
not be run; a missed goal is a finding and not an error.
"""

import argparse
import importlib
import sys
import time
import traceback

from scripts.bench import document, machine
from scripts.bench.goals import Report

# In this order under `all`: what computes most comes last.
MODULES = {
    "relay": "relay",
    "queue": "queue_cost",
    "api": "api_cost",
    "departure": "departure",
    "latency": "latency",
    "capacity": "capacity",
    "overload": "overload",
    "memory": "memory",
    "startup": "startup",
    "changes": "changes",
    "serial": "serial",
    "engine": "engine",
    "end_to_end": "end_to_end",
    "streams": "streams",
    "peers": "peers",
    "prefix": "prefix",
    "sized": "sized",
}


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "names", nargs="+", choices=[*MODULES, "all"], metavar="NAME", help=", ".join([*MODULES, "all"])
    )
    parser.add_argument(
        "--quick", action="store_true", help="seconds instead of minutes: shows that it works, not how fast"
    )
    parser.add_argument("--write", action="store_true", help="write the tables into docs/benchmarks.md too")
    chosen = parser.parse_args()
    names = list(MODULES) if "all" in chosen.names else chosen.names
    write = (chosen.write or "all" in chosen.names) and not chosen.quick
    failed = [name for name in names if not _run(name, chosen.quick, write)]
    if failed:
        print(f"could not be measured: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _run(name: str, quick: bool, write: bool) -> bool:
    about = machine.about(f"python -m scripts.bench {name}")
    print(f"== {name}: {about[2]}", flush=True)
    began = time.monotonic()
    try:
        report: Report = importlib.import_module(f"scripts.bench.{MODULES[name]}").run(quick)
    except Exception:
        traceback.print_exc()
        return False
    for table in report.tables:
        print(f"\n{table.text()}")
    print(f"\n   {time.monotonic() - began:.0f} s\n", flush=True)
    if write:
        document.write(report, about)
    return True


if __name__ == "__main__":
    sys.exit(main())
