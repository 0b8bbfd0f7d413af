"""Packed parameters: the same tree back, bit for bit, from few buffers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.decode.packed import pack
from dflash_jax.models.layers import Int8Matrix
from tests.decode import tiny


def test_a_packed_tree_comes_back_bit_for_bit():
    rng = np.random.default_rng(0)
    tree = {
        "a": {"weight": jnp.asarray(rng.normal(size=(3, 4)), jnp.float32), "bias": jnp.arange(3.0)},
        "int8": Int8Matrix(jnp.ones((2, 4), jnp.int8), jnp.asarray([0.5, 2.0])),
        "kernel": jnp.asarray(rng.normal(size=(2, 2, 5)), jnp.bfloat16),
        "ids": jnp.asarray([5, 1, 3], jnp.int32),
        "scalar": jnp.float32(7),
    }
    unpacked = jax.jit(lambda packed: packed.unpack())(pack(tree))
    assert jax.tree.structure(unpacked) == jax.tree.structure(tree)
    for got, want in zip(jax.tree.leaves(unpacked), jax.tree.leaves(tree), strict=True):
        assert tiny.same_bits(got, want)


def test_only_matrices_are_buffers_of_their_own():
    params = tiny.target_params()
    matrices = [leaf for leaf in jax.tree.leaves(params) if leaf.ndim == 2]
    assert len(jax.tree.leaves(params)) > len(matrices) + 1
    assert len(jax.tree.leaves(pack(params))) == len(matrices) + 1


def test_shapes_alone_can_be_packed():
    shapes = jax.eval_shape(lambda: pack(tiny.target_params()))
    assert jax.tree.structure(shapes) == jax.tree.structure(pack(tiny.target_params()))
