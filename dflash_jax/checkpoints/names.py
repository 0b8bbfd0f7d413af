"""Explicit name tables: which checkpoint tensor fills which parameter, and nothing else.

A table claims every tensor by name and shape. A tensor that is missing, unclaimed or misshapen is
an `InputError` that names it; a checkpoint is never loaded in part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from dflash_jax.errors import InputError

# How many names a message lists before it only counts.
LISTED_NAMES = 5

Path = tuple[str, ...]


class TensorSource(Protocol):
    """Named tensors of a checkpoint, read one at a time."""

    @property
    def label(self) -> str:
        """The file or directory, for messages."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor's shape, row-major; reads no tensor."""

    def read(self, name: str) -> np.ndarray:
        """One tensor as floating-point numbers."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One row of a name table.

    Attributes:
      name: the tensor in the checkpoint.
      path: the parameter, e.g. ("layers_0", "self_attn", "q_proj", "weight").
      shape: of the tensor in the checkpoint.
      transform: applied to the tensor read; its result is the parameter.
    """

    name: str
    path: Path
    shape: tuple[int, ...]
    transform: Callable[[np.ndarray], np.ndarray] | None = None


def load_parameters(
    source: TensorSource,
    table: Sequence[Entry],
    dtype: Any,
    ignored: Collection[str] = (),
) -> dict[str, Any]:
    """Reads every entry of `table` into a nested dict of JAX arrays of `dtype`.

    Each tensor is read and converted before the next, so that the peak is one tensor above the
    result. `ignored` lists, by full name, the tensors that may be there and are not wanted.

    Raises:
      InputError: a tensor is missing, unclaimed, or of another shape.
    """
    check_names(source, table, ignored)
    flat = {}
    for entry in table:
        tensor = source.read(entry.name)
        if entry.transform is not None:
            tensor = entry.transform(tensor)
        # The copy frees the parameter from the mapped file and from the reader's dtype.
        flat[entry.path] = jax.device_put(np.array(tensor, dtype=dtype, order="C"))
    return nest(flat)


def check_names(
    source: TensorSource, table: Sequence[Entry], ignored: Collection[str] = ()
) -> None:
    """Raises InputError unless the source holds exactly the table's tensors, in its shapes."""
    shapes = source.shapes()
    if not shapes:
        raise InputError(f"{source.label}: the checkpoint holds no tensors")
    claimed = {entry.name: entry.shape for entry in table}
    missing = [name for name in claimed if name not in shapes]
    if missing:
        raise InputError(f"{source.label}: missing {_list_names(missing, claimed)}")
    extra = [name for name in shapes if name not in claimed and name not in ignored]
    if extra:
        raise InputError(f"{source.label}: unexpected {_list_names(extra, shapes)}")
    for name, shape in claimed.items():
        if tuple(shapes[name]) != shape:
            raise InputError(
                f"{source.label}: tensor {name} has shape {tuple(shapes[name])}, "
                f"the model needs {shape}"
            )


def _list_names(names: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> str:
    listed = ", ".join(f"{name} {tuple(shapes[name])}" for name in names[:LISTED_NAMES])
    rest = len(names) - LISTED_NAMES
    noun = "tensor" if len(names) == 1 else "tensors"
    return f"{noun} {listed}" + (f" and {rest} more" if rest > 0 else "")


def nest(flat: Mapping[Path, Any]) -> dict[str, Any]:
    """{("a", "b"): x} -> {"a": {"b": x}}."""
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tree
