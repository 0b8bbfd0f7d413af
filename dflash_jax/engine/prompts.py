"""Prompts as users give them, to token ids."""

from __future__ import annotations

import json
from typing import Any

from dflash_jax.checkpoints.tokenizer import Tokenizer
from dflash_jax.errors import InputError

KINDS = ("prompt", "messages", "tokens")


def read_prompt_file(path: str, tokenizer: Tokenizer, chat: bool = True) -> list[list[int]]:
    """JSON lines, each with one of `prompt`, `messages`, `tokens`, as token ids.

    Raises:
      InputError: the file cannot be read, is empty, or has a line that is no such object.
    """
    prompts = []
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    where = f"{path}:{number}"
                    prompts.append(encode_prompt(_parsed(line, where), tokenizer, chat, where))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"prompt file {path}: {error}") from error
    if not prompts:
        raise InputError(f"prompt file {path} has no prompt in it")
    return prompts


def _parsed(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # no JSON, numbers too long, lists too deep
        raise InputError(f"{where} is no JSON object: {error}") from error
    if not isinstance(record, dict):
        raise InputError(f"{where} is no JSON object")
    return record


def encode_prompt(
    record: dict[str, Any], tokenizer: Tokenizer, chat: bool = True, where: str = "prompt"
) -> list[int]:
    """Token ids of a record.

    Args:
      record: with one of `prompt` (text), `messages` (a chat), `tokens` (ids).
      chat: whether a `prompt` is a chat's user turn, not raw text.
      where: names the record in errors.
    """
    given = [name for name in KINDS if name in record]
    if len(given) != 1:
        raise InputError(f"{where}: give one of {', '.join(KINDS)}")
    value = record[given[0]]
    if given[0] == "tokens":
        if not isinstance(value, list) or not all(type(token) is int for token in value):
            raise InputError(f"{where}: tokens must be a list of whole numbers")
        return value
    if given[0] == "messages":
        try:
            return tokenizer.encode_chat(value)
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
    if not isinstance(value, str) or not value:
        raise InputError(f"{where}: the prompt must be a text that is not empty")
    if chat:
        return tokenizer.encode_chat([{"role": "user", "content": value}])
    return tokenizer.encode(value)


def require_fit(prompts: list[list[int]], context_limit: int, vocab_size: int) -> None:
    """Raises InputError for a prompt that cannot be decoded; before anything is compiled."""
    for number, prompt in enumerate(prompts, 1):
        if len(prompt) >= context_limit:
            raise InputError(
                f"prompt {number}, a prompt of {len(prompt)} tokens, leaves no room in the context "
                f"of {context_limit}: shorten it or raise --config.context_limit"
            )
        for token in prompt:
            if not 0 <= token < vocab_size:
                raise InputError(
                    f"prompt {number}: token id {token} is outside 0..{vocab_size - 1}"
                )
