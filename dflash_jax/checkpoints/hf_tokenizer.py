"""A tokenizer from a Hugging Face directory: tokenizer.json, its config, its chat template."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import tokenizers

from dflash_jax.checkpoints.chat import ChatTemplate
from dflash_jax.checkpoints.json_values import read_json, refused_kinds, typed
from dflash_jax.checkpoints.tokenizer import Tokenizer
from dflash_jax.errors import InputError

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"


def from_directory(directory: pathlib.Path) -> Tokenizer:
    """Reads the tokenizer; InputError when a file is missing or not readable."""
    path = directory / TOKENIZER_FILE
    if not path.is_file():
        raise InputError(f"{directory}: holds no {TOKENIZER_FILE}")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise InputError(f"{path}: not a readable tokenizer ({error})") from error
    # Settings saved with the file would cut or pad prompts in silence.
    backend.no_truncation()
    backend.no_padding()
    config_path = directory / CONFIG_FILE
    config = read_json(config_path) if config_path.is_file() else {}
    added = backend.get_added_tokens_decoder()
    with refused_kinds(config_path):
        source = _chat_template(directory, config)
        bos_id = _token_id(backend, config, "bos_token")
        eos_id = _token_id(backend, config, "eos_token")
    return Tokenizer(
        backend=backend,
        vocab_size=1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1),
        bos_id=bos_id,
        eos_id=eos_id,
        special_ids=frozenset(index for index, token in added.items() if token.special),
        chat_template=ChatTemplate(source, str(directory)) if source else None,
    )


def _token_id(backend: tokenizers.Tokenizer, config: Mapping[str, Any], name: str) -> int | None:
    """The id of a token that the config gives as text, or as {"content": text}."""
    token = config.get(name)
    if isinstance(token, Mapping):
        token = token.get("content")
    if token is None:
        return None
    if not isinstance(token, str):
        raise InputError(f"{name} must be a text, not {token!r}")
    token_id = backend.token_to_id(token)
    if token_id is None:
        raise InputError(f"{name} {token!r} is not in {TOKENIZER_FILE}")
    return token_id


def _chat_template(directory: pathlib.Path, config: Mapping[str, Any]) -> str | None:
    path = directory / TEMPLATE_FILE
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path}: not a readable template ({error})") from error
    template = config.get("chat_template")
    if isinstance(template, list):
        label = "an entry of chat_template"
        named = {typed(e, "name", str, label): typed(e, "template", str, label) for e in template}
        template = named.get("default")
    if not isinstance(template, str | None):
        raise InputError(f"chat_template must be a text, not a {type(template).__name__}")
    return template
