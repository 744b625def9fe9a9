"""How large a row's cache is, by architecture (pure): what each layer keeps, as mlx-lm's model code allocates it.

Owns the table of architectures. Must never know files, weights or budgets: a config comes in as a mapping. Invariant: a
layout with `known` equals what mlx-lm allocates (tests/worker/test_cache_layout.py compares every entry of the table);
any other is the plain formula, an upper bound for most, which the worker corrects by what it measures after loading.

mlx-lm does not always do what a config suggests: gemma2 and mistral ignore their sliding windows, deepseek_v2 and minicpm3
keep every head's keys and values where deepseek_v3 keeps the latent ones. The table says what it does.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Config = Mapping[str, Any]

FLOAT32_BYTES = 4


@dataclass(frozen=True)
class CacheBytes:
    """Bytes that a worker's rows keep. token: of each token. windows: (tokens, bytes of each) of layers that keep only
    the last so many tokens. row: of a row, however long it is."""

    token: int
    windows: tuple[tuple[int, int], ...] = ()
    row: int = 0

    @property
    def longest_token(self) -> int:
        """What a token of a short row takes, while all windows still grow."""
        return self.token + sum(size for _, size in self.windows)

    def total(self, tokens: int, rows: int) -> int:
        """What `rows` rows of `tokens` tokens together take at most, however these are spread."""
        windows = sum(size * min(tokens, rows * window) for window, size in self.windows)
        return self.token * tokens + windows + self.row * rows


@dataclass(frozen=True)
class CacheLayout:
    """The same in numbers and not yet bytes. Windows with the same length are one entry. row_float32: those of a row
    that are float32 whatever the weights are. known: it is one of the table's, and its config says all that it needs."""

    token: int
    windows: tuple[tuple[int, int], ...] = ()
    row: int = 0
    row_float32: int = 0
    known: bool = True

    def in_bytes(self, width: int) -> CacheBytes:
        """width: bytes of one number of the model's activations."""
        windows = tuple((length, values * width) for length, values in self.windows)
        return CacheBytes(self.token * width, windows, self.row * width + self.row_float32 * FLOAT32_BYTES)


class _Unsaid(Exception):
    """The config lacks a number, or has something else in its place."""


# --- Reading a config -------------------------------------------------------------------------------------------------


def _number(config: Config, *names: str, default: int | None = None) -> int:
    for name in names:
        value = config.get(name)
        if type(value) is int and value > 0:
            return value
    if default is None:
        raise _Unsaid(names[0])
    return default


def _strings(config: Config, *names: str) -> list[str] | None:
    for name in names:
        value = config.get(name)
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return value
    return None


def layers_of(config: Config) -> int:
    """How many layers; 0: not said."""
    return _number(config, "num_hidden_layers", "n_layer", "n_layers", "num_layers", default=0)


def heads_of(config: Config) -> tuple[int, int]:
    """(KV heads, size of a head); 0 for what is not said."""
    heads = _number(config, "num_attention_heads", "n_head", "n_heads", default=0)
    width = _number(config, "hidden_size", "n_embd", "d_model", default=0)
    return (
        _number(config, "num_key_value_heads", default=heads),
        _number(config, "head_dim", default=width // heads if heads else 0),
    )


def _attention(config: Config) -> int:
    """Values that one layer of grouped-query attention keeps of each token."""
    heads, size = heads_of(config)
    if not heads or not size:
        raise _Unsaid("num_attention_heads")
    return 2 * heads * size


def _layers(config: Config) -> int:
    layers = layers_of(config)
    if not layers:
        raise _Unsaid("num_hidden_layers")
    return layers


# --- Families ---------------------------------------------------------------------------------------------------------


def _plain(config: Config) -> CacheLayout:
    return CacheLayout(_layers(config) * _attention(config))


def _one_head(config: Config) -> CacheLayout:
    """gpt_bigcode: one KV head for all, unless it says otherwise."""
    if config.get("multi_query", True) is False:
        return _plain(config)
    return _plain({**config, "num_key_value_heads": 1})


def _latent(config: Config) -> CacheLayout:
    """Multi-head latent attention that keeps the latent and the rotary part."""
    return CacheLayout(_layers(config) * (_number(config, "kv_lora_rank") + _number(config, "qk_rope_head_dim")))


def _latent_twice(config: Config) -> CacheLayout:
    return CacheLayout(2 * _latent(config).token)


def _latent_indexed(config: Config) -> CacheLayout:
    """The same with an indexer, whose keys mlx-lm keeps as keys and as values."""
    return CacheLayout(_latent(config).token + _layers(config) * 2 * _number(config, "index_head_dim"))


def _unfolded(config: Config) -> CacheLayout:
    """Latent attention of which mlx-lm keeps every head's own keys and values."""
    key = _number(config, "qk_nope_head_dim") + _number(config, "qk_rope_head_dim")
    if config.get("model_type") == "minicpm3":
        value = _number(config, "hidden_size") // _number(config, "num_attention_heads")
    else:
        value = _number(config, "v_head_dim")
    return CacheLayout(_layers(config) * _number(config, "num_attention_heads") * (key + value))


def _windowed(config: Config, sliding: list[bool], window: int) -> CacheLayout:
    one, count = _attention(config), sum(sliding)
    windows = ((window, count * one),) if count else ()
    return CacheLayout((len(sliding) - count) * one, windows)


def _by_kinds(config: Config) -> CacheLayout:
    """Layers that a list calls sliding_attention; without one all are full (llama and its like)."""
    kinds = _strings(config, "layer_types")
    if kinds is None or "sliding_attention" not in kinds:
        return _plain(config)
    return _windowed(config, [kind == "sliding_attention" for kind in kinds], _number(config, "sliding_window"))


def _every_fourth_full(config: Config) -> CacheLayout:
    kinds = _strings(config, "layer_types") or [
        "full_attention" if (layer + 1) % 4 == 0 else "sliding_attention" for layer in range(_layers(config))
    ]
    return _by_kinds({**config, "layer_types": kinds})


def _gpt_oss(config: Config) -> CacheLayout:
    kinds = _strings(config, "layer_types") or ["sliding_attention", "full_attention"] * (_layers(config) // 2)
    window = _number(config, "sliding_window", default=128)
    return _by_kinds({**config, "layer_types": kinds, "sliding_window": window})


def _patterned(**defaults: int) -> Callable[[Config], CacheLayout]:
    """Every so manieth layer is full. defaults: what mlx-lm takes where a config says nothing."""

    def layout(config: Config) -> CacheLayout:
        config = {**defaults, **config}
        every = _number(config, "sliding_window_pattern")
        sliding = [layer % every != every - 1 for layer in range(_layers(config))]
        return _windowed(config, sliding, _number(config, "sliding_window"))

    return layout


def _lettered(config: Config) -> CacheLayout:
    """exaone4: a pattern of letters, L for sliding layers."""
    pattern = config.get("sliding_window_pattern")
    if not pattern:
        return _plain(config)
    if not isinstance(pattern, str):
        raise _Unsaid("sliding_window_pattern")
    sliding = [pattern[layer % len(pattern)] == "L" for layer in range(_layers(config))]
    return _windowed(config, sliding, _number(config, "sliding_window"))


def _gemma3n(config: Config) -> CacheLayout:
    """The last layers use the caches of earlier ones."""
    kinds = _strings(config, "layer_types")
    if kinds is None:
        raise _Unsaid("layer_types")
    own = kinds[: _layers(config) - _number(config, "num_kv_shared_layers", default=0)]
    return _by_kinds({**config, "layer_types": own, "num_hidden_layers": len(own)})


# States ---------------------------------------------------------------------------------------------------------------


def _mamba2_row(channels: int, state: int, groups: int, kernel: int, heads: int, size: int) -> tuple[int, int]:
    """(values of the convolution, values of the state) that one layer keeps of a row."""
    return (kernel - 1) * (channels + 2 * groups * state), heads * size * state


def _mamba(config: Config) -> CacheLayout:
    inner = _number(config, "intermediate_size", "d_inner")
    state = _number(config, "state_size", "d_state")
    row = inner * (_number(config, "conv_kernel", "d_conv") - 1) + inner * state
    return CacheLayout(0, row=_layers(config) * row)


def _mamba2(config: Config) -> CacheLayout:
    heads, size = _number(config, "num_heads"), _number(config, "head_dim")
    state = _number(config, "ssm_state_size", "state_size")
    conv, ssm = _mamba2_row(
        heads * size, state, _number(config, "n_groups"), _number(config, "conv_kernel"), heads, size
    )
    return CacheLayout(0, row=_layers(config) * conv, row_float32=_layers(config) * ssm)


def _falcon_h1(config: Config) -> CacheLayout:
    """Both in every layer."""
    heads, size = _number(config, "mamba_n_heads"), _number(config, "mamba_d_head")
    conv, ssm = _mamba2_row(
        _number(config, "mamba_d_ssm", default=heads * size), _number(config, "mamba_d_state"),
        _number(config, "mamba_n_groups"), _number(config, "mamba_d_conv"), heads, size,
    )  # fmt: skip
    layers = _layers(config)
    return CacheLayout(layers * _attention({"head_dim": 64, **config}), row=layers * conv, row_float32=layers * ssm)


def _granite_hybrid(config: Config) -> CacheLayout:
    kinds = _strings(config, "layer_types") or []
    attention, mamba = kinds.count("attention"), kinds.count("mamba")
    if not attention + mamba:
        raise _Unsaid("layer_types")
    conv = ssm = 0
    if mamba:
        heads, size = _number(config, "mamba_n_heads"), _number(config, "mamba_d_head")
        conv, ssm = _mamba2_row(
            heads * size, _number(config, "mamba_d_state"), _number(config, "mamba_n_groups"),
            _number(config, "mamba_d_conv"), heads, size,
        )  # fmt: skip
    return CacheLayout(attention * _attention(config), row=mamba * conv, row_float32=mamba * ssm)


def _nemotron_h(config: Config) -> CacheLayout:
    letters = config.get("hybrid_override_pattern")
    if not letters:
        kinds = _strings(config, "layers_block_type", "layer_types") or []
        names = {"attention": "*", "full_attention": "*", "mamba": "M", "linear_attention": "M", "conv": "M"}
        letters = [names.get(kind, "-") for kind in kinds]
    attention, mamba = letters.count("*"), letters.count("M")
    if not attention + mamba:
        raise _Unsaid("hybrid_override_pattern")
    heads, size = _number(config, "mamba_num_heads"), _number(config, "mamba_head_dim")
    conv, ssm = _mamba2_row(
        heads * size, _number(config, "ssm_state_size"), _number(config, "n_groups"),
        _number(config, "conv_kernel"), heads, size,
    )  # fmt: skip
    return CacheLayout(attention * _attention(config), row=mamba * conv, row_float32=mamba * ssm)


def _jamba(config: Config) -> CacheLayout:
    kinds = _strings(config, "layers_block_type")
    if kinds is None:
        period, offset = _number(config, "attn_layer_period"), config.get("attn_layer_offset", 0)
        kinds = ["attention" if layer % period == offset else "mamba" for layer in range(_layers(config))]
    attention = kinds.count("attention")
    inner = _number(config, "mamba_expand") * _number(config, "hidden_size")
    row = inner * (_number(config, "mamba_d_conv") - 1 + _number(config, "mamba_d_state"))
    return CacheLayout(attention * _attention(config), row=(len(kinds) - attention) * row)


def _gated_delta(config: Config) -> CacheLayout:
    """qwen3_next, qwen3_5: every so manieth layer is attention, the others keep a state in float32."""
    every = _number(config, "full_attention_interval", default=4)
    layers = _layers(config)
    full = layers // every
    key_heads, key = _number(config, "linear_num_key_heads"), _number(config, "linear_key_head_dim")
    value_heads, value = _number(config, "linear_num_value_heads"), _number(config, "linear_value_head_dim")
    conv = (_number(config, "linear_conv_kernel_dim") - 1) * (2 * key_heads * key + value_heads * value)
    linear = layers - full
    return CacheLayout(full * _attention(config), row=linear * conv, row_float32=linear * value_heads * key * value)


def _lfm2(config: Config) -> CacheLayout:
    indices, kinds = config.get("full_attn_idxs"), _strings(config, "layer_types")
    full = len(indices) if isinstance(indices, list) else kinds.count("full_attention") if kinds else 0
    if not full:
        raise _Unsaid("layer_types")
    row = (_number(config, "conv_L_cache") - 1) * _number(config, "hidden_size")
    return CacheLayout(full * _attention(config), row=(_layers(config) - full) * row)


_FAMILIES: dict[str, Callable[[Config], CacheLayout]] = {
    **dict.fromkeys(
        (
            "apertus", "cohere", "deepseek", "dots1", "ernie4_5", "exaone", "gemma", "gemma2", "glm", "glm4",
            "glm4_moe", "gpt2", "gpt_neox", "granite", "granitemoe", "helium", "hunyuan_v1_dense", "internlm2",
            "internlm3", "mimo", "minicpm", "mixtral", "nemotron", "olmo2", "olmoe", "phi", "phi3", "phimoe",
            "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2",
        ),
        _plain,
    ),
    "gpt_bigcode": _one_head,
    **dict.fromkeys(("llama", "mistral", "ministral3", "xverse", "iquestcoder", "afmoe", "mellum", "exaone_moe"), _by_kinds),
    **dict.fromkeys(("deepseek_v3", "kimi_k2", "joyai_llm_flash", "glm4_moe_lite"), _latent),
    **dict.fromkeys(("deepseek_v2", "minicpm3"), _unfolded),
    "deepseek_v32": _latent_indexed,
    "longcat_flash": _latent_twice,
    "gemma3_text": _patterned(
        sliding_window_pattern=6, sliding_window=512, head_dim=256, num_attention_heads=4, num_key_value_heads=1
    ),
    "gemma3": _patterned(
        sliding_window_pattern=6, sliding_window=512, head_dim=256, num_attention_heads=8, num_key_value_heads=4
    ),
    "cohere2": _patterned(sliding_window_pattern=4, sliding_window=4096, head_dim=128),
    "gpt_oss": _gpt_oss,
    "olmo3": _every_fourth_full,
    "exaone4": _lettered,
    "gemma3n": _gemma3n,
    "mamba": _mamba,
    "falcon_mamba": _mamba,
    "mamba2": _mamba2,
    "falcon_h1": _falcon_h1,
    "granitemoehybrid": _granite_hybrid,
    "nemotron_h": _nemotron_h,
    "jamba": _jamba,
    "qwen3_next": _gated_delta,
    "qwen3_5": _gated_delta,
    "qwen3_5_moe": _gated_delta,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2,
}  # fmt: skip

# Shells around a text model of another kind, which they name.
_SHELLS = frozenset({"mistral3", "llava", "pixtral", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "kimi_vl"})


def kinds() -> frozenset[str]:
    """The architectures of the table."""
    return frozenset(_FAMILIES)


def read(kind: str, text_kind: str, config: Config) -> CacheLayout:
    """kind: the config's model_type; text_kind: that of its text model, if it has one; config: both in one mapping."""
    name = text_kind.removesuffix("_text") if kind in _SHELLS else kind
    family = _FAMILIES.get(name)
    try:
        if family is not None:
            return family({**config, "model_type": name})
    except _Unsaid:
        pass
    heads, size = heads_of(config)
    return CacheLayout(layers_of(config) * 2 * heads * size, known=False)
