"""Fresh starts without any warm-up timings.

    python scripts/replay.py --config=configs/replay/blind.py --out=docs/receipts/replay/blind

One CPU core, about 6 minutes. docs/receipts/replay/blind.md has what it gives.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    # (surface, context_length, text, event, after)
    config.places = (
        ("thread", 34, "short", "", ""),
        ("thread", 7588, "mid", "", ""),
        ("thread", 28946, "deep", "", ""),
        ("thread", 58543, "deep", "", ""),
        ("thread", 121022, "deep", "", ""),
        ("flat", 2000, "short", "", ""),
        ("stepped", 2000, "short", "", ""),
        ("cpu-f32", 500, "short", "", ""),
        ("cpu-int8", 500, "short", "", ""),
    )
    config.rules = ("renewal", "ratio")
    config.priors = (False,)
    config.drifts = (False,)
    config.outliers = (0.01,)
    return config
