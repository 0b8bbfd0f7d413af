"""The cells nearest to a bar, with four times the streams: 28,946 tokens, 10 % timing noise.

    python scripts/replay.py --config=configs/replay/deep.py --out=docs/receipts/replay/deep

One CPU core, about 3 minutes. docs/receipts/replay/deep.md has what it gives.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    # (surface, context_length, text, event, after)
    config.places = (("thread", 28946, "deep", "", ""),)
    config.rules = ("renewal", "ratio")
    config.noises = (0.10,)
    config.streams = 160
    return config
