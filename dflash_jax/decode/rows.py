"""The row table: how many rows a compiled function may have on a backend.

A matmul's bits depend on its row count, because XLA picks another kernel; they do not depend on a
row's index or on the other rows. So a window is padded to a count from a table within which a
row's bits are equal. The table is a claim; `decode.selfcheck` proves it at start-up on the real
shapes.
"""

from __future__ import annotations

import dataclasses

from dflash_jax.errors import InputError
from dflash_jax.models.delta_rule import BLOCK
from dflash_jax.tree.masks import MAX_ROWS


@dataclasses.dataclass(frozen=True)
class RowPolicy:
    """Fixed tile sizes of one backend; all of them are part of the bits of a reply."""

    row_counts: tuple[int, ...]  # rising; a window takes the first that holds it
    query_tile: int  # rows whose scores are one matmul
    key_chunk: int  # keys of the cache whose scores are one matmul
    prefill_chunk: int  # prompt tokens of one forward

    def __post_init__(self) -> None:
        if self.prefill_chunk < 1 or self.prefill_chunk % BLOCK:
            raise InputError(
                f"row policy: prefill_chunk {self.prefill_chunk} must be a multiple of {BLOCK}, "
                "where recurrent states stand"
            )

    def rows(self, width: int) -> int:
        """Rows of the function that verifies `width` nodes."""
        return next(count for count in self.row_counts if count >= width + 1)


_LARGEST_ONLY = (MAX_ROWS,)
# What `jax.default_backend()` says: "gpu" on CUDA, and the Intel plugins' own names.
_GPUS = ("gpu", "cuda", "sycl", "oneapi", "xpu")


def row_policy(backend: str, jax_version: tuple[int, ...]) -> RowPolicy:
    """The table of a backend, as measured.

    Args:
      backend: `jax.default_backend()`: "cpu", "gpu", "cuda", "sycl", "oneapi".
      jax_version: such as (0, 10, 2).

    Raises:
      InputError: a backend that nothing is known of.
    """
    if backend in _GPUS:
        # Padding costs nothing where a matmul waits for the weights; few, large chunks, since a
        # loop step costs tens of microseconds there.
        return RowPolicy(_LARGEST_ONLY, MAX_ROWS, 2048, 256)
    if backend != "cpu":
        raise InputError(f"no row table for JAX's backend {backend!r}: run on cpu, xpu or cuda")
    # jax 0.5.0: a row's bits are equal from 12 rows on; newer ones: from 2 rows on, 1 row differs.
    # A padding row costs some 2 % of a round, a row count more some 14 s of compiling.
    counts = (2, 4, 8, 12, 16) if jax_version >= (0, 10) else (12, 16)
    return RowPolicy(counts, 4, 128, 128)


def safest(policy: RowPolicy) -> RowPolicy:
    """One row count for every width: what is left when a table proves wrong."""
    return dataclasses.replace(policy, row_counts=_LARGEST_ONLY, query_tile=MAX_ROWS)
