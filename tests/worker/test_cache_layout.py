"""The table of caches against what mlx-lm's own model code allocates."""

import dataclasses

import pytest

from tests.worker import architectures
from worker import cache_layout
from worker.cache_layout import CacheBytes, CacheLayout
from worker.engines.measure import measured


@pytest.mark.parametrize("kind", sorted(cache_layout.kinds()))
def test_a_layout_is_what_mlx_lm_allocates(kind: str) -> None:
    config = architectures.config(kind)
    text = config.get("text_config", {})
    layout = cache_layout.read(kind, text.get("model_type", ""), {**config, **text})
    # Shapes of two short runs, of which nothing is computed.
    found, vocabulary = measured(architectures.model(config))
    assert layout.known and layout.in_bytes(2) == found
    assert vocabulary == 128


@pytest.mark.parametrize("key", ["kv_lora_rank", "qk_rope_head_dim", "num_hidden_layers"])
def test_a_config_that_does_not_say_is_not_known(key: str) -> None:
    config = architectures.config("deepseek_v3")
    assert not cache_layout.read("deepseek_v3", "", {**config, key: None}).known
    assert not cache_layout.read("deepseek_v3", "", {**config, key: "7"}).known


def test_an_unknown_architecture_is_taken_as_plain_attention() -> None:
    config = architectures.config("qwen3")
    assert cache_layout.read("of next year", "", config) == CacheLayout(4 * 2 * 2 * 16, known=False)
    assert cache_layout.read("of next year", "", {}) == CacheLayout(0, known=False)


def test_a_shell_has_the_caches_of_its_text_model() -> None:
    text = architectures.config("ministral3")
    assert cache_layout.read("mistral3", "ministral3", text) == cache_layout.read("ministral3", "", text)
    assert cache_layout.read("qwen3_vl", "qwen3_text", architectures.config("qwen3")).known


def test_bytes_of_rows_however_they_are_spread() -> None:
    kv = CacheBytes(10, ((100, 3), (1000, 1)), 500)
    assert kv.longest_token == 14
    for rows in (1, 2, 7):
        for longest in (1, 50, 100, 101, 5000):
            one = 10 * longest + 3 * min(longest, 100) + min(longest, 1000) + 500
            assert rows * one == kv.total(rows * longest, rows)
    # Longer and shorter ones together: never more.
    assert kv.total(10_000, 2) >= kv.total(9_950, 1) + kv.total(50, 1)


def test_widths() -> None:
    layout = CacheLayout(5, ((8, 2),), 3, 7)
    assert layout.in_bytes(2) == CacheBytes(10, ((8, 4),), 6 + 28)
    assert dataclasses.replace(layout, known=False).in_bytes(4) == CacheBytes(20, ((8, 8),), 12 + 28)
