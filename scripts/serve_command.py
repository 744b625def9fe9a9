"""`millpond serve`: from settings to a running instance.

Resolves what the operator gave (defaults, model ids, downloads) into the one environment that broker, pool and API read,
checks what can be checked before anything starts, and hands over to scripts/instance.
"""

import argparse
import os
import socket
import sys
from pathlib import Path
from typing import Any

from common import runtime, settings
from common.errors import ConfigError
from common.models import ModelChoice, check_folder, denoises
from scripts import demo_model, options
from scripts.instance import Instance
from worker.settings import WorkerSettings


def register(commands: Any) -> None:
    """Add the subcommand."""
    command = commands.add_parser("serve", help="serve models over HTTP", description="Serve models over HTTP.")
    options.add_flags(command)
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve until told to end. Raises ConfigError for what cannot work."""
    environment = options.resolved(arguments, os.environ)
    chosen = settings.load(WorkerSettings, environment)
    served = models(chosen)
    environment["MILLPOND_DRAFT_MODEL"] = ",".join(drafts(chosen, served))
    environment["MILLPOND_MODEL"] = ",".join(str(model) for model in served)
    place = runtime.runtime(chosen.port, chosen.runtime)
    runtime.create(place)
    host = environment.get("MILLPOND_HOST", "127.0.0.1")
    with runtime.hold(place.serve_lock):
        check_port(host, chosen.port)
        return Instance(environment, place, host, chosen.port, chosen.shutdown_timeout).run()


def models(chosen: WorkerSettings) -> list[ModelChoice]:
    """The models to serve, each in a folder that looks like one. Raises ConfigError."""
    found = [located(model) for model in chosen.model] or [demo(chosen.home_folder)]
    names = [model.name for model in found]
    if len(set(names)) != len(names):
        raise ConfigError(f"MILLPOND_MODEL: two models are called {max(names, key=names.count)!r}; use name=PATH")
    for model in found:
        check_folder(model)
    counts = [] if isinstance(chosen.workers, str) else chosen.workers
    for setting, given in (("WORKERS", counts), ("SHARE", chosen.share)):
        unknown = {name for name, _ in given if name} - set(names)
        if unknown:
            raise ConfigError(
                f"MILLPOND_{setting}: no model is called {sorted(unknown)[0]!r}; there are {', '.join(names)}"
            )
    return found


def demo(home: Path) -> ModelChoice:
    """The demo model, fetched when it is not there."""
    return ModelChoice(demo_model.DEMO_MODEL, str(demo_model.fetch(home)))


def drafts(chosen: WorkerSettings, models: list[ModelChoice]) -> list[str]:
    """model=FOLDER of every draft model. Raises ConfigError for one that is none, or is for a model that cannot use it."""
    names = {model.name for model in models}
    denoising = {model.name for model in models if denoises(model.folder)}
    for name, _ in chosen.draft_model:
        if name and name not in names:
            raise ConfigError(f"MILLPOND_DRAFT_MODEL: no model is called {name!r}; there are {', '.join(sorted(names))}")
        if name in denoising:
            raise ConfigError(f"MILLPOND_DRAFT_MODEL: {name!r} is denoised in blocks and can use no draft model")
    found = {}
    for source in {chosen.draft_for(name) for name in names - denoising} - {""}:
        found[source] = located(ModelChoice(source, source))
        check_folder(found[source])
    return [f"{name}={found[chosen.draft_for(name)].folder}" for name in sorted(names - denoising) if chosen.draft_for(name)]


def located(model: ModelChoice) -> ModelChoice:
    """The model with its folder; a hub id is downloaded through mlx-lm, with its progress bar."""
    folder = model.folder.expanduser()
    if folder.is_dir() or model.source.startswith((".", "/", "~")) or model.source.count("/") != 1:
        return ModelChoice(model.name, str(folder.absolute()))
    from scripts.download import download

    print(f"millpond: fetching {model.source}", file=sys.stderr)
    return ModelChoice(model.name, str(download(model.source)))


def check_port(host: str, port: int) -> None:
    """Raises ConfigError when somebody else listens there, or the address is not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As gunicorn binds: a port in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from None
