"""A byte-level BPE tokenizer from GGUF metadata, splitting text as llama.cpp does."""

from __future__ import annotations

import enum

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from dflash_jax.checkpoints.chat import ChatTemplate
from dflash_jax.checkpoints.gguf_file import GGUFFile
from dflash_jax.checkpoints.tokenizer import Tokenizer as CheckpointTokenizer
from dflash_jax.errors import InputError


class TokenType(enum.IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Llama 3 splits digits in threes, Qwen 2 one by one; else they are the same.
_TIKTOKEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = _TIKTOKEN.replace("DIGITS", "{1,3}")
QWEN2 = _TIKTOKEN.replace("DIGITS", "")
ONE_DIGIT = r"\p{N}"

# `tokenizer.ggml.pre` -> the patterns that split a text, one after the other.
PRE_TOKENIZERS = {
    "gpt-2": (GPT2,),
    "smollm": (ONE_DIGIT, GPT2),
    "llama-bpe": (LLAMA3,),
    "qwen2": (QWEN2,),
}
# Pieces that are a token as a whole skip the merges.
IGNORE_MERGES = ("llama-bpe",)


def from_gguf(file: GGUFFile) -> CheckpointTokenizer:
    """Builds the tokenizer, or raises InputError for one of another kind."""
    model = file.value("tokenizer.ggml.model", str)
    if model != "gpt2":
        raise InputError(
            f"{file.label}: tokenizer {model!r} is not supported, only 'gpt2' (byte-level BPE)"
        )
    pre = file.value("tokenizer.ggml.pre", str)
    if pre not in PRE_TOKENIZERS:
        raise InputError(f"{file.label}: pre-tokenizer {pre!r} is none of {sorted(PRE_TOKENIZERS)}")
    tokens = file.value("tokenizer.ggml.tokens", list)
    types = file.value("tokenizer.ggml.token_type", list, [TokenType.NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise InputError(f"{file.label}: {len(tokens)} tokens but {len(types)} token types")
    backend = _backend(file, pre, tokens, types)
    bos_id = _special_id(file, "bos", len(tokens))
    eos_id = _special_id(file, "eos", len(tokens))
    # Llama 3 texts start with a BOS unless the file says otherwise.
    add_bos = file.value("tokenizer.ggml.add_bos_token", bool, pre == "llama-bpe")
    add_eos = file.value("tokenizer.ggml.add_eos_token", bool, False)
    _surround(backend, bos_id if add_bos else None, eos_id if add_eos else None)
    source = file.value("tokenizer.chat_template", str, "")
    return CheckpointTokenizer(
        backend=backend,
        vocab_size=1 + max(i for i, kind in enumerate(types) if kind != TokenType.UNUSED),
        bos_id=bos_id,
        eos_id=eos_id,
        special_ids=frozenset(i for i, kind in enumerate(types) if kind == TokenType.CONTROL),
        chat_template=ChatTemplate(source, file.label) if source else None,
    )


def _backend(file: GGUFFile, pre: str, tokens: list[str], types: list[int]) -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = []
    for merge in file.value("tokenizer.ggml.merges", list):
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    try:
        backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre in IGNORE_MERGES))
    except Exception as error:  # the library raises nothing narrower
        raise InputError(f"{file.label}: the tokenizer's merges do not fit ({error})") from error
    splits = [pre_tokenizers.Split(Regex(p), "isolated") for p in PRE_TOKENIZERS[pre]]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    backend.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, types, strict=True):
        if kind == TokenType.CONTROL:
            backend.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif kind == TokenType.USER_DEFINED:
            backend.add_tokens([AddedToken(token, normalized=False)])
    return backend


def _special_id(file: GGUFFile, name: str, count: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = file.value(key, int, None)
    if value is not None and not 0 <= value < count:
        raise InputError(f"{file.label}: {key} {value} is none of the {count} tokens")
    return value


def _surround(backend: Tokenizer, bos_id: int | None, eos_id: int | None) -> None:
    """Makes `encode(add_special=True)` put these around a text."""
    named = [
        {"id": name, "ids": [token_id], "tokens": [backend.id_to_token(token_id)]}
        for name, token_id in (("BOS", bos_id), ("EOS", eos_id))
        if token_id is not None
    ]
    if named:
        before = "" if bos_id is None else "BOS "
        after = "" if eos_id is None else " EOS"
        backend.post_processor = processors.TemplateProcessing(
            single=f"{before}$A{after}", special_tokens=named
        )


def stop_ids(file: GGUFFile, tokenizer: CheckpointTokenizer) -> frozenset[int]:
    """End of sequence, of turn and of message, as the file declares them."""
    names = ("eos", "eot", "eom")
    declared = {_special_id(file, name, tokenizer.vocab_size) for name in names}
    return frozenset(token for token in declared if token is not None)
