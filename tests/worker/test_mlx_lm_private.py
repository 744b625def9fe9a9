"""The private parts of mlx-lm that the engine builds on are those of the pinned version."""

import inspect
import re
from pathlib import Path

import pytest

pytest.importorskip("mlx_lm")

import mlx_lm  # noqa: E402
import mlx_lm.utils  # noqa: E402
from mlx_lm.sample_utils import make_logits_processors  # noqa: E402

from worker.engines import mlx_lm_0_32  # noqa: E402

GENERATOR = mlx_lm_0_32.generate.BatchGenerator


def test_the_installed_version_is_the_one_this_was_written_for() -> None:
    assert mlx_lm.__version__ == mlx_lm_0_32.VERSION
    pinned = re.search(r"mlx-lm ==(\S+)", (Path(__file__).parents[2] / "setup.cfg").read_text())
    assert pinned and pinned[1] == mlx_lm_0_32.VERSION


def test_the_generator_takes_what_it_is_given() -> None:
    taken = inspect.signature(GENERATOR.__init__).parameters
    assert {"completion_batch_size", "prefill_batch_size", "prefill_step_size"} <= set(taken)
    taken = inspect.signature(GENERATOR.insert).parameters
    assert {"prompts", "max_tokens", "samplers", "logits_processors", "stop_sequences"} <= set(taken)
    assert list(inspect.signature(GENERATOR.remove).parameters)[1] == "uids"
    assert isinstance(inspect.getattr_static(GENERATOR, "stream"), property)


def test_its_answers_have_the_fields_that_are_read() -> None:
    fields = mlx_lm_0_32.generate.PromptProcessingBatch.Response.__dataclass_fields__
    assert {"uid", "progress"} <= set(fields)
    fields = mlx_lm_0_32.generate.GenerationBatch.Response.__dataclass_fields__
    assert {"uid", "token", "logprobs", "finish_reason"} <= set(fields)


def test_closing_only_restores_the_wired_limit() -> None:
    source = inspect.getsource(GENERATOR.close)
    assert "set_wired_limit" in source and source.count("self.") == source.count("self._old_wired_limit") + 1


def test_loading_and_processors_have_the_arguments_that_are_used() -> None:
    assert {"lazy"} <= set(inspect.signature(mlx_lm.utils.load_model).parameters)
    assert list(inspect.signature(mlx_lm.utils.dequantize_model).parameters) == ["model"]
    taken = set(inspect.signature(make_logits_processors).parameters)
    assert {f"{kind}_context_size" for kind in ("repetition", "presence", "frequency")} <= taken


def test_making_a_batch_leaves_the_wired_limit_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without one the calls are recorded in its place."""
    import mlx.core as mx

    limits = [100]

    def set_wired_limit(value: int) -> int:
        limits.append(value)
        return limits[-2]

    monkeypatch.setattr(mx, "set_wired_limit", set_wired_limit)
    monkeypatch.setattr(mx, "device_info", lambda *_: {"max_recommended_working_set_size": 900})
    batch = mlx_lm_0_32.Batch(object(), 4, 32, 1, [2])  # type: ignore[arg-type]
    assert 900 in limits and limits[-1] == 100
    limits.append(555)
    del batch
    assert limits[-1] == 555
