"""The command `millpond`: finds the subcommand and turns our errors into one line and an exit status.

Status 2: what was asked cannot work. 1: it stopped working. 130: the user pressed Ctrl-C.
"""

import argparse
import sys
from collections.abc import Sequence

from common import __version__
from common.errors import ConfigError, MillpondError


def parser() -> argparse.ArgumentParser:
    """All subcommands and flags."""
    from scripts import change_commands, chat, doctor, logs_command, plan_command, serve_command, status, top, trace_command
    from scripts.loadtest import command as loadtest

    whole = argparse.ArgumentParser(prog="millpond", description="Serves MLX language models from a pool of processes.")
    whole.add_argument("--version", action="version", version=f"millpond {__version__}")
    commands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (
        serve_command, plan_command, chat, status, top, change_commands, trace_command, logs_command, doctor, loadtest,
    ):  # fmt: skip
        module.register(commands)
    return whole


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    chosen = parser().parse_args(arguments)
    try:
        return chosen.run(chosen)
    except ConfigError as error:
        print(f"millpond: {error}", file=sys.stderr)
        return 2
    except MillpondError as error:
        print(f"millpond: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
