"""The plan's figures against what mlx holds after loading, and with the caches filled: within 5 % for each architecture.

The models are tiny and random, but large enough that 5 % is more than what mlx needs beside them.
"""

import gc
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from common.errors import ConfigError
from tests.worker import architectures
from worker import device, model_files
from worker.engines import batched, sampling
from worker.engines.batch import Batch, Prompt
from worker.engines.batched import BatchedEngine
from worker.engines.measure import measured
from worker.engines.mlx_lm_0_32 import RowNeeds
from worker.engines.prompt_cache import PromptCache
from worker.engines.weights import load_weights
from worker.plan import FLOAT32, KEEP, KV_PEAK, KV_STEP, OVERHEAD_BYTES, Fit, Needs, fit, needs

pytestmark = pytest.mark.slow

# Buffers grow by KV_STEP columns, however few of them are filled; longer than the windows is enough.
ROWS, COLUMNS, PROMPT = 2, KV_STEP, 20
SIZES: dict[str, Any] = {
    "vocab_size": 8192, "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 8,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size_per_layer_input": 8192,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model of one architecture. bits: of its layers; mixed: 8 for the embedding. precision: as it is to be held."""

    kind: str
    bits: int = 0
    mixed: bool = False
    precision: str = KEEP
    changes: dict[str, Any] = field(default_factory=dict)


WINDOWS = {"sliding_window": 12}
CASES = {
    "llama": Case("llama"),
    "llama, tied": Case("llama", changes={"tie_word_embeddings": True}),
    "llama, grouped heads": Case("llama", changes={"num_key_value_heads": 2, "head_dim": 256}),
    "llama, 4-bit": Case("llama", bits=4),
    "llama, 4-bit with 8-bit embeddings": Case("llama", bits=4, mixed=True),
    "llama, 4-bit held as float32": Case("llama", bits=4, mixed=True, precision=FLOAT32),
    "qwen2": Case("qwen2", changes={"head_dim": ""}),
    "qwen3": Case("qwen3"),
    "qwen3_moe": Case("qwen3_moe", precision=FLOAT32),
    "gemma2": Case("gemma2"),
    "gemma3": Case("gemma3_text", changes=WINDOWS),
    "gpt_oss": Case("gpt_oss", precision=FLOAT32, changes=WINDOWS),
    "deepseek_v2": Case("deepseek_v2"),
    "deepseek_v3": Case("deepseek_v3", changes={"kv_lora_rank": 512, "qk_rope_head_dim": 64}),
    "deepseek_v3, 4-bit": Case("deepseek_v3", bits=4, changes={"kv_lora_rank": 512, "qk_rope_head_dim": 64}),
    "deepseek_v3, 4-bit held as float32": Case(
        "deepseek_v3", bits=4, precision=FLOAT32, changes={"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    ),
    "mamba2": Case("mamba2", changes={"num_heads": 16, "head_dim": 64, "state_size": 64, "intermediate_size": 1024}),
    "jamba": Case("jamba", changes={"head_dim": "", "num_attention_heads": 2, "num_key_value_heads": 2}),
    "falcon_h1": Case("falcon_h1"),
    "granitemoehybrid": Case(
        "granitemoehybrid", changes={"head_dim": "", "layer_types": ["mamba", *["attention"] * 3], "num_attention_heads": 2,
                                     "num_key_value_heads": 2}
    ),
    "qwen3_next": Case("qwen3_next", precision=FLOAT32),
    "lfm2": Case("lfm2", changes={"head_dim": "", "block_dim": 128}),
}  # fmt: skip


def quantized(model: nn.Module, config: dict[str, Any], case: Case) -> None:
    """As `mlx_lm convert` would: in place, and the config says so."""

    def how(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized") or module.weight.shape[-1] % 32:
            return False
        return {"group_size": 32, "bits": 8} if case.mixed and "embed" in path else True

    nn.quantize(model, 32, case.bits, class_predicate=how)
    config["quantization"] = {"group_size": 32, "bits": case.bits}
    if case.mixed:
        config["quantization"]["model.embed_tokens"] = {"group_size": 32, "bits": 8}


def build(case: Case, folder: Path) -> Path:
    config = architectures.config(case.kind, **{**SIZES, **case.changes})
    model = architectures.model(config)
    if case.bits:
        quantized(model, config, case)
    return architectures.save(model, config, folder)


def active() -> int:
    gc.collect()
    device.clear_cache()
    return device.memory()["active"]


def filled(model: nn.Module) -> Iterator[int]:
    """Bytes that two rows' caches hold, past their first own tokens; through the batch as requests go."""
    before = active()
    batch = Batch(model, [], PromptCache(0), 1 << 30, 1 << 30, 1.0)
    batch.enter([
        Prompt(RowNeeds(row, 100, sampling.greedy), [1 + row] * PROMPT) for row in range(ROWS)
    ])  # fmt: skip
    while batch.reads:
        batch.read(ROWS * 10)
    for _ in range(2):
        batch.decode()
    yield active() - before


@pytest.mark.parametrize("name", CASES)
def test_the_plan_is_what_mlx_holds(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    folder = build(case, tmp_path)
    facts = model_files.read(folder)
    planned = needs(facts, case.precision, ROWS)
    before = active()
    model = load_weights(folder, case.precision, lambda words: None)
    held = active() - before
    (kv,) = filled(model)
    expected = planned.kv.total(ROWS * COLUMNS, ROWS)
    found, _ = measured(model)
    print(f"\n| {name} | {planned.weights} | {held} | {expected} | {kv} |")
    assert held == pytest.approx(planned.weights, rel=0.05) and held > 500_000
    assert kv == pytest.approx(expected, rel=0.05) and kv > 200_000
    assert not facts.estimated and found == planned.kv
    # What the worker corrects its plan with after loading.
    assert Needs(held, planned.overhead, found).least(4096) == pytest.approx(planned.least(4096), rel=0.01)


def told(engine: BatchedEngine) -> list[str]:
    words: list[str] = []
    engine.load(words.append)
    return words


def test_a_worker_says_what_fits_by_what_it_measured_and_not_by_what_was_planned(tiny_model: Path) -> None:
    share = 520 << 20
    engine = BatchedEngine(tiny_model, slots=16, kv_tokens=7, memory_share=share)
    words = told(engine)
    # Two layers of two heads of 16, keys and values, float32.
    assert engine.facts.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert engine.facts.weight_bytes == pytest.approx(model_files.read(tiny_model).float32_bytes, rel=0.05)
    room = share - OVERHEAD_BYTES - engine.facts.weight_bytes
    assert engine.facts.slots <= 16 and 1024 <= engine.facts.kv_tokens < 16 * 4096
    assert (engine.facts.kv_tokens + engine.facts.slots * KV_STEP) * 512 * KV_PEAK <= room
    assert any(f"room for {engine.facts.kv_tokens} KV tokens" in line and "7 were planned" in line for line in words)
    engine.close()


def test_a_share_that_leaves_nothing_for_the_prompt_cache_keeps_none(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Needs] = []

    def with_no_spare(need: Needs, share: int, slots: int, context: int, wanted: int) -> Fit:
        given.append(need)
        return fit(need, need.least(context), slots, context, wanted)

    monkeypatch.setattr(batched, "fit", with_no_spare)
    engine = BatchedEngine(tiny_model, memory_share=600 << 20, prompt_cache_bytes=1 << 20)
    told(engine)
    assert given and engine._kept.limit_bytes == 0
    engine.close()


def test_a_model_that_is_larger_than_its_share_once_loaded_says_by_how_much(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"loaded, this model needs 0\.5\d GiB, .* \d\d\.\d MiB too little"):
        told(BatchedEngine(tiny_model, memory_share=500 << 20))
