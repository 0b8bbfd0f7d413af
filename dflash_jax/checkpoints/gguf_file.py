"""A GGUF file: its metadata, and its tensors as a `names.TensorSource`."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np

from dflash_jax.errors import InputError

REQUIRED = object()


class _Reader(gguf.GGUFReader):
    """Slices a plain array: a memmap's own slices make the 300,000 of a vocabulary take seconds."""

    @property  # type: ignore[override]
    def data(self) -> np.ndarray:
        return self._data

    @data.setter
    def data(self, mapped: np.ndarray) -> None:
        self._data = np.asarray(mapped)


class GGUFFile:
    """Metadata by key, and tensors in any type that `gguf` dequantises.

    Raises:
      InputError: no GGUF, truncated, or unreadable; one line that names the file.
    """

    def __init__(self, path: pathlib.Path):
        self.path = path
        if not path.is_file():
            raise InputError(f"{path}: no such file")
        try:
            reader = _Reader(path)
        except (OSError, ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
            # The reader meets a truncated or foreign file wherever its next slice comes up short.
            raise InputError(f"{path}: not a readable GGUF file, or truncated") from error
        self._fields = reader.fields
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}

    @property
    def label(self) -> str:
        return str(self.path)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        # GGUF lists the fastest dimension first.
        return {
            name: tuple(int(size) for size in reversed(tensor.shape))
            for name, tensor in self._tensors.items()
        }

    def read(self, name: str) -> np.ndarray:
        """The tensor dequantised, in float32."""
        tensor = self._tensors[name]
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise InputError(f"{self.path}: tensor {name}: {error}") from error
        return values.reshape(self.shapes()[name])

    def has(self, key: str) -> bool:
        return key in self._fields

    def value(self, key: str, kind: type, default: Any = REQUIRED) -> Any:
        """Metadata `key` as `kind` (bool, int, float, str or list).

        Raises:
          InputError: the key is absent without a default, or of another kind.
        """
        field = self._fields.get(key)
        if field is None:
            if default is REQUIRED:
                raise InputError(f"{self.path}: metadata key {key} is missing")
            return default
        try:
            value = field.contents()
        except ValueError as error:
            raise InputError(f"{self.path}: metadata key {key} is unreadable") from error
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise InputError(
                f"{self.path}: metadata key {key} should be {kind.__name__}, "
                f"it is {type(value).__name__}"
            )
        return value
