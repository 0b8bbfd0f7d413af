"""Safetensors of a Hugging Face directory, single or sharded, as a `names.TensorSource`."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from dflash_jax.checkpoints.json_values import read_json, typed
from dflash_jax.errors import InputError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Stored dtypes whose numbers are the weights themselves; any other is a quantised checkpoint.
PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")


class SafetensorsSource:
    """The tensors of `model.safetensors`, or of the shards that the index names.

    Raises:
      InputError: no safetensors, a missing shard, a truncated file, named in the message.
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
    """The files that hold a directory's tensors: the single file, or the index's shards.

    As in transformers the single file counts where there are both, unless the index lists it too.
    """
    single = directory / SINGLE_FILE
    files = sorted(set(_listed(directory).values()))
    if single.is_file() and single not in files:
        return [single]
    if not files:
        raise InputError(f"{directory}: holds neither {SINGLE_FILE} nor {INDEX_FILE}")
    for file in files:
        if not file.is_file():
            raise InputError(f"{directory / INDEX_FILE}: shard {file.name} is missing")
    return files


def _listed(directory: pathlib.Path) -> dict[str, pathlib.Path]:
    """Where the index, if there is one, has each tensor."""
    path = directory / INDEX_FILE
    if not path.is_file():
        return {}
    weight_map = typed(read_json(path), "weight_map", dict, str(path), {})
    if not weight_map:
        raise InputError(f"{path}: no weight_map")
    label = f"{path}: weight_map"
    return {name: directory / typed(weight_map, name, str, label) for name in weight_map}
