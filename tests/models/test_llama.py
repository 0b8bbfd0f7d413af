"""Parity of Llama and Qwen3 with `transformers` on tiny random models, in float32."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.errors import InputError
from dflash_jax.models.llama import FactorScaling, Llama3Scaling, LlamaConfig

pytest.importorskip("transformers", reason="the oracle is in the test extra")

from dflash_jax.checkpoints import llama_config, llama_names, names
from tests import tiny_llama

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}


class StateDict:
    """A model's own tensors as a `names.TensorSource`."""

    label = "state dict"

    def __init__(self, model):
        self._tensors = {name: value.numpy() for name, value in model.state_dict().items()}

    def shapes(self):
        return {name: value.shape for name, value in self._tensors.items()}

    def read(self, name):
        return self._tensors[name]


def convert(model, dtype="float32") -> tuple[LlamaConfig, dict]:
    description = model.config.to_dict() | {"architectures": [type(model).__name__]}
    config = llama_config.from_hugging_face(description, "config", np.dtype(dtype))
    params = names.load_parameters(
        StateDict(model),
        llama_names.hugging_face_table(config),
        names.as_floats(config.dtype),
        llama_names.hugging_face_ignored(config),
    )
    return config, {"params": params}


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("Llama", {}),
        ("Llama", {"num_key_value_heads": 4}),
        ("Llama", {"num_key_value_heads": 1, "head_dim": 32}),
        ("Llama", {"tie_word_embeddings": True}),
        ("Llama", {"attention_bias": True, "mlp_bias": True}),
        ("Llama", {"rope_parameters": LLAMA3}),
        ("Llama", {"rope_parameters": LINEAR}),
        ("Qwen3", {}),
        ("Qwen3", {"tie_word_embeddings": True, "attention_bias": True, "head_dim": 32}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "plain",
)
def test_logits_and_taps_equal_transformers(kind, overrides):
    model = tiny_llama.hf_model(kind, **overrides)
    tokens = tiny_llama.some_tokens(100)
    expected, hidden_states = tiny_llama.hf_outputs(model, tokens)
    config, params = convert(model)
    logits, out = tiny_llama.forward(config, params, tokens, taps=(1, 0))

    assert np.abs(expected).max() > 1.0
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)
    assert logits.dtype == np.float32
    np.testing.assert_allclose(out.taps[0], hidden_states[2], rtol=0, atol=1e-5)
    np.testing.assert_allclose(out.taps[1], hidden_states[1], rtol=0, atol=1e-5)
    np.testing.assert_allclose(out.hidden, hidden_states[-1], rtol=0, atol=1e-5)


def test_rope_scaling_changes_the_logits():
    """Guards the parity above: scaling that both sides ignored would pass it."""
    tokens = tiny_llama.some_tokens(100)
    logits = [
        tiny_llama.hf_outputs(tiny_llama.hf_model(rope_parameters=rope), tokens)[0]
        for rope in (tiny_llama.ROPE, LLAMA3)
    ]
    assert np.abs(logits[0] - logits[1]).max() > 0.1


def test_taps_of_the_last_block_come_before_the_norm():
    config, params = convert(tiny_llama.hf_model())
    _, out = tiny_llama.forward(config, params, tiny_llama.some_tokens(), taps=(2,))
    weight = params["params"]["norm"]["weight"]
    tap = np.asarray(out.taps[0])
    normed = tap / np.sqrt((tap**2).mean(-1, keepdims=True) + config.rms_norm_eps) * weight
    np.testing.assert_allclose(out.hidden, normed, atol=1e-5)


def test_bfloat16_stays_near_float32():
    model = tiny_llama.hf_model()
    tokens = tiny_llama.some_tokens()
    exact, _ = tiny_llama.forward(*convert(model), tokens)
    logits, out = tiny_llama.forward(*convert(model, jnp.bfloat16), tokens, taps=(0,))
    assert out.hidden.dtype == out.taps[0].dtype == jnp.bfloat16
    assert logits.dtype == np.float32
    assert np.abs(logits - exact).max() < 0.1 * np.abs(exact).max()


def test_init_gives_the_name_table_shapes():
    for overrides in ({}, {"attention_bias": True, "mlp_bias": True, "qk_norm": True}):
        config = dataclasses.replace(convert(tiny_llama.hf_model())[0], **overrides)
        tokens = jnp.zeros((1, 3), jnp.int32)
        rotary = tiny_llama.layers.Rotary(jnp.ones((3, 8)), jnp.zeros((3, 8)))
        shapes = jax.eval_shape(
            lambda c=config, t=tokens, r=rotary: tiny_llama.Llama(c).init(
                jax.random.key(0), t, r, lambda layer, q, k, v: q, method="init_all"
            )
        )
        expected: dict[names.Path, tuple[int, ...]] = {}
        for entry in llama_names.hugging_face_table(config):  # joined maps: rows add up
            rows = entry.shape[0] + expected.get(entry.path, (0,))[0]
            expected[entry.path] = (rows, *entry.shape[1:])
        assert jax.tree.map(lambda leaf: leaf.shape, shapes["params"]) == names.nest(expected)


def test_tap_layer_out_of_range_is_refused():
    config, params = convert(tiny_llama.hf_model())
    with pytest.raises(InputError, match=r"tap layer 3 is not in 0\.\.2"):
        tiny_llama.forward(config, params, tiny_llama.some_tokens(), taps=(3,))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_kv_heads", 3, "multiple"),
        ("head_dim", 15, "even"),
        ("num_layers", 0, "num_layers"),
        ("vocab_size", 2.5, "vocab_size"),
        ("rms_norm_eps", 0.0, "rms_norm_eps"),
        ("dtype", "float16", "dtype"),
    ],
)
def test_config_refuses(field, value, message):
    config = convert(tiny_llama.hf_model())[0]
    with pytest.raises(InputError, match=message):
        dataclasses.replace(config, **{field: value})


def test_config_is_hashable_and_takes_dtype_names():
    config = convert(tiny_llama.hf_model())[0]
    assert dataclasses.replace(config, dtype="bfloat16").dtype == jnp.bfloat16
    assert hash(config) == hash(dataclasses.replace(config, dtype="float32"))


def test_scaling_refuses_what_does_not_fit():
    with pytest.raises(InputError, match="high_freq_factor"):
        Llama3Scaling(8.0, 4.0, 4.0, 64)
    with pytest.raises(InputError, match="2 factors for 3"):
        FactorScaling((1.0, 2.0)).scale(np.ones(3, np.float32))
