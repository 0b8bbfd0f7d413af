"""Every compiled function of a round lowers for each platform, without what the plugin lacks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import jax
import pytest

from dflash_jax.checkpoints.drafter import Drafter
from dflash_jax.decode.programs import DecodeSpec, Program, Programs, build_programs
from dflash_jax.decode.rows import RowPolicy, row_policy
from dflash_jax.engine.smoke import TinyModels, tiny_models
from dflash_jax.models.dflash2 import init_params
from dflash_jax.tree.growth import CAP
from tests.platform import portability

CPU, GPU = row_policy("cpu", (0, 10, 2)), row_policy("sycl", (0, 5, 0))
DTYPES = ("float32", "bfloat16")


@functools.cache
def programs(dtype: str, policy: RowPolicy) -> Programs:
    models = tiny_models(dtype)
    return described(models, models.drafter, policy)


def described(
    models: TinyModels, drafter: Drafter, policy: RowPolicy, top_k: int | None = None
) -> Programs:
    vocab_size = models.target.vocab_size
    spec = DecodeSpec(models.target, drafter.config, 512, policy, vocab_size, top_k)
    return build_programs(spec, models.target_params, drafter.params, CAP)


def names(policy: RowPolicy) -> list[str]:
    """Widths padded to one row count share a function."""
    return ["prefill", "extend", "draft", *(f"verify_{n}_rows" for n in policy.row_counts)]


def selected() -> Iterator[tuple[str, RowPolicy, str]]:
    """(dtype, policy, program)."""
    for dtype in DTYPES:
        for policy in (CPU, GPU):
            yield from ((dtype, policy, name) for name in names(policy))


def id_of(value: object) -> str:
    if isinstance(value, RowPolicy):
        return "cpu" if value == CPU else "gpu"
    return str(value)


def problems(program: Program) -> list[str]:
    return portability.problems(program.function, program.inputs, program.donated)


@pytest.mark.parametrize(("dtype", "policy", "name"), list(selected()), ids=id_of)
def test_each_function_is_portable(dtype: str, policy: RowPolicy, name: str) -> None:
    assert problems(named(programs(dtype, policy), name)) == []


def named(all_programs: Programs, name: str) -> Program:
    (program,) = (p for p in all_programs.all() if p.name == name)
    return program


@pytest.mark.parametrize("policy", [CPU, GPU], ids=id_of)
def test_those_are_all_functions_of_all_widths(policy: RowPolicy) -> None:
    described_programs = programs("float32", policy)
    assert sorted(p.name for p in described_programs.all()) == sorted(names(policy))
    assert len(described_programs.verify) == CAP + 1
    assert {p.name for p in described_programs.verify} <= set(names(policy))


def test_a_drafter_without_selector_and_convolutions_is_portable() -> None:
    models = tiny_models()
    config = dataclasses.replace(
        models.drafter.config,
        selector_rank=0,
        selector_top_k=0,
        conv_kernel_size=0,
        conv_group_size=0,
    )
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    drafter = Drafter(config, params, "shapes")
    draft = described(models, drafter, GPU, top_k=4).draft
    assert draft is not None
    assert problems(draft) == []


def test_a_cache_is_updated_in_place_on_the_intel_platforms() -> None:
    for name in names(GPU):
        program = named(programs("bfloat16", GPU), name)
        module = portability.lower(program.function, program.inputs, "sycl", program.donated)
        cache = 2  # keys and values
        assert module.count("tf.aliasing_output") >= cache, name
