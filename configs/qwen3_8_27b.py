"""Qwen3.8-27B (text part) with its DFlash2 drafter, from folders that you give.

    python scripts/decode.py --config=configs/qwen3_8_27b.py --config.target=Qwen3.8-27B \
        --config.drafter=Qwen3.8-27B-DFlash2 --prompt="Why is the sky blue?"

The target may be the official folder, FP8, compressed-tensors or MLX, or a GGUF file. Hardware:
one accelerator with 70 GB of free memory in bfloat16 (54 GB of target, 4 of drafter, 5 of caches
and states at this context), 40 GB in int8. Whatever does not fit is refused before it is loaded.

    python scripts/bench_target.py --config=configs/qwen3_8_27b.py --record=docs/receipts/target

needs no folders: random weights of `sizes`, drawn on the device. Expected on an H200: equal hashes
at every width; rounds of 24 to 28 ms at 34 tokens, 34 to 39 at 28,946 (docs/receipts/target.md).
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    config.target = ""
    config.drafter = ""
    config.weights = "bfloat16"
    config.context_limit = 32768
    config.sizes = ml_collections.ConfigDict({"target": _target(), "drafter": _drafter()})
    return config


def _target() -> dict:
    return {
        "vocab_size": 248320,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_layers": 64,
        "full_attention_interval": 4,
        "num_heads": 24,
        "num_kv_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
    }


def _drafter() -> dict:
    return {
        "intermediate_size": 17408,
        "num_layers": 5,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e7,
        "max_position_embeddings": 262144,
        "target_layer_ids": (5, 19, 33, 47, 61),
        "mask_token_id": 248070,
        "block_size": 8,
        "layer_type": "sliding_attention",
        "sliding_window": 2048,
        "is_causal": False,
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 256,
        "selector_top_k": 16,
    }
