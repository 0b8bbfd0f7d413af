"""Warm-up prices, with rounds that take made-up times."""

from __future__ import annotations

import types

import pytest

from dflash_jax.engine import decoder as engine


@pytest.mark.parametrize("burst", range(1, 22))
def test_a_burst_of_other_work_spoils_no_price(monkeypatch, burst):
    """Three slow rounds in a row, wherever they fall: each program is timed once among them."""
    rounds = []

    def time_round(decoder, state, cache, width, context, sampling):
        slow = 30.0 if burst <= len(rounds) < burst + 3 else 0.0
        rounds.append(width)
        return state, cache, 10.0 + width + slow + context / 1000

    monkeypatch.setattr(engine, "_time_round", time_round)
    decoder = types.SimpleNamespace(
        spec=types.SimpleNamespace(
            context_limit=4096, policy=types.SimpleNamespace(rows=lambda width: 2 * (width // 2))
        ),
        widths=tuple(range(8)),
        take_buffers=lambda: (None, None),
    )
    found = engine._timed(decoder)
    assert found == [
        (width, context, 10.0 + 2 * (width // 2) + 1 + context / 1000)  # its program's widest
        for context in (64, 2048)
        for width in range(8)
    ]
    assert len(rounds) == 1 + 2 * 3 * 4  # widths of one program are timed once
