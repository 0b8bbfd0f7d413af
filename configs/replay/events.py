"""Recovery: a sudden 1.5 × slow-down, and changes of slope, at round 200.

    python scripts/replay.py --config=configs/replay/events.py --out=docs/receipts/replay/events

One CPU core, about 12 minutes. docs/receipts/replay/events.md has what it gives.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    # (surface, context_length, text, event, after)
    config.places = (
        ("thread", 34, "short", "slow", ""),
        ("thread", 28946, "deep", "slow", ""),
        ("flat", 2000, "short", "slow", ""),
        ("stepped", 2000, "short", "slow", ""),
        ("thread", 34, "short", "slope", "linear:34:3"),
        ("thread", 34, "short", "slope", "linear:34:0"),
        ("thread", 28946, "deep", "slope", "linear:50:1"),
        ("thread", 28946, "deep", "slope", "linear:50:0"),
        ("thread", 28946, "deep", "slope", "linear:50:14"),
        ("thread", 121022, "deep", "slope", "linear:93:5"),
        ("flat", 2000, "short", "slope", "linear:20:4"),
        ("stepped", 2000, "short", "slope", "stepped:24:12"),
        ("stepped", 2000, "short", "slope", "stepped:24:0.5"),
    )
    config.rules = ("renewal", "ratio")
    config.drifts = (False,)
    return config
