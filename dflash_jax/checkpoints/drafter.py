"""Drafters in the Hugging Face layout: `config.json` with a `dflash_config`, and safetensors.

A drafter that does not fit is refused by name, never repaired: unknown architectures, tensors that
are missing, extra or misshapen, values that the config does not give.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors.numpy import save

from dflash_jax.checkpoints import int8_rows
from dflash_jax.checkpoints.drafter_config import CONFIG, config_json, read_config
from dflash_jax.checkpoints.names import Entry, as_floats, as_int8, check_names, load_parameters
from dflash_jax.checkpoints.safetensors_files import INDEX_FILE, SINGLE_FILE, tensor_files
from dflash_jax.errors import InputError
from dflash_jax.models.dflash2_config import DrafterConfig

DRAFT_VOCAB = "draft_vocab"
INT8 = "int8"
_STORED = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
STORED_DTYPES = (*_STORED, INT8)  # of `save_drafter`


class TargetConfig(Protocol):
    """What a target's config must tell for a drafter to be checked against it."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...


class Drafter(NamedTuple):
    """A loaded drafter: `DFlash2(config).apply({"params": params}, ...)`."""

    config: DrafterConfig
    params: dict[str, Any]
    fingerprint: str  # sha256 over config.json and the tensor files


def load_drafter(
    directory: str | os.PathLike[str],
    target_config: TargetConfig | None = None,
    dtype: Any = jnp.float32,
    int8: bool = False,
) -> Drafter:
    """Reads a DFlash or DFlash2 drafter; its parameters and its computation take `dtype`.

    Args:
      int8: keep its matrices as Int8Matrix.

    Raises:
      InputError: the folder, its config or its tensors are not a drafter's, or do not fit each
        other or the target.
    """
    path = Path(directory)
    if not path.is_dir():
        raise InputError(f"drafter {path}: no such folder")
    config = read_config(path / CONFIG, dtype)
    if target_config is not None:
        check_target(config, target_config, str(path))
    source = int8_rows.Int8RowsSource(path, integers=(DRAFT_VOCAB,))
    table = name_table(config, weight_suffix=_has_weight_suffix(source.shapes()))
    check_names(source, table)
    floats = [entry for entry in table if entry.name != DRAFT_VOCAB]
    store = as_int8(config.dtype) if int8 else as_floats(config.dtype)
    params = load_parameters(source, floats, store, ignored=(DRAFT_VOCAB,))
    if config.draft_vocab_size:
        ids = source.read(DRAFT_VOCAB)
        _check_ids(ids, config, str(path))
        params[DRAFT_VOCAB] = jnp.asarray(ids)
    return Drafter(config, params, _fingerprint([path / CONFIG, *tensor_files(path)]))


def check_target(config: DrafterConfig, target: TargetConfig, label: str) -> None:
    """Raises InputError unless the drafter was made for a target of these sizes."""
    for what, drafters, targets in (
        ("hidden size", config.hidden_size, target.hidden_size),
        ("vocabulary", config.vocab_size, target.vocab_size),
        ("number of target layers", config.num_target_layers, target.num_layers),
    ):
        if drafters != targets:
            raise InputError(
                f"drafter {label}: its {what} is {drafters}, but the target's is {targets}"
            )


def save_drafter(
    directory: str | os.PathLike[str],
    config: DrafterConfig,
    params: Mapping[str, Any],
    dtype: str = "float32",
) -> None:
    """Writes `config.json` and `model.safetensors`; each replaces the old one in a single step.

    Args:
      dtype: "float32", "float16" or "bfloat16"; or "int8", which stores each matrix as int8 with
        one float32 scale a row and the rest as float32, for our own loader alone.

    Raises:
      InputError: params are not this config's, the dtype is unknown or cannot hold the values, or
        the folder holds shards, which would hide the new file.
    """
    if dtype not in STORED_DTYPES:
        raise InputError(f"drafter dtype {dtype!r} is none of {STORED_DTYPES}")
    path = Path(directory)
    if (path / INDEX_FILE).exists():
        raise InputError(
            f"{path}: holds a sharded checkpoint ({INDEX_FILE}); choose another folder"
        )
    tree = _Tree(str(path), params)
    table = name_table(config)
    check_names(tree, table)
    stored: dict[str, np.ndarray] = {}
    for entry in table:
        if entry.name == DRAFT_VOCAB:
            stored[DRAFT_VOCAB] = np.asarray(params[DRAFT_VOCAB], np.int32)
            _check_ids(stored[DRAFT_VOCAB], config, str(path))
        else:
            stored |= _encode(entry.name, tree.read(entry.name), dtype, str(path))
    path.mkdir(parents=True, exist_ok=True)
    _replace(path / SINGLE_FILE, lambda at: at.write_bytes(save(stored, {"format": "pt"})))
    text = json.dumps(config_json(config, "float32" if dtype == INT8 else dtype), indent=2)
    _replace(path / CONFIG, lambda at: at.write_text(text + "\n", encoding="utf-8"))


def name_table(config: DrafterConfig, weight_suffix: bool = False) -> list[Entry]:
    """Every tensor of the checkpoint, its parameter and its shape.

    `weight_suffix`: the codebooks are named as the reference's own `save_pretrained` may name them.
    """
    c = config
    d = c.hidden_size
    table = [
        _entry("fc.weight", d, len(c.target_layer_ids) * d),
        _entry("hidden_norm.weight", d),
        _entry("norm.weight", d),
    ]
    for layer in range(c.num_layers):
        table += _layer_entries(config, layer)
    if c.has_selector:
        for name in ("predecessor_codebook", "successor_codebook"):
            path = ("candidate_selector", name)
            stored = ".".join(path) + (".weight" if weight_suffix else "")
            table.append(Entry(stored, path, (c.vocab_size, c.selector_rank)))
        table.append(_entry("candidate_selector.hidden_projection.weight", c.selector_rank, d))
    if c.draft_vocab_size:
        table.append(_entry(DRAFT_VOCAB, c.draft_vocab_size))
    return table


def _layer_entries(config: DrafterConfig, layer: int) -> Iterator[Entry]:
    c = config
    d, heads, kv = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    scope = f"layers_{layer}"

    def entry(name: str, *shape: int) -> Entry:
        return Entry(f"layers.{layer}.{name}", (scope, *name.split(".")), shape)

    for name, rows, columns in (
        ("q_proj", heads, d),
        ("k_proj", kv, d),
        ("v_proj", kv, d),
        ("o_proj", d, heads),
    ):
        yield entry(f"self_attn.{name}.weight", rows, columns)
        if c.attention_bias:
            yield entry(f"self_attn.{name}.bias", rows)
    yield entry("self_attn.q_norm.weight", c.head_dim)
    yield entry("self_attn.k_norm.weight", c.head_dim)
    yield entry("mlp.gate_proj.weight", c.intermediate_size, d)
    yield entry("mlp.up_proj.weight", c.intermediate_size, d)
    yield entry("mlp.down_proj.weight", d, c.intermediate_size)
    yield entry("input_layernorm.weight", d)
    yield entry("post_attention_layernorm.weight", d)
    if c.has_convolutions:
        kernels = 2 * c.conv_kernel_size * (d // c.conv_group_size)
        for name in ("attention_conv", "mlp_conv"):
            yield entry(f"{name}.base_kernel", 2, c.conv_kernel_size, d)
            yield entry(f"{name}.kernel_projection.weight", kernels, d)


def _entry(name: str, *shape: int) -> Entry:
    return Entry(name, tuple(name.split(".")), shape)


def _has_weight_suffix(shapes: Mapping[str, Any]) -> bool:
    return "candidate_selector.predecessor_codebook.weight" in shapes


class _Tree:
    """Parameters as a `TensorSource`, under the checkpoint's names."""

    def __init__(self, label: str, params: Mapping[str, Any]):
        self.label = f"drafter for {label}"
        self._arrays: dict[str, Any] = {}
        for key, value in params.items():
            self._add(key.replace("layers_", "layers."), value)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(array.shape) for name, array in self._arrays.items()}

    def read(self, name: str) -> np.ndarray:
        return np.asarray(self._arrays[name])

    def _add(self, name: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, child in value.items():
                self._add(f"{name}.{key}", child)
        else:
            self._arrays[name] = value


def _check_ids(ids: np.ndarray, config: DrafterConfig, label: str) -> None:
    # Rising ids make the head's lower row the lower id, as ties between logits need.
    if ids[0] < 0 or ids[-1] >= config.vocab_size or np.any(np.diff(ids) <= 0):
        raise InputError(f"{label}: {DRAFT_VOCAB} must rise within 0..{config.vocab_size - 1}")


def _encode(name: str, array: np.ndarray, dtype: str, label: str) -> dict[str, np.ndarray]:
    """The tensor as it is stored. Values that are not finite, or do not stay so, are refused."""
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype == INT8 and array.ndim == 2:
            stored = int8_rows.encode(name, array)
        else:
            stored = {name: np.ascontiguousarray(array, _STORED.get(dtype, np.float32))}
    if not all(np.isfinite(part.astype(np.float32)).all() for part in stored.values()):
        raise InputError(f"{label}: {name} has values that {dtype} cannot hold")
    return stored


def _fingerprint(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    """Writes beside `path`, then renames: a reader sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
