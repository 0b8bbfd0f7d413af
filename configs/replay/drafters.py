"""Drafters that are wrong about themselves, with and without the landing calibration.

    python scripts/replay.py --config=configs/replay/drafters.py --out=docs/receipts/replay/drafters

One CPU core, about 10 minutes. docs/receipts/replay/drafters.md has what it gives.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    # (surface, context_length, text, event, after)
    config.places = (
        ("thread", 34, "short", "", ""),
        ("thread", 7588, "mid", "", ""),
        ("thread", 28946, "deep", "", ""),
        ("flat", 2000, "short", "", ""),
        ("stepped", 2000, "short", "", ""),
        ("cpu-f32", 500, "short", "", ""),
    )
    config.rules = ("renewal", "ratio")
    config.kinds = ("greedy",)
    config.drafters = ("over-confident", "under-confident", "vague")
    config.calibrates = ("evaluated", "online", "")
    config.drifts = (False,)
    config.outliers = (0.01,)
    return config
