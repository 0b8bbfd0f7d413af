"""What a start says while its programs are loaded or compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import rich.console
import rich.progress

from dflash_jax.decode.executables import Progress


@contextlib.contextmanager
def program_progress(console: rich.console.Console) -> Iterator[Progress]:
    """A line that says which of the two it is; then a bar, or without a terminal a line each."""
    dumb = not console.is_terminal
    with rich.progress.Progress(console=console, transient=True, disable=dumb) as bar:
        task = bar.add_task("programs", total=None)

        def show(done: int, total: int, anew: int) -> None:
            if not done:
                console.print(_announcement(total, anew))
            elif anew and dumb:
                console.print(f"{done} of {total} programs ready")
            bar.update(task, completed=done, total=total)

        yield show


def _announcement(total: int, anew: int) -> str:
    if anew:
        return f"compiling {anew} of {total} programs: seconds to minutes each"
    return f"loading {total} compiled programs: seconds"
