"""Our logits against llama.cpp's, position by position, on the same tokens (teacher-forced).

llama.cpp multiplies quantised weights with activations rounded to 8 bits, so near ties fall the
other way now and then; on weights dequantised to float32 it does not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.checkpoints import Target
from dflash_jax.errors import InputError
from dflash_jax.models import layers, targets

# Sequences are padded to this many rows, so that one executable serves them all.
ROWS = 256
F32_CACHE = 0  # GGML_TYPE_F32: llama.cpp's own default is float16


@dataclasses.dataclass(frozen=True)
class Disagreement:
    """A position where the two pick different tokens. Margins are in logits, both positive."""

    sequence: int
    position: int
    ours: int
    theirs: int
    our_margin: float  # our logit of our pick, above our logit of theirs
    their_margin: float  # their logit of their pick, above their logit of ours


@dataclasses.dataclass(frozen=True)
class Parity:
    """Of all positions compared."""

    positions: int
    agreement: float  # share of positions with the same top-1 token
    mean_abs_difference: float  # of logits
    max_abs_difference: float
    mean_kl: float  # nats, of ours from theirs
    disagreements: tuple[Disagreement, ...]


def open_peer(
    path: pathlib.Path, threads: int = 2, context: int = ROWS, all_logits: bool = True
) -> Any:
    """A `llama_cpp.Llama` for `context` tokens; with `all_logits` it keeps every position's.

    Raises:
      InputError: llama-cpp-python is not installed.
    """
    try:
        import llama_cpp
    except ImportError as error:
        raise InputError("llama-cpp-python is missing: run `pip install llama-cpp-python`") from (
            error
        )
    with _plain_buffers(llama_cpp):
        return llama_cpp.Llama(
            str(path),
            n_ctx=context,
            n_batch=ROWS,
            n_threads=threads,
            n_threads_batch=threads,
            logits_all=all_logits,
            type_k=F32_CACHE,
            type_v=F32_CACHE,
            seed=0,
            verbose=False,
        )


@contextlib.contextmanager
def _plain_buffers(llama_cpp: Any) -> Iterator[None]:
    """Keeps weights as the file has them. `Llama` has no argument for it.

    Repacked for AMX, Q4_1 weights crash 0.3.36 (general protection fault) with two rows and more
    on a virtual machine that shows AMX.
    """
    defaults = llama_cpp.llama_cpp.llama_model_default_params

    def plain() -> Any:
        params = defaults()
        params.use_extra_bufts = False
        return params

    llama_cpp.llama_cpp.llama_model_default_params = plain
    try:
        yield
    finally:
        llama_cpp.llama_cpp.llama_model_default_params = defaults


def sampled_sequences(peer: Any, prompts: Sequence[Sequence[int]], length: int) -> list[list[int]]:
    """Each prompt continued by the peer, at temperature 1, to `length` tokens in all."""
    sequences = []
    for prompt in prompts:
        tokens = list(prompt)
        peer.reset()
        for token in peer.generate(prompt, temp=1.0, top_k=0, top_p=1.0, min_p=0.0):
            tokens.append(int(token))
            if len(tokens) >= length:
                break
        sequences.append(tokens)
    return sequences


def peer_logits(peer: Any, tokens: Sequence[int]) -> np.ndarray:
    """float32 [T, V] of llama.cpp."""
    peer.reset()
    peer.eval(list(tokens))
    return np.array(peer.scores[: len(tokens)], np.float32)


class OurLogits:
    """float32 [T, V] of our model, for sequences of up to ROWS tokens."""

    def __init__(self, target: Target):
        config = target.config
        model = targets.module(config)
        rotary = layers.rotary_table(targets.rotary_frequencies(config), ROWS)
        mask = jnp.tril(jnp.ones((ROWS, ROWS), bool))

        def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return layers.attention(q, k, v, mask)

        def forward(params: dict[str, Any], tokens: jax.Array) -> Any:
            recur = targets.whole_sequence(config)
            out = targets.forward(config, params["params"], tokens, rotary, attend, recur)
            return model.apply(params, out.hidden, method="logits")

        self._params = target.params
        self._forward = jax.jit(forward)

    def __call__(self, tokens: Sequence[int]) -> np.ndarray:
        padded = np.zeros(ROWS, np.int32)
        padded[: len(tokens)] = tokens
        return np.asarray(self._forward(self._params, padded))[: len(tokens)]


def compare(target: Target, peer: Any, sequences: Sequence[Sequence[int]]) -> Parity:
    """Runs both over the sequences and compares every position."""
    return compare_logits(OurLogits(target), lambda tokens: peer_logits(peer, tokens), sequences)


def compare_logits(
    ours_of: Callable[[Sequence[int]], np.ndarray],
    theirs_of: Callable[[Sequence[int]], np.ndarray],
    sequences: Sequence[Sequence[int]],
) -> Parity:
    """Two models' logits [T, V], each from a sequence's tokens, over every position."""
    disagreements: list[Disagreement] = []
    gaps, kls = [], []
    for index, tokens in enumerate(sequences):
        ours, theirs = ours_of(tokens), theirs_of(tokens)
        disagreements.extend(_disagreements(index, ours, theirs))
        difference = np.abs(ours - theirs)
        gaps.append((difference.mean(-1), difference.max(-1)))
        kls.append(_kl(theirs, ours))
    positions = sum(map(len, sequences))
    means, maxima = (np.concatenate(parts) for parts in zip(*gaps, strict=True))
    return Parity(
        positions=positions,
        agreement=1 - len(disagreements) / positions,
        mean_abs_difference=float(means.mean()),
        max_abs_difference=float(maxima.max()),
        mean_kl=float(np.concatenate(kls).mean()),
        disagreements=tuple(disagreements),
    )


def _disagreements(index: int, ours: np.ndarray, theirs: np.ndarray) -> Iterator[Disagreement]:
    our_picks, their_picks = ours.argmax(-1), theirs.argmax(-1)
    for position in np.flatnonzero(our_picks != their_picks):
        mine, other = our_picks[position], their_picks[position]
        yield Disagreement(
            sequence=index,
            position=int(position),
            ours=int(mine),
            theirs=int(other),
            our_margin=float(ours[position, mine] - ours[position, other]),
            their_margin=float(theirs[position, other] - theirs[position, mine]),
        )


def _kl(of: np.ndarray, to: np.ndarray) -> np.ndarray:
    """KL(softmax(of) || softmax(to)), [T]."""
    log_p, log_q = (x - np.logaddexp.reduce(x, axis=-1, keepdims=True) for x in (of, to))
    return (np.exp(log_p) * (log_p - log_q)).sum(-1)


def converted_copy(path: pathlib.Path, copy: pathlib.Path, kind: str = "ALL_F32") -> None:
    """llama.cpp's own copy of a GGUF in another type, as `LLAMA_FTYPE_<kind>`.

    "ALL_F32" takes its 8-bit activations away too.
    """
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.allow_requantize = True
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_{kind}")
    status = llama_cpp.llama_model_quantize(str(path).encode(), str(copy).encode(), params)
    if status:
        raise InputError(f"{path}: llama.cpp could not convert it to {kind} (status {status})")
