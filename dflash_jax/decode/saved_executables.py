"""Compiled programs on disk, whole: a later start loads them without tracing anything.

XLA's own cache saves compiling alone; tracing and lowering a model's programs takes longer than
reading them. They lie in JAX's cache directory (`platform.initialize` sets it: private to the user,
one for each set of versions and CPU), under a key of everything else that they depend on, this
package's source included. Without that directory nothing is kept.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pathlib
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.experimental import serialize_executable

_FOLDER = "executables"
_MOST_BYTES = 2 * 2**30  # beyond that, the programs that were not loaded for longest are deleted
_PACKAGE = pathlib.Path(__file__).parent.parent


def load_or_compile(
    description: str, inputs: tuple[Any, ...], compile_it: Callable[[], Any]
) -> tuple[Any, str]:
    """The executable, and a warning for the user or "".

    Args:
      description: all that the program depends on besides the shapes of `inputs`.
      inputs: pytrees of jax.ShapeDtypeStruct, its positional arguments.
      compile_it: makes it when there is none on disk.
    """
    path = _path(description, inputs)
    if path is None:
        return compile_it(), ""
    with contextlib.suppress(FileNotFoundError):
        try:
            return _load(path, inputs), ""
        except FileNotFoundError:
            raise
        except Exception:  # noqa: BLE001 (whatever a damaged file makes pickle and XLA say)
            path.unlink(missing_ok=True)
            warning = f"compiling anew: {path} was damaged"
            return _compiled_and_saved(path, compile_it, warning)
    return _compiled_and_saved(path, compile_it, "")


def is_kept(description: str, inputs: tuple[Any, ...]) -> bool:
    """Whether `load_or_compile` finds it on disk."""
    path = _path(description, inputs)
    return path is not None and path.exists()


@contextlib.contextmanager
def kept_here_alone() -> Iterator[None]:
    """Keeps JAX's own cache from writing what is compiled inside.

    Twice the disk for nothing; and an executable that XLA has loaded from there serialises without
    its code (jax 0.10.2: "Function ... not found" when it runs).
    """
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, float("inf"))
    try:
        yield
    finally:
        jax.config.update(name, before)


def _load(path: pathlib.Path, inputs: tuple[Any, ...]) -> Any:
    payload, out_tree = pickle.loads(path.read_bytes())
    with contextlib.suppress(OSError):
        path.touch()
    in_tree = jax.tree.structure((inputs, {}))
    return serialize_executable.deserialize_and_load(payload, in_tree, out_tree)


def _compiled_and_saved(
    path: pathlib.Path, compile_it: Callable[[], Any], warning: str
) -> tuple[Any, str]:
    executable = compile_it()
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        payload, _, out_tree = serialize_executable.serialize(executable)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        temporary.write_bytes(pickle.dumps((payload, out_tree)))
        temporary.replace(path)
        _prune(path.parent)
    except (OSError, ValueError, jax.errors.JaxRuntimeError) as error:
        warning = f"not kept for the next start in {path.parent}: {error}"
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    return executable, warning


def _prune(folder: pathlib.Path) -> None:
    """Other versions of this package, other models: deleted, the longest unused first."""
    files = sorted(
        ((path, path.stat()) for path in folder.iterdir()),
        key=lambda file: file[1].st_mtime,
        reverse=True,
    )
    total = 0
    for path, status in files:
        total += status.st_size
        if total > _MOST_BYTES:
            path.unlink(missing_ok=True)


def _path(description: str, inputs: tuple[Any, ...]) -> pathlib.Path | None:
    folder = getattr(jax.config, "jax_compilation_cache_dir", None)
    if not folder:
        return None
    device = jax.devices()[0]
    parts = (
        _source_digest(),
        description,
        str(jax.tree.structure(inputs)),
        str([(leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(inputs)]),
        device.device_kind,
        device.client.platform_version,
        os.environ.get("XLA_FLAGS", ""),
        str(getattr(jax.config, "jax_default_matmul_precision", None)),
    )
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return pathlib.Path(folder) / _FOLDER / key[:32]


@functools.cache
def _source_digest() -> str:
    """Over this package's source files."""
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(path.relative_to(_PACKAGE).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()
