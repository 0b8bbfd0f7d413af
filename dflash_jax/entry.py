"""How a script starts: its flags parsed, and whatever is wrong with them said in one line."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable

from absl import app, flags

from dflash_jax.errors import InputError, one_line_errors

# What running a config file, or overriding its values, raises when something is wrong in it.
_CONFIG_ERRORS = (
    AttributeError,
    ImportError,
    KeyError,
    NameError,
    OSError,
    SyntaxError,
    TypeError,
    ValueError,
)


def run(main: Callable[[list[str]], None]) -> None:
    """`absl.app.run`, with bad input as one line and exit status 2 instead of a traceback."""

    def guarded(argv: list[str]) -> None:
        with one_line_errors():
            main(argv)

    if isinstance(sys.stdout, io.TextIOWrapper):
        # A reply may hold any character; the terminal's encoding need not.
        sys.stdout.reconfigure(errors="backslashreplace")
    app.run(guarded, flags_parser=parse_flags)


def parse_flags(argv: list[str]) -> list[str]:
    """The program's name; takes flags alone, so that a forgotten `--` is not ignored."""
    with one_line_errors():
        try:
            rest = flags.FLAGS(argv)
        except flags.Error as error:
            raise InputError(_one_line(error)) from error
        except _CONFIG_ERRORS as error:
            kind = type(error).__name__
            raise InputError(f"--config: {kind} in it: {_one_line(error)}") from error
        if len(rest) > 1:
            raise InputError(f"unexpected argument {rest[1]!r}: flags start with --")
        for name in flags.FLAGS:
            try:
                # A config that was not found raises at the first look at any of its attributes.
                hasattr(flags.FLAGS[name].value, "lock")
            except OSError as error:
                raise InputError(f"--{name}: {_one_line(error)}") from error
    return rest


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
