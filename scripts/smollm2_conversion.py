"""From SmolLM2's GGUF file to the folder that mlx-lm loads.

Owns the mapping of tensor names, row orders and metadata between the two. Must never know where the file came from or
who loads the folder, and imports mlx inside convert() only, so that importing this module does not load it.
Invariant: nothing is rounded; every tensor holds exactly the values that the GGUF file's does.
"""

import json
import sys
from pathlib import Path
from typing import Any

# llama.cpp's names of a layer's tensors, and of the others, as Hugging Face's llama calls them.
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHER_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}

CONTROL_TOKEN = 3  # gguf's TokenType.CONTROL


def convert(gguf: Path, folder: Path) -> None:
    """Write the MLX model folder of a SmolLM2 GGUF file; nothing is rounded on the way."""
    import mlx.core as mx

    # Rearranging rows is no work for a device, which a process that only converts should not open.
    with mx.stream(mx.cpu):
        tensors, metadata = mx.load(str(gguf), return_metadata=True)
        facts = {key: _plain(value) for key, value in metadata.items()}
        heads = {"attn_q": facts["llama.attention.head_count"], "attn_k": facts["llama.attention.head_count_kv"]}
        weights = {}
        for name, tensor in tensors.items():
            *_, kind, part = name.split(".")
            if kind in heads:
                tensor = _deinterleave(tensor, heads[kind])
            # The norms stay float32, and with them activations and KV cache. They would fit float16, but on a CPU
            # MLX's quantized product takes 20 times longer with float16 activations (219 s for 37 tokens of prompt).
            weights[f"{_mlx_name(name)}.{part}"] = tensor
        folder.mkdir(parents=True, exist_ok=True)
        mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    _write_json(folder / "config.json", _config(facts))
    _write_json(folder / "generation_config.json", _generation_config(facts))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(facts))
    _save_tokenizer(folder / "tokenizer.json", facts)


def _plain(value: Any) -> Any:
    """A metadata value without its mlx array."""
    return value.tolist() if hasattr(value, "tolist") else value


def _mlx_name(name: str) -> str:
    match name.split("."):
        case ["blk", layer, kind, _]:
            return f"model.layers.{layer}.{LAYER_TENSORS[kind]}"
        case [kind, _] if kind in OTHER_TENSORS:
            return OTHER_TENSORS[kind]
    raise ValueError(f"unexpected tensor {name}")


def _deinterleave(rows: Any, heads: int) -> Any:
    """llama.cpp rotates neighbouring rows of q and k, Hugging Face's llama a head's two halves: undo its reordering.

    Quantization groups lie along a row, so packed weights, scales and biases move alike.
    """
    count, width = rows.shape
    return rows.reshape(heads, count // heads // 2, 2, width).swapaxes(1, 2).reshape(count, width)


def _config(facts: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": facts["llama.embedding_length"],
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_hidden_layers": facts["llama.block_count"],
        "num_attention_heads": facts["llama.attention.head_count"],
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "head_dim": facts["llama.rope.dimension_count"],
        "max_position_embeddings": facts["llama.context_length"],
        "rms_norm_eps": round(facts["llama.attention.layer_norm_rms_epsilon"], 9),
        "rope_theta": facts["llama.rope.freq_base"],
        "vocab_size": facts["llama.vocab_size"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "pad_token_id": facts["tokenizer.ggml.padding_token_id"],
        "quantization": {
            # Q4_1, and Q8_0 for the embedding.
            "group_size": 32,
            "bits": 4,
            "model.embed_tokens": {"group_size": 32, "bits": 8},
        },
    }


def _generation_config(facts: dict[str, Any]) -> dict[str, Any]:
    return {
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "pad_token_id": facts["tokenizer.ggml.padding_token_id"],
        # The model's authors sample with these; the package says nothing of it.
        "do_sample": True,
        "temperature": 0.2,
        "top_p": 0.9,
    }


def _tokenizer_config(facts: dict[str, Any]) -> dict[str, Any]:
    tokens = facts["tokenizer.ggml.tokens"]
    return {
        # The class that takes tokenizer.json as it is; GPT2Tokenizer builds a pipeline of its own.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[facts["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[facts["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[facts["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[facts["tokenizer.ggml.unknown_token_id"]],
        "add_bos_token": facts["tokenizer.ggml.add_bos_token"],
        "add_prefix_space": facts["tokenizer.ggml.add_space_prefix"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": facts["llama.context_length"],
        "chat_template": facts["tokenizer.chat_template"],
    }


def _save_tokenizer(path: Path, facts: dict[str, Any]) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    # No unknown token: 21 bytes that hardly occur in text are not in the vocabulary, and dropping them is better than
    # putting <|endoftext|>, which ends a document, into somebody's sentence.
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = facts["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == CONTROL_TOKEN
        ]
    )
    tokenizer.save(str(path))


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
