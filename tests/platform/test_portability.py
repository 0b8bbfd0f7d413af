"""The functions of a round contain nothing that the Intel plugin's XLA lacks, on any platform."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jaxlib.mlir.dialects import stablehlo

from dflash_jax import plugins
from tests.platform import portability

F32 = jax.ShapeDtypeStruct((16, 64), jnp.float32)
I8 = jax.ShapeDtypeStruct((64, 64), jnp.int8)
INDEX = jax.ShapeDtypeStruct((), jnp.int32)


def int8_matmul(x: jax.Array, y: jax.Array) -> jax.Array:
    return lax.dot_general(x, y, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)


PORTABLE = {
    "matmul": (lambda x: jax.nn.softmax(x.astype(jnp.bfloat16) @ x.T), (F32,)),
    "int8 matmul": (int8_matmul, (I8, I8)),
    "top-k": (lambda x: lax.top_k(x, 4), (F32,)),
    "gelu": (lambda x: jax.nn.gelu(x, approximate=False), (F32,)),
    "loop": (lambda n, x: lax.fori_loop(0, n, lambda _, x: x.cumsum(0), x), (INDEX, F32)),
    "update": (lambda n, x: lax.dynamic_update_slice(x, x[:2], (n, 0)), (INDEX, F32)),
}


@pytest.mark.parametrize("name", PORTABLE)
def test_portable_functions_pass(name: str) -> None:
    assert portability.problems(*PORTABLE[name]) == []


def double_kernel(x_ref: Any, out_ref: Any) -> None:
    out_ref[...] = x_ref[...] * 2


def pallas_double(x: jax.Array) -> jax.Array:
    return pl.pallas_call(double_kernel, out_shape=x)(x)


NOT_PORTABLE = {
    "LAPACK": (lambda x: jnp.linalg.qr(x), (F32,), "sycl: custom call Qr"),
    "approximate top-k": (lambda x: lax.approx_max_k(x, 4), (F32,), "custom call ApproxTopK"),
    "callback": (
        lambda x: jax.pure_callback(lambda x: x, F32, x),
        (F32,),
        "sycl: does not lower: `EmitPythonCallback` not supported on sycl",
    ),
    "Pallas without a twin": (pallas_double, (F32,), "sycl: does not lower"),
}


@pytest.mark.parametrize("name", NOT_PORTABLE)
def test_other_functions_fail(name: str) -> None:
    function, inputs, problem = NOT_PORTABLE[name]
    found = portability.problems(function, inputs)
    assert any(problem in line for line in found), found


def test_a_donated_buffer_that_is_not_used_fails() -> None:
    found = portability.problems(lambda x: x[:2], (F32,), donated=(0,))
    assert len(found) == len(portability.PLATFORMS)
    assert found[0].startswith("sycl: does not lower: Some donated buffers were not usable")


def test_an_op_or_a_version_that_the_plugin_lacks_fails() -> None:
    module = portability.lower(lambda x: jnp.tan(jnp.sort(x)), (F32,), "sycl")
    assert portability.module_problems(module) == []
    names = portability.NAMES - {"sort_v1"}
    assert portability.module_problems(module, names=names) == ["op sort_v1"]
    # stablehlo.tan came with 1.4.0
    (problem,) = portability.module_problems(module, version="1.3.0")
    assert problem.startswith("not in StableHLO 1.3.0")


def test_facts_agree_with_the_installed_plugin() -> None:
    plugin = plugins.find("xpu")
    if plugin is None or plugin.library is None or plugin.version != "0.7.0":
        pytest.skip("intel-extension-for-openxla 0.7.0 is not in this environment")
    code = plugin.library.read_bytes()
    names = set(re.findall(rb"vhlo\.([a-z_0-9]+_v[0-9]+)\0", code))
    assert {name.decode() for name in names} == portability.NAMES
    for target in portability.CUSTOM_CALLS:
        assert b"\0" + target.encode() + b"\0" in code
    version = stablehlo.get_version_from_compatibility_requirement(
        stablehlo.StablehloCompatibilityRequirement.WEEK_12
    )
    assert version == portability.STABLEHLO_VERSION
