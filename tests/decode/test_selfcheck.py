"""The start-up check passes here, sees every kind of difference, and is never silent."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.decode import selfcheck
from dflash_jax.decode.attention import NEAR
from dflash_jax.decode.executables import compile_programs
from dflash_jax.decode.programs import new_target_state
from dflash_jax.decode.sampling import GREEDY
from dflash_jax.engine import LoneDriver, Request
from dflash_jax.engine import decoder as decoder_module
from dflash_jax.tree.masks import MAX_ROWS
from tests.decode import tiny

WIDTH = 5  # the one that is tampered with


def run_check(executables) -> selfcheck.SelfCheck:
    base = tiny.decoder()
    state = new_target_state(base.spec)
    found, _ = selfcheck.check(base.spec, base.weights, state, executables, base.neutral)
    return found


def one_ulp(x: jax.Array) -> jax.Array:
    return jnp.asarray(np.nextafter(np.asarray(x), np.float32(np.inf)))


def tampered_logits(done):
    return done._replace(report=done.report._replace(logits=one_ulp(done.report.logits)))


def tampered_taps(done):
    return done._replace(taps=one_ulp(done.taps))


def tampered_key(done):
    """One value of the last layer, in the row of the last committed token."""
    cache, last = done.state.cache, int(done.state.length) - 1
    where = (-1, 0, last, 0)
    k = cache.k.at[where].set(one_ulp(cache.k[where]))
    return done._replace(state=done.state._replace(cache=cache._replace(k=k)))


def tampered_value(done):
    cache, first = done.state.cache, int(done.state.length) - int(done.report.emitted)
    where = (0, 1, first, 3)
    v = cache.v.at[where].set(one_ulp(cache.v[where]))
    return done._replace(state=done.state._replace(cache=cache._replace(v=v)))


def tampered_pick(done):
    tokens = done.report.tokens.at[0].add(1)
    return done._replace(report=done.report._replace(tokens=tokens))


def with_sabotage(executables, tamper):
    honest = executables.verify[WIDTH]
    return executables._replace(
        verify={**executables.verify, WIDTH: lambda *inputs: tamper(honest(*inputs))}
    )


def test_every_width_passes_here():
    found = tiny.decoder().check
    assert found.passed
    assert found.widths == tiny.WIDTHS


@pytest.mark.parametrize(
    ("tamper", "what"),
    [
        (tampered_logits, "logits"),
        (tampered_taps, "taps"),
        (tampered_key, "k"),
        (tampered_value, "v"),
        (tampered_pick, "tokens"),
    ],
)
def test_one_ulp_of_one_width_is_found_and_named(tamper, what):
    found = run_check(with_sabotage(tiny.decoder().executables, tamper))
    assert not found.passed
    assert len(found.differences) == 2  # greedy and sampled
    for line in found.differences:
        assert line.startswith(f"width {WIDTH}, ")
        assert line.endswith(f": {what} differ from plain decoding's")


def test_chains_and_trees_land_to_the_last_node():
    """Else most rows of a window would go unchecked."""
    committed = []

    def note(done):
        committed.append(int(done.report.emitted))
        return done

    assert run_check(with_sabotage(tiny.decoder().executables, note)).passed
    assert committed == [WIDTH + 1, WIDTH // 2 + 1]


def test_far_keys_lie_on_both_sides_of_a_chunks_edge():
    base = tiny.decoder()
    state = new_target_state(base.spec)
    state = selfcheck._prompt(base.spec, base.weights, state, base.executables, base.neutral)
    ends = int(state.length) + np.arange(MAX_ROWS) - (NEAR - 1)
    assert ends[0] < base.spec.policy.key_chunk < ends[-1]


@pytest.mark.slow
def test_prepare_says_so_and_pads_every_window_when_a_width_is_not_exact(monkeypatch):
    """The first attempt's width 5 is off by one ulp; the second is compiled as it is."""
    lines = []
    session = tiny.decoder().executables  # compiled before the patch

    def compile_or_reuse(programs, widths, progress, options=None, say=print):
        if programs.verify[0].inputs[2].shape[0] < MAX_ROWS:
            verify = {width: session.verify[width] for width in widths}
            return with_sabotage(session._replace(verify=verify), tampered_logits)
        return compile_programs(programs, widths, progress, options, say)

    monkeypatch.setattr(decoder_module, "compile_programs", compile_or_reuse)
    prepared = tiny.make_decoder(widths=(0, WIDTH), say=lines.append)
    assert prepared.spec.policy.row_counts == (MAX_ROWS,)
    assert prepared.check.passed
    (line,) = lines
    assert f"width {WIDTH}, greedy: logits differ" in line
    request = Request(tiny.prompt_of(33), GREEDY, 16)
    replies = [
        tiny.decode(LoneDriver(prepared, rule=rule), request)[0]
        for rule in ("fixed:0", f"fixed:{WIDTH}")
    ]
    assert replies[0] == replies[1] == tiny.reference_tokens(tiny.prompt_of(33), GREEDY, 16)
