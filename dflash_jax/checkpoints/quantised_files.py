"""Quantised safetensors of a Hugging Face directory, read as floating-point numbers.

    FP8                  weight F8_E4M3 [o, i], weight_scale_inv [o/block, i/block]: w * scale
    compressed-tensors   weight_packed I32 [o, i/8], weight_scale [o, i/group],
                         weight_zero_point I32 [o/8, i/group] if asymmetric: (q - z) * scale
    MLX                  weight U32 [o, i/8], scales and biases [o, i/group]: q * scale + bias

Four bits are packed eight to a word, the lowest first. What a quantiser left alone stays as it is.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from dflash_jax.checkpoints.json_values import typed
from dflash_jax.checkpoints.safetensors_files import PLAIN_DTYPES, SafetensorsSource
from dflash_jax.errors import InputError

_PER_WORD = 8  # four-bit numbers in 32 bits
_OFFSET = 8  # compressed-tensors stores numbers of -8..7 as 0..15


def open_tensors(directory: pathlib.Path, config: Mapping[str, Any]) -> SafetensorsSource:
    """The directory's tensors, dequantised as its config.json says.

    Raises:
      InputError: a quantisation that is not covered, or tensors that do not fit it.
    """
    label = str(directory / "config.json")
    quantisation = typed(config, "quantization_config", dict, label, {})
    quantisation = quantisation or typed(config, "quantization", dict, label, {})
    if not quantisation:
        return SafetensorsSource(directory)
    method = quantisation.get("quant_method")
    if method == "fp8":
        return Fp8Source(directory, quantisation)
    if method == "compressed-tensors":
        return CompressedSource(directory, quantisation)
    if method is None and "bits" in quantisation:
        return MlxSource(directory, quantisation)
    raise InputError(
        f"{directory}: quantisation {method!r} is none of fp8, compressed-tensors and MLX's"
    )


class _QuantisedSource(SafetensorsSource):
    """Tensors of several stored parts each, under the name `<module>.weight`."""

    packed: str  # the part that makes a module a quantised one
    packed_dtype: str
    other_dtypes: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()  # the other parts, by suffix; some may be absent

    def __init__(self, directory: pathlib.Path):
        self._dtypes: dict[str, str] = {}
        super().__init__(directory)
        stored, self._modules = dict(self._shapes), set()
        for name in stored:
            module, _, kind = name.rpartition(".")
            if kind == self.packed and self._dtypes[name] == self.packed_dtype:
                self._modules.add(module)
        for module in sorted(self._modules):
            for part in (self.packed, *self.parts):
                self._shapes.pop(f"{module}.{part}", None)
            self._shapes[f"{module}.weight"] = self._shape(module, stored)
        self._check_dtypes()

    def read(self, name: str) -> np.ndarray:
        module, _, kind = name.rpartition(".")
        if kind != "weight" or module not in self._modules:
            return super().read(name)
        return self._dequantised(module)

    def _shape(self, module: str, stored: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """The weight's shape; InputError unless the module's parts fit each other."""
        raise NotImplementedError

    def _dequantised(self, module: str) -> np.ndarray:
        raise NotImplementedError

    def _part(self, module: str, part: str) -> np.ndarray:
        return super().read(f"{module}.{part}")

    def _require(
        self, stored: Mapping[str, tuple[int, ...]], name: str, shape: tuple[int, ...]
    ) -> None:
        if stored.get(name) != shape:
            found = stored.get(name, "missing")
            raise InputError(f"{self.label}: tensor {name} is {found}, its weight needs {shape}")

    def _check_dtypes(self) -> None:
        """What is no part of a quantised module must be plain numbers."""
        for name in self._shapes:
            dtype = self._dtypes.get(name)
            if dtype not in (None, self.packed_dtype, *PLAIN_DTYPES) or (
                dtype == self.packed_dtype and name.rpartition(".")[0] not in self._modules
            ):
                raise InputError(f"{self.label}: tensor {name} is stored as {dtype}")

    def _add_tensor(self, path: pathlib.Path, name: str, view: Any) -> None:
        dtype = view.get_dtype()
        self._dtypes[name] = dtype
        if dtype not in (self.packed_dtype, *self.other_dtypes):
            super()._add_tensor(path, name, view)
            return
        if name in self._file_of:
            raise InputError(f"{path}: tensor {name} is in {self._file_of[name].name} too")
        self._file_of[name] = path
        self._shapes[name] = tuple(view.get_shape())


class Fp8Source(_QuantisedSource):
    """The official FP8: blocks of `weight_block_size` share a scale."""

    packed, packed_dtype = "weight", "F8_E4M3"
    parts = ("weight_scale_inv",)

    def __init__(self, directory: pathlib.Path, quantisation: Mapping[str, Any]):
        block = quantisation.get("weight_block_size")
        if not isinstance(block, list) or len(block) != 2 or min(block) < 1:
            raise InputError(f"{directory}: FP8 needs a weight_block_size of two, got {block!r}")
        self._block = block
        super().__init__(directory)

    def _shape(self, module: str, stored: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        rows, columns = _matrix(f"{module}.weight", stored, self.label)
        high, wide = self._block
        scales = (-(-rows // high), -(-columns // wide))
        self._require(stored, f"{module}.weight_scale_inv", scales)
        return rows, columns

    def _dequantised(self, module: str) -> np.ndarray:
        name = f"{module}.weight"
        stored = _stored_bytes(self._file_of[name], name).view(ml_dtypes.float8_e4m3fn)
        weight = stored.reshape(self._shapes[name]).astype(np.float32)
        scale = self._part(module, "weight_scale_inv").astype(np.float32)
        high, wide = self._block
        for row in range(scale.shape[0]):  # a strip at a time: no second array of the whole size
            strip = weight[row * high : (row + 1) * high]
            strip *= np.repeat(scale[row], wide)[: strip.shape[1]]
        return weight


class CompressedSource(_QuantisedSource):
    """compressed-tensors `pack-quantized`, four bits in groups along the inputs."""

    packed, packed_dtype = "weight_packed", "I32"
    other_dtypes = ("I64",)
    parts = ("weight_scale", "weight_zero_point", "weight_shape")

    def __init__(self, directory: pathlib.Path, quantisation: Mapping[str, Any]):
        groups = quantisation.get("config_groups") or {}
        if quantisation.get("format") != "pack-quantized" or len(groups) != 1:
            raise InputError(
                f"{directory}: of compressed-tensors only pack-quantized with one group is covered"
            )
        (group,) = groups.values()
        weights = group.get("weights") or {}
        covered: dict[str, tuple[Any, ...]] = {
            "num_bits": (4,),
            "type": ("int",),
            "strategy": ("group",),
            "actorder": (None, "static", "weight"),  # those that keep the groups in order
        }
        for name, values in covered.items():
            if weights.get(name) not in values:
                raise InputError(f"{directory}: {name} {weights.get(name)!r} is not supported")
        if group.get("input_activations"):
            raise InputError(f"{directory}: quantised activations are not supported")
        self._group = _group_size(weights, directory)
        self._symmetric = typed(weights, "symmetric", bool, str(directory), True)
        super().__init__(directory)

    def _shape(self, module: str, stored: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        rows, words = _matrix(f"{module}.weight_packed", stored, self.label)
        columns = words * _PER_WORD
        self._require(stored, f"{module}.weight_shape", (2,))
        self._require(stored, f"{module}.weight_scale", (rows, columns // self._group))
        zeros = f"{module}.weight_zero_point"
        if not self._symmetric:
            self._require(stored, zeros, (-(-rows // _PER_WORD), columns // self._group))
        elif zeros in stored:
            raise InputError(f"{self.label}: {zeros} in a symmetric quantisation")
        return rows, columns

    def _dequantised(self, module: str) -> np.ndarray:
        values = _nibbles(self._part(module, "weight_packed"))
        values -= _OFFSET
        scale = self._part(module, "weight_scale").astype(np.float32)
        shape = tuple(int(size) for size in self._part(module, "weight_shape"))
        if shape != values.shape:
            raise InputError(f"{self.label}: {module}.weight_shape is {shape}, not {values.shape}")
        groups = values.reshape(len(values), -1, self._group)
        if not self._symmetric:
            zeros = _nibbles(self._part(module, "weight_zero_point").T).T[: len(values)] - _OFFSET
            groups -= zeros[:, :, None]
        groups *= scale[:, :, None]
        return values


class MlxSource(_QuantisedSource):
    """MLX's affine four bits, in groups along the inputs."""

    packed, packed_dtype = "weight", "U32"
    parts = ("scales", "biases")

    def __init__(self, directory: pathlib.Path, quantisation: Mapping[str, Any]):
        if quantisation["bits"] != 4 or quantisation.get("mode", "affine") != "affine":
            raise InputError(f"{directory}: of MLX only affine quantisation to 4 bits is covered")
        for name, value in quantisation.items():
            if isinstance(value, Mapping) and dict(quantisation, **value) != dict(quantisation):
                raise InputError(f"{directory}: {name} is quantised unlike the rest")
        self._group = _group_size(quantisation, directory)
        super().__init__(directory)

    def _shape(self, module: str, stored: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        rows, words = _matrix(f"{module}.weight", stored, self.label)
        columns = words * _PER_WORD
        for part in self.parts:
            self._require(stored, f"{module}.{part}", (rows, columns // self._group))
        return rows, columns

    def _dequantised(self, module: str) -> np.ndarray:
        values = _nibbles(self._part(module, "weight"))
        groups = values.reshape(len(values), -1, self._group)
        groups *= self._part(module, "scales").astype(np.float32)[:, :, None]
        groups += self._part(module, "biases").astype(np.float32)[:, :, None]
        return values


def _group_size(values: Mapping[str, Any], directory: pathlib.Path) -> int:
    size: int = typed(values, "group_size", int, str(directory / "config.json"))
    if size < 1:
        raise InputError(f"{directory / 'config.json'}: group_size must be positive, not {size}")
    return size


def _matrix(name: str, stored: Mapping[str, tuple[int, ...]], label: str) -> tuple[int, int]:
    shape = stored[name]
    if len(shape) != 2:
        raise InputError(f"{label}: quantised tensor {name} has shape {shape}, not a matrix's")
    return shape[0], shape[1]


def _stored_bytes(path: pathlib.Path, name: str) -> np.ndarray:
    """A tensor's bytes: safetensors' own reader gives NumPy no eight-bit floats.

    The file begins with a header's length in 8 bytes, then the header, JSON (already checked).
    """
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        begin, end = json.loads(file.read(size))[name]["data_offsets"]
        file.seek(8 + size + begin)
        return np.fromfile(file, np.uint8, end - begin)


def _nibbles(words: np.ndarray) -> np.ndarray:
    """32-bit words [rows, n] -> float32 [rows, 8 n] of 0..15, the lowest four bits first."""
    pairs = np.ascontiguousarray(words).view(np.uint8)  # little-endian, as safetensors stores them
    out = np.empty((*pairs.shape[:-1], 2 * pairs.shape[-1]), np.float32)
    out[..., 0::2] = pairs & 15
    out[..., 1::2] = pairs >> 4
    return out
