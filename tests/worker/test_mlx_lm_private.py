"""The private parts of mlx-lm that the engine builds on are those of the pinned version."""

import hashlib
import inspect
import re
from pathlib import Path

import mlx_lm
import mlx_lm.utils
import pytest
from mlx_lm.sample_utils import make_logits_processors

from worker.engines import mlx_lm_0_32

READING = mlx_lm_0_32.generate.PromptProcessingBatch
DECODING = mlx_lm_0_32.generate.GenerationBatch


def test_the_installed_version_is_the_one_this_was_written_for() -> None:
    assert mlx_lm.__version__ == mlx_lm_0_32.VERSION
    pinned = re.search(r"mlx-lm ==(\S+)", (Path(__file__).parents[2] / "setup.cfg").read_text())
    assert pinned and pinned[1] == mlx_lm_0_32.VERSION


def test_the_batches_take_what_they_are_given() -> None:
    assert list(inspect.signature(DECODING.__init__).parameters)[1:] == [
        "model", "uids", "inputs", "prompt_cache", "tokens", "samplers", "fallback_sampler", "logits_processors",
        "stop_sequences", "max_tokens",
    ]  # fmt: skip
    taken = list(inspect.signature(READING.__init__).parameters)
    assert taken[1:5] == ["model", "uids", "caches", "tokens"]
    assert {"prefill_step_size", "samplers", "logits_processors"} <= set(taken)
    assert {"extend", "filter", "extract_cache", "_step", "next"} <= set(dir(DECODING))
    assert {"filter", "extract_cache", "split", "_copy", "prompt"} <= set(dir(READING))


def test_the_step_is_the_one_that_was_replaced() -> None:
    """What Decoding._step() does in its place was written against this text."""
    text = inspect.getsource(DECODING._step) + inspect.getsource(DECODING.next)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "2736d3a4a28ef607"


def test_speculation_takes_what_it_is_given_and_counts_as_was_read() -> None:
    """Where a round ends, and what its caches hold then, was read from this text."""
    step = mlx_lm_0_32.generate.speculative_generate_step
    taken = list(inspect.signature(step).parameters)
    assert taken[:4] == ["prompt", "model", "draft_model", "stream"]
    assert {"num_draft_tokens", "max_tokens", "sampler", "prompt_cache"} <= set(taken)
    assert hashlib.sha256(inspect.getsource(step).encode()).hexdigest()[:16] == "84bed200ad064afd"


def test_its_answers_have_the_fields_that_are_read() -> None:
    assert {"uid", "token", "logprobs", "finish_reason"} <= set(DECODING.Response.__dataclass_fields__)


def test_a_layer_s_offset_is_not_changed_in_place() -> None:
    """Layers share one array (mlx_lm_0_32._share_offsets): what one makes of its own must be another."""
    import mlx.core as mx
    from mlx_lm.models.cache import BatchKVCache

    layers = [BatchKVCache([2, 0, 1]) for _ in range(3)]
    for layer in layers[:2]:
        layer.update_and_fetch(mx.zeros((3, 1, 4, 8)), mx.zeros((3, 1, 4, 8)))
    mlx_lm_0_32._share_offsets(layers)
    assert layers[0].offset is layers[1].offset is not layers[2].offset
    changes = [
        lambda one: one.update_and_fetch(mx.zeros((3, 1, 1, 8)), mx.zeros((3, 1, 1, 8))),
        lambda one: one.trim(1),
        lambda one: (one.prepare(right_padding=[1, 0, 0]), one.finalize()),
        lambda one: one.filter(mx.array([0, 2])),
        lambda one: one.extend(layers[2]),
    ]
    for change in changes:
        before = layers[1].offset.tolist()
        change(layers[0])
        assert layers[1].offset.tolist() == before != layers[0].offset.tolist()
        layers[0] = BatchKVCache([2, 0, 1])
        layers[0].update_and_fetch(mx.zeros((3, 1, 4, 8)), mx.zeros((3, 1, 4, 8)))
        mlx_lm_0_32._share_offsets(layers)


def test_loading_and_processors_have_the_arguments_that_are_used() -> None:
    assert {"lazy"} <= set(inspect.signature(mlx_lm.utils.load_model).parameters)
    assert list(inspect.signature(mlx_lm.utils.dequantize_model).parameters) == ["model"]
    taken = set(inspect.signature(make_logits_processors).parameters)
    assert {f"{kind}_context_size" for kind in ("repetition", "presence", "frequency")} <= taken


def test_making_a_batch_leaves_the_wired_limit_as_it_was(monkeypatch: pytest.MonkeyPatch, tiny_model: Path) -> None:
    """mlx-lm's own generators raise it to the device's whole working set, which machines have panicked from."""
    import mlx.core as mx

    from worker.engines.batch import Batch
    from worker.engines.prompt_cache import PromptCache

    monkeypatch.setattr(mx, "set_wired_limit", lambda value: 1 / 0)
    monkeypatch.setattr(mx, "device_info", lambda *_: {"max_recommended_working_set_size": 900})
    Batch(mlx_lm_0_32.load(tiny_model), [2], PromptCache(0), 0, 0, 0.0)
