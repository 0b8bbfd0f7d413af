"""The target writes text for training: a fixed-shape loop over whole conversations, on the device.

A row starts from forced tokens (a prompt, or only the opening of a user turn) and then goes on by
itself to the end of the buffer. When a turn ends, the tokens that the chat template puts between
turns are forced, and the other role speaks:

    <opening> user writes ... <end> | \\n <assistant> | reply ... <end> | \\n <user> | writes ...
     forced    temperature 1          forced            own            forced

The cache grows in segments, so that early steps do not read what is not yet written.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dflash_jax.errors import InputError
from dflash_jax.models import delta_rule, layers, targets
from dflash_jax.models.layers import MASKED, Rotary
from dflash_jax.models.llama import LlamaConfig
from dflash_jax.models.targets import TargetConfig

USER, ASSISTANT = 0, 1

Pick = Callable[[jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """Shape and sampling of one batch. Hashable.

    `min_p` cuts the tail of the distribution (tokens below min_p times the best one's
    probability): unlike top-k it needs no sort of the vocabulary.
    """

    batch: int = 4096
    length: int = 512  # tokens a row
    segments: int = 4  # sizes that the cache grows through
    min_p: float = 0.03
    user_temperature: float = 1.0
    max_user_tokens: int = 96  # a turn that is longer is ended by force
    max_reply_tokens: int = 320

    def __post_init__(self) -> None:
        if self.batch < 1 or self.length < 2 or not 1 <= self.segments < self.length:
            raise InputError(f"rollout: batch, length and segments must be positive, got {self}")
        if not 0 < self.min_p <= 1:
            raise InputError(f"rollout: min_p must be in (0, 1], got {self.min_p}")

    @property
    def bounds(self) -> tuple[int, ...]:
        """Cache sizes of the segments, growing to `length`."""
        step = -(-self.length // self.segments)
        return tuple(min(step * (i + 1), self.length) for i in range(self.segments))


class Template(NamedTuple):
    """What the chat template puts around turns, as tokens."""

    opening: np.ndarray  # int32, before the first user turn
    after_user: np.ndarray  # int32: the end token, then up to where the reply starts
    after_assistant: np.ndarray  # int32: the end token, then up to where the user starts


class Prompts(NamedTuple):
    """The forced starts of a batch; NumPy, or arrays on the devices."""

    tokens: Any  # [B, S] int32, padded
    lengths: Any  # [B] int32, at least 1
    roles: Any  # [B] int32: who speaks next, USER or ASSISTANT
    temperature: Any  # [B] float32, of the replies


class _State(NamedTuple):
    """One recurrent layer."""

    rule: Any  # [B, Hv, Dk, Dv] float32
    inputs: Any  # [B, W - 1, C], the last inputs of the convolution


class _Carry(NamedTuple):
    keys: tuple[Any, ...]  # an attention layer [B, K, s, H]
    values: tuple[Any, ...]
    states: tuple[_State, ...]  # by recurrent layer
    token: jax.Array  # [B] int32, at the present position
    role: jax.Array  # [B] int32
    pending: jax.Array  # [B] int32: next index into the role's transition; 0 is none
    turn: jax.Array  # [B] int32: tokens in this turn


class _StepRecur:
    """`Recur` of one token a row: all arguments are [B, 1, ...]."""

    def __init__(self, states: tuple[_State, ...]):
        self.states = list(states)

    def inputs(self, index: int, x: jax.Array) -> jax.Array:
        state = self.states[index]
        pool = jnp.concatenate([state.inputs, x], axis=1)
        self.states[index] = state._replace(inputs=pool[:, 1:])
        return pool[:, None]

    def delta_rule(
        self,
        index: int,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        g: jax.Array,
        beta: jax.Array,
    ) -> jax.Array:
        state = self.states[index]
        out, rule = jax.vmap(delta_rule.step)(state.rule, *(x[:, 0] for x in (q, k, v, g, beta)))
        self.states[index] = state._replace(rule=rule)
        return out[:, None]


def attend_one(q: jax.Array, keys: jax.Array, values: jax.Array, position: jax.Array) -> jax.Array:
    """One query a row over a cache: q [B, 1, N, H], keys [B, K, s, H] -> [B, 1, N, H]."""
    batch, _, heads, head_dim = q.shape
    kv_heads = keys.shape[1]
    grouped = q.reshape(batch, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("bkgh,bksh->bkgs", grouped, keys, preferred_element_type=jnp.float32)
    scores = jnp.where(
        jnp.arange(keys.shape[2]) <= position, scores * head_dim**-0.5, jnp.float32(MASKED)
    )
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    return jnp.einsum("bkgs,bksh->bkgh", weights, values).reshape(q.shape)


def draw(logits: jax.Array, temperature: jax.Array, key: jax.Array, min_p: float) -> jax.Array:
    """Gumbel-max draw after min-p: logits [B, V] float32, temperature [B] (0: greedy) -> [B]."""
    t = temperature[:, None]
    noise = jax.random.gumbel(key, logits.shape, jnp.float32)
    floor = jnp.max(logits, axis=-1, keepdims=True) + t * np.log(min_p)
    scores = jnp.where(logits >= floor, logits + t * noise, MASKED)
    return jnp.argmax(scores, axis=-1).astype(jnp.int32)


class Rollout:
    """Compiled loops that write batches of one shape.

    Args:
      target: config and parameters of the target; parameters on their devices.
      config: shape of a batch.
      template: turns of the chat template.
      stop_ids: tokens that end a turn.
      mesh: devices that share the batch, on one axis; the parameters are on all of them.
      pick: (logits [B, V], position of the token to be drawn) -> [B] int32; None draws by
        temperature and min-p.

    Raises:
      InputError: rows longer than the target's positions.
    """

    def __init__(
        self,
        target: tuple[TargetConfig, Any],
        config: RolloutConfig,
        template: Template,
        stop_ids: tuple[int, ...],
        mesh: Mesh,
        pick: Pick | None = None,
    ):
        self.config = config
        self._pick = pick
        self._target, self._params = target
        longest = self._target.max_position_embeddings
        if config.length > longest:
            raise InputError(f"rollout: length {config.length} is beyond the target's {longest}")
        axis = mesh.axis_names[0]
        self._rows = NamedSharding(mesh, PartitionSpec(axis))
        self._written = NamedSharding(mesh, PartitionSpec(None, axis))
        self._stop_ids = np.array(stop_ids, np.int32)
        width = max(len(template.after_user), len(template.after_assistant))
        self._transitions = np.zeros((2, width), np.int32)
        self._transitions[USER, : len(template.after_user)] = template.after_user
        self._transitions[ASSISTANT, : len(template.after_assistant)] = template.after_assistant
        self._transition_lengths = np.array(
            [len(template.after_user), len(template.after_assistant)], np.int32
        )
        self._compiled: list[Any] = []
        self._grow = jax.jit(
            lambda array, extra: jnp.pad(array, ((0, 0), (0, 0), (0, extra), (0, 0))),
            static_argnums=1,
            out_shardings=self._rows,
        )

    def write(self, prompts: Prompts, key: jax.Array) -> tuple[np.ndarray, np.ndarray]:
        """Continues a batch to full length.

        Returns:
          tokens int32 [B, S], and own bool [B, S]: tokens that the target chose in a reply.
        """
        placed = Prompts(*(self._place(field) for field in prompts))
        carry = self._start(placed)
        outputs, size = [], 0
        for executable in self._executables(carry, placed, key):
            grown, size = executable.size - size, executable.size
            # One array after another, so that old and new caches do not stand side by side.
            keys, values = list(carry.keys), list(carry.values)
            carry = carry._replace(keys=(), values=())
            for arrays in (keys, values):
                for layer, array in enumerate(arrays):
                    arrays[layer] = self._grow(array, grown)
                    del array
            carry = carry._replace(keys=tuple(keys), values=tuple(values))
            carry, written = executable.run(self._params, carry, placed, key)
            outputs.append(jax.tree.map(np.asarray, written))
        tokens = np.concatenate([prompts.tokens[:, :1], *(out[0].T for out in outputs)], axis=1)
        own = np.concatenate(
            [np.zeros((len(tokens), 1), bool), *(out[1].T for out in outputs)], axis=1
        )
        return tokens, own

    def _place(self, array: np.ndarray) -> jax.Array:
        return jax.device_put(array, self._rows)

    def _start(self, prompts: Prompts) -> _Carry:
        c, batch = self._target, self.config.batch
        empty = self._place(np.zeros((batch, c.num_kv_heads, 0, c.head_dim), jnp.dtype(c.dtype)))
        caches = (empty,) * targets.attention_layers(c)
        # The carry is donated, so no two of its fields may share a buffer, nor with the prompts.
        pending, turn = (self._place(np.zeros(batch, np.int32)) for _ in range(2))
        states = tuple(self._new_state() for _ in range(targets.recurrent_layers(c)))
        token, role = prompts.tokens[:, 0], prompts.roles + 0
        return _Carry(caches, caches, states, token, role, pending, turn)

    def _new_state(self) -> _State:
        c, batch = self._target, self.config.batch
        assert not isinstance(c, LlamaConfig)
        sizes = (c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim)
        inputs = np.zeros((batch, c.linear_conv_kernel_dim - 1, c.conv_dim), jnp.dtype(c.dtype))
        return _State(self._place(np.zeros((batch, *sizes), np.float32)), self._place(inputs))

    def _executables(self, carry: _Carry, prompts: Prompts, key: jax.Array) -> list[_Segment]:
        """Compiles the segments side by side on the first call."""
        if self._compiled:
            return self._compiled

        def compile_segment(first: int, size: int) -> _Segment:
            last = min(size, self.config.length - 1)

            def loop(params: Any, carry: _Carry, prompts: Prompts, key: jax.Array) -> Any:
                def step(carry: _Carry, position: jax.Array) -> Any:
                    return self._step(params, prompts, key, carry, position)

                return jax.lax.scan(step, carry, jnp.arange(first, last))

            def resized(array: jax.Array) -> jax.ShapeDtypeStruct:
                batch, heads, _, head_dim = array.shape
                return jax.ShapeDtypeStruct(
                    (batch, heads, size, head_dim), array.dtype, sharding=self._rows
                )

            example = carry._replace(
                keys=tuple(map(resized, carry.keys)), values=tuple(map(resized, carry.values))
            )
            jitted = jax.jit(
                loop, donate_argnums=1, out_shardings=(self._rows, (self._written, self._written))
            )
            return _Segment(size, jitted.lower(self._params, example, prompts, key).compile())

        bounds = self.config.bounds
        with concurrent.futures.ThreadPoolExecutor(len(bounds)) as pool:
            self._compiled = list(pool.map(compile_segment, (0, *bounds[:-1]), bounds))
        return self._compiled

    def _step(
        self, params: Any, prompts: Prompts, key: jax.Array, carry: _Carry, position: jax.Array
    ) -> tuple[_Carry, tuple[jax.Array, jax.Array]]:
        """Reads the token at `position`, writes the one after it."""
        keys, values, states, logits = self._forward(params, carry, position)
        speaks = carry.role == ASSISTANT
        if self._pick:
            chosen = self._pick(logits, position + 1)
        else:
            temperature = jnp.where(speaks, prompts.temperature, self.config.user_temperature)
            step_key = jax.random.fold_in(key, position)
            chosen = draw(logits, temperature, step_key, self.config.min_p)
        end = jnp.asarray(self._transitions[:, 0])[carry.role]
        limit = jnp.where(speaks, self.config.max_reply_tokens, self.config.max_user_tokens)
        too_long = carry.turn >= limit
        chosen = jnp.where(too_long, end, chosen)
        in_prompt = position + 1 < prompts.lengths
        in_transition = carry.pending > 0
        transition = jnp.asarray(self._transitions)[carry.role, carry.pending]
        token = jnp.where(in_transition, transition, chosen)
        token = jnp.where(in_prompt, prompts.tokens[:, position + 1], token)
        free = ~in_prompt & ~in_transition

        ends = free & jnp.isin(chosen, jnp.asarray(self._stop_ids))
        pending = jnp.where(ends, 1, jnp.where(in_transition, carry.pending + 1, 0))
        done = pending >= jnp.asarray(self._transition_lengths)[carry.role]
        done &= pending > 0
        new_carry = _Carry(
            keys,
            values,
            states,
            token,
            jnp.where(done, 1 - carry.role, carry.role),
            jnp.where(done, 0, pending),
            jnp.where(free & ~ends, carry.turn + 1, 0),
        )
        return new_carry, (token, free & speaks & ~too_long)

    def _forward(
        self, params: Any, carry: _Carry, position: jax.Array
    ) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...], tuple[_State, ...], jax.Array]:
        """One token a row through the target; the new caches, and logits [B, V] float32."""
        config = self._target
        table = layers.rotary_table(targets.rotary_frequencies(config), self.config.length)
        rotary = Rotary(*(column[position][None] for column in table))
        keys, values = list(carry.keys), list(carry.values)

        def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            for cache, new in ((keys, k), (values, v)):
                cache[layer] = jax.lax.dynamic_update_slice_in_dim(
                    cache[layer], new.swapaxes(1, 2).astype(cache[layer].dtype), position, axis=2
                )
            return attend_one(q, keys[layer], values[layer], position)

        recur = _StepRecur(carry.states)
        output = targets.forward(config, params, carry.token[:, None], rotary, attend, recur)
        hidden = output.hidden[:, 0]
        logits: Any = targets.module(config).apply({"params": params}, hidden, method="logits")
        return tuple(keys), tuple(values), tuple(recur.states), logits


class _Segment(NamedTuple):
    size: int  # of the cache
    run: Any
