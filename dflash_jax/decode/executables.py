"""Every program compiled ahead of serving; and counting what compiles after that."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from dflash_jax.decode import saved_executables
from dflash_jax.decode.programs import Program, Programs

# Compilation leaves the interpreter's lock; two at once keep a small machine's cores busy.
_COMPILERS = 2


class Executables(NamedTuple):
    """The compiled programs of a stream."""

    prefill: Any
    verify: dict[int, Any]  # by width
    extend: Any | None
    draft: Any | None


def compile_programs(
    programs: Programs,
    widths: tuple[int, ...],
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
    options: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Executables:
    """Compiles the programs for some widths, or loads them as an earlier start has kept them.

    Args:
      programs: all of them.
      widths: the widths that will be verified.
      progress: called with a program's name, and how many of how many are compiled.
      options: XLA's, by name.
      say: gets a warning about a kept program that is damaged or cannot be kept.
    """
    wanted = [programs.prefill, *dict.fromkeys(programs.verify[width] for width in widths)]
    wanted += [program for program in (programs.extend, programs.draft) if program is not None]
    compiled = compile_all(wanted, progress, options, say)
    return Executables(
        prefill=compiled["prefill"],
        verify={width: compiled[programs.verify[width].name] for width in widths},
        extend=compiled.get("extend"),
        draft=compiled.get("draft"),
    )


def compile_all(
    wanted: Sequence[Program],
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
    options: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Executables by name, compiled or loaded; the arguments are `compile_programs`'."""
    compiled: dict[str, Any] = {}

    def compile_one(program: Program) -> tuple[str, Any]:
        description = repr((program.name, program.spec, sorted((options or {}).items())))
        executable, warning = saved_executables.load_or_compile(
            description, program.inputs, lambda: program.compile(options)
        )
        if warning:
            say(f"warning: {program.name}: {warning}")
        return program.name, executable

    pool = concurrent.futures.ThreadPoolExecutor(_COMPILERS)
    try:
        with saved_executables.kept_here_alone():
            jobs = [pool.submit(compile_one, program) for program in wanted]
            for job in concurrent.futures.as_completed(jobs):
                name, executable = job.result()
                compiled[name] = executable
                _return_freed_memory()
                progress(name, len(compiled), len(wanted))
    finally:
        # Without waiting: after an error or Ctrl-C a running compilation is of no use.
        pool.shutdown(wait=False, cancel_futures=True)
    return compiled


def _return_freed_memory() -> None:
    """Hands back what compiling has freed: glibc would keep it."""
    with contextlib.suppress(OSError, AttributeError):  # another libc
        ctypes.CDLL("libc.so.6").malloc_trim(0)


class CompileCounter:
    """Counts XLA compilations in this process from its creation on."""

    _EVENT = "/jax/core/compile/backend_compile_duration"

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_: Any) -> None:
        del duration_secs
        if event == self._EVENT:
            self.count += 1
