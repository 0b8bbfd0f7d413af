"""Prompts that begin as an earlier one did start from what that one left.

A prompt is read in chunks of one size at absolute positions, so what a chunk leaves depends on the
tokens up to its end alone, bit for bit. Kept are, under a hash of those tokens,

    rows     keys and values that the chunk added to the target's cache and the drafter's context
    states   of a hybrid's recurrent layers behind the chunk. They are as large as many chunks'
             rows, so they are kept at two places of a prompt: behind its last whole chunk, where a
             chat goes on, and where it left the prompts known before, as others will too

What decoding commits is not kept: it has other bits than the same tokens read as a prompt.
"""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from dflash_jax.decode.attention import Cache
from dflash_jax.decode.chunk_copies import ChunkCopies, Rows
from dflash_jax.decode.programs import TargetState
from dflash_jax.decode.recurrence import States

MIB = 2**20
_ROWS, _STATES = "rows", "states"


class PromptCache:
    """Chunks of prompts, the least recently used dropped first. One stream at a time uses it."""

    def __init__(
        self,
        copies: ChunkCopies,
        chunk: int,
        capacity: int,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """
        Args:
          copies: for the streams' buffers.
          chunk: tokens of one, `RowPolicy.prefill_chunk`.
          capacity: most bytes of device memory.
          say: gets a warning about a capacity that holds nothing.
        """
        self.copies = copies
        self.capacity = capacity
        self.bytes = 0  # held now
        self._chunk = chunk
        self._sizes = {_ROWS: self.copies.rows_bytes, _STATES: self.copies.states_bytes}
        # So many chunks of one prompt fit beside its states: it never drops what it has kept.
        room = self.capacity - self._sizes[_STATES]
        self._most = max(0, room // max(1, self._sizes[_ROWS]))
        if self._most == 0:
            least = -(-sum(self._sizes.values()) // MIB)
            say(f"warning: the prompt cache is too small to keep anything: give it {least} MiB")
        # (kind, hash) -> what is kept; the least recently used first.
        self._items: collections.OrderedDict[tuple[str, bytes], Any] = collections.OrderedDict()

    def read(self, prompt: np.ndarray) -> PromptReading:
        """A prompt, int32 [n], that is about to be read."""
        digest, hashes = b"", []
        for end in range(self._chunk, len(prompt) + 1, self._chunk):
            tokens = prompt[end - self._chunk : end].astype("<i4").tobytes()
            digest = hashlib.sha256(digest + tokens).digest()
            hashes.append(digest)
        # The last token is always read: the reply's first is picked from it.
        last = min((len(prompt) - 1) // self._chunk, self._most)
        return PromptReading(self, hashes[: self._most], last, self._chunk)

    def clear(self) -> None:
        self._items.clear()
        self.bytes = 0

    def rows(self, key: bytes) -> Rows | None:
        """Of a chunk; None: not kept."""
        return self._items.get((_ROWS, key))

    def states(self, key: bytes) -> States | None:
        """Behind a chunk; None: not kept."""
        return self._items.get((_STATES, key))

    def put_rows(self, key: bytes, rows: Rows) -> None:
        self._put((_ROWS, key), rows)

    def put_states(self, key: bytes, states: States) -> None:
        self._put((_STATES, key), states)

    def _put(self, item: tuple[str, bytes], value: Any) -> None:
        self._items[item] = value
        self.bytes += self._sizes[item[0]]
        while self.bytes > self.capacity:
            (kind, _), _ = self._items.popitem(last=False)
            self.bytes -= self._sizes[kind]

    def touch(self, path: list[bytes], found: int = 0) -> None:
        """Marks a prompt's chunks as used now, and the states behind the first `found` of them.

        An earlier chunk after those that follow it: so none is dropped before them.
        """
        used = [(_STATES, path[found - 1])] if found else []
        for item in (*used, *((_ROWS, key) for key in reversed(path))):
            if item in self._items:
                self._items.move_to_end(item)


class PromptReading:
    """One prompt's way through the cache: `load` what is known, read the rest, `save` it."""

    def __init__(self, cache: PromptCache, hashes: list[bytes], last: int, chunk: int) -> None:
        """
        Args:
          hashes: of the prompt's whole chunks, as many as may be kept.
          last: most chunks that need not be read.
          chunk: tokens of one.
        """
        self._cache, self._hashes, self._chunk = cache, hashes, chunk
        known = 0
        while known < len(hashes) and cache.rows(hashes[known]) is not None:
            known += 1
        self._found = min(known, last)
        self._keep_states: set[int] = set()  # behind so many chunks
        if cache.copies.copy_states is not None:
            self._keep_states = {self._found, last} - {0}
            while self._found and cache.states(hashes[self._found - 1]) is None:
                self._found -= 1

    @property
    def tokens(self) -> int:
        """Tokens at the prompt's start that need not be read."""
        return self._found * self._chunk

    def load(
        self, state: TargetState, drafter_cache: Cache | None
    ) -> tuple[TargetState, Cache | None]:
        """Buffers (donated) as they stand behind those tokens."""
        copies = self._cache.copies
        caches = (state.cache, drafter_cache)
        for number, key in enumerate(self._hashes[: self._found]):
            rows = self._cache.rows(key)
            assert rows is not None  # nobody drops any between `read` and here
            caches = copies.load_rows(caches, rows, jnp.int32(number * self._chunk))
        states = state.states
        if self._found and copies.copy_states is not None:
            kept = self._cache.states(self._hashes[self._found - 1])
            assert kept is not None
            states = copies.copy_states(kept)
        self._cache.touch(self._hashes, self._found)
        length = jnp.int32(self.tokens)
        return state._replace(cache=caches[0], length=length, states=states), caches[1]

    def save(self, begin: int, state: TargetState, drafter_cache: Cache | None) -> None:
        """Keeps the chunk from position `begin` on, which has just been read, if it is whole."""
        number, cache = begin // self._chunk, self._cache
        if number >= len(self._hashes):
            return
        key = self._hashes[number]
        if cache.rows(key) is None:
            rows = cache.copies.save_rows(state.cache, drafter_cache, jnp.int32(begin))
            cache.put_rows(key, rows)
        if number + 1 in self._keep_states and cache.states(key) is None:
            assert cache.copies.copy_states is not None
            cache.put_states(key, cache.copies.copy_states(state.states))
        cache.touch(self._hashes)
