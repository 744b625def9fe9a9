"""What is read from model folders, and what is said about damaged ones."""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from worker import model_files
from worker.cache_layout import CacheLayout

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
}


def write_header(path: Path, entries: dict[str, Any], payload: int) -> None:
    text = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(payload))


def folder(tmp_path: Path, config: dict[str, Any], tensors: dict[str, tuple[str, list[int]]], **files: Any) -> Path:
    """A model folder of these tensors (dtype, shape), laid out one after the other."""
    entries: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    at = 0
    for name, (dtype, shape) in tensors.items():
        size = model_files.ITEM_BYTES[dtype]
        for length in shape:
            size *= length
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    write_header(tmp_path / "model.safetensors", entries, at)
    for name, content in {"config": config, **files}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return tmp_path


PLAIN = {"embed.weight": ("BF16", [100, 64]), "norm.weight": ("F32", [64])}


def test_a_plain_model(tmp_path: Path) -> None:
    facts = model_files.read(
        folder(
            tmp_path,
            LLAMA,
            PLAIN,
            generation_config={"eos_token_id": [2, 5], "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 7},
        )
    )
    assert (facts.parameters, facts.stored_bytes, facts.float32_bytes) == (6464, 12800 + 256, 6464 * 4)
    assert (facts.layers, facts.kv_heads, facts.head_size, facts.cache) == (2, 2, 16, CacheLayout(128))
    assert (facts.kind, facts.context, facts.value_bytes) == ("llama", 512, 2)
    assert facts.quantization == "" and not facts.estimated
    assert facts.eos_ids == (2, 5)
    assert facts.defaults == {"temperature": 0.6, "top_p": 0.9, "top_k": 20}


def test_packed_weights_unfold(tmp_path: Path) -> None:
    config = LLAMA | {"quantization": {"group_size": 32, "bits": 4, "embed": {"group_size": 64, "bits": 8}}}
    tensors = {
        "up.weight": ("U32", [10, 8]), "up.scales": ("F16", [10, 2]), "up.biases": ("F16", [10, 2]),
        "up.bias": ("F16", [10]),
        "embed.weight": ("U32", [7, 16]), "embed.scales": ("F16", [7, 1]), "embed.biases": ("F16", [7, 1]),
    }  # fmt: skip
    facts = model_files.read(folder(tmp_path, config, tensors))
    assert facts.parameters == 10 * 64 + 10 + 7 * 64
    assert facts.quantization == "4-bit"


def test_what_mlx_lm_leaves_in_the_files_is_not_counted(tmp_path: Path) -> None:
    more = {
        "model.layers.1.self_attn.rotary_emb.inv_freq": ("F32", [8]),
        "model.layers.2.mlp.weight": ("BF16", [64, 64]),  # the config says two layers
        "vision_tower.patch.weight": ("BF16", [9, 9]),
        "lm_head.weight": ("BF16", [100, 64]),
    }
    tied = model_files.read(folder(tmp_path, LLAMA | {"tie_word_embeddings": True}, PLAIN | more))
    assert (tied.stored_bytes, tied.parameters, tied.estimated) == (12800 + 256, 6464, False)
    loose = model_files.read(folder(tmp_path, LLAMA | {"tie_word_embeddings": False}, PLAIN | more))
    assert loose.stored_bytes == tied.stored_bytes + 12800


def test_eight_bit_floats_are_unpacked_at_load(tmp_path: Path) -> None:
    tensors = {"up.weight": ("F8_E4M3", [8, 8]), "up.weight_scale_inv": ("F32", [1, 1])}
    facts = model_files.read(folder(tmp_path, LLAMA, tensors))
    assert (facts.stored_bytes, facts.float32_bytes, facts.estimated) == (128, 256, True)


@pytest.mark.demo
def test_the_demo_model(demo_model: Path) -> None:
    facts = model_files.read(demo_model)
    assert facts.parameters == 134_515_008
    assert facts.cache.in_bytes(4).total(1, 1) == 46_080
    assert (facts.context, facts.eos_ids, facts.defaults) == (8192, (2,), {"temperature": 0.2, "top_p": 0.9})
    assert not facts.estimated


def test_a_nested_text_model_wins(tmp_path: Path) -> None:
    config = {"model_type": "vlm", "hidden_size": 9999, "text_config": LLAMA | {"eos_token_id": 9}}
    facts = model_files.read(folder(tmp_path, config, PLAIN))
    assert (facts.kind, facts.head_size, facts.context, facts.eos_ids) == ("vlm", 16, 512, (9,))


def test_every_named_end_counts_and_a_word_is_looked_up(tmp_path: Path) -> None:
    path = folder(
        tmp_path,
        LLAMA | {"eos_token_id": 1},
        PLAIN,
        generation_config={"eos_token_id": [2, True]},
        tokenizer_config={"eos_token": {"content": "<end>"}},
        tokenizer={"added_tokens": [{"id": 7, "content": "<end>"}, {"id": 8, "content": "<x>"}]},
    )
    assert model_files.read(path).eos_ids == (1, 2, 7)


@pytest.mark.parametrize(
    ("change", "context", "estimated"),
    [
        ({"max_position_embeddings": None, "n_ctx": 77}, 77, False),
        ({"max_position_embeddings": None}, model_files.UNKNOWN_CONTEXT, True),
        ({"model_type": "of next year"}, 512, True),
        # mlx-lm's llama knows no window but the one that layer_types names.
        ({"sliding_window": 64}, 512, False),
        ({"sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"]}, 512, False),
        ({"layer_types": ["full_attention", "sliding_attention"]}, 512, True),
        ({"num_hidden_layers": None}, 512, True),
        ({"model_type": "deepseek_v3"}, 512, True),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, 512, True),
    ],
)
def test_guesses_are_marked(tmp_path: Path, change: dict[str, Any], context: int, estimated: bool) -> None:
    facts = model_files.read(folder(tmp_path, LLAMA | change, PLAIN))
    assert (facts.context, facts.estimated) == (context, estimated)


def test_greedy_by_makers_choice(tmp_path: Path) -> None:
    path = folder(tmp_path, LLAMA, PLAIN, generation_config={"do_sample": False, "temperature": 0.6})
    assert model_files.read(path).defaults == {"temperature": 0.0}


# --- Damage -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    return folder(tmp_path, LLAMA, PLAIN)


def refused(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        model_files.read(path)
    text = str(caught.value)
    assert "\n" not in text and str(path) in text
    return text


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", b"", b"[" * 100_000])
def test_config_that_is_no_object(damaged: Path, content: bytes) -> None:
    (damaged / "config.json").write_bytes(content)
    assert "config.json is damaged" in refused(damaged)


def test_missing_files(damaged: Path) -> None:
    (damaged / "config.json").rename(damaged / "other.json")
    assert "no config.json" in refused(damaged)
    (damaged / "other.json").rename(damaged / "config.json")
    (damaged / "model.safetensors").unlink()
    assert "no model*.safetensors" in refused(damaged)


@pytest.mark.parametrize("length", [0, 5, 8, 30])
def test_a_header_that_is_cut_short(damaged: Path, length: int) -> None:
    path = damaged / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    assert "header is cut short" in refused(damaged)


def test_data_that_is_cut_short(damaged: Path) -> None:
    path = damaged / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    assert "10 bytes are missing" in refused(damaged)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]},
        {"dtype": "F32", "shape": [1]},
        {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]},
        {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]},
        "F32",
        None,
    ],
)
def test_entries_that_are_no_tensors(damaged: Path, entry: object) -> None:
    write_header(damaged / "model.safetensors", {"x": entry}, 100)
    assert "tensor 'x'" in refused(damaged)


@pytest.mark.parametrize("content", [b"not json", b"[1]", b"\xff\xff"])
def test_headers_that_are_no_object(damaged: Path, content: bytes) -> None:
    (damaged / "model.safetensors").write_bytes(struct.pack("<Q", len(content)) + content)
    assert "header is not" in refused(damaged)


def test_a_shard_that_the_index_names_and_nobody_has(damaged: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (damaged / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-2.safetensors" in refused(damaged)


def test_a_folder_in_place_of_a_file(damaged: Path) -> None:
    (damaged / "config.json").unlink()
    (damaged / "config.json").mkdir()
    assert "cannot read" in refused(damaged)


def test_the_tiny_model_is_read_as_it_was_made(tiny_model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_model, tmp_path / "copy")
    facts = model_files.read(copy)
    assert facts.stored_bytes == facts.float32_bytes and facts.value_bytes == 4
    assert facts.context == 4096 and len(facts.eos_ids) == 1
