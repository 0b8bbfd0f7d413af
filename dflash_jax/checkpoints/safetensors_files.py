"""Safetensors of a Hugging Face directory, single or sharded, as a `names.TensorSource`."""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from dflash_jax.errors import InputError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Stored dtypes whose numbers are the weights themselves; any other is a quantised checkpoint.
PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """A JSON object. InputError when the file is missing, unreadable or something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


@contextlib.contextmanager
def refused_kinds(path: pathlib.Path) -> Iterator[None]:
    """Reading a JSON file's values inside: one of a kind that it cannot have is an InputError."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise InputError(f"{path}: a value of the wrong kind ({error})") from error


class SafetensorsSource:
    """The tensors of `model.safetensors`, or of the shards that the index names.

    Raises:
      InputError: no safetensors, a missing shard, or a truncated file, named in the message.
    """

    def __init__(self, directory: pathlib.Path):
        self.directory = directory
        self._file_of: dict[str, pathlib.Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in tensor_files(directory):
            self._add(path)

    @property
    def label(self) -> str:
        return str(self.directory)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str) -> np.ndarray:
        path = self._file_of[name]
        try:
            with safe_open(path, framework="np") as file:
                return file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise InputError(f"{path}: cannot read tensor {name} ({error})") from error

    def _add(self, path: pathlib.Path) -> None:
        try:
            with safe_open(path, framework="np") as file:
                for name in file.keys():  # noqa: SIM118 (no dict: it cannot be iterated)
                    self._add_tensor(path, name, file.get_slice(name))
        except (OSError, SafetensorError) as error:
            raise InputError(f"{path}: no readable safetensors file ({error})") from error

    def _add_tensor(self, path: pathlib.Path, name: str, view: Any) -> None:
        if view.get_dtype() not in PLAIN_DTYPES:
            raise InputError(
                f"{path}: tensor {name} is stored as {view.get_dtype()}; "
                f"only {', '.join(PLAIN_DTYPES)} are read"
            )
        if name in self._file_of:
            raise InputError(f"{path}: tensor {name} is in {self._file_of[name].name} too")
        self._file_of[name] = path
        self._shapes[name] = tuple(view.get_shape())


def tensor_files(directory: pathlib.Path) -> list[pathlib.Path]:
    """The files that hold a directory's tensors: the index's shards, else the single file."""
    index_path = directory / INDEX_FILE
    if not index_path.is_file():
        if not (directory / SINGLE_FILE).is_file():
            raise InputError(f"{directory}: holds neither {SINGLE_FILE} nor {INDEX_FILE}")
        return [directory / SINGLE_FILE]
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index_path}: no weight_map")
    files = [directory / str(name) for name in sorted(set(weight_map.values()))]
    for file in files:
        if not file.is_file():
            raise InputError(f"{index_path}: shard {file.name} is missing")
    return files
