"""What a model folder says about its model: config.json, generation_config.json and the headers of the weights.

Owns the reading of these files and the errors for damaged ones. Must never know mlx: the pool plans with these facts
before any worker exists, and a header is a few kilobytes of JSON in front of gigabytes that are not read.
Invariant: what is returned was found in the files; what had to be guessed sets `estimated`.
"""

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from worker import cache_layout
from worker.cache_layout import CacheLayout

# The format's own bound on its header (safetensors' MAX_HEADER_SIZE).
MAX_HEADER_BYTES = 100_000_000

# mlx-lm loads these and no other weights in the folder.
WEIGHTS = "model*.safetensors"

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip

CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx")
# A model that names no context at all; small, because a prompt past the real one gives nonsense without an error.
UNKNOWN_CONTEXT = 2048

# Parts of a checkpoint that mlx-lm leaves out of a text model: towers for pictures and sound, heads for several tokens at
# once, tables that are computed. Converted models have lost them already.
LEFT_OUT = (
    "vision_tower.", "vision_model.", "multi_modal_projector.", "visual.", "audio_tower.", "embed_audio.",
    "embed_vision.", "mtp.",
)  # fmt: skip
COMPUTED = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", "masked_bias", "attn.rope.freqs")

SAMPLING_DEFAULTS = {
    "temperature": (0.0, 2.0), "top_p": (0.0, 1.0), "top_k": (0, 1 << 30), "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-6, 1e6),
}  # fmt: skip


@dataclass(frozen=True)
class Tensor:
    """One entry of a safetensors header."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int

    @property
    def items(self) -> int:
        """Stored values; a packed one counts once."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class ModelFacts:
    """A model before it is loaded.

    stored_bytes: the weights as they lie in the files, without those that mlx-lm leaves there. float32_bytes: all of them
    dequantized to float32. cache: what rows keep. value_bytes: width of the model's own activations. width, inner,
    vocabulary: of its widest layers, 0 where not said. quantization: "" or like "4-bit". estimated: a number here is a
    guess, see read().
    """

    kind: str
    parameters: int
    stored_bytes: int
    float32_bytes: int
    quantization: str
    context: int
    layers: int
    kv_heads: int
    head_size: int
    cache: CacheLayout
    value_bytes: int
    eos_ids: tuple[int, ...]
    defaults: dict[str, float | int]
    estimated: bool
    width: int = 0
    inner: int = 0
    vocabulary: int = 0


def read(folder: Path) -> ModelFacts:
    """Facts of the model in `folder`. Raises ConfigError for missing, damaged and contradictory files."""
    config = read_json(folder / "config.json")
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else {}
    # Values of a nested text model win: the outer level may describe the vision tower.
    flat = {**config, **{key: value for key, value in text.items() if value is not None}}
    generation = read_json(folder / "generation_config.json", optional=True)
    tokenizer = read_json(folder / "tokenizer_config.json", optional=True)
    quantization = _quantization(flat)
    tensors, sure = _held(read_tensors(folder), flat, quantization)
    parameters, float32_bytes = _counted(tensors, quantization)
    context, context_known = _context(flat, tokenizer)
    cache = cache_layout.read(str(config.get("model_type", "")), str(text.get("model_type", "")), flat)
    kv_heads, head_size = cache_layout.heads_of(flat)
    return ModelFacts(
        kind=str(config.get("model_type", "")),
        parameters=parameters,
        stored_bytes=sum(tensor.bytes for tensor in tensors.values()),
        float32_bytes=float32_bytes,
        quantization=f"{quantization['bits']}-bit" if quantization.get("bits") else "",
        context=context,
        layers=cache_layout.layers_of(flat),
        kv_heads=kv_heads,
        head_size=head_size,
        cache=cache,
        value_bytes=4 if (flat.get("torch_dtype") or flat.get("dtype")) == "float32" else 2,
        eos_ids=_eos_ids(folder, (generation, config, text), tokenizer),
        defaults=_defaults(generation),
        estimated=not (context_known and cache.known and sure),
        width=_size(flat, "hidden_size", "n_embd", "d_model"),
        inner=max(
            _size(flat, "intermediate_size", "ffn_hidden_size"),
            _size(flat, "moe_intermediate_size") * max(1, _size(flat, "num_experts_per_tok")),
        ),
        vocabulary=_size(flat, "vocab_size"),
    )


def read_json(path: Path, optional: bool = False) -> dict[str, Any]:
    """The JSON object in `path`; {} for a missing optional one. Raises ConfigError."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        if optional:
            return {}
        raise ConfigError(f"{path.parent} has no {path.name}, so it is not an MLX model folder") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged: not JSON ({error}); fetch the model again") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is damaged: not a JSON object; fetch the model again")
    return value


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the folder's weight files by name. Raises ConfigError."""
    files = sorted(folder.glob(WEIGHTS))
    if not files:
        raise ConfigError(f"{folder} has no {WEIGHTS} weights, so it is not an MLX model folder")
    index = read_json(folder / "model.safetensors.index.json", optional=True)
    shards = index.get("weight_map")
    named = set(shards.values()) if isinstance(shards, dict) else set()
    missing = sorted(named - {file.name for file in files})
    if missing:
        lacking = f"{len(missing)} of {len(named)} weight files, first {missing[0]}"
        raise ConfigError(f"{folder} lacks {lacking}; fetch the model again")
    return {name: tensor for file in files for name, tensor in read_header(file).items()}


def read_header(path: Path) -> dict[str, Tensor]:
    """The header of one safetensors file, checked against the file's length. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
            if length > min(size - 8, MAX_HEADER_BYTES):
                raise ConfigError(f"{path} is damaged: its header is cut short; fetch the model again")
            header = json.loads(file.read(length))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{path} is damaged: its header is not JSON; fetch the model again") from None
    if not isinstance(header, dict):
        raise ConfigError(f"{path} is damaged: its header is not an object; fetch the model again")
    header.pop("__metadata__", None)
    return {name: _tensor(path, name, entry, size - 8 - length) for name, entry in header.items()}


def _tensor(path: Path, name: str, entry: Any, room: int) -> Tensor:
    try:
        shape = tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        tensor = Tensor(entry["dtype"], shape, end - begin)
        whole = all(isinstance(number, int) and number >= 0 for number in (*shape, begin, end))
        width = ITEM_BYTES.get(tensor.dtype)
    except (TypeError, KeyError, ValueError):
        raise ConfigError(f"{path} is damaged: tensor {name!r} is no tensor's entry; fetch the model again") from None
    if not whole or (width is not None and tensor.items * width != tensor.bytes):
        raise ConfigError(f"{path} is damaged: tensor {name!r} has not the size of its shape; fetch the model again")
    if end > room:
        raise ConfigError(f"{path} is damaged: {end - room} bytes are missing at its end; fetch the model again")
    return tensor


def _quantization(config: dict[str, Any]) -> dict[str, Any]:
    found = config.get("quantization") or config.get("quantization_config")
    return found if isinstance(found, dict) else {}


def _counted(tensors: dict[str, Tensor], quantization: dict[str, Any]) -> tuple[int, int]:
    """(parameters, bytes as float32). Packed weights unfold to their scales' columns x group size; the scales
    vanish."""
    total = 0
    for name, tensor in tensors.items():
        layer, _, part = name.rpartition(".")
        if part in ("scales", "biases") and f"{layer}.scales" in tensors and f"{layer}.weight" in tensors:
            continue
        scales = tensors.get(f"{layer}.scales") if part == "weight" else None
        if scales is None:
            total += tensor.items
            continue
        own = quantization.get(layer)
        group = (own.get("group_size") if isinstance(own, dict) else None) or quantization.get("group_size") or 64
        total += scales.items * int(group)
    return total, total * 4


def _held(
    tensors: dict[str, Tensor], config: dict[str, Any], quantization: dict[str, Any]
) -> tuple[dict[str, Tensor], bool]:
    """(the tensors that mlx-lm holds of those in the files; whether that is sure)."""
    left_out = LEFT_OUT + (("lm_head.",) if config.get("tie_word_embeddings") else ())
    layers = cache_layout.layers_of(config)
    # Somebody else's packing: mlx-lm repacks it.
    held, sure = {}, not quantization.get("quant_method") or "group_size" in quantization
    for name, tensor in tensors.items():
        short = name.removeprefix("model.").removeprefix("language_model.")
        if short.startswith(left_out) or name.endswith(COMPUTED) or name.endswith("weight_scale_inv"):
            continue
        parts = short.removeprefix("model.").split(".")
        if parts[0] == "layers" and len(parts) > 1 and parts[1].isdigit() and 0 < layers <= int(parts[1]):
            continue  # predicts several tokens at once
        if tensor.dtype.startswith("F8_E4M3"):
            # Unpacked to bfloat16 with the scales left out above.
            tensor, sure = Tensor("BF16", tensor.shape, 2 * tensor.bytes), False
        held[name] = tensor
    return held, sure


def _size(config: dict[str, Any], *names: str) -> int:
    return next((config[name] for name in names if type(config.get(name)) is int and config[name] > 0), 0)


def _context(config: dict[str, Any], tokenizer: dict[str, Any]) -> tuple[int, bool]:
    """(tokens, known)."""
    for key in CONTEXT_KEYS:
        if isinstance(config.get(key), int) and config[key] > 0:
            return config[key], True
    # Transformers writes 1e30 for "no limit".
    limit = tokenizer.get("model_max_length")
    if isinstance(limit, int) and 0 < limit < 1 << 30:
        return limit, True
    return UNKNOWN_CONTEXT, False


def _eos_ids(folder: Path, configs: tuple[dict[str, Any], ...], tokenizer: dict[str, Any]) -> tuple[int, ...]:
    """Every id that any file calls the end of a sequence: chat models often name one in each."""
    found: set[int] = set()
    for config in configs:
        value = config.get("eos_token_id")
        found |= {item for item in (value if isinstance(value, list) else [value]) if type(item) is int and item >= 0}
    word = tokenizer.get("eos_token")
    word = word.get("content") if isinstance(word, dict) else word
    if isinstance(word, str) and word:
        added = read_json(folder / "tokenizer.json", optional=True).get("added_tokens") or []
        found |= {entry["id"] for entry in added if isinstance(entry, dict) and entry.get("content") == word}
    return tuple(sorted(found))


def _defaults(generation: dict[str, Any]) -> dict[str, float | int]:
    """Sampling settings that the model's makers chose; values that make no sense are as if they were not there."""
    if generation.get("do_sample") is False:
        return {"temperature": 0.0}
    found: dict[str, float | int] = {}
    for name, (low, high) in SAMPLING_DEFAULTS.items():
        value = generation.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high:
            found[name] = value
    return found
