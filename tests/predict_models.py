"""Small configurations in the form of config.json, one for each kind of attention, experts and quantization."""

from __future__ import annotations

from typing import Any

from pytest_gpuguard.predict import Box

RTX = Box("rtx-pro-6000-server", 8, 97887, 636, "120", False)
H100 = Box("h100", 8, 81559, 479, "90", True)
H200 = Box("h200", 8, 143771, 614, "90", True)
SMALL = Box("rtx-4090", 2, 24564, None, "89", False)
MI355X = Box("mi355x", 8, 294896, None, None, True)

#: A dense model with grouped queries: 16 layers of 2048, 16 heads of 128, 4 KV heads.
DENSE: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

#: Latent attention with 384 routed experts and one shared, int4 experts, a vision tower: the shape of a 1T model.
LATENT: dict[str, Any] = {
    "text_config": {
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 163840,
        "max_position_embeddings": 262144,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 4, "type": "int", "group_size": 32, "symmetric": True, "strategy": "group"},
                }
            },
            "ignore": [
                "lm_head",
                "re:.*self_attn.*",
                "re:.*shared_experts.*",
                "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
            ],
        },
    },
    "vision_config": {
        "vt_hidden_size": 1152,
        "vt_num_hidden_layers": 27,
        "vt_intermediate_size": 4304,
        "merge_kernel_size": [2, 2],
    },
}

#: A mixture of experts with block-wise fp8.
FP8_EXPERTS: dict[str, Any] = DENSE | {
    "num_hidden_layers": 24,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
    "quantization_config": {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"],
    },
}

#: Windowed layers between full ones.
WINDOWED: dict[str, Any] = DENSE | {
    "num_hidden_layers": 6,
    "sliding_window": 1024,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
}

#: Three gated linear-attention layers for each full one.
HYBRID: dict[str, Any] = DENSE | {
    "num_hidden_layers": 8,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "mamba_ssm_dtype": "float32",
}


def changed(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A configuration with other fields in its text part; None takes a field away."""
    if "text_config" in config:
        return config | {"text_config": changed(config["text_config"], **changes)}
    return {name: value for name, value in (config | changes).items() if value is not None}
