"""SmolLM2-135M-Instruct's drafter, from the target's own text.

  python scripts/generate_data.py --config=configs/train/smollm2.py --out=data/smollm2
  python scripts/train_drafter.py --config=configs/train/smollm2.py --data=data/smollm2 \
      --out=runs/smollm2
  python scripts/eval_drafter.py --config=configs/train/smollm2.py --drafter=runs/smollm2/drafter \
      --out=runs/smollm2/eval

For one H200 (docs/training.md has memory, times and results). Any value can be overridden, as in
--config.drafter.num_layers=2.
"""

from ml_collections import ConfigDict

from dflash_jax.train import recipe


def get_config() -> ConfigDict:
    return recipe.make(
        target="embedded",  # or a .gguf file, or a Hugging Face folder
        dtype="bfloat16",
        data={
            "shards": 20,  # of 2.1 million tokens
            "prompt_files": ("configs/prompts/train.jsonl",),
            "self_fraction": 0.4,
            "temperatures": (0.0, 0.7, 1.0),
            "temperature_weights": (0.6, 0.15, 0.25),
        },
        rollout={"batch": 4096, "length": 512, "segments": 2},
        drafter={
            "num_layers": 3,
            "block_size": 8,
            "target_layer_ids": (1, 8, 14, 20, 27),
            "intermediate_size": 1536,
            "sliding_window": 512,
            "selector_rank": 32,
            "selector_top_k": 16,
            "draft_vocab_size": 16384,
            "mask_token_id": 16,  # <empty_output>: no text has it
        },
        train={
            "steps": 6000,
            "batch": 64,
            "anchors": 64,
            "optimizer": "muon",
            "learning_rate": 2e-3,
        },
    )
