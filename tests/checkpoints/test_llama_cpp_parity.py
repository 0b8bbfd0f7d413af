"""Logits against llama.cpp: tiny random GGUFs in float32, and the embedded model as stored."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("transformers", reason="the oracle is in the test extra")

from dflash_jax.bench import llama_cpp_parity as parity
from dflash_jax.checkpoints import embedded_path, load_target
from dflash_jax.errors import InputError
from dflash_jax.models.llama import Llama3Scaling
from tests import tiny_llama

LINEAR = {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0}
FREQUENCIES = tiny_llama.layers.inverse_frequencies(16, 10000.0)
FACTORS = FREQUENCIES / Llama3Scaling(8.0, 1.0, 4.0, 64).scale(FREQUENCIES)


@pytest.mark.parametrize(
    ("kind", "overrides", "written"),
    [
        ("Llama", {}, {}),
        ("Llama", {"attention_bias": True, "tie_word_embeddings": True}, {}),
        ("Llama", {}, LINEAR),
        ("Llama", {}, {"rope_factors": FACTORS}),
        ("Qwen3", {}, {}),
    ],
    ids=["plain", "biased-tied", "linear", "llama3-factors", "qwen3"],
)
def test_tiny_models_equal_llama_cpp(kind, overrides, written, tmp_path):
    model = tiny_llama.hf_model(kind, max_position_embeddings=parity.ROWS, **overrides)
    path = tiny_llama.write_gguf(model, tmp_path / "tiny.gguf", **written)
    tokens = tiny_llama.some_tokens(100, batch=1)[0].tolist()
    theirs = parity.peer_logits(parity.open_peer(path, threads=1), tokens)
    ours = parity.OurLogits(load_target(path))(tokens)
    assert np.abs(theirs).max() > 1.0
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5)


@pytest.mark.model
@pytest.mark.slow
def test_embedded_model_agrees_with_llama_cpp(tmp_path):
    """As stored, llama.cpp rounds activations to 8 bits, and ties fall; dequantised, none do."""
    try:
        path = embedded_path()
    except InputError as error:
        pytest.skip(str(error))
    target = load_target(path)
    text = (pathlib.Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")
    tokens = target.tokenizer.encode(text)
    sequences = [tokens[start : start + 200] for start in (0, 500, 1000)]

    stored = parity.compare(target, parity.open_peer(path, threads=1), sequences)
    assert stored.positions == 600
    assert stored.agreement >= 0.9, stored.disagreements
    assert all(min(d.our_margin, d.their_margin) < 1.0 for d in stored.disagreements)
    assert stored.mean_kl < 0.01

    copy = tmp_path / "float32.gguf"
    parity.converted_copy(path, copy)
    exact = parity.compare(target, parity.open_peer(copy, threads=1), sequences)
    assert exact.agreement >= 0.998, exact.disagreements
    assert all(max(d.our_margin, d.their_margin) < 1e-3 for d in exact.disagreements)
    assert exact.max_abs_difference < 1e-3
