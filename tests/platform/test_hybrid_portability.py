"""A hybrid's functions lower for each platform, donate their state, and use what the plugin has."""

from __future__ import annotations

import functools

import jax
import pytest

from dflash_jax.decode.programs import DecodeSpec, Program, build_programs
from dflash_jax.decode.rows import row_policy
from dflash_jax.tree.growth import CAP
from tests import tiny_qwen3_5 as tiny
from tests.platform import portability


@functools.cache
def programs(backend: str) -> dict[str, Program]:
    policy = row_policy(backend, (0, 10))
    spec = DecodeSpec(tiny.CONFIG, None, 512, policy, tiny.CONFIG.vocab_size)
    params = tiny.random_params(tiny.CONFIG)["params"]
    built = build_programs(spec, params, None, CAP)
    return {"prefill": built.prefill, "verify": built.verify[CAP]}


@pytest.mark.parametrize("backend", ["cpu", "sycl"])
@pytest.mark.parametrize("name", ["prefill", "verify"])
def test_hybrids_lower_everywhere(backend, name):
    program = programs(backend)[name]
    assert portability.problems(program.function, program.inputs, program.donated) == []


@pytest.mark.parametrize("name", ["prefill", "verify"])
def test_cache_and_states_are_updated_in_place(name):
    program = programs("sycl")[name]
    module = portability.lower(program.function, program.inputs, "sycl", program.donated)
    cache, lengths = 2, 2
    states = len(jax.tree.leaves(program.inputs[1])) - cache - lengths
    assert states == 5 * tiny.CONFIG.num_linear_layers
    assert module.count("tf.aliasing_output") >= cache + states
