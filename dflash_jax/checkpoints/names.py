"""Explicit name tables: which checkpoint tensor fills which parameter, and nothing else.

A table claims every tensor by name and shape. A tensor that is missing, unclaimed or misshapen is
an `InputError` that names it; a checkpoint is never loaded in part.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from dflash_jax.errors import InputError
from dflash_jax.models.layers import Int8Matrix, int8_rows_and_scale
from dflash_jax.models.targets import TargetConfig

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


Store = Callable[[Path, np.ndarray], Any]


class Opened(NamedTuple):
    """A checkpoint whose config is known and whose tensors are not read yet."""

    config: TargetConfig
    read: Callable[[], dict[str, Any]]  # the parameters


def as_floats(dtype: Any) -> Store:
    """Every tensor as a JAX array of `dtype`."""

    def store(path: Path, tensor: np.ndarray) -> jax.Array:
        # The copy frees the parameter from the mapped file and from the reader's dtype.
        return jax.device_put(np.array(tensor, dtype=dtype, order="C"))

    return store


def as_int8(dtype: Any) -> Store:
    """Matrices named `weight` as an Int8Matrix, the rest as JAX arrays of `dtype`."""
    floats = as_floats(dtype)

    def store(path: Path, tensor: np.ndarray) -> Any:
        if path[-1] == "weight" and tensor.ndim == 2:
            return Int8Matrix(*map(jax.device_put, int8_rows_and_scale(tensor)))
        return floats(path, tensor)

    return store


def load_parameters(
    source: TensorSource,
    table: Sequence[Entry],
    store: Store,
    ignored: Collection[str] = (),
) -> dict[str, Any]:
    """Reads every entry of `table` into a nested dict of what `store` makes of it.

    Neighbouring entries of one path are one parameter, their rows one below the other. Each
    parameter is read and stored before the next, so that the peak is one above the result.
    `ignored` lists, by full name, the tensors that may be there and are not wanted.

    Raises:
      InputError: a tensor is missing, unclaimed, or of another shape.
    """
    check_names(source, table, ignored)
    flat = {}
    for path, entries in itertools.groupby(table, key=lambda entry: entry.path):
        tensors = [_read(source, entry) for entry in entries]
        whole = tensors[0] if len(tensors) == 1 else np.concatenate(tensors)
        # Copies to a device are asynchronous: on a busy machine they would pile up.
        flat[path] = jax.block_until_ready(store(path, whole))
    return nest(flat)


def _read(source: TensorSource, entry: Entry) -> np.ndarray:
    tensor = source.read(entry.name)
    return tensor if entry.transform is None else entry.transform(tensor)


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
