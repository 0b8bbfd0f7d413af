"""A replay that runs in seconds, for the tests and for a first look.

    python scripts/replay.py --config=configs/replay/small.py --out=runs/small

One CPU core, a few seconds. Too few streams for a verdict.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    # (surface, context_length, text, event, after)
    config.places = (
        ("thread", 34, "short", "", ""),
        ("thread", 28946, "deep", "", ""),
        ("flat", 2000, "short", "slope", "linear:20:4"),
    )
    config.rules = ("renewal", "ratio", "fixed:3")
    config.kinds = ("greedy",)
    config.noises = (0.03,)
    config.drifts = (True,)
    config.outliers = (0.01,)
    config.streams = 4
    config.rounds = 96
    return config
