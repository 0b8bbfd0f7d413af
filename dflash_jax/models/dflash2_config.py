"""Sizes and options of a DFlash or DFlash2 drafter, and which rows see which keys."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp

from dflash_jax.errors import InputError

FULL = "full_attention"
SLIDING = "sliding_attention"
# float16 is not among them: its range has made drafters accept nothing.
COMPUTE_DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
    """Sizes and options of a drafter; hashable, so it may be a static argument.

    Raises InputError when the values do not fit each other.
    """

    vocab_size: int
    hidden_size: int  # the target's
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int  # past it the caller drops to plain decoding
    num_target_layers: int
    target_layer_ids: tuple[int, ...]  # tap l is the output of the target's block l
    mask_token_id: int
    block_size: int  # as trained: the anchor and block_size - 1 drafted positions
    layer_types: tuple[str, ...]  # FULL or SLIDING, one a layer
    sliding_window: int | None = None
    is_causal: bool | None = None  # None: sliding layers are causal
    conv_kernel_size: int = 0  # taps; 0: no convolutions
    conv_group_size: int = 0
    selector_rank: int = 0  # 0: no selector
    selector_top_k: int = 0
    input_embedding_scale: float = 1.0  # the caller scales the target's embeddings by it
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None  # None or 0: off
    attention_bias: bool = False
    # Our own extension: the head covers only these many ids, listed in the parameter `draft_vocab`.
    draft_vocab_size: int = 0  # 0: the whole vocabulary
    dtype: Any = jnp.float32  # of the computation

    def __post_init__(self) -> None:
        object.__setattr__(self, "target_layer_ids", tuple(self.target_layer_ids))
        object.__setattr__(self, "layer_types", tuple(self.layer_types))
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))
        self._check_values()
        self._check_attention()
        self._check_vocabulary()

    def _check_values(self) -> None:
        for name in _POSITIVE:
            value = getattr(self, name)
            _require(_is_int(value) and value > 0, f"{name} is {value!r}, not a positive integer")
        for name in _NOT_NEGATIVE:
            value = getattr(self, name)
            _require(_is_int(value) and value >= 0, f"{name} is {value!r}, not an integer from 0")
        for name in _POSITIVE_NUMBERS:
            value = getattr(self, name)
            fits = isinstance(value, int | float) and 0 < value < math.inf
            _require(fits, f"{name} is {value!r}, not a positive number")
        cap = self.final_logit_softcapping
        _require(
            cap is None or (isinstance(cap, int | float) and 0 <= cap < math.inf),
            f"final_logit_softcapping is {cap!r}, not a number from 0",
        )
        _require(
            str(self.dtype) in COMPUTE_DTYPES, f"dtype {self.dtype} is none of {COMPUTE_DTYPES}"
        )

    def _check_attention(self) -> None:
        _require(
            self.num_heads % self.num_kv_heads == 0,
            f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}",
        )
        _require(self.head_dim % 2 == 0, f"head_dim {self.head_dim} is odd")
        _require(
            len(self.layer_types) == self.num_layers
            and all(kind in (FULL, SLIDING) for kind in self.layer_types),
            f"layer_types must be {self.num_layers} times {FULL} or {SLIDING}",
        )
        window = self.sliding_window
        _require(
            SLIDING not in self.layer_types or (_is_int(window) and window > 0),
            f"layer_types has {SLIDING}, but sliding_window is {window!r}",
        )
        for name in ("is_causal", "attention_bias"):
            value = getattr(self, name)
            known = isinstance(value, bool) or (name == "is_causal" and value is None)
            _require(known, f"{name} is {value!r}, not true or false")
        ids = self.target_layer_ids
        _require(len(ids) > 0, "target_layer_ids is empty")
        _require(
            all(_is_int(layer) and 0 <= layer < self.num_target_layers for layer in ids),
            f"target_layer_ids {list(ids)} must be within 0..{self.num_target_layers - 1}"
            " (num_target_layers)",
        )
        _require(
            (self.conv_kernel_size > 0) == (self.conv_group_size > 0),
            f"conv_kernel_size {self.conv_kernel_size} and conv_group_size"
            f" {self.conv_group_size} must both be given or both be 0",
        )
        _require(
            not self.has_convolutions or self.hidden_size % self.conv_group_size == 0,
            f"conv_group_size {self.conv_group_size} does not divide hidden_size"
            f" {self.hidden_size}",
        )

    def _check_vocabulary(self) -> None:
        _require(self.block_size > 1, f"block_size {self.block_size} leaves nothing to draft")
        _require(
            self.block_size <= _LARGEST_BLOCK,
            f"block_size {self.block_size} exceeds {_LARGEST_BLOCK}",
        )
        _require(
            self.block_size * self.selector_top_k**2 <= _LARGEST_LATTICE,
            f"selector_top_k {self.selector_top_k} gives a lattice of more than {_LARGEST_LATTICE}"
            " numbers",
        )
        for name in ("mask_token_id", "draft_vocab_size"):
            value, limit = getattr(self, name), self.vocab_size - (name == "mask_token_id")
            _require(value <= limit, f"{name} {value} exceeds the vocabulary of {self.vocab_size}")
        _require(
            (self.selector_rank > 0) == (self.selector_top_k > 0),
            f"selector_rank {self.selector_rank} and selector_top_k {self.selector_top_k}"
            " must both be given or both be 0",
        )
        _require(
            self.selector_top_k <= self.head_rows,
            f"selector_top_k {self.selector_top_k} exceeds the {self.head_rows} ids of the head",
        )

    @property
    def has_convolutions(self) -> bool:
        return self.conv_kernel_size > 0

    @property
    def has_selector(self) -> bool:
        return self.selector_rank > 0

    @property
    def head_rows(self) -> int:
        """Rows of the head: the draft vocabulary's, or the whole vocabulary's."""
        return self.draft_vocab_size or self.vocab_size

    def window(self, layer: int) -> int | None:
        """The layer's window in tokens; None sees the whole context."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    def causal(self, layer: int) -> bool:
        """Whether rows of the layer see no later row."""
        if self.is_causal is None:
            return self.layer_types[layer] == SLIDING
        return self.is_causal


_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_position_embeddings",
    "num_target_layers",
    "block_size",
)
_NOT_NEGATIVE = (
    "mask_token_id",
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
    "draft_vocab_size",
)
_POSITIVE_NUMBERS = ("rms_norm_eps", "rope_theta", "input_embedding_scale", "output_multiplier")


# Beyond these a lattice, of block_size * selector_top_k ** 2 numbers, is no matter of a round.
_LARGEST_BLOCK, _LARGEST_LATTICE = 1024, 2**24
_MOST_LAYERS = 4096  # a damaged count would fill the memory with their kinds


def repeated(kind: str, num_layers: Any) -> tuple[str, ...]:
    """`layer_types` of one kind; `DrafterConfig` refuses a count that cannot be."""
    return (kind,) * (min(num_layers, _MOST_LAYERS) if _is_int(num_layers) else 0)


def _is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InputError(f"drafter config: {message}")


def visible(
    config: DrafterConfig, layer: int, query_positions: jax.Array, key_positions: jax.Array
) -> jax.Array:
    """Which rows see which keys, by absolute position alone.

        window 3, both ways   key 0 1 2 3 4 | 5 6 7 (the block)
                      query 5     . . . x x | x x x
                      query 7     . . . . . | x x x

    Args:
      query_positions: [..., T] int.
      key_positions: [..., S] int.

    Returns:
      bool [..., T, S]: |q - k| < window, and k <= q where the layer is causal. Whether a cache slot
      is filled, or belongs to the row's own block, is the caller's to add.
    """
    distance = query_positions[..., :, None] - key_positions[..., None, :]
    mask = jnp.ones(distance.shape, bool)
    window = config.window(layer)
    if window is not None:
        mask &= jnp.abs(distance) < window
    if config.causal(layer):
        mask &= distance >= 0
    return mask
