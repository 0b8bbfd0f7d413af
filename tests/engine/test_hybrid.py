"""Hybrids in the engine: a reply is the same whatever drafts it, and streams leave no trace."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.bench import contexts
from dflash_jax.checkpoints.drafter import Drafter
from dflash_jax.decode import selfcheck
from dflash_jax.decode.programs import HEAD_ROWS, new_target_state
from dflash_jax.decode.recurrence import copied
from dflash_jax.decode.sampling import GREEDY, Sampling
from dflash_jax.engine import Decoder, LoneDriver, Request, prepare, token_sha256
from dflash_jax.errors import InputError
from dflash_jax.models.dflash2 import init_params
from dflash_jax.models.qwen3_5 import FULL, LINEAR
from dflash_jax.tree.growth import EMPTY
from tests import tiny_qwen3_5
from tests.decode import tiny

TARGET = dataclasses.replace(
    tiny_qwen3_5.CONFIG, vocab_size=tiny.VOCABULARY, layer_types=(LINEAR, FULL, LINEAR)
)
DRAFTER = dataclasses.replace(tiny.DRAFTER, num_target_layers=3, target_layer_ids=(0, 2))
SAMPLINGS = {"greedy": GREEDY, "sampled": Sampling(1.0, top_k=40, top_p=0.95, seed=3)}
RULES = [*(f"fixed:{width}" for width in range(16)), "renewal"]


def policy():
    """Few row counts: each costs seconds to compile."""
    table = tiny.policy()
    counts = table.row_counts
    return dataclasses.replace(table, row_counts=(counts[0], counts[len(counts) // 2], counts[-1]))


def make_decoder(target=TARGET, draft: Drafter | None = None, **overrides) -> Decoder:
    settings = {
        "vocab_size": tiny.KNOWN,
        "context_limit": tiny.CONTEXT_LIMIT,
        "policy": policy(),
        "time_widths": False,
    }
    params = tiny_qwen3_5.random_params(target)["params"]
    return prepare(target, params, draft, **(settings | overrides))


@functools.cache
def decoder() -> Decoder:
    params = init_params(DRAFTER, jax.random.key(1))
    return make_decoder(draft=Drafter(DRAFTER, params, "tiny"))


@functools.cache
def plain(size: int, name: str, max_tokens: int = 60) -> list[int]:
    driver = LoneDriver(decoder(), rule="fixed:0")
    return tiny.decode(driver, Request(tiny.prompt_of(size), SAMPLINGS[name], max_tokens))[0]


def test_plain_tokens_equal_full_recomputation():
    cases = [(size, name) for size in (1, 31, 33, 100) for name in SAMPLINGS]
    texts = [[*tiny.prompt_of(size), *plain(size, name)] for size, name in cases]
    rows = np.stack([np.pad(np.array(text, np.int32), (0, 192 - len(text))) for text in texts])
    logits, _ = tiny_qwen3_5.forward(TARGET, tiny_qwen3_5.random_params(TARGET), rows)
    for (size, name), text, row in zip(cases, texts, logits, strict=True):
        for position in range(size, len(text)):
            wanted = tiny.reference_pick(row[position - 1, : tiny.KNOWN], position, SAMPLINGS[name])
            assert text[position] == wanted


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_gives_plain_decodings_hash(rule, name):
    driver = LoneDriver(decoder(), rule=rule)
    for size in (31, 33):
        request = Request(tiny.prompt_of(size), SAMPLINGS[name], 24)
        tokens, _, records = tiny.decode(driver, request)
        assert token_sha256(tokens) == token_sha256(plain(size, name)[:24])
        if rule.startswith("fixed"):
            assert {record.width for record in records[1:]} == {int(rule[6:])}


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_gives_plain_decodings_hash_when_drafts_land(rule, name):
    rounds = 0
    for size in (1, 33, 100):
        prompt, reply = tiny.prompt_of(size), plain(size, name)
        knowing = tiny.knowing_decoder(prompt, reply, base=decoder())
        driver = LoneDriver(knowing, rule=rule)
        tokens, _, records = tiny.decode(driver, Request(prompt, SAMPLINGS[name], 50))
        assert token_sha256(tokens) == token_sha256(reply[:50])
        rounds += len(records) - 1
    if rule.startswith("fixed") and int(rule[6:]) >= 4:
        assert rounds < 3 * 25  # else the test had nothing to accept


@pytest.mark.parametrize("after_rounds", [0, 1, 3])
def test_a_stream_closed_half_way_leaves_a_clean_slot(after_rounds):
    driver = LoneDriver(decoder(), rule="fixed:7")
    with driver.stream(Request(tiny.prompt_of(100), SAMPLINGS["sampled"], 40)) as stream:
        rounds = stream.rounds()
        for _ in range(after_rounds):
            next(rounds)
    fresh = dataclasses.replace(decoder(), buffers=tiny.new_buffers(decoder().spec))
    request = Request(tiny.prompt_of(33), GREEDY, 24)
    alone = tiny.decode(LoneDriver(fresh, rule="fixed:7"), request)[0]
    assert tiny.decode(driver, request)[0] == alone == plain(33, "greedy")[:24]


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_rewound_stream_gives_the_tokens_of_a_whole_one(name):
    request = Request(tiny.prompt_of(50), SAMPLINGS[name], 30)
    drivers = {rule: LoneDriver(decoder(), rule=rule) for rule in ("renewal", "fixed:0", "fixed:9")}
    whole = tiny.decode(drivers["renewal"], request)[0]
    prefilled = contexts.prefill(drivers["renewal"], request)
    for rule in ("fixed:9", "fixed:0", "renewal", "fixed:9"):
        with contexts.rewound(drivers[rule], request, prefilled) as stream:
            list(stream.rounds())
        assert stream.tokens == whole


# State ------------------------------------------------------------------------------------


def prefilled(prompt):
    """A state of its own after a prompt."""
    base = decoder()
    state, chunk = new_target_state(base.spec), base.spec.policy.prefill_chunk
    arrays = jax.tree.map(jnp.asarray, GREEDY.arrays())
    for begin in range(0, len(prompt), chunk):
        piece = np.asarray(prompt[begin : begin + chunk], np.int32)
        tokens, count = jnp.asarray(np.pad(piece, (0, chunk - len(piece)))), jnp.int32(len(piece))
        state = base.executables.prefill(
            base.weights, state, tokens, count, arrays, base.neutral[HEAD_ROWS]
        ).state
    return state


def verify(state, tree, width):
    base = decoder()
    window = jnp.asarray(tiny.window_array(tree, width, base.spec.policy.rows(width)))
    arrays = jax.tree.map(jnp.asarray, GREEDY.arrays())
    return base.executables.verify[width](
        base.weights, state, window, arrays, base.neutral[len(window)]
    )


def test_what_a_round_commits_has_the_bits_of_feeding_its_tokens_one_by_one():
    rng = np.random.default_rng(0)
    for size in (20, 33, 45, 60):
        start, run = prefilled(tiny.prompt_of(size)), plain(size, "greedy")[1:]
        after, state = {}, tiny.copied(start)
        for count in range(1, 17):
            state = verify(state, EMPTY, 0).state
            after[count] = copied(state.states)
        longest = 0
        for width in range(16):
            tree = tiny.tree_around(rng, run, 15)
            done = verify(tiny.copied(start), tree, width)
            count = int(done.report.emitted)
            longest = max(longest, count)
            got, wanted = jax.tree.leaves(done.state.states), jax.tree.leaves(after[count])
            assert all(tiny.same_bits(a, b) for a, b in zip(got, wanted, strict=True))
        assert longest > 3


def test_states_are_donated():
    state = prefilled(tiny.prompt_of(5))
    done = verify(state, EMPTY, 0)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.states))
    base = decoder()
    arrays = jax.tree.map(jnp.asarray, GREEDY.arrays())
    chunk = jnp.zeros(tiny.CHUNK, jnp.int32)
    base.executables.prefill(
        base.weights, done.state, chunk, jnp.int32(1), arrays, base.neutral[HEAD_ROWS]
    )
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(done.state.states))


@pytest.mark.parametrize("field", ["blocks", "inputs"])
def test_the_self_check_sees_one_ulp_of_a_state(field):
    base, width = decoder(), 5
    honest = base.executables.verify[width]

    def tampered(*inputs):
        done = honest(*inputs)
        first, *others = done.state.states
        value = getattr(first, field)
        where = (0,) * value.ndim
        value = value.at[where].set(np.nextafter(np.asarray(value[where]), np.float32(np.inf)))
        states = (first._replace(**{field: value}), *others)
        return done._replace(state=done.state._replace(states=states))

    executables = base.executables._replace(verify={0: base.executables.verify[0], width: tampered})
    state = new_target_state(base.spec)
    found, _ = selfcheck.check(base.spec, base.weights, state, executables, base.neutral)
    assert len(found.differences) == 2  # greedy and sampled
    assert all(": states differ from plain" in line for line in found.differences)


# Other hybrids ----------------------------------------------------------------------------


@pytest.mark.parametrize("layer_types", [(LINEAR,), (FULL,)], ids=["no-attention", "no-recurrence"])
def test_one_kind_of_layer_alone(layer_types):
    config = dataclasses.replace(DRAFTER, num_target_layers=1, target_layer_ids=(0,))
    draft = Drafter(config, init_params(config, jax.random.key(1)), "tiny")
    target = dataclasses.replace(TARGET, layer_types=layer_types)
    one = dataclasses.replace(policy(), row_counts=(16,))
    base = make_decoder(target, draft, policy=one, widths=(0, 7))
    assert base.buffers.state.cache.k.shape[0] == layer_types.count(FULL)
    assert len(base.buffers.state.states) == layer_types.count(LINEAR)
    for sampling in SAMPLINGS.values():
        request = Request(tiny.prompt_of(40), sampling, 24)
        tokens = tiny.decode(LoneDriver(base, rule="fixed:0"), request)[0]
        knowing = tiny.knowing_decoder(request.prompt, [*tokens, *[0] * 16], base=base)
        drafted, _, records = tiny.decode(LoneDriver(knowing, rule="fixed:7"), request)
        assert drafted == tokens
        assert len(records) < 15


def test_a_prompt_chunk_that_states_cannot_stand_at_is_refused():
    with pytest.raises(InputError, match="prefill_chunk 24 must be a multiple of 16"):
        dataclasses.replace(policy(), prefill_chunk=24)
