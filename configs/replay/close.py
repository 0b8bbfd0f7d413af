"""The cells nearest to a bar, with four times the streams.

    python scripts/replay.py --config=configs/replay/close.py --out=docs/receipts/replay/close

One CPU core, about 6 minutes. docs/receipts/replay/close.md has what it gives.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    # (surface, context_length, text, event, after)
    config.places = (
        ("thread", 34, "short", "", ""),
        ("thread", 28946, "deep", "", ""),
        ("thread", 28946, "deep", "slope", "linear:50:0"),
    )
    config.rules = ("renewal", "ratio")
    config.drifts = (False,)
    config.streams = 160
    return config
