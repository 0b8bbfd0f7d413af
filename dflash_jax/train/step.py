"""One step of training: the frozen target reads, the drafter drafts at random anchors, learns."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import optax

from dflash_jax.checkpoints.drafter import STORED_DTYPES
from dflash_jax.errors import InputError
from dflash_jax.models import layers, targets
from dflash_jax.models.dflash2 import init_params
from dflash_jax.models.dflash2_config import DrafterConfig
from dflash_jax.models.layers import Rotary
from dflash_jax.models.targets import TargetConfig
from dflash_jax.train.blocks import Blocks, block_hidden, choose_anchors, cut_blocks
from dflash_jax.train.losses import (
    NOT_DRAFTED,
    Head,
    HeadOutput,
    HeadSpec,
    Rows,
    head_loss,
    selector_loss,
)
from dflash_jax.train.muon import scale_by_muon

ATTENTIONS = ("xla", "cudnn")
ADAMW, MUON = OPTIMIZERS = ("adamw", "muon")
DRAFT_VOCAB = "draft_vocab"
# Published decay of the position weights, by block size; see TrainConfig.decay.
DECAYS = ((8, 4.0), (10, 5.0), (16, 7.0))


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How to train. Weight of drafted position k: exp(-(k - 1) / decay)."""

    steps: int = 6000
    batch: int = 64  # sequences a step, over all devices
    anchors: int = 64  # blocks a sequence
    optimizer: str = ADAMW  # or "muon": the layers' matrices by Muon, the rest by AdamW
    learning_rate: float = 2e-3
    warmup: float = 0.04  # share of the training
    weight_decay: float = 0.01
    clip: float = 1.0  # of the gradient's global norm
    beta1: float = 0.9
    beta2: float = 0.98
    selector_weight: float = 0.1
    # A label outside the candidates: put in place of the last one, or left out of the loss.
    selector_replaces: bool = False
    label_weight: float = 0.0  # share of cross-entropy with the label instead of the distribution
    decay: float = 0.0  # 0: 4, 5 or 7 for blocks of 8, 10 or 16
    head_chunks: int = 8  # logits of so many parts of a step's blocks live one after another
    attention: str = "xla"  # the target's: "xla", or "cudnn" on a GPU
    start_from: str = ""  # folder of a drafter whose weights the training starts from
    max_shards: int = 0  # of the corpus; 0 is all
    seed: int = 0
    log_every: int = 50  # steps
    eval_every: int = 500  # steps
    eval_rows: int = 256  # held-out sequences
    checkpoint_every_s: float = 120
    export_dtype: str = "bfloat16"  # of the drafter that is written at the end

    def __post_init__(self) -> None:
        for name in (
            "steps",
            "batch",
            "anchors",
            "head_chunks",
            "log_every",
            "eval_every",
            "eval_rows",
        ):
            if getattr(self, name) < 1:
                raise InputError(f"train config: {name} must be at least 1")
        for name in ("learning_rate", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"train config: {name} must be a number above 0")
        for name in ("seed", "max_shards", "weight_decay", "selector_weight", "decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"train config: {name} must be a number from 0")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"train config: {name} must be from 0 to below 1")
        if self.export_dtype not in STORED_DTYPES:
            raise InputError(
                f"train config: export_dtype {self.export_dtype!r} is none of {STORED_DTYPES}"
            )
        if self.anchors % self.head_chunks:
            raise InputError(
                f"train config: anchors {self.anchors} is no multiple of head_chunks "
                f"{self.head_chunks}"
            )
        if self.attention not in ATTENTIONS:
            raise InputError(f"train config: attention {self.attention!r} is none of {ATTENTIONS}")
        if self.optimizer not in OPTIMIZERS:
            raise InputError(f"train config: optimizer {self.optimizer!r} is none of {OPTIMIZERS}")
        if not 0 <= self.label_weight <= 1 or not 0 <= self.warmup < 1:
            raise InputError("train config: label_weight and warmup must be in [0, 1]")

    def position_decay(self, block_size: int) -> float:
        fitting = [decay for size, decay in DECAYS if size >= block_size]
        return self.decay or (fitting[0] if fitting else DECAYS[-1][1])


def learning_rate(config: TrainConfig, progress: float) -> float:
    """Linear warm-up, then a cosine to zero; `progress` is the share of training done, 0..1."""
    if progress < config.warmup:
        return config.learning_rate * progress / config.warmup
    done = min((progress - config.warmup) / (1 - config.warmup), 1.0)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


class Models(NamedTuple):
    """Static: both configs and how to train. Hashable."""

    target: TargetConfig
    drafter: DrafterConfig
    train: TrainConfig


class Frozen(NamedTuple):
    """Arrays that training reads but never changes."""

    target: Any  # the target's parameters
    embedding: jax.Array  # [V, D], the target's
    head: Head


class Batch(NamedTuple):
    """Sequences of the corpus."""

    tokens: jax.Array  # [B, S] int32
    own: jax.Array  # [B, S] bool


@flax.struct.dataclass
class TrainState:
    """All that changes. The random draws are keyed by `step`, so this is enough to resume."""

    step: jax.Array  # [] int32
    params: Any  # float32, without the draft vocabulary
    opt: Any


class Metrics(NamedTuple):
    """Of one step or evaluation. P drafted positions."""

    loss: jax.Array  # [] weighted mean, unary
    selector_loss: jax.Array  # [] weighted mean
    hits: jax.Array  # [P] share of labels that are the best candidate
    recall: jax.Array  # [P] share of labels among the candidates
    chain: jax.Array  # [] mean tokens a round of a chain of best candidates, bonus included
    gradient_norm: jax.Array  # []


def optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW or Muon without a learning rate, which each step is given (time may govern it)."""

    def decayed(params: Any) -> Any:
        return jax.tree.map(lambda p: p.ndim >= 2, params)

    adam = optax.scale_by_adam(config.beta1, config.beta2)
    if config.optimizer == MUON:
        scale = optax.multi_transform({MUON: scale_by_muon(), ADAMW: adam}, _optimizer_of)
    else:
        scale = adam
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        scale,
        optax.add_decayed_weights(config.weight_decay, mask=decayed),
    )


def _optimizer_of(params: Any) -> Any:
    """Muon for the matrices of attention, feed-forward and `fc`.

    Not for codebooks (rows are looked up, most gradients are 0), nor for the kernel projections,
    whose outputs are added to the identity and shall stay small.
    """

    def of(path: tuple[Any, ...], leaf: jax.Array) -> str:
        names = {part.key for part in path}
        matrix = leaf.ndim == 2 and names & {"self_attn", "mlp", "fc"}
        return MUON if matrix else ADAMW

    return jax.tree_util.tree_map_with_path(of, params)


def initial_state(models: Models, params: Any = None) -> TrainState:
    """The state before the first step; `params` None draws them from the seed."""
    if params is None:
        params = init_params(models.drafter, jax.random.key(models.train.seed))
        params.pop(DRAFT_VOCAB, None)
    return TrainState(jnp.int32(0), params, optimizer(models.train).init(params))


def read_target(models: Models, frozen: Frozen, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The target over whole sequences [B, S]: normed hidden [B, S, D], taps [B, S, n·D]."""
    length = tokens.shape[1]
    table = layers.rotary_table(targets.rotary_frequencies(models.target), length)
    mask = jnp.tril(jnp.ones((length, length), bool))

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        del layer
        if models.train.attention == "cudnn":
            return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        return layers.attention(q, k, v, mask)

    output = targets.forward(
        models.target,
        frozen.target,
        tokens,
        table.at(jnp.arange(length)),
        attend,
        targets.whole_sequence(models.target),
        models.drafter.target_layer_ids,
    )
    return output.hidden, jnp.concatenate(output.taps, axis=-1)


def drafter_table(config: DrafterConfig, length: int) -> Rotary:
    """Rotary rows of a sequence of `length` tokens and of a block behind it."""
    frequencies = layers.inverse_frequencies(config.head_dim, config.rope_theta)
    return layers.rotary_table(frequencies, length + config.block_size)


def label_rows(
    models: Models, head: Head, blocks: Blocks, target_hidden: jax.Array
) -> tuple[Rows, jax.Array]:
    """What each drafted position should say, and the token before it [B, A, P]."""
    drafted = blocks.labels.shape[-1]
    positions = blocks.anchors[..., None] + jnp.arange(drafted)
    positions = jnp.minimum(positions, target_hidden.shape[1] - 1)
    flat = positions.reshape(positions.shape[0], -1, 1)
    gathered = jnp.take_along_axis(target_hidden, flat, axis=1)
    decay = models.train.position_decay(models.drafter.block_size)
    rows = head.row_of[blocks.labels]
    weights = jnp.where(
        blocks.valid & (rows != NOT_DRAFTED), jnp.exp(-jnp.arange(drafted) / decay), 0
    )
    before = jnp.concatenate([blocks.anchor_tokens[..., None], blocks.labels[..., :-1]], axis=-1)
    hidden = gathered.reshape(*positions.shape, target_hidden.shape[-1])
    return Rows(hidden, jnp.maximum(rows, 0), weights.astype(jnp.float32)), before


def loss_and_metrics(
    models: Models, params: Any, frozen: Frozen, batch: Batch, key: jax.Array
) -> tuple[jax.Array, Metrics]:
    """The whole forward at random anchors: the loss to descend, and what to report."""
    config, train = models.drafter, models.train
    hidden, taps = read_target(models, frozen, batch.tokens)
    anchors = choose_anchors(batch.own, train.anchors, key)
    blocks = cut_blocks(batch.tokens, batch.own, anchors, config.block_size - 1)
    rows, before = label_rows(models, frozen.head, blocks, hidden)
    table = drafter_table(config, batch.tokens.shape[1])
    drafted = block_hidden(config, params, taps, frozen.embedding, blocks, table)
    spec = HeadSpec(config, config.selector_top_k or 16, train.head_chunks, train.label_weight)
    output = head_loss(spec, drafted, rows, frozen.head.weight)
    total = jnp.maximum(rows.weights.sum(), 1e-6)
    pair_loss = jnp.float32(0)
    if config.has_selector:
        pair_loss = selector_loss(
            config,
            params,
            drafted,
            output,
            before,
            rows.label_rows,
            rows.weights,
            frozen.head.ids,
            train.selector_replaces,
        )
    loss = (output.loss + train.selector_weight * pair_loss) / total
    return loss, _metrics(frozen.head, blocks, output, output.loss / total, pair_loss / total)


def _metrics(
    head: Head, blocks: Blocks, output: HeadOutput, loss: jax.Array, pair_loss: jax.Array
) -> Metrics:
    label = head.row_of[blocks.labels][..., None]
    found = output.top_rows == label
    count = jnp.maximum(blocks.valid.sum(axis=(0, 1)), 1)
    # A chain's length is known where all its labels are.
    whole = blocks.valid.all(axis=-1)
    length = jnp.cumprod(found[..., 0].astype(jnp.float32), axis=-1).sum(axis=-1)
    return Metrics(
        loss,
        pair_loss,
        (found[..., 0] & blocks.valid).sum(axis=(0, 1)) / count,
        (found.any(axis=-1) & blocks.valid).sum(axis=(0, 1)) / count,
        1 + jnp.sum(length * whole) / jnp.maximum(whole.sum(), 1),
        jnp.float32(0),
    )


def train_step(
    models: Models, state: TrainState, frozen: Frozen, batch: Batch, rate: jax.Array
) -> tuple[TrainState, Metrics]:
    """One update at learning rate `rate`. Batch and loss are global over the devices."""
    key = jax.random.fold_in(jax.random.key(models.train.seed), state.step)

    def loss_of(params: Any) -> tuple[jax.Array, Metrics]:
        return loss_and_metrics(models, params, frozen, batch, key)

    gradients, metrics = jax.grad(loss_of, has_aux=True)(state.params)
    updates, opt = optimizer(models.train).update(gradients, state.opt, state.params)
    params = jax.tree.map(lambda p, u: p - rate * u, state.params, updates)
    metrics = metrics._replace(gradient_norm=optax.global_norm(gradients))
    return TrainState(state.step + 1, params, opt), metrics


def eval_step(models: Models, params: Any, frozen: Frozen, batch: Batch) -> Metrics:
    """Metrics of one batch, at anchors that are the same in every evaluation."""
    return loss_and_metrics(models, params, frozen, batch, jax.random.key(0))[1]


@functools.cache
def compiled_steps(models: Models) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Jitted train and evaluation steps; the state is donated."""
    train = jax.jit(functools.partial(train_step, models), donate_argnums=0)
    return train, jax.jit(functools.partial(eval_step, models))


def count_parameters(config: DrafterConfig) -> int:
    """Trained numbers of a drafter."""
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    shapes.pop(DRAFT_VOCAB, None)
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
