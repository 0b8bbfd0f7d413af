"""A tiny drafter, for tests and for trying the pipeline on a CPU; any small target will do.

  python scripts/generate_data.py --config=configs/train/tiny.py --config.target=TARGET \
      --prompts=configs/prompts/train.jsonl --out=data
  python scripts/train_drafter.py --config=configs/train/tiny.py --config.target=TARGET \
      --data=data --out=run

One layer, blocks of 4, sequences of 64 tokens; trains in under a minute on two cores.
"""

from ml_collections import ConfigDict

from dflash_jax.train import recipe


def get_config() -> ConfigDict:
    return recipe.make(
        target="",
        dtype="float32",
        data={"shards": 2, "held_out_fraction": 0.1, "max_repeat_tokens": 64},
        rollout={"batch": 64, "length": 64, "segments": 2},
        drafter={
            "num_layers": 1,
            "block_size": 4,
            "target_layer_ids": (0, 1),
            "intermediate_size": 64,
            "sliding_window": 64,
            "conv_group_size": 8,
            "selector_rank": 8,
            "selector_top_k": 4,
            "mask_token_id": 0,
        },
        train={
            "steps": 200,
            "batch": 8,
            "anchors": 8,
            "head_chunks": 2,
            "learning_rate": 3e-3,
            "log_every": 20,
            "eval_every": 100,
            "eval_rows": 16,
            "export_dtype": "float32",
        },
    )
