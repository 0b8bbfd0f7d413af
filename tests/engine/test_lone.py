"""A reply is the same whatever drafts it, and stops where plain decoding stops."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from dflash_jax import pricing
from dflash_jax.decode.executables import CompileCounter
from dflash_jax.decode.sampling import GREEDY, Sampling
from dflash_jax.engine import LoneDriver, Request, prepare, token_sha256
from dflash_jax.engine.lone import LENGTH, STOP
from dflash_jax.errors import InputError
from dflash_jax.models import layers
from dflash_jax.tree.growth import NO_PARENT
from tests.decode import tiny

SAMPLINGS = {
    "greedy": GREEDY,
    "seed 1": Sampling(temperature=1.0, seed=1),
    "seed 2, filters": Sampling(1.0, top_k=40, top_p=0.95, min_p=0.01, seed=2**63 + 5),
}
RULES = [*(f"fixed:{width}" for width in tiny.WIDTHS), "renewal", "ratio", "band:10", "tiers"]
# One token, a chunk but one, a chunk, one more, and several.
SIZES = (1, tiny.CHUNK - 1, tiny.CHUNK, tiny.CHUNK + 1, 100)


@functools.cache
def plain(size: int, name: str, max_tokens: int = 40):
    return tiny.plain(size, SAMPLINGS[name], max_tokens)


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("size", SIZES)
def test_plain_tokens_equal_full_recomputation(size, name):
    tokens, reason = plain(size, name)
    assert tokens == tiny.reference_tokens(tiny.prompt_of(size), SAMPLINGS[name], 40)
    assert reason == LENGTH


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_gives_plain_decodings_hash(rule, name):
    driver = LoneDriver(tiny.decoder(), rule=rule)
    for size in SIZES[1:4]:
        request = Request(tiny.prompt_of(size), SAMPLINGS[name], 24)
        tokens, _, records = tiny.decode(driver, request)
        assert token_sha256(tokens) == token_sha256(plain(size, name)[0][:24])
        if rule.startswith("fixed"):
            assert {record.width for record in records[1:]} == {int(rule[6:])}


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_gives_plain_decodings_hash_when_drafts_land(rule, name):
    rounds = 0
    for size in (1, tiny.CHUNK + 1, 100):
        prompt, long_reply = tiny.prompt_of(size), plain(size, name, 60)[0]
        driver = LoneDriver(tiny.knowing_decoder(prompt, long_reply), rule=rule)
        tokens, reason, records = tiny.decode(driver, Request(prompt, SAMPLINGS[name], 40))
        assert token_sha256(tokens) == token_sha256(plain(size, name)[0])
        assert reason == LENGTH
        rounds += len(records) - 1
        for record in records[1:]:
            check_record(record)
    if rule.startswith("fixed") and int(rule[6:]) >= 4:
        assert rounds < 3 * 20  # else the test had nothing to accept


def check_record(record) -> None:
    """Landed nodes are one root path; emitted tokens are theirs and one more, unless cut."""
    path = np.flatnonzero(record.landed)
    parents = [record.tree.parents[node] for node in path]
    assert parents == [NO_PARENT, *path[:-1]][: len(path)]
    spelled = [int(record.tree.tokens[node]) for node in path]
    assert list(record.tokens[: len(spelled)]) == spelled[: len(record.tokens)]
    assert len(record.tokens) <= len(spelled) + 1


class Spy:
    """A rule that verifies three nodes and writes down what it is told."""

    name = "fixed:3"
    learn_every = pricing.LEARN_ROUNDS

    def __init__(self) -> None:
        self.told: list[dict] = []

    def choose(self, chances, context_length):
        del context_length
        return min(3, len(chances))

    def observe(self, **what) -> None:
        self.told.append(what)

    def keep(self):
        return len(self.told)

    def explain(self):
        return {"told": len(self.told)}

    def seed(self, calibration) -> None:
        pass


def test_the_rule_learns_each_round_once_with_its_own_chances(monkeypatch):
    driver, spy = LoneDriver(tiny.decoder(), rule="fixed:3"), Spy()
    monkeypatch.setattr(driver, "_make_rule", lambda name: spy)
    _, _, records = tiny.decode(driver, Request(tiny.prompt_of(33), GREEDY, 12))
    assert driver.calibration == len(records) - 1  # the last one is learned before the rule is kept
    for told, record in zip(spy.told, records[1:], strict=True):
        assert told["width"] == record.width == 3
        assert told["context_length"] == record.context_length
        assert told["round_ms"] == record.round_ms
        assert told["sample"] is record.sample
        np.testing.assert_array_equal(told["chances"], record.chances)
        np.testing.assert_array_equal(told["landed"], record.landed)
    # Some rounds are learned at once, while the next one runs: its reasons are from before.
    behind = [number - record.why["told"] for number, record in enumerate(records[1:])]
    assert len(behind) > 2 * pricing.LEARN_ROUNDS
    assert behind == [1 + (n - 1) % pricing.LEARN_ROUNDS if n else 0 for n in range(len(behind))]


def test_a_switched_rule_serves_the_next_stream_and_keeps_its_own_calibration():
    driver = LoneDriver(tiny.decoder(), rule="renewal")
    request = Request(tiny.prompt_of(33), GREEDY, 24)
    with driver.stream(request) as stream:
        rounds = stream.rounds()
        next(rounds)
        next(rounds)
        driver.switch("fixed:5")
        assert {record.why["rule"] for record in rounds} == {"renewal"}
    assert stream.tokens == tiny.plain(33, GREEDY, 24)[0]
    assert driver.calibration is None  # the new rule has learned nothing yet
    tokens, _, records = tiny.decode(driver, request)
    assert tokens == stream.tokens
    assert {record.width for record in records[1:]} == {5}
    driver.switch("fixed:0")
    assert (driver.plain, {record.width for record in tiny.decode(driver, request)[2]}) == (
        True,
        {0},
    )
    driver.switch("renewal")
    assert driver.calibration["rule"] == "renewal"
    assert tiny.decode(driver, request)[0] == stream.tokens


@pytest.mark.parametrize(
    ("rule", "says"),
    [("best", "unknown rule"), ("fixed:2", "widths 0, 5"), ("fixed:16", "fixed:15")],
)
def test_a_rule_that_cannot_be_is_refused_and_the_old_one_stays(rule, says):
    executables = tiny.decoder().executables
    few = {width: executables.verify[width] for width in (0, 5)}
    decoder = dataclasses.replace(tiny.decoder(), executables=executables._replace(verify=few))
    driver = LoneDriver(decoder, rule="fixed:5")
    with pytest.raises(InputError, match=says):
        driver.switch(rule)
    assert (driver.rule, driver.widths) == ("fixed:5", (0, 5))


@pytest.mark.filterwarnings("error")
def test_the_hottest_temperature_grows_trees_without_overflow():
    sampling = Sampling(temperature=1e300, seed=4)
    driver = LoneDriver(tiny.decoder(), rule="fixed:7")
    tokens, _, _ = tiny.decode(driver, Request(tiny.prompt_of(33), sampling, 12))
    assert tokens == tiny.plain(33, sampling, 12)[0]


def test_int8_weights_give_one_hash_too():
    params = {
        name: layers.Int8Matrix(*map(jnp.asarray, layers.int8_rows_and_scale(np.asarray(leaf))))
        if name[-1] == "weight" and leaf.ndim == 2
        else leaf
        for name, leaf in flatten_dict(tiny.target_params()).items()
    }
    decoder = prepare(
        tiny.TARGET,
        unflatten_dict(params),
        tiny.drafter(),
        vocab_size=tiny.KNOWN,
        context_limit=tiny.CONTEXT_LIMIT,
        policy=tiny.policy(),
        widths=(0, 3, 15),
        time_widths=False,
    )
    for name, sampling in SAMPLINGS.items():
        request = Request(tiny.prompt_of(50), sampling, 30)
        hashes = set()
        for rule in ("fixed:0", "fixed:3", "fixed:15"):
            with LoneDriver(decoder, rule=rule).stream(request) as stream:
                list(stream.rounds())
            hashes.add(stream.token_sha256)
        assert len(hashes) == 1, name


def test_an_accepted_path_may_be_a_whole_window_deep():
    prompt, reply = tiny.prompt_of(20), plain(20, "greedy", 60)[0]
    base = tiny.knowing_decoder(prompt, reply)

    def draft(*inputs):
        cache, proposals = tiny_draft(*inputs)
        begin = int(inputs[4]) - len(prompt) + 1
        right = np.array(reply[begin : begin + 15])
        rows = np.arange(len(right))
        proposals.candidates[rows] = (right[:, None] + np.arange(6)) % tiny.KNOWN
        proposals.log_chances[rows] = -50.0
        proposals.log_chances[rows, :, 0] = 0.0
        return cache, proposals

    tiny_draft = base.executables.draft
    base.executables = base.executables._replace(draft=draft)
    tokens, _, records = tiny.decode(LoneDriver(base, rule="fixed:15"), Request(prompt, GREEDY, 33))
    assert tokens == reply[:33]
    assert [len(record.tokens) for record in records] == [1, 16, 16]


# Stops and budgets ------------------------------------------------------------------------


@pytest.mark.parametrize("width", [3, 7, 15])
@pytest.mark.parametrize("name", ["greedy", "seed 1"])
def test_a_stop_token_inside_an_accepted_path_cuts_it(name, width):
    prompt, reply = tiny.prompt_of(40), plain(40, name, 60)[0]
    inside = 0
    for stop in sorted(set(reply[:24])):
        first = reply.index(stop)
        driver = LoneDriver(tiny.knowing_decoder(prompt, reply, seed=stop), rule=f"fixed:{width}")
        request = Request(prompt, SAMPLINGS[name], 40, frozenset({stop}))
        tokens, reason, records = tiny.decode(driver, request)
        assert tokens == reply[: first + 1]
        assert reason == STOP
        assert sum(len(record.tokens) for record in records) == len(tokens)
        inside += len(records[-1].tokens) <= records[-1].landed.sum()
    assert inside  # otherwise every stop was a bonus token


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 11, 16, 17])
def test_the_budget_inside_an_accepted_path_cuts_it(max_tokens):
    prompt, reply = tiny.prompt_of(40), plain(40, "greedy", 60)[0]
    driver = LoneDriver(tiny.knowing_decoder(prompt, reply), rule="fixed:15")
    tokens, reason, _ = tiny.decode(driver, Request(prompt, GREEDY, max_tokens))
    assert (tokens, reason) == (reply[:max_tokens], LENGTH)


@pytest.mark.parametrize("room", [1, 2, 9, 20])
@pytest.mark.parametrize("rule", ["fixed:0", "fixed:15"])
def test_the_context_limit_inside_an_accepted_path_cuts_it(rule, room):
    prompt = tiny.prompt_of(tiny.CONTEXT_LIMIT - room)
    reply = tiny.reference_tokens(prompt, GREEDY, room + 16)
    driver = LoneDriver(tiny.knowing_decoder(prompt, reply), rule=rule)
    tokens, reason, _ = tiny.decode(driver, Request(prompt, GREEDY, 1000))
    assert (tokens, reason) == (reply[:room], LENGTH)


@pytest.mark.parametrize("rule", ["fixed:0", "fixed:15"])
def test_a_stop_token_that_is_also_the_last_of_the_budget_is_a_stop(rule):
    prompt, reply = tiny.prompt_of(40), plain(40, "greedy", 60)[0]
    stop = reply[9]
    budget = reply.index(stop) + 1
    driver = LoneDriver(tiny.knowing_decoder(prompt, reply), rule=rule)
    request = Request(prompt, GREEDY, budget, frozenset({stop}))
    assert tiny.decode(driver, request)[:2] == (reply[:budget], STOP)


def test_a_stop_token_as_the_first_token_ends_the_reply_at_the_prompt():
    reply = plain(40, "greedy", 60)[0]
    driver = LoneDriver(tiny.decoder(), rule="fixed:7")
    request = Request(tiny.prompt_of(40), GREEDY, 40, frozenset({reply[0]}))
    tokens, reason, records = tiny.decode(driver, request)
    assert (tokens, reason, len(records)) == (reply[:1], STOP, 1)


# State ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["fixed:0", "fixed:7", "renewal"])
def test_a_shorter_request_after_a_longer_one_equals_the_same_alone(rule):
    driver = LoneDriver(tiny.decoder(), rule=rule)
    tiny.decode(driver, Request(tiny.prompt_of(300), SAMPLINGS["seed 1"], 30))
    tokens, _, records = tiny.decode(driver, Request(tiny.prompt_of(5), GREEDY, 24))
    fresh = tiny.decoder()
    fresh.buffers = tiny.new_buffers()
    alone, _, records_alone = tiny.decode(
        LoneDriver(fresh, rule=rule), Request(tiny.prompt_of(5), GREEDY, 24)
    )
    assert tokens == alone
    if rule.startswith("fixed"):  # the drafter sees nothing of the first request either
        assert [r.tree.tokens.tolist() for r in records] == [
            r.tree.tokens.tolist() for r in records_alone
        ]
        assert [r.tree.own.tolist() for r in records] == [
            r.tree.own.tolist() for r in records_alone
        ]


@pytest.mark.parametrize("after_rounds", [0, 1, 3])
def test_a_stream_closed_half_way_leaves_a_clean_slot(after_rounds):
    driver = LoneDriver(tiny.decoder(), rule="fixed:7")
    with driver.stream(Request(tiny.prompt_of(100), SAMPLINGS["seed 1"], 40)) as stream:
        rounds = stream.rounds()
        for _ in range(after_rounds):
            next(rounds)
    request = Request(tiny.prompt_of(33), GREEDY, 24)
    assert tiny.decode(driver, request)[0] == plain(33, "greedy")[0][:24]


def test_a_closed_stream_neither_goes_on_nor_takes_anothers_buffers():
    driver = LoneDriver(tiny.decoder(), rule="fixed:3")
    first = driver.stream(Request(tiny.prompt_of(33), GREEDY, 24))
    rounds = first.rounds()
    next(rounds)
    first.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(rounds)
    with driver.stream(Request(tiny.prompt_of(33), GREEDY, 24)) as second:
        first.close()  # again: the second stream still holds the buffers
        with pytest.raises(RuntimeError, match="still open"):
            driver.stream(Request(tiny.prompt_of(33), GREEDY, 24))
        list(second.rounds())
    assert second.tokens == plain(33, "greedy")[0][:24]


def test_beyond_the_drafters_positions_plain_decoding_goes_on():
    prompt, reply = tiny.prompt_of(40), plain(40, "greedy", 60)[0]
    knowing = tiny.knowing_decoder(prompt, reply)
    short = dataclasses.replace(tiny.DRAFTER, max_position_embeddings=84)
    knowing.spec = dataclasses.replace(knowing.spec, drafter=short)
    tokens, _, records = tiny.decode(
        LoneDriver(knowing, rule="fixed:7"), Request(prompt, GREEDY, 40)
    )
    assert tokens == reply[:40]
    widths = [record.width for record in records[1:]]
    assert widths[0] == 7
    assert widths[-1] == 0
    assert sorted(widths, reverse=True) == widths  # once beyond, never back
    # A prompt that is already beyond: plain from the first round on.
    tokens, _, records = tiny.decode(
        LoneDriver(knowing, rule="fixed:7"), Request(tiny.prompt_of(100), GREEDY, 10)
    )
    assert tokens == plain(100, "greedy")[0][:10]
    assert {record.width for record in records} == {0}


def test_the_mask_token_may_stand_in_a_prompt():
    prompt = (tiny.DRAFTER.mask_token_id, *tiny.prompt_of(10), tiny.DRAFTER.mask_token_id)
    request = Request(prompt, GREEDY, 12)
    replies = [
        tiny.decode(LoneDriver(tiny.decoder(), rule=rule), request)[0]
        for rule in ("fixed:0", "fixed:7")
    ]
    assert replies[0] == replies[1] == tiny.reference_tokens(prompt, GREEDY, 12)


# Bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (tiny.prompt_of(tiny.CONTEXT_LIMIT), "leaves no room"),
        (tiny.prompt_of(tiny.CONTEXT_LIMIT + 200), "leaves no room"),
        ((1, tiny.VOCABULARY), "outside 0..319"),
        ((1, -1), "outside 0..319"),
    ],
)
def test_a_bad_prompt_is_refused_and_the_next_one_works(prompt, message):
    driver = LoneDriver(tiny.decoder(), rule="fixed:3")
    with pytest.raises(InputError, match=message) as caught:
        driver.stream(Request(prompt))
    assert "\n" not in str(caught.value)
    request = Request(tiny.prompt_of(33), GREEDY, 24)
    assert tiny.decode(driver, request)[0] == plain(33, "greedy")[0][:24]


def test_an_empty_prompt_and_an_empty_budget_are_refused():
    with pytest.raises(InputError, match="prompt is empty"):
        Request(())
    with pytest.raises(InputError, match="max_tokens 0 must be at least 1"):
        Request((1,), max_tokens=0)


@pytest.mark.parametrize(
    ("rule", "message"),
    [("best", "unknown rule"), ("fixed:16", "give fixed:0 to fixed:15"), ("fixed:-1", "fixed:0")],
)
def test_unknown_rules_and_widths_are_refused(rule, message):
    with pytest.raises(InputError, match=message):
        LoneDriver(tiny.decoder(), rule=rule)


def test_drafting_without_a_drafter_is_refused_and_plain_decoding_works():
    bare = tiny.make_decoder(drafter=None, widths=(0,))
    with pytest.raises(InputError, match="no drafter is loaded"):
        LoneDriver(bare, rule="fixed:3")
    driver = LoneDriver(bare, rule="fixed:0")
    tokens, _, _ = tiny.decode(driver, Request(tiny.prompt_of(33), SAMPLINGS["seed 1"], 24))
    # Not a word about taps: these programs do not compute them.
    assert tokens == plain(33, "seed 1")[0][:24]


# Compilation, other processes, long runs --------------------------------------------------


def test_nothing_compiles_after_the_first_stream():
    driver = LoneDriver(tiny.decoder(), rule="renewal")
    tiny.decode(driver, Request(tiny.prompt_of(3), GREEDY, 4))
    counter = CompileCounter()
    for size in (2, 45, 130):
        for sampling in SAMPLINGS.values():
            tiny.decode(driver, Request(tiny.prompt_of(size), sampling, 12))
    assert counter.count == 0


_CHILD = """
import json, sys
from dflash_jax.decode.executables import CompileCounter
from dflash_jax.engine import LoneDriver, Request, prepare, token_sha256
from tests.decode import tiny
from tests.engine.test_lone import SAMPLINGS
decoder = tiny.make_decoder(widths=(0, 3, 15))
driver = {rule: LoneDriver(decoder, rule=rule) for rule in ("fixed:15", "fixed:3", "fixed:0")}
counter = CompileCounter()
hashes = {}
for rule in driver:
    for name, sampling in SAMPLINGS.items():
        request = Request(tiny.prompt_of(33), sampling, 24)
        hashes[rule + name] = token_sha256(tiny.decode(driver[rule], request)[0])
json.dump({"hashes": hashes, "compiles": counter.count}, sys.stdout)
"""


@pytest.mark.slow
def test_another_process_gives_the_same_hashes_and_compiles_nothing_after_warm_up():
    root = pathlib.Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", _CHILD],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for rule in ("fixed:0", "fixed:3", "fixed:15"):
        for name in SAMPLINGS:
            assert found["hashes"][rule + name] == token_sha256(plain(33, name)[0][:24])
    assert found["compiles"] == 0  # its first stream included


def soak(rounds: int) -> None:
    """Sampled replies one after another, each checked against plain decoding's first tokens."""
    done, seed = 0, 0
    drivers = [LoneDriver(tiny.decoder(), rule=rule) for rule in ("renewal", "fixed:5")]
    while done < rounds:
        seed += 1
        size = 1 + 37 * seed % 200
        request = Request(tiny.prompt_of(size), Sampling(1.0, top_p=0.99, seed=seed), 180)
        tokens, reason, records = tiny.decode(drivers[seed % 2], request)
        done += len(records) - 1
        assert (len(tokens), reason) == (180, LENGTH)
        assert max(tokens) < tiny.KNOWN
        if seed % 10 == 1:
            assert tokens == tiny.plain(size, request.sampling, 180)[0]


def test_some_hundred_sampled_rounds():
    soak(600)


@pytest.mark.slow
def test_twenty_thousand_sampled_rounds():
    soak(20_000)
