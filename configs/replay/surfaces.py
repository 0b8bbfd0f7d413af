"""Flat, stepped by tiles of 4 rows, and measured price surfaces.

    python scripts/replay.py --config=configs/replay/surfaces.py --out=docs/receipts/replay/surfaces

One CPU core, about 12 minutes. docs/receipts/replay/surfaces.md has what it gives.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    # (surface, context_length, text, event, after)
    config.places = (
        ("flat", 2000, "short", "", ""),
        ("flat", 60000, "deep", "", ""),
        ("stepped", 2000, "short", "", ""),
        ("stepped", 30000, "deep", "", ""),
        ("cpu-f32", 500, "short", "", ""),
        ("cpu-f32", 6000, "mid", "", ""),
        ("cpu-int8", 500, "short", "", ""),
        ("cpu-int8", 6000, "mid", "", ""),
    )
    config.rules = ("renewal", "ratio")
    return config
