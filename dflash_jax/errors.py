"""The one exception that a user may cause, and how an entry point shows it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


class InputError(Exception):
    """Bad input: a flag, a file, a checkpoint, a prompt.

    The message is one line that names the input and the remedy.
    """


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Entry points wrap their work in this: an `InputError` becomes one line and exit status 2."""
    try:
        yield
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
