"""The row table of each backend, and what `prepare` tries when a table proves wrong."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import pytest

from dflash_jax.decode.rows import RowPolicy, row_policy, safest
from dflash_jax.decode.selfcheck import SelfCheck
from dflash_jax.engine import decoder
from dflash_jax.engine.smoke import tiny_models
from dflash_jax.errors import InputError
from dflash_jax.platform import DETERMINISTIC_OPTIONS

GPUS = ("gpu", "cuda", "sycl", "oneapi", "xpu")


@pytest.mark.parametrize("backend", GPUS)
def test_gpus_have_one_row_count(backend: str) -> None:
    policy = row_policy(backend, (0, 5, 0))
    assert {policy.rows(width) for width in range(16)} == {16}
    assert policy == safest(policy)


@pytest.mark.parametrize(
    ("version", "rows"), [((0, 5, 0), 12), ((0, 10, 0), 2), ((0, 10, 2), 2), ((0, 11, 2), 2)]
)
def test_the_cpus_row_counts_follow_its_version(version: tuple[int, ...], rows: int) -> None:
    policy = row_policy("cpu", version)
    assert policy.rows(0) == rows
    assert policy.rows(15) == 16
    assert all(width < policy.rows(width) <= 16 for width in range(16))


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(InputError, match="no row table for JAX's backend 'tpu'"):
        row_policy("tpu", (0, 10, 2))


class Attempts:
    """Stands in for compiling and checking: the first `failing` attempts are not exact."""

    def __init__(self, failing: int) -> None:
        self.failing = failing
        self.made: list[tuple[RowPolicy, Any]] = []

    def __call__(self, spec, params, drafter, widths, progress, options, say) -> Any:
        del params, drafter, progress
        self.made.append((spec.policy, options))
        differences = ("width 3, greedy chain: k",) if len(self.made) <= self.failing else ()
        return SimpleNamespace(check=SelfCheck(widths, differences), prices=[])


def prepare(
    monkeypatch: pytest.MonkeyPatch, backend: str, failing: int, lines: list[str]
) -> list[tuple[RowPolicy, Any]]:
    attempts = Attempts(failing)
    monkeypatch.setattr(decoder, "_compiled", attempts)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    target = tiny_models().target
    decoder.prepare(target, {}, None, vocab_size=9, context_limit=64, say=lines.append)
    return attempts.made


def test_an_exact_table_needs_no_second_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    for backend in ("cpu", *GPUS):
        made = prepare(monkeypatch, backend, 0, lines)
        assert made == [(row_policy(backend, jax.__version_info__), None)]
    assert lines == []


def test_the_cpu_falls_back_to_one_row_count_aloud(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    table = row_policy("cpu", jax.__version_info__)
    made = prepare(monkeypatch, "cpu", 1, lines)
    assert made == [(table, None), (safest(table), None)]
    (line,) = lines
    assert line.startswith("windows of [")
    assert "not exact here (width 3, greedy chain: k)" in line
    assert line.endswith("trying every window padded to 16 rows instead")


@pytest.mark.parametrize("backend", GPUS)
def test_a_gpu_falls_back_to_deterministic_kernels_aloud(
    monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    lines: list[str] = []
    table = row_policy(backend, jax.__version_info__)
    made = prepare(monkeypatch, backend, 1, lines)
    assert made == [(table, None), (table, DETERMINISTIC_OPTIONS)]
    assert "trying deterministic kernels (slower)" in lines[0]


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_when_nothing_is_exact_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    lines: list[str] = []
    with pytest.raises(InputError, match="this backend cannot decode exactly"):
        prepare(monkeypatch, backend, 2, lines)
    assert len(lines) == 1


def test_compiler_options_reach_the_compiler() -> None:
    program = decoder.build_programs(
        decoder.DecodeSpec(tiny_models().target, None, 64, row_policy("cpu", (0, 10)), 9),
        tiny_models().target_params,
        None,
        0,
    ).verify[0]
    with pytest.raises(Exception, match="no_such_option"):
        program.compile({"no_such_option": True})
    # An option for GPUs that the CPU's compiler knows and does not heed.
    assert program.compile(DETERMINISTIC_OPTIONS) is not None
