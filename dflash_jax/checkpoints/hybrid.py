"""Loads a Qwen3.5 hybrid's config and parameters, from a directory or a GGUF file."""

from __future__ import annotations

import pathlib
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from dflash_jax.checkpoints import qwen3_5_config, qwen3_5_gguf, qwen3_5_names, safetensors_files
from dflash_jax.checkpoints.gguf_file import GGUFFile
from dflash_jax.checkpoints.names import Store, as_floats, as_int8, load_parameters
from dflash_jax.checkpoints.quantised_files import open_tensors
from dflash_jax.errors import InputError
from dflash_jax.models.qwen3_5 import Qwen35Config


class Hybrid(NamedTuple):
    """A loaded target: `Qwen35(config).apply({"params": params}, ...)`."""

    config: Qwen35Config
    params: dict[str, Any]


def load_hybrid(path: str | pathlib.Path, weights: str = "float32") -> Hybrid:
    """Loads a Hugging Face directory, plain or quantised, an MLX directory, or a `.gguf` file.

    Args:
      weights: "float32", "bfloat16" or "int8": see `target.load_target`.

    Raises:
      InputError: nothing there, another architecture, a file that is truncated or does not fit.
    """
    path = pathlib.Path(path)
    dtype = jnp.dtype("float32" if weights == "int8" else weights)
    store = as_int8(dtype) if weights == "int8" else as_floats(dtype)
    if path.is_dir():
        return load_directory(path, dtype, store)
    if path.is_file():
        return load_gguf(GGUFFile(path), dtype, store)
    raise InputError(f"target {path}: no such file or directory")


def load_directory(directory: pathlib.Path, dtype: np.dtype, store: Store) -> Hybrid:
    config_path = directory / "config.json"
    description = safetensors_files.read_json(config_path)
    config = qwen3_5_config.from_hugging_face(description, str(config_path), dtype)
    source = open_tensors(directory, description)
    names = source.shapes()
    if config.num_layers > len(names):
        raise InputError(f"{directory}: {config.num_layers} layers, but {len(names)} tensors")
    return Hybrid(config, qwen3_5_names.load_hugging_face(source, config, store))


def load_gguf(file: GGUFFile, dtype: np.dtype, store: Store) -> Hybrid:
    config = qwen3_5_gguf.config_of(file, dtype)
    table, ignored = qwen3_5_gguf.table(config), qwen3_5_gguf.ignored(config, file)
    store = qwen3_5_names.keeping_float32(store)
    return Hybrid(config, load_parameters(file, table, store, ignored))
