"""The engines; each module imports only what it needs, so that a worker pays for one.

make() is the only way in. Must never import an engine before it is asked for: the scripted one runs where mlx is not.
"""

from pathlib import Path

from common.models import ModelChoice, denoises
from worker.engine import Engine
from worker.settings import WorkerSettings


def make(chosen: WorkerSettings, model: ModelChoice) -> Engine:
    """The engine that the settings name, for this model, not yet loaded."""
    if chosen.engine == "scripted":
        from worker.engines.scripted import ScriptedEngine

        return ScriptedEngine(
            model.folder,
            slots=chosen.slots,
            context=chosen.context or 8192,
            rate=chosen.scripted_rate,
            delay_s=chosen.scripted_delay,
            block=chosen.scripted_block,
            load_s=chosen.scripted_load,
        )
    if denoises(model.folder):
        return _diffusion(chosen, model)
    from worker.engines.batched import BatchedEngine
    from worker.engines.company import GAP_S

    draft = chosen.draft_for(model.name)
    return BatchedEngine(
        model.folder,
        slots=chosen.slots,
        kv_tokens=chosen.kv_tokens,
        context=chosen.context,
        prefill_step=chosen.prefill_step,
        cpu_weights=chosen.cpu_weights,
        memory_share=chosen.memory_share,
        prompt_cache_bytes=chosen.prompt_cache_bytes,
        decode_stall_s=chosen.decode_stall_ms / 1000,
        draft=Path(draft) if draft else None,
        draft_tokens=chosen.draft_tokens,
        company_s=GAP_S,
    )


def _diffusion(chosen: WorkerSettings, model: ModelChoice) -> Engine:
    from worker.engines.diffusion import Denoising, DiffusionGemma
    from worker.engines.serial import SerialEngine

    denoising = Denoising(
        chosen.diffusion_steps, chosen.diffusion_threshold, chosen.diffusion_canvas, chosen.diffusion_sampler
    )
    return SerialEngine(
        model.folder,
        lambda texts, progress: DiffusionGemma(
            model.folder,
            texts,
            progress,
            denoising=denoising,
            context=chosen.context,
            prefill_step=chosen.prefill_step,
            cpu_weights=chosen.cpu_weights,
            memory_share=chosen.memory_share,
        ),
        slots=chosen.slots,
        context=chosen.context,
    )
