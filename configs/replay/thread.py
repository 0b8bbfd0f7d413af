"""The reference thread's card at its five depths.

    python scripts/replay.py --config=configs/replay/thread.py --out=docs/receipts/replay/thread

One CPU core, about 8 minutes. docs/receipts/replay/thread.md has what it gives.
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
    )
    return config
