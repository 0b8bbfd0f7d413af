"""A hybrid's functions lower for each platform, donate their state, and use what the plugin has."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from dflash_jax.tree.masks import MAX_ROWS, WINDOW_COLUMNS
from tests import tiny_qwen3_5 as tiny
from tests.platform import portability


@functools.cache
def decoder(backend: str) -> tiny.Decoder:
    params = tiny.random_params(tiny.CONFIG)
    return tiny.Decoder(tiny.CONFIG, params, chunk=256, capacity=4096, backend=backend)


@pytest.mark.parametrize("backend", ["cpu", "sycl"])
@pytest.mark.parametrize("name", ["prefill", "verify"])
def test_hybrids_lower_everywhere(backend, name):
    d = decoder(backend)
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    stream = jax.eval_shape(d.new_stream)
    if name == "prefill":
        inputs = (stream, jax.ShapeDtypeStruct((d.policy.prefill_chunk,), jnp.int32), scalar)
    else:
        window = jax.ShapeDtypeStruct((d.policy.rows(15), WINDOW_COLUMNS), jnp.int32)
        inputs = (stream, window, jax.ShapeDtypeStruct((MAX_ROWS,), jnp.int32), scalar)
    function = functools.partial(getattr(tiny, name), d)
    assert portability.problems(function, inputs, donated=(0,)) == []
