"""Opens a Qwen3.5 hybrid: its config at once, its parameters when they are asked for."""

from __future__ import annotations

import functools
import pathlib

import numpy as np

from dflash_jax.checkpoints import qwen3_5_config, qwen3_5_gguf, qwen3_5_names
from dflash_jax.checkpoints.gguf_file import GGUFFile
from dflash_jax.checkpoints.json_values import read_json
from dflash_jax.checkpoints.names import Opened, Store, load_parameters
from dflash_jax.checkpoints.quantised_files import open_tensors
from dflash_jax.errors import InputError


def open_directory(directory: pathlib.Path, dtype: np.dtype, store: Store) -> Opened:
    """A Hugging Face directory, plain or quantised, or an MLX one."""
    config_path = directory / "config.json"
    description = read_json(config_path)
    config = qwen3_5_config.from_hugging_face(description, str(config_path), dtype)
    source = open_tensors(directory, description)
    names = source.shapes()
    if config.num_layers > len(names):
        raise InputError(f"{directory}: {config.num_layers} layers, but {len(names)} tensors")
    read = functools.partial(qwen3_5_names.load_hugging_face, source, config, store)
    return Opened(config, read)


def open_gguf(file: GGUFFile, dtype: np.dtype, store: Store) -> Opened:
    """A GGUF file of the architecture `qwen35`."""
    config = qwen3_5_gguf.config_of(file, dtype)
    table, ignored = qwen3_5_gguf.table(config), qwen3_5_gguf.ignored(config, file)
    store = qwen3_5_names.keeping_float32(store)
    return Opened(config, functools.partial(load_parameters, file, table, store, ignored))
