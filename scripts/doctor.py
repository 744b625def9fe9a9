"""`millpond doctor`: looks at the machine and the settings as `serve` would find them, and says what it would change.

Every check is a function from what it looks at to findings; none changes anything but making the cache folders that `serve`
makes as well. Exit status 0 when serve could start (or runs well), 1 when something is wrong, 2 for settings that are none.
"""

import argparse
import dataclasses
import os
import resource
import shutil
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from api.settings import ApiSettings
from broker.settings import BrokerSettings
from common import runtime, settings
from common.client import BrokerClient, NoBroker
from common.errors import ConfigError
from common.models import check_folder
from common.runtime import Runtime
from scripts import demo_model, options
from scripts.serve_command import check_port
from worker import device, model_files, sgemm
from worker.layout import Layout, lay_out
from worker.settings import WorkerSettings

OK, WARNING, WRONG = "ok", "warning", "wrong"
# Sockets of clients, two per process of ours, logs and model files.
SPARE_FILES = 200


@dataclass(frozen=True)
class Finding:
    """What was looked at, how it is, what was found, and what to change ("": nothing)."""

    what: str
    level: str
    found: str
    change: str = ""

    def lines(self) -> list[str]:
        """For people."""
        first = f"{self.level:<8} {self.what:<12} {self.found}"
        return [first, f"{'':<21} -> {self.change}"] if self.change else [first]


def register(commands: Any) -> None:
    """Add the subcommand."""
    command = commands.add_parser("doctor", help="check the machine and the settings, and say what to change")
    options.add_flags(command)
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print every finding. Raises ConfigError for settings that are none."""
    environment = options.resolved(arguments, os.environ)
    worst = OK
    for finding in findings(environment):
        print("\n".join(finding.lines()), flush=True)
        if finding.level == WRONG or worst == OK:
            worst = finding.level
    print({OK: "everything is as it should be", WARNING: "it works, and could be better"}.get(worst, "something is wrong"))
    return 1 if worst == WRONG else 0


def findings(environment: dict[str, str]) -> Iterator[Finding]:
    """All checks, in the order in which `serve` would fail. Raises ConfigError."""
    chosen = settings.load(WorkerSettings, environment)
    broker = settings.load(BrokerSettings, environment)
    api = settings.load(ApiSettings, environment)
    yield python(sys.version_info[:3])
    place, finding = runtime_folder(chosen.port, chosen.runtime)
    yield finding
    yield from models(chosen)
    plain = chosen.engine == "scripted"
    if not plain:
        yield from computing(chosen)
        yield memory(psutil.virtual_memory().total, psutil.virtual_memory().available)
    there = [model for model in chosen.model if model.folder.is_dir()]
    try:
        layout = lay_out(dataclasses.replace(chosen, model=there), 0)
    except ConfigError as error:
        yield Finding("budget", WRONG, str(error))
        layout = None
    else:
        yield from budget(layout)
    slots = sum(seat.slots for seats in layout.seats.values() for seat in seats) if layout else chosen.slots
    inflight = broker.max_inflight if isinstance(broker.max_inflight, int) else slots
    yield files(resource.getrlimit(resource.RLIMIT_NOFILE), inflight + broker.max_queue)
    snapshot = running(place) if place is not None else None
    yield port(api.host, chosen.port, snapshot is not None)
    if snapshot is not None:
        yield from instance(snapshot)


def python(version: tuple[int, ...]) -> Finding:
    """The interpreter."""
    words = ".".join(map(str, version))
    if version < (3, 11):
        return Finding("python", WRONG, words, "3.11 or newer is needed")
    return Finding("python", OK, words)


def runtime_folder(number: int, base: str) -> tuple[Runtime | None, Finding]:
    """Where the sockets lie: short enough, ours, private."""
    try:
        place = runtime.runtime(number, base)
    except ConfigError as error:
        return None, Finding("runtime", WRONG, str(error))
    folder = next(path for path in (place.folder, *place.folder.parents) if path.exists())
    found = folder.stat()
    if folder == place.folder:
        if found.st_uid != os.getuid():
            return place, Finding("runtime", WRONG, f"{folder} belongs to somebody else", "remove it, or set MILLPOND_RUNTIME")
        if stat.S_IMODE(found.st_mode) & 0o077:
            return place, Finding("runtime", WARNING, f"{folder} is open to others", "serve will make it private")
    elif not os.access(folder, os.W_OK | os.X_OK):
        return place, Finding("runtime", WRONG, f"{place.folder} cannot be made in {folder}", "set MILLPOND_RUNTIME")
    length = len(os.fsencode(place.front.removeprefix("ipc://")))
    return place, Finding("runtime", OK, f"{place.folder}, socket paths of {length} of {runtime.MAX_PATH_BYTES} bytes")


def models(chosen: WorkerSettings) -> Iterator[Finding]:
    """Every model's folder and headers."""
    if not chosen.model:
        yield Finding("model", OK, f"none chosen: serve takes the demo model {demo_model.DEMO_MODEL}")
    for model in chosen.model:
        if not model.folder.is_dir() and model.source.count("/") == 1 and not model.source.startswith((".", "/", "~")):
            yield Finding("model", OK, f"{model.name}: {model.source} is fetched by serve if it is not there yet")
            continue
        try:
            check_folder(model)
            facts = model_files.read(model.folder)
        except ConfigError as error:
            yield Finding("model", WRONG, str(error))
            continue
        kind = " ".join(filter(None, (facts.kind, facts.quantization)))
        yield Finding("model", OK, f"{model.name}: {kind}, {size(facts.stored_bytes)}, context {facts.context}")


def computing(chosen: WorkerSettings) -> Iterator[Finding]:
    """What computes, and with what libraries."""
    try:
        machine = device.probe()
    except ConfigError as error:
        yield Finding("device", WRONG, str(error))
        return
    for number, found in enumerate(machine["devices"]):
        memory = f", {size(int(found['memory']))}" if found["memory"] else ""
        yield Finding("device" if not number else f"device {number}", OK, f"{machine['backend']} ({found['name']}){memory}")
    if machine["backend"] != device.CPU or sys.platform != "linux":
        return
    try:
        preloads = device.cpu_environment(chosen.threads_for(1), chosen.home_folder).get("LD_PRELOAD", "")
    except ConfigError as error:
        yield Finding("home", WRONG, str(error))
        return
    if "openblas" in preloads:
        names = [Path(path).name for path in preloads.split(":")]
        alone = "" if any(name.startswith(sgemm.NAME) for name in names) else "; without our own multiplication before it"
        yield Finding("blas", OK, next(name for name in names if "openblas" in name) + alone)
    else:
        package = "ngsolve-openblas" if os.uname().machine == "x86_64" else "cmeel-openblas"
        yield Finding("blas", WARNING, "only the reference BLAS, ten times slower", f"pip install {package}")
    yield compiler(shutil.which("c++") or shutil.which("g++") or shutil.which("clang++"))


def compiler(path: str | None) -> Finding:
    """MLX fuses operations on a CPU by compiling them."""
    if path is None:
        return Finding("compiler", WARNING, "no C++ compiler: kernels are not fused", "install g++ or clang++")
    return Finding("compiler", OK, path)


def memory(total: int, available: int) -> Finding:
    """What is free now."""
    words = f"{size(available)} of {size(total)} free"
    if available < total // 10:
        return Finding("memory", WARNING, words, "end what else uses it, or lower MILLPOND_MEMORY_BUDGET")
    return Finding("memory", OK, words)


def budget(layout: Layout) -> Iterator[Finding]:
    """What the plan makes of it."""
    for name, seats in layout.seats.items():
        record = layout.records[name]
        share = f", {size(seats[0].share)} each" if seats[0].share else ""
        found = f"{name}: {len(seats)} worker{'s' * (len(seats) != 1)} of {record.slots} slots{share}, {record.kv_tokens} KV tokens"
        # A row as long as the model allows that fits no worker is refused although the model could do it.
        if record.kv_tokens < record.context:
            change = f"prompts and replies of more than {record.kv_tokens} tokens are refused; raise MILLPOND_MEMORY_BUDGET"
            yield Finding("budget", WARNING, found, change)
        else:
            yield Finding("budget", OK, found)


def files(limits: tuple[int, int], requests: int) -> Finding:
    """Open files: each client is a socket."""
    soft, hard = limits
    needed = requests + SPARE_FILES
    shown = "no limit" if soft == resource.RLIM_INFINITY else str(soft)
    if soft != resource.RLIM_INFINITY and soft < needed:
        return Finding("files", WRONG, f"{shown} may be open, {needed} are needed", f"ulimit -n {needed} (at most {hard})")
    return Finding("files", OK, f"{shown} may be open, {needed} are needed")


def port(host: str, number: int, is_ours: bool) -> Finding:
    """Whether serve could listen."""
    try:
        check_port(host, number)
    except ConfigError as error:
        if is_ours:
            return Finding("port", OK, f"{host}:{number} is this instance's")
        return Finding("port", WRONG, str(error))
    if is_ours:
        return Finding("port", WRONG, f"an instance runs, but nobody listens on {host}:{number}", "see millpond logs")
    return Finding("port", OK, f"{host}:{number} is free")


def running(place: Runtime) -> dict[str, Any] | None:
    """The snapshot of an instance that runs there."""
    if not place.broker_lock.exists():
        return None
    try:
        with BrokerClient(place.front, "doctor") as client:
            return client.snapshot(2.0)
    except NoBroker:
        return None


def instance(snapshot: dict[str, Any]) -> Iterator[Finding]:
    """How a running instance is."""
    for worker in snapshot["workers"]:
        found = f"{worker['name']} is {worker['state']}, {worker['restarts']} restarts"
        last = worker.get("log", [])[-1:]
        if worker["state"] in ("failed", "stuck"):
            change = f"{last[0]}; then millpond restart {worker['name']}" if last else f"millpond restart {worker['name']}"
            yield Finding("worker", WRONG, found, change)
        else:
            yield Finding("worker", OK, found)
    if snapshot["malformed"]:
        yield Finding("broker", WARNING, f"{snapshot['malformed']} messages that were none", "see millpond logs")
    if not snapshot["pools"]:
        yield Finding("pool", WRONG, "no pool is there to start workers", "see millpond logs")


def size(count: int) -> str:
    """Bytes for people."""
    return f"{count / 2**30:.2f} GiB"
