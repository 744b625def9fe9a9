"""From settings and the machine to the workers that will be started: names, memory shares, environments.

The bridge between the operator's wishes (worker/settings), the device (worker/device), the models' files (worker/model_files)
and the pure plan (worker/plan); it starts nothing. Raises ConfigError when the budget holds no worker.
"""

from dataclasses import dataclass
from pathlib import Path

from common import settings
from common.models import ModelChoice, denoises
from worker import device, model_files
from worker.plan import FLOAT32, KEEP, KV_PEAK, Plan, kv_bytes_per_token, plan, weight_bytes
from worker.settings import WorkerSettings
from worker.supervision import ModelRecord, Supervision


@dataclass(frozen=True)
class Share:
    """What one worker is started with: variables beside the pool's own."""

    environment: dict[str, str]


def divide(chosen: WorkerSettings) -> tuple[Supervision, dict[str, Share]]:
    """The workers to run and each one's share."""
    # A script computes nothing: its device is never asked for.
    machine = {"backend": device.CPU, "limit": 0} if chosen.engine == "scripted" else device.probe()
    budget = chosen.memory_budget
    if isinstance(budget, float):
        budget = int(int(machine["limit"]) * budget)
    # On a CPU and on Metal a second worker of a model splits the same cores, so it is the operator's choice.
    counts = {model.name: chosen.workers_for(model.name) or 1 for model in chosen.model}
    total = sum(counts.values())
    supervision, shares = Supervision(), {}
    for model in chosen.model:
        count = counts[model.name]
        facts = model_files.read(model.folder)
        context = min(chosen.context or facts.context, facts.context)
        # A draft model reads one row at a time beside the batch.
        draft_bytes = 0
        if chosen.engine == "scripted":
            planned = Plan(count, chosen.slots, chosen.slots * context, KEEP, 0, 0, 0, 0)
        else:
            on_cpu = machine["backend"] == device.CPU
            draft_bytes = _draft_bytes(_draft(chosen, model), context, on_cpu and chosen.cpu_weights != KEEP)
            planned = plan(
                budget * count // total - count * draft_bytes,
                facts,
                count,
                # The serial lane runs one request at a time; the others wait in the broker, where they can go elsewhere.
                1 if denoises(model.folder) else chosen.slots,
                context,
                on_cpu=on_cpu,
                cpu_weights=chosen.cpu_weights,
                prompt_cache_bytes=chosen.prompt_cache_bytes,
            )
        names = [f"{model.name}-{number}" for number in range(count)]
        supervision.plan(ModelRecord(model.name, planned.slots, context, planned.kv_tokens), names)
        for name in names:
            shares[name] = Share(_environment(chosen, model, name, planned, context, total, draft_bytes))
    return supervision, shares


def _environment(
    chosen: WorkerSettings, model: ModelChoice, name: str, planned: Plan, context: int, total: int,
    draft_bytes: int,
) -> dict[str, str]:  # fmt: skip
    draft = _draft(chosen, model)
    own = {
        "model": str(model),
        "worker_name": name,
        "slots": str(planned.slots),
        "context": str(context),
        "kv_tokens": str(planned.kv_tokens),
        "memory_share": str(planned.share_bytes + draft_bytes),
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


def _draft_bytes(folder: str, context: int, as_float32: bool) -> int:
    """What a draft model takes of a worker's memory: its weights and one row's cache."""
    if not folder:
        return 0
    facts = model_files.read(Path(folder))
    precision = FLOAT32 if as_float32 else KEEP
    row = min(context, facts.context) * kv_bytes_per_token(facts, precision)
    return weight_bytes(facts, precision) + int(KV_PEAK * row)
