"""A smoke run on any decoder, and a tiny random target and drafter to try it without a checkpoint.

The run decodes a few rounds plainly and drafted and compares the tokens. The tiny pair has no
text in it; its sizes are odd multiples of a kernel's tiles, where row counts matter most.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.checkpoints.drafter import Drafter
from dflash_jax.decode.sampling import Sampling
from dflash_jax.engine.decoder import Decoder
from dflash_jax.engine.lone import LoneDriver, Request
from dflash_jax.models import dflash2, targets
from dflash_jax.models.dflash2_config import FULL, SLIDING, DrafterConfig
from dflash_jax.models.llama import LlamaConfig
from dflash_jax.models.targets import TargetConfig

_PROMPT_TOKENS = 5
_TOKENS = 8
_SAMPLINGS = (Sampling(), Sampling(temperature=1.0, seed=3))


class TinyModels(NamedTuple):
    """What `engine.prepare` takes; random weights."""

    target: TargetConfig
    target_params: Any
    drafter: Drafter


def tiny_models(dtype: str = "float32", context_limit: int = 512) -> TinyModels:
    """A random target of two layers and a DFlash2 drafter that fits it."""
    target = LlamaConfig(
        vocab_size=1024,
        hidden_size=192,
        intermediate_size=320,
        num_layers=2,
        num_heads=3,
        num_kv_heads=1,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=10_000.0,
        max_position_embeddings=context_limit,
        tie_word_embeddings=True,
        dtype=jnp.dtype(dtype),
    )
    drafter = DrafterConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_layers=2,
        num_heads=3,
        num_kv_heads=1,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=10_000.0,
        max_position_embeddings=context_limit,
        num_target_layers=target.num_layers,
        target_layer_ids=(0, 1),
        mask_token_id=0,
        block_size=8,
        layer_types=(SLIDING, FULL),
        sliding_window=64,
        is_causal=False,
        conv_kernel_size=2,
        conv_group_size=16,
        selector_rank=16,
        selector_top_k=4,
        dtype=jnp.dtype(dtype),
    )
    target_shapes = targets.parameter_shapes(target)
    drafter_shapes = jax.eval_shape(lambda: dflash2.init_params(drafter, jax.random.key(0)))
    params = random_params(drafter_shapes, dtype, seed=1)
    return TinyModels(
        target, random_params(target_shapes, dtype), Drafter(drafter, params, "random")
    )


def random_params(shapes: Any, dtype: str, seed: int = 0) -> Any:
    """Norms around 1, the rest around 0; drawn on the host, so that nothing is compiled."""
    rng = np.random.default_rng(seed)

    def draw(path: Any, leaf: Any) -> jax.Array:
        around = float("norm" in path[-2].key)
        noise = rng.standard_normal(leaf.shape, np.float32)
        return jnp.asarray((around + 0.1 * noise).astype(jnp.dtype(dtype)))

    return jax.tree_util.tree_map_with_path(draw, shapes)


class SmokeRun(NamedTuple):
    """What a smoke run did."""

    plain_tokens: int
    rounds: int  # drafted ones
    tokens: int  # in them
    differences: tuple[str, ...]  # one line each; empty when plain and drafted tokens are equal


def smoke_run(decoder: Decoder) -> SmokeRun:
    """Decodes a made-up prompt plainly and, with a drafter, at every compiled width."""
    ids = np.random.default_rng(0).integers(0, decoder.spec.vocab_size, _PROMPT_TOKENS)
    plain_tokens = rounds = tokens = 0
    differences = []
    for sampling in _SAMPLINGS:
        request = Request(tuple(ids.tolist()), sampling, _TOKENS)
        plain, _ = _reply(decoder, request, width=0)
        plain_tokens += len(plain)
        for width in decoder.widths[1:] if decoder.drafter else ():
            reply, drafted = _reply(decoder, request, width)
            rounds += drafted
            tokens += len(reply) - 1  # the first is the prompt's
            if reply != plain:
                kind = "greedy" if sampling.greedy else "sampled"
                differences.append(f"width {width}, {kind}: {reply} is not {plain}")
    return SmokeRun(plain_tokens, rounds, tokens, tuple(differences))


def _reply(decoder: Decoder, request: Request, width: int) -> tuple[list[int], int]:
    """(tokens, rounds after the prompt)."""
    with LoneDriver(decoder, rule=f"fixed:{width}").stream(request) as stream:
        records = list(stream.rounds())
    return stream.tokens, len(records) - 1
