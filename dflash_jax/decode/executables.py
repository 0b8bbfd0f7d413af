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

# (programs that are ready, of how many, how many of all are compiled: the rest was kept on disk).
# Called before the first program too.
Progress = Callable[[int, int, int], None]

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
    progress: Progress = lambda done, total, anew: None,
    options: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Executables:
    """Compiles the programs for some widths, or loads them as an earlier start has kept them.

    Args:
      programs: all of them.
      widths: the widths that will be verified.
      progress: see `Progress`.
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
    progress: Progress = lambda done, total, anew: None,
    options: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Executables by name, compiled or loaded; the arguments are `compile_programs`'."""
    compiled: dict[str, Any] = {}

    def describe(program: Program) -> str:
        return repr((program.name, program.spec, sorted((options or {}).items())))

    def compile_one(program: Program) -> tuple[str, Any]:
        executable, warning = saved_executables.load_or_compile(
            describe(program), program.inputs, lambda: program.compile(options)
        )
        if warning:
            say(f"warning: {program.name}: {warning}")
        return program.name, executable

    kept = sum(saved_executables.is_kept(describe(each), each.inputs) for each in wanted)
    progress(0, len(wanted), len(wanted) - kept)
    pool = concurrent.futures.ThreadPoolExecutor(_COMPILERS)
    try:
        with saved_executables.kept_here_alone():
            jobs = [pool.submit(compile_one, program) for program in wanted]
            for job in concurrent.futures.as_completed(jobs):
                name, executable = job.result()
                compiled[name] = executable
                _return_freed_memory()
                progress(len(compiled), len(wanted), len(wanted) - kept)
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
