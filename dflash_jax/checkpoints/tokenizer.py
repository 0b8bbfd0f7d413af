"""The tokenizer of a checkpoint: text to token ids and back, special tokens, chat messages."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tokenizers
from tokenizers.decoders import DecodeStream

from dflash_jax.checkpoints.chat import ChatTemplate, Message
from dflash_jax.errors import InputError

# Tokens that end a turn, in the templates that are in use. One ends a reply when the checkpoint's
# own template writes it.
END_OF_TURN_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<|eot|>", "<end_of_turn>")


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """Wraps a `tokenizers.Tokenizer`; made by `load_target`.

    Attributes:
      backend: the tokenizer proper.
      vocab_size: ids 0..vocab_size-1 may be tokens. A model with more rows is padded: the ids
        above must never be drawn.
      bos_id, eos_id: as the checkpoint declares, or None.
      special_ids: control tokens, which carry no text.
      chat_template: None for a base model.
    """

    backend: tokenizers.Tokenizer
    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    special_ids: frozenset[int]
    chat_template: ChatTemplate | None

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        """Ids of `text`; special tokens written in it are recognised.

        `add_special` adds what the checkpoint puts around a text (a BOS, mostly).

        Raises:
          InputError: a lone surrogate, which is no Unicode text.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(
                f"text holds a lone surrogate (\\u{ord(text[error.start]):04x}) "
                f"at character {error.start}"
            ) from error
        return self.backend.encode(text, add_special_tokens=add_special).ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of `ids`; bytes that form no character become U+FFFD."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special)

    def stream(self) -> StreamDecoder:
        """A decoder for tokens that arrive one by one."""
        return StreamDecoder(self)

    def token_id(self, token: str) -> int | None:
        return self.backend.token_to_id(token)

    def apply_chat_template(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The text of a chat prompt; InputError as `ChatTemplate.render`, or without template."""
        if self.chat_template is None:
            raise InputError("the checkpoint has no chat template: give a prompt, not messages")
        for name, token_id in (("bos_token", self.bos_id), ("eos_token", self.eos_id)):
            token = "" if token_id is None else self.backend.id_to_token(token_id)
            variables.setdefault(name, token)
        return self.chat_template.render(messages, add_generation_prompt, **variables)

    def encode_chat(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Ids of a chat prompt. The template writes a BOS itself where one is wanted."""
        return self.encode(self.apply_chat_template(messages, add_generation_prompt, **variables))

    def end_of_turn_ids(self) -> frozenset[int]:
        """Special tokens with which the chat template ends a turn."""
        if self.chat_template is None:
            return frozenset()
        written = [token for token in END_OF_TURN_TOKENS if token in self.chat_template.source]
        ids = {self.token_id(token) for token in written}
        return frozenset(token_id for token_id in ids if token_id in self.special_ids)


class StreamDecoder:
    """Text of a growing reply: incomplete characters wait for their last byte."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._emitted = 0  # characters

    def push(self, token: int) -> str:
        """The text that `token` completes, perhaps none."""
        self._ids.append(token)
        text = self._stream.step(self._tokenizer.backend, token) or ""
        self._emitted += len(text)
        return text

    def finish(self) -> str:
        """What still waited, at the end of the reply."""
        return self._tokenizer.decode(self._ids)[self._emitted :]
