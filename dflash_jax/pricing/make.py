"""Rules by name."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_jax.errors import InputError
from dflash_jax.pricing.baselines import Fixed, Ratio, Tiers
from dflash_jax.pricing.cost import programs_of
from dflash_jax.pricing.renewal import Renewal
from dflash_jax.pricing.rule import Limits, PriorRow, Rule, checked_prior

RULES = ("renewal", "ratio", "band:P", "tiers", "fixed:K")


def make_rule(
    name: str = "renewal",
    cap: int = 15,
    least: int = 0,
    tile: int = 4,
    prior: Sequence[PriorRow] | None = None,
    *,
    clock: str = "lone",
) -> Rule:
    """A width rule.

    name: `renewal`; `ratio`, the reference thread's; `band:P`, its variant that takes the widest
    width within P percent of the best; `tiers`; `fixed:K`. prior: warm-up timings, rows of
    (width, context_length, ms), or None; neighbouring widths with equal timings at every context
    are taken to run one program, and cost the same. The other arguments: see `Limits`.

    With a cap below 2 nodes there is nothing to choose: the width is the cap, whatever the name.
    Nor has `renewal` anything to choose if all widths run one program, as on a GPU: it takes the
    whole tree.
    Raises `InputError` for an unknown name or a value out of range.
    """
    limits = Limits(cap=cap, least=least, tile=tile, clock=clock)
    rows = checked_prior(prior, cap)
    kind, _, value = name.partition(":")
    if kind in ("band", "fixed"):
        number = _number(name, kind, value, cap)
    elif name not in ("renewal", "ratio", "tiers"):
        raise _unknown(name)
    if kind == "fixed":
        return Fixed(name, limits, int(number))
    if cap < 2:
        return Fixed(name, limits, cap)
    if kind == "band":
        return Ratio(name, limits, rows, band=number / 100.0)
    if kind == "ratio":
        return Ratio(name, limits, rows)
    if kind == "tiers":
        return Tiers(name, limits)
    if programs_of(rows, cap) == [cap]:
        return Fixed(name, limits, cap)
    return Renewal(limits, rows)


def _number(name: str, kind: str, value: str, cap: int) -> float:
    """The P of band:P (0 to 100) or the K of fixed:K (0 to cap)."""
    try:
        number = float(value) if kind == "band" else float(int(value))
    except ValueError as error:
        raise _unknown(name) from error
    most = 100.0 if kind == "band" else float(cap)
    if not 0.0 <= number <= most:
        raise InputError(f"rule {name!r}: give {kind}:0 to {kind}:{most:g}")
    return number


def _unknown(name: str) -> InputError:
    return InputError(
        f"unknown rule {name!r}: give one of {', '.join(RULES)} "
        "(P a percentage, K a width up to the cap)"
    )
