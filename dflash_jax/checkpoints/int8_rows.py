"""Matrices as int8 with one float32 scale a row: a quarter of float32, for small drafters.

A matrix `name` [rows, columns] of dtype I8 is stored beside `name_scale` [rows]; its value is
int8 · scale. Readers see the float matrix alone.
"""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np

from dflash_jax.checkpoints.safetensors_files import SafetensorsSource
from dflash_jax.errors import InputError
from dflash_jax.models.layers import int8_rows_and_scale

SCALE = "_scale"


def encode(name: str, matrix: np.ndarray) -> dict[str, np.ndarray]:
    """The two stored tensors of a float matrix [rows, columns], rounded to nearest."""
    values, scale = int8_rows_and_scale(matrix)
    return {name: values, name + SCALE: scale}


class Int8RowsSource(SafetensorsSource):
    """Safetensors whose matrices may be int8, and whose tensors named in `integers` are int32.

    Raises:
      InputError: as `SafetensorsSource`, and where an int8 matrix has no fitting scale.
    """

    def __init__(self, directory: pathlib.Path, integers: tuple[str, ...] = ()):
        self._integers = integers
        self._int8: set[str] = set()
        super().__init__(directory)
        for name in sorted(self._int8):
            rows = self._shapes[name][:1]
            if len(self._shapes[name]) != 2 or self._shapes.pop(name + SCALE, None) != rows:
                raise InputError(
                    f"{self.label}: int8 tensor {name} needs to be a matrix beside"
                    f" {name}{SCALE} {rows}"
                )

    def read(self, name: str) -> np.ndarray:
        tensor = super().read(name)
        if name not in self._int8:
            return tensor
        scale = super().read(name + SCALE)
        return tensor.astype(np.float32) * scale.astype(np.float32)[:, None]

    def _add_tensor(self, path: pathlib.Path, name: str, view: Any) -> None:
        dtype = view.get_dtype()
        if (name in self._integers) != (dtype == "I32"):
            raise InputError(f"{path}: tensor {name} is stored as {dtype}")
        if dtype not in ("I8", "I32"):
            super()._add_tensor(path, name, view)
            return
        if dtype == "I8":
            self._int8.add(name)
        self._file_of[name] = path
        self._shapes[name] = tuple(view.get_shape())
