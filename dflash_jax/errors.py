"""The one exception that a user may cause, and how an entry point shows it."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Iterator


class InputError(Exception):
    """Bad input: a flag, a file, a checkpoint, a prompt.

    The message is one line that names the input and the remedy.
    """


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Entry points wrap their work in this: an `InputError` becomes one line and exit status 2.

    Ctrl-C ends the process at once with status 130: threads that compile cannot be interrupted,
    and waiting for them would take half a minute. A reader of the output that has gone (`| head`)
    ends it with status 141, as the shell's own tools do, and without a word; a full disk is
    a line too.
    """
    try:
        try:
            yield
        except InputError as error:
            line = " ".join(str(error).splitlines())  # a value in it may have several
            print(f"error: {line}", file=sys.stderr)
            sys.exit(2)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        os._exit(130)
    except BrokenPipeError:
        _give_up_stdout()
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        _give_up_stdout()
        where = error.filename or "standard output or a file"
        print(f"error: {where}: {error.strerror}: free some space", file=sys.stderr)
        sys.exit(2)


_FULL = (errno.ENOSPC, errno.EDQUOT)


def _give_up_stdout() -> None:
    """What is still buffered must not fail once more when the interpreter ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
