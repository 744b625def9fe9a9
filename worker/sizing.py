"""From settings and the machine to the workers that will be started: names, memory shares, environments.

The bridge between the operator's wishes (worker/settings), the device (worker/device), the models' files (worker/model_files)
and the pure plan (worker/shares); it starts nothing. Raises ConfigError when the budget holds no worker.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from common import settings
from common.models import ModelChoice, denoises
from worker import device, model_files
from worker.device import Machine
from worker.plan import FLOAT32, KEEP, Plan, beside_bytes
from worker.settings import WorkerSettings
from worker.shares import Device, Kind, Placed, Wish, place
from worker.supervision import ModelRecord, Supervision


@dataclass(frozen=True)
class Share:
    """What one worker is started with: variables beside the pool's own."""

    environment: dict[str, str]


@dataclass(frozen=True)
class Survey:
    """What is planned for this machine."""

    machine: Machine
    budgets: tuple[int, ...]
    placed: list[Placed]


def survey(chosen: WorkerSettings, machine: Callable[[], Machine] = device.machine) -> Survey:
    """Every model's workers, each with its share and its device."""
    if chosen.engine == "scripted":
        return _scripted(chosen)
    found = machine()
    budgets = found.budgets(chosen.memory_budget)
    devices = [Device(index, name, budgets[index]) for index, name in enumerate(found.names)]
    wishes = [_wish(chosen, model, found) for model in chosen.model]
    # One Apple GPU or CPU gains nothing from two workers that split it: more of them are the operator's choice.
    kind = Kind(found.backend == device.CPU, found.backend == device.CUDA, chosen.cpu_weights)
    return Survey(found, budgets, place(devices, wishes, kind))


def _wish(chosen: WorkerSettings, model: ModelChoice, machine: Machine) -> Wish:
    facts, draft, beside = model_files.read(model.folder), _draft(chosen, model), 0
    if draft:
        as_float32 = machine.backend == device.CPU and chosen.cpu_weights != KEEP
        context = min(chosen.context or facts.context, facts.context)
        beside = beside_bytes(model_files.read(Path(draft)), FLOAT32 if as_float32 else KEEP, context)
    return Wish(
        model.name,
        facts,
        chosen.workers_for(model.name),
        chosen.share_of(model.name),
        # The serial lane runs one request at a time; the others wait in the broker, where they can go elsewhere.
        1 if denoises(model.folder) else chosen.slots,
        chosen.context,
        chosen.prompt_cache_bytes,
        beside,
    )


def _scripted(chosen: WorkerSettings) -> Survey:
    """A script computes nothing: its device is never asked for, and its share is what a budget in bytes allows."""
    counts = {model.name: chosen.workers_for(model.name) or 1 for model in chosen.model}
    budget = chosen.memory_budget if isinstance(chosen.memory_budget, int) else 0
    share = budget // sum(counts.values())
    placed = []
    for model in chosen.model:
        facts = model_files.read(model.folder)
        context, count = min(chosen.context or facts.context, facts.context), counts[model.name]
        made = Plan(count, chosen.slots, chosen.slots * context, KEEP, share, 0, 0, 0)
        placed.append(Placed(model.name, made, context, (0,) * count, (count,)))
    return Survey(Machine("scripted", ("",), (0,)), (budget,), placed)


def divide(chosen: WorkerSettings) -> tuple[Supervision, dict[str, Share]]:
    """The workers to run and each one's share."""
    made = survey(chosen)
    total = sum(len(placed.devices) for placed in made.placed)
    supervision, shares = Supervision(), {}
    for model, placed in zip(chosen.model, made.placed, strict=True):
        planned = placed.plan
        names = [f"{model.name}-{number}" for number in range(planned.workers)]
        supervision.plan(ModelRecord(model.name, planned.slots, placed.context, planned.kv_tokens), names)
        for name, index in zip(names, placed.devices, strict=True):
            shares[name] = Share(_environment(chosen, model, name, placed, total) | made.machine.only(index))
    return supervision, shares


def _environment(chosen: WorkerSettings, model: ModelChoice, name: str, placed: Placed, total: int) -> dict[str, str]:
    planned, draft = placed.plan, _draft(chosen, model)
    own = {
        "model": str(model),
        "worker_name": name,
        "slots": str(planned.slots),
        "context": str(placed.context),
        "kv_tokens": str(planned.kv_tokens),
        "memory_share": str(planned.share_bytes),
        "draft_model": f"{model.name}={draft}" if draft else "",
        "cpu_weights": planned.precision,
        # 0 would mean auto, and the plan may have left nothing.
        "prompt_cache_bytes": str(max(1, planned.prompt_cache_bytes)),
    }
    environment = {settings.environment_name(key): value for key, value in own.items()}
    if chosen.engine != "scripted":
        environment |= device.cpu_environment(chosen.threads_for(total), chosen.home_folder)
    return environment


def _draft(chosen: WorkerSettings, model: ModelChoice) -> str:
    """The folder of its draft model; "": none. Block diffusion has no use for one."""
    return "" if denoises(model.folder) else chosen.draft_for(model.name)
