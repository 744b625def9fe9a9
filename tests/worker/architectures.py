"""Tiny models of every architecture that the plan knows, and how to make one: a config, and mlx-lm's own model of it with
random weights."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

Config = dict[str, Any]

BASE: Config = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "torch_dtype": "bfloat16", "tie_word_embeddings": False, "rope_scaling": None,
    "head_dim": 16, "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
LATENT: Config = {
    "kv_lora_rank": 32, "q_lora_rank": 48, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 24,
    "moe_intermediate_size": 32, "n_routed_experts": None, "n_shared_experts": None, "first_k_dense_replace": 4,
}  # fmt: skip
EXPERTS: Config = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "norm_topk_prob": True, "shared_expert_intermediate_size": 32,
}  # fmt: skip
MIXED_KINDS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
MAMBA2: Config = {
    "num_heads": 4, "state_size": 16, "conv_kernel": 4, "n_groups": 2, "use_bias": False, "use_conv_bias": True,
    "time_step_limit": [0.0, 1e9], "time_step_rank": "auto", "layer_norm_epsilon": 1e-5,
}  # fmt: skip
MAMBA_D: Config = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_n_groups": 1,
    "mamba_d_ssm": 128, "mamba_conv_bias": True, "mamba_proj_bias": False, "mamba_expand": 2,
}  # fmt: skip
DELTA: Config = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4, "partial_rotary_factor": 0.5, "full_attention_interval": 2,
}  # fmt: skip

# What differs from BASE; a value of "" takes the key out.
ARCHITECTURES: dict[str, Config] = {
    "apertus": {"qk_norm": True, "post_norm": False, "rope_traditional": False},
    "cohere": {"layer_norm_eps": 1e-5, "logit_scale": 1.0, "use_qk_norm": False, "layer_norm_bias": False},
    "deepseek": {},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
              "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "n_group": 1,
              "topk_group": 1},
    "ernie4_5": {"use_bias": False},
    "exaone": {"layer_norm_epsilon": 1e-5, "num_layers": 4},
    "gemma": {},
    "gemma2": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 16,
               "sliding_window": 32},
    "glm": {"pad_token_id": 0, "partial_rotary_factor": 0.5},
    "glm4": {"partial_rotary_factor": 0.5},
    "glm4_moe": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                 "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "n_group": 1,
                 "topk_group": 1, "use_qk_norm": True, "partial_rotary_factor": 0.5},
    "gpt2": {"n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 512, "n_ctx": 512, "layer_norm_epsilon": 1e-5,
             "num_key_value_heads": "", "head_dim": "", "num_hidden_layers": "", "hidden_size": "",
             "num_attention_heads": ""},
    "gpt_bigcode": {"n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 512, "n_inner": 96, "head_dim": "",
                    "layer_norm_epsilon": 1e-5, "num_key_value_heads": "", "num_hidden_layers": "",
                    "hidden_size": "", "num_attention_heads": ""},
    "gpt_neox": {"layer_norm_eps": 1e-5, "rotary_emb_base": 10000, "rotary_pct": 0.25, "num_key_value_heads": "",
                 "head_dim": ""},
    "granite": {"logits_scaling": 1.0, "attention_multiplier": 1.0, "embedding_multiplier": 1.0,
                "residual_multiplier": 1.0},
    "granitemoe": {"logits_scaling": 1.0, "attention_multiplier": 1.0, "embedding_multiplier": 1.0,
                   "residual_multiplier": 1.0, "num_local_experts": 4, "num_experts_per_tok": 2},
    "helium": {},
    "hunyuan_v1_dense": {"use_qk_norm": True, "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"}},
    "internlm2": {},
    "internlm3": {},
    "mimo": {"num_nextn_predict_layers": 1},
    "minicpm": {"dim_model_base": 64, "scale_depth": 1.0, "scale_emb": 1.0},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": ""},
    "nemotron": {"hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    "olmo2": {},
    "olmoe": EXPERTS,
    "phi": {"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "head_dim": "", "num_key_value_heads": 4},
    "phi3": {"sliding_window": 32, "head_dim": ""},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "original_max_position_embeddings": 64,
               "rope_scaling": {"long_factor": [1.0] * 8, "short_factor": [1.0] * 8, "long_mscale": 1.0,
                                "short_mscale": 1.0, "type": "longrope"}},
    "qwen2": {"use_sliding_window": False, "sliding_window": 32},
    "qwen2_moe": EXPERTS | {"head_dim": ""},
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "seed_oss": {"attention_out_bias": False, "attention_dropout": 0.0, "residual_dropout": 0.0},
    "smollm3": {"no_rope_layer_interval": 4},
    "stablelm": {"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "use_qkv_bias": False, "head_dim": ""},
    "starcoder2": {"norm_epsilon": 1e-5, "head_dim": ""},
    # Sliding windows.
    "llama": {"layer_types": MIXED_KINDS, "sliding_window": 32},
    "mistral": {"sliding_window": 32},
    "xverse": {},
    "iquestcoder": {},
    "ministral3": {"layer_types": MIXED_KINDS, "sliding_window": 32,
                   "rope_parameters": {"rope_theta": 10000.0, "llama_4_scaling_beta": 0.1,
                                       "original_max_position_embeddings": 512}},
    "afmoe": {"layer_types": MIXED_KINDS, "sliding_window": 32, "num_experts": 4, "num_experts_per_tok": 2,
              "num_shared_experts": 1, "num_dense_layers": 1, "moe_intermediate_size": 32},
    "mellum": EXPERTS | {"layer_types": MIXED_KINDS, "sliding_window": 32,
               "rope_parameters": {kind: {"rope_theta": 10000.0, "rope_type": "default"} for kind in set(MIXED_KINDS)}},
    "exaone_moe": {"layer_types": MIXED_KINDS, "sliding_window": 32, "num_experts": 4, "num_experts_per_tok": 2,
                   "moe_intermediate_size": 32, "num_shared_experts": 1, "first_k_dense_replace": 1,
                   "norm_topk_prob": True, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
                   "is_moe_layer": [False, True, True, True]},
    "gemma3_text": {"sliding_window": 32, "sliding_window_pattern": 3, "head_dim": 32},
    "gemma3": {"text_config": BASE | {"model_type": "gemma3_text", "sliding_window": 32, "num_hidden_layers": 7,
                                      "sliding_window_pattern": ""}},
    "cohere2": {"sliding_window": 32, "sliding_window_pattern": 2, "layer_norm_eps": 1e-5, "logit_scale": 1.0,
                "layer_norm_bias": False},
    "gpt_oss": {"sliding_window": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    "olmo3": {"sliding_window": 32, "num_hidden_layers": 6},
    "exaone4": {"sliding_window": 32, "sliding_window_pattern": "LLG", "rope_scaling": {"rope_type": "default"}},
    "gemma3n": {"text_config": BASE | {
        "model_type": "gemma3n_text", "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 32, "num_kv_shared_layers": 2, "altup_num_inputs": 2, "laurel_rank": 8,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128, "intermediate_size": [96] * 4,
        "activation_sparsity_pattern": [0.0] * 4, "altup_coef_clip": 120.0, "altup_correct_scale": True,
        "altup_active_idx": 0, "final_logit_softcapping": 30.0, "rope_local_base_freq": 1e4, "query_rescale_scalar": 1.0,
        "rms_norm_eps": 1e-6}},
    # Latent attention.
    "deepseek_v2": LATENT | {"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                                              "original_max_position_embeddings": 512}},
    "minicpm3": LATENT | {"dim_model_base": 64, "scale_depth": 1.0, "scale_emb": 1.0,
                          "rope_scaling": {"long_factor": [1.0] * 4, "short_factor": [1.0] * 4, "type": "longrope",
                                           "original_max_position_embeddings": 64}},
    "deepseek_v3": LATENT,
    "kimi_k2": LATENT,
    "joyai_llm_flash": LATENT,
    "glm4_moe_lite": LATENT | {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "n_group": 1,
                               "topk_group": 1, "num_experts_per_tok": 2, "moe_layer_freq": 1,
                               "partial_rotary_factor": 1.0, "routed_scaling_factor": 1.0,
                               "n_routed_experts": 4, "n_shared_experts": 1},
    "deepseek_v32": LATENT | {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 8},
    "longcat_flash": LATENT | {
        "num_layers": 4, "attention_method": "MLA", "zero_expert_type": "identity", "ffn_hidden_size": 96, "moe_topk": 2,
        "expert_ffn_hidden_size": 32, "n_routed_experts": 4, "zero_expert_num": 1, "routed_scaling_factor": 1.0,
        "mla_scale_q_lora": True, "mla_scale_kv_lora": True},
    # States.
    "mamba": MAMBA2,
    "falcon_mamba": MAMBA2,
    "mamba2": MAMBA2 | {"head_dim": 32},
    "falcon_h1": MAMBA_D,
    "granitemoehybrid": MAMBA_D | {
        "layer_types": ["mamba", "mamba", "attention", "mamba"], "embedding_multiplier": 1.0, "logits_scaling": 1.0,
        "attention_multiplier": 1.0, "residual_multiplier": 1.0, "shared_intermediate_size": 96, "head_dim": ""},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "conv_kernel": 4, "n_groups": 2,
                   "layer_norm_epsilon": 1e-5, "use_bias": False, "use_conv_bias": True, "mamba_proj_bias": False,
                   "hybrid_override_pattern": "M-*M"},
    "jamba": MAMBA_D | {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "head_dim": "",
                        "expert_layer_offset": 1, "num_experts": 1, "num_experts_per_tok": 1},
    "qwen3_next": EXPERTS | DELTA,
    "qwen3_5": {"text_config": BASE | DELTA | {"model_type": "qwen3_5_text"}},
    "qwen3_5_moe": {"text_config": BASE | DELTA | EXPERTS | {"model_type": "qwen3_5_moe_text"}},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "conv"], "norm_eps": 1e-5, "conv_bias": False,
             "conv_L_cache": 3, "block_dim": 64, "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.0,
             "block_auto_adjust_ff_dim": False, "head_dim": ""},
    "lfm2_moe": EXPERTS | {"full_attn_idxs": [1, 3], "norm_eps": 1e-5, "conv_bias": False, "conv_L_cache": 3,
                           "use_expert_bias": False, "num_dense_layers": 1, "head_dim": ""},
}  # fmt: skip


def config(kind: str, **changes: Any) -> Config:
    """A tiny model's config.json."""
    own = {**BASE, **ARCHITECTURES[kind], "model_type": kind, **changes}
    if "text_config" in own:
        own = {"model_type": kind, "torch_dtype": "bfloat16", "vocab_size": 128} | {"text_config": own["text_config"]}
        own["text_config"] = {key: value for key, value in own["text_config"].items() if value != ""}
    return {key: value for key, value in own.items() if value != ""}


def model(config: Config, dtype: mx.Dtype = mx.bfloat16) -> nn.Module:
    """mlx-lm's model of a config, its random weights not yet computed."""
    model_class, args_class = _get_classes(config)
    made = model_class(args_class.from_dict(config))
    made.set_dtype(dtype)
    return made


def save(made: nn.Module, config: Config, folder: Path) -> Path:
    """A model folder as mlx-lm would load it."""
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(made.parameters())), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder
