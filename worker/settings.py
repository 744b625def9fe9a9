"""What an operator can say about workers and the pool, each with its reason."""

import os
from dataclasses import dataclass
from pathlib import Path

from common.models import MODEL, ModelChoice
from common.settings import Parser, auto_or, byte_size, choice, integer, listing, number, seconds, setting, share_or_size, text


def _parse_count(value: str) -> tuple[str, int]:
    name, equals, count = value.rpartition("=")
    if not count.strip().isdigit() or not 1 <= int(count) <= 1024 or (equals and not name.strip()):
        raise ValueError
    return name.strip(), int(count)


COUNTS = Parser(_parse_count, "a number from 1 to 1024, or name=number")


def _parse_share(value: str) -> tuple[str, float]:
    name, equals, part = value.rpartition("=")
    share = float(part)
    if not equals or not name.strip() or not 0 < share <= 1:
        raise ValueError
    return name.strip(), share


SHARES = Parser(_parse_share, "name=fraction, like chat=0.4")

def _parse_draft(value: str) -> tuple[str, str]:
    name, equals, source = value.partition("=")
    if not equals:
        name, source = "", value
    if not source.strip() or (equals and not name.strip()):
        raise ValueError
    return name.strip(), source.strip()


DRAFT = Parser(_parse_draft, "a model folder, a Hugging Face id, or model=either")


@dataclass(frozen=True)
class WorkerSettings:
    """Settings of workers; the pool reads the same ones and passes them on. Durations are seconds, sizes bytes."""

    port: int = setting(integer(1, 65535), 8080, "port of the HTTP endpoint; also names the runtime folder")
    runtime: str = setting(text("a folder path"), "", "folder for sockets and logs (default: the system's private one)")
    model: list[ModelChoice] = setting(listing(MODEL), [], "model folder, Hugging Face id, or name=either; repeatable")
    workers: list[tuple[str, int]] | str = setting(
        auto_or(listing(COUNTS)), "auto", "workers per model: auto (one per device), N, or name=N"
    )
    # None by default: room that is kept free is taken from the rows and prompts of those that serve.
    spare_workers: int = setting(
        integer(0, 64), 0, "workers per model that the budget keeps room for, so that a replacement can start beside the old"
    )
    share: list[tuple[str, float]] = setting(
        listing(SHARES), [], "a model's part of the memory budget, name=fraction; repeatable (default: by need)"
    )
    engine: str = setting(choice("batched", "scripted"), "batched", "what generates: MLX, or a script for tests")
    # Rows of one batch. On the two-core reference machine tokens/s still grows up to 16 rows (docs/benchmarks.md).
    slots: int = setting(integer(1, 4096), 16, "requests at once per worker")
    threads: int = setting(integer(0, 1024), 0, "CPU threads per worker (0: cores divided by workers)")
    memory_budget: float | int = setting(share_or_size(), 0.8, "memory for all workers: a share of the device, or a size")
    context: int = setting(integer(0, 2**31), 0, "longest prompt and reply together (0: what the model allows)")
    # The stall target decides how much is read at a time; this bounds the memory that one stretch needs.
    prefill_step: int = setting(integer(1, 65536), 2048, "most prompt tokens read between two decode steps")
    # A pause of half a second is seen but not taken for a hang. On the reference machine, where a step of 16 rows takes
    # 0.04 s and any chunk some hundredths more, prompts still get most of the time.
    decode_stall_ms: int = setting(
        integer(1, 60_000), 500, "how long reading a prompt may hold up running replies, in milliseconds"
    )
    # An eighth holds some dozen conversations beside the rows that run; more is better spent on more of these.
    prompt_cache_bytes: int = setting(
        byte_size(), 0, "bytes of prompts already read that a worker keeps (0: an eighth of its memory)"
    )
    cpu_weights: str = setting(
        choice("auto", "float32", "keep"), "auto", "weights on CPU: float32 where they fit, or as stored"
    )
    draft_model: list[tuple[str, str]] = setting(
        listing(DRAFT), [], "speculative decoding: the draft model, for all models or model=DRAFT; repeatable"
    )
    # mlx-lm's own default for its server.
    draft_tokens: int = setting(integer(1, 64), 3, "speculative decoding: tokens drafted at a time")
    # mlx-vlm's own defaults; what a model's makers chose stands where a setting says 0.
    diffusion_steps: int = setting(integer(0, 4096), 0, "block diffusion: denoising steps of a block at most (0: the model's own)")
    diffusion_threshold: float = setting(
        number(0, 1), 0.9, "block diffusion: how sure a position must be to be kept, with the sampler confidence-threshold"
    )
    diffusion_canvas: int = setting(integer(0, 65536), 0, "block diffusion: positions of a block at most (0: the model's own)")
    diffusion_sampler: str = setting(
        choice("confidence-threshold", "entropy-bound"), "confidence-threshold", "block diffusion: which positions a step keeps"
    )
    scripted_rate: float = setting(number(0, 1e6, "tokens/s"), 50.0, "scripted engine: tokens/s per request, 0 as fast as it goes")
    scripted_delay: float = setting(seconds(0, 3600), 0.0, "scripted engine: time before the first token")
    scripted_block: int = setting(integer(1, 65536), 1, "scripted engine: tokens committed at a time")
    scripted_load: float = setting(seconds(0, 3600), 0.0, "scripted engine: time that loading takes")
    shutdown_timeout: float = setting(seconds(0, 3600), 30.0, "how long running requests may go on at shutdown")
    home: str = setting(text("a folder path"), "~/.cache/millpond", "folder for models and compiled kernels")
    log_level: str = setting(choice("debug", "info", "warning", "error"), "info", "how much to log")
    log_format: str = setting(choice("text", "json"), "text", "log lines for people or for machines")
    worker_name: str = setting(text(), "", "this worker's name", internal=True)
    kv_tokens: int = setting(integer(0, 2**53), 0, "tokens of KV memory of this worker", internal=True)
    memory_share: int = setting(byte_size(), 0, "bytes this worker may use", internal=True)

    @property
    def home_folder(self) -> Path:
        """MILLPOND_HOME as a path."""
        return Path(self.home).expanduser().absolute()

    def workers_for(self, model: str) -> int | None:
        """How many workers the operator wants for a model; None: auto."""
        if isinstance(self.workers, str):
            return None
        counts = dict(self.workers)
        return counts.get(model, counts.get(""))

    def share_of(self, model: str) -> float | None:
        """The part of the budget that the operator gives a model; None: by need."""
        return dict(self.share).get(model)

    def draft_for(self, model: str) -> str:
        """Where a model's draft model comes from; "": it has none."""
        drafts = dict(self.draft_model)
        return drafts.get(model, drafts.get("", ""))

    def threads_for(self, workers: int) -> int:
        """CPU threads of each of `workers` workers."""
        return self.threads or max(1, (os.cpu_count() or 1) // max(1, workers))
