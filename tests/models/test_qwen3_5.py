"""The hybrid against `transformers` on tiny random weights, and its decoding against itself."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.checkpoints import qwen3_5_names
from dflash_jax.checkpoints.names import as_floats, as_int8
from dflash_jax.decode.sampling import Sampling, picks
from dflash_jax.errors import InputError
from dflash_jax.models import layers
from dflash_jax.models.qwen3_5 import FULL, LINEAR, Qwen35, WholeSequence
from dflash_jax.tree.growth import NO_PARENT, DraftTree
from dflash_jax.tree.masks import MAX_ROWS, window_array
from tests import tiny_qwen3_5 as tiny

CONFIG = tiny.CONFIG
TOLERANCE = 1e-4


def close(got, expected, tolerance=TOLERANCE):
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance)


# --- against transformers -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True, "num_key_value_heads": 1},
        {"linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_value_head_dim": 32},
        {"linear_conv_kernel_dim": 2, "rope_parameters": tiny.ROPE | {"partial_rotary_factor": 1}},
        {"layer_types": [LINEAR, LINEAR, FULL, FULL, LINEAR], "num_hidden_layers": 5},
        {"layer_types": [LINEAR, LINEAR], "num_hidden_layers": 2},
        {"layer_types": [FULL, FULL], "num_hidden_layers": 2},
    ],
    ids=lambda overrides: "-".join(overrides) or "plain",
)
def test_logits_and_every_layer_equal_transformers(overrides):
    pytest.importorskip("transformers", reason="the oracle is in the test extra")
    model = tiny.hf_model(**overrides)
    tokens = tiny.some_tokens(100, batch=2)
    expected, hidden_states = tiny.hf_outputs(model, tokens)
    config, params = tiny.convert(model)
    taps = tuple(reversed(range(config.num_layers)))
    logits, out = tiny.forward(config, params, tokens, taps)

    assert np.abs(expected).max() > 1.0
    assert logits.dtype == np.float32
    close(logits, expected)
    close(out.hidden, hidden_states[-1])
    for layer, tap in zip(taps[1:], out.taps[1:], strict=True):  # the last is known normed only
        close(tap, hidden_states[layer + 1])


@pytest.fixture(scope="module")
def oracle():
    """(config, params, logits of a text of 700 tokens)."""
    pytest.importorskip("transformers", reason="the oracle is in the test extra")
    model = tiny.hf_model()
    tokens = tiny.some_tokens(700)
    logits, _ = tiny.hf_outputs(model, tokens[None])
    return *tiny.convert(model), tokens, logits[0]


@pytest.fixture(scope="module")
def decoder_of(oracle):
    """A decoder by its prompt chunk; each compiles once."""
    return functools.cache(lambda chunk: tiny.Decoder(oracle[0], oracle[1], chunk))


@pytest.mark.parametrize("chunk", [16, 48, 128])
@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 63, 129, 700])
def test_prompts_in_any_chunking_equal_transformers(oracle, decoder_of, chunk, count):
    _, _, tokens, expected = oracle
    logits, stream = decoder_of(chunk).prefill(tokens[:count])
    close(logits, expected[:count])
    assert int(stream.length) == count


@pytest.mark.parametrize("prompt", [0, 1, 20, 64, 95])
def test_steps_equal_transformers(oracle, decoder_of, prompt):
    """Prefilled or not, token by token: what the chunked oracle says."""
    _, _, tokens, expected = oracle
    decoder = decoder_of(48)
    stream = decoder.prefill(tokens[:prompt])[1] if prompt else decoder.new_stream()
    for position in range(prompt, prompt + 60):
        rows, stream = verify(decoder, stream, chain([]), tokens[position : position + 1], [0])
        close(rows.logits[0], expected[position])


def test_narrow_weights_stay_near_float32():
    pytest.importorskip("transformers", reason="the oracle is in the test extra")
    model = tiny.hf_model()
    tokens = tiny.some_tokens(50, batch=2)
    exact, _ = tiny.forward(*tiny.convert(model), tokens)
    config, params = tiny.convert(model, jnp.bfloat16)
    logits, out = tiny.forward(config, params, tokens, taps=(0,))
    assert out.hidden.dtype == out.taps[0].dtype == jnp.bfloat16
    assert logits.dtype == np.float32
    assert np.abs(logits - exact).max() < 0.1 * np.abs(exact).max()
    source = tiny.Tensors(tiny.state_dict(model))
    loaded = qwen3_5_names.load_hugging_face(source, CONFIG, as_int8(jnp.float32))
    logits, _ = tiny.forward(CONFIG, {"params": loaded}, tokens)
    assert np.abs(logits - exact).max() < 0.2 * np.abs(exact).max()
    mixer = params["params"]["layers_0"]["linear_attn"]
    assert mixer["A_log"].dtype == mixer["dt_bias"].dtype == jnp.float32
    assert mixer["out_proj"]["weight"].dtype == jnp.bfloat16


# --- decoding: bits depend on the text alone ----------------------------------------------------


def chain(tokens) -> DraftTree:
    nodes = np.arange(len(tokens))
    return DraftTree(np.asarray(tokens, np.int32), nodes - 1, nodes + 1, np.zeros(len(nodes)))


def random_tree(rng: np.random.Generator, width: int) -> DraftTree:
    """Any tree whose parents come before their children; its tokens are random."""
    parents = np.array([rng.integers(-1, node) for node in range(width)], np.int64)
    depths = np.zeros(width, np.int64)
    for node, parent in enumerate(parents):
        depths[node] = 1 + (depths[parent] if parent != NO_PARENT else 0)
    return DraftTree(rng.integers(0, 256, width).astype(np.int32), parents, depths, np.zeros(width))


def path_to(tree: DraftTree, row: int) -> list[int]:
    """Rows from the anchor's, 0, to `row`."""
    path = [row]
    while path[0]:
        path.insert(0, int(tree.parents[path[0] - 1]) + 1)
    return path


def verify(decoder, stream, tree: DraftTree, text, path, count=None, rows=None):
    """A window whose anchor is text[0], with `count` rows of `path` committed."""
    width = len(tree.tokens)
    window = window_array(tree, width, rows or decoder.policy.rows(width))
    window[window[:, 1] == 0, 0] = text[0]
    padded = np.array(path + [0] * (MAX_ROWS - len(path)), np.int32)
    return decoder.verify(
        stream, jnp.asarray(window), jnp.asarray(padded), jnp.int32(count or len(path))
    )


def bits(tree) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


TEXT = tiny.some_tokens(120, seed=5)
PROMPT = 37


class Plain:
    """TEXT, its first PROMPT tokens prefilled, then one token a round."""

    def __init__(self, weights: str):
        dtype = jnp.dtype("float32" if weights == "int8" else weights)
        config = dataclasses.replace(SMALL, dtype=dtype)
        store = as_int8(dtype) if weights == "int8" else as_floats(dtype)
        source = tiny.Tensors(tiny.random_tensors(config))
        params = {"params": qwen3_5_names.load_hugging_face(source, config, store)}
        self.decoder = tiny.Decoder(config, params, capacity=256)
        _, stream = self.decoder.prefill(TEXT[:PROMPT])
        self.streams, self.rows = {PROMPT: stream}, {}
        for position in range(PROMPT, len(TEXT)):
            rows, stream = verify(self.decoder, stream, chain([]), TEXT[position:], [0])
            self.rows[position] = self.row_bits(rows, 0)
            self.streams[position + 1] = stream

    def row_bits(self, rows: tiny.Verified, row: int) -> list[bytes]:
        # A head in bfloat16 is not exact on the CPU: 2 rows differ from 4, whatever the model.
        exact = self.decoder.config.dtype == jnp.float32
        return bits((rows.hidden[row], rows.logits[row] if exact else ()))


SMALL = dataclasses.replace(CONFIG, layer_types=(LINEAR, FULL))


@functools.cache
def plain(weights: str = "float32") -> Plain:
    return Plain(weights)


def check_history(plain: Plain, seed: int, until: int = len(TEXT) - MAX_ROWS):
    """TEXT through random rounds; every row and every state is plain decoding's, bit for bit."""
    rng = np.random.default_rng(seed)
    position = int(rng.integers(PROMPT, until))
    stream = plain.streams[position]
    while position < until:
        width = int(rng.integers(0, 16))
        tree = random_tree(rng, width)
        path = path_to(tree, int(rng.integers(0, width + 1)))
        tree.tokens[[row - 1 for row in path[1:]]] = TEXT[position + 1 : position + len(path)]
        count = int(rng.integers(1, len(path) + 1))
        rows, stream = verify(plain.decoder, stream, tree, TEXT[position:], path, count)
        for depth, row in enumerate(path):
            got = plain.row_bits(rows, row)
            assert got == plain.rows[position + depth], (width, position, depth)
        position += count
        assert bits(stream.states) == bits(plain.streams[position].states)
        cache, expected = stream.cache, plain.streams[position].cache
        for ours, theirs in zip(cache, expected, strict=True):
            assert bits(ours[:, :, :position]) == bits(theirs[:, :, :position])


@given(st.integers(0, 2**31))
@settings(max_examples=20, deadline=None)
def test_any_rounds_give_plain_decodings_bits(seed):
    check_history(plain(), seed)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int8", "bfloat16"])
def test_any_rounds_give_plain_decodings_bits_with_other_weights(weights):
    for seed in range(5):
        check_history(plain(weights), seed)


@pytest.mark.parametrize("width", range(16))
def test_a_node_equals_its_path_alone(width):
    """Every row of any tree: what a fresh prefill of the text and its path gives."""
    decoder = plain().decoder
    rng = np.random.default_rng(width)
    position = int(rng.integers(PROMPT, len(TEXT)))
    tree = random_tree(rng, width)
    rows, _ = verify(decoder, plain().streams[position], tree, TEXT[position:], [0])
    tokens = np.concatenate([TEXT[position : position + 1], tree.tokens])
    for row in {width, *rng.integers(0, width + 1, 3)}:
        whole = np.concatenate([TEXT[:position], tokens[path_to(tree, row)]])
        logits, _ = decoder.prefill(whole)
        close(rows.logits[row], logits[-1], 2e-5)


def test_two_rejection_histories_leave_one_state():
    """Accept all at once, or be rejected fifteen times."""
    decoder, start, position = plain().decoder, plain().streams[60], 60
    _, at_once = verify(decoder, start, chain(TEXT[61:76]), TEXT[60:], list(range(16)))
    stream, rng = start, np.random.default_rng(0)
    for position in range(60, 76):
        wrong = random_tree(rng, int(rng.integers(1, 16)))
        wrong.tokens[:] = (TEXT[position + 1] + 1 + wrong.tokens % 200) % 300
        _, stream = verify(decoder, stream, wrong, TEXT[position:], [0])
    assert bits(at_once.states) == bits(stream.states)
    assert bits(at_once.states) == bits(plain().streams[76].states)


def test_bits_do_not_depend_on_the_row_count():
    decoder, stream = plain().decoder, plain().streams[50]
    tree = random_tree(np.random.default_rng(2), decoder.policy.row_counts[0] - 1)
    width = len(tree.tokens)
    results = [
        bits([x[: width + 1] for x in verify(decoder, stream, tree, TEXT[50:], [0], rows=rows)[0]])
        for rows in decoder.policy.row_counts
    ]
    assert all(result == results[0] for result in results)


LENGTH = 64  # tokens of a reply
_picks = jax.jit(picks)


def reply(width: int, sampling: Sampling, known: list[int]) -> tuple[list[int], int]:
    """(tokens, rounds) of a reply whose trees mix `known`'s tokens with wrong ones."""
    decoder, stream, rng = plain().decoder, plain().streams[PROMPT], np.random.default_rng(width)
    arrays = sampling.arrays()
    tokens, rounds = [int(TEXT[PROMPT])], 0
    while len(tokens) < LENGTH:
        tree = random_tree(rng, width)
        path = path_to(tree, int(rng.integers(0, width + 1)))
        right = known[len(tokens) : len(tokens) + len(path) - 1]
        for row, token in zip(path[1:], right, strict=False):
            tree.tokens[row - 1] = token
        rows, _ = verify(decoder, stream, tree, tokens[-1:], [0])
        depths = np.concatenate([[0], tree.depths, np.zeros(len(rows.logits) - width - 1, int)])
        positions = jnp.asarray(int(stream.length) + depths + 1, jnp.int32)
        chosen = np.asarray(_picks(rows.logits, positions, arrays))
        landed = [0]  # from the anchor, to a child that holds the pick, and so on
        while True:
            parent = landed[-1] - 1 if landed[-1] else NO_PARENT
            matches = (tree.parents == parent) & (tree.tokens == chosen[landed[-1]])
            if not matches.any() or len(landed) == MAX_ROWS:
                break
            landed.append(int(np.argmax(matches)) + 1)
        _, stream = verify(decoder, stream, tree, tokens[-1:], landed)
        tokens += [int(token) for token in chosen[landed]]
        rounds += 1
    return tokens[:LENGTH], rounds


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=3)])
def test_replies_are_equal_at_every_width(sampling):
    expected, most = reply(0, sampling, [])
    total = 0
    for width in range(1, 16):
        got, rounds = reply(width, sampling, expected)
        assert got == expected, width
        total += rounds
    assert most == LENGTH - 1
    assert 150 < total < 15 * most  # some hundreds of rounds, in which drafts landed


# --- the module ---------------------------------------------------------------------------------


def test_init_gives_the_name_table_shapes():
    for overrides in ({}, {"attention_bias": True}, {"tie_word_embeddings": True}):
        config = dataclasses.replace(CONFIG, **overrides)
        tokens = jnp.zeros((1, 3), jnp.int32)
        rotary = layers.Rotary(jnp.ones((3, 4)), jnp.zeros((3, 4)))
        shapes = jax.eval_shape(
            lambda c=config, t=tokens, r=rotary: Qwen35(c).init(
                jax.random.key(0),
                t,
                r,
                lambda index, q, k, v: q,
                WholeSequence(c),
                method="init_all",
            )
        )
        expected = jax.tree.map(np.shape, tiny.random_params(config)["params"])
        assert jax.tree.map(lambda leaf: leaf.shape, shapes["params"]) == expected


def test_tap_layer_out_of_range_is_refused():
    with pytest.raises(InputError, match=r"tap layer 4 is not in 0\.\.3"):
        tiny.forward(CONFIG, tiny.random_params(CONFIG), tiny.some_tokens(3), taps=(4,))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_kv_heads", 3, "multiple"),
        ("linear_num_key_heads", 4, "multiple"),
        ("layer_types", (), "layer_types"),
        ("layer_types", ("sliding_attention",), "sliding_attention"),
        ("partial_rotary_factor", 1.5, "48 rotary dimensions"),
        ("partial_rotary_factor", 0.01, "0 rotary dimensions"),
        ("vocab_size", 2.5, "vocab_size"),
        ("linear_conv_kernel_dim", 0, "linear_conv_kernel_dim"),
        ("rms_norm_eps", 0.0, "rms_norm_eps"),
        ("dtype", "float16", "dtype"),
    ],
)
def test_config_refuses(field, value, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(CONFIG, **{field: value})


def test_config_is_hashable_and_counts_its_layers():
    config = dataclasses.replace(CONFIG, dtype="bfloat16", layer_types=[LINEAR, FULL, LINEAR])
    assert hash(config) == hash(dataclasses.replace(config))
    assert (config.num_layers, config.num_full_layers, config.num_linear_layers) == (3, 1, 2)
