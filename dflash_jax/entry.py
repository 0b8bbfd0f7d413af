"""How a script starts: its flags parsed, and whatever is wrong with them said in one line."""

from __future__ import annotations

import contextlib
import io
import math
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

from absl import app, flags
from ml_collections import config_flags
from ml_collections.config_flags import config_path

from dflash_jax.errors import InputError, one_line_errors

# What running a config file, or overriding its values, raises when something is wrong in it.
_CONFIG_ERRORS = (
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    OSError,
    SyntaxError,
    TypeError,
    ValueError,
)


def config_flag(default: str | None, help_text: str) -> flags.FlagHolder[Any]:
    """The flag `--config`. ml_collections reads a default and its overrides here already."""
    with one_line_errors(), _config_errors(default):
        return config_flags.DEFINE_config_file("config", default, help_text)


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
        with _config_errors():
            rest = flags.FLAGS(argv)
        if len(rest) > 1:
            raise InputError(f"unexpected argument {rest[1]!r}: flags start with --")
        for name in flags.FLAGS:
            _check_flag(name, argv)
    return rest


def _check_flag(name: str, argv: list[str]) -> None:
    """What absl and ml_collections let pass."""
    flag = flags.FLAGS[name]
    try:
        # A config that was not found raises at the first look at any of its attributes.
        hasattr(flag.value, "lock")
    except OSError as error:
        raise InputError(f"--{name}: {_one_line(error)}") from error
    if isinstance(flag.value, float) and not math.isfinite(flag.value):
        raise InputError(f"--{name}={flag.value}: give a finite number")
    if isinstance(flag, flags.MultiFlag) and len(_found(re.escape(name), argv)) > 1:
        # ml_collections would join them, where any other flag's last value counts.
        raise InputError(f"--{name} is given more than once: give one tuple, such as '(1,2)'")


@contextlib.contextmanager
def _config_errors(default: str | None = None) -> Iterator[None]:
    try:
        yield
    except flags.Error as error:
        raise InputError(_one_line(error)) from error
    except _CONFIG_ERRORS as error:
        if isinstance(error, OSError) and error.errno:  # of --help's output
            raise
        _refuse_unknown_field(default)
        kind = type(error).__name__
        raise InputError(f"--config: {kind} in it: {_one_line(error)}") from error


def _refuse_unknown_field(default: str | None) -> None:
    """Raises InputError for an override of what the config does not have."""
    with contextlib.suppress(*_CONFIG_ERRORS):  # the file's own
        path = [default, *_found("config[=\n](.*)")][-1]
        alone = flags.FlagValues()
        config_flags.DEFINE_config_file("config", path, flag_values=alone, sys_argv=[""])
        for name in _found(r"config\.([^=\n]*)"):
            try:
                config_path.get_type(name, alone["config"].value)
            except (AttributeError, LookupError, TypeError, ValueError) as error:
                raise InputError(f"--config.{name}: {path} has no such field") from error


def _found(pattern: str, argv: list[str] | None = None) -> list[str]:
    """What follows the dashes of the flags, --flagfile's included, that begin so."""
    given = flags.FLAGS.read_flags_from_files(argv or sys.argv, force_gnu=False)
    return re.findall(rf"^--?(?:no)?{pattern}", "\n".join(given), re.MULTILINE)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
