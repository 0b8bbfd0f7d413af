"""The embedded SmolLM2-135M-Instruct: loads, speaks, tokenises as llama.cpp does."""

from __future__ import annotations

import itertools
import pathlib
import random
import subprocess
import sys

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.checkpoints import Target, embedded_path, gguf_tokenizer, load_target
from dflash_jax.checkpoints.gguf_file import GGUFFile
from dflash_jax.errors import InputError
from dflash_jax.models import layers
from dflash_jax.models.llama import Llama, inverse_frequencies

pytestmark = pytest.mark.model

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def path() -> pathlib.Path:
    try:
        return embedded_path()
    except InputError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def source(path) -> GGUFFile:
    return GGUFFile(path)


@pytest.fixture(scope="module")
def smollm2(path) -> Target:
    return load_target(path)


def test_config_and_tokens(smollm2):
    config = smollm2.config
    assert (config.num_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocab_size, config.max_position_embeddings) == (49152, 8192)
    assert config.tie_word_embeddings
    assert config.rope_theta == 100000.0
    assert smollm2.stop_token_ids == {2}
    assert smollm2.tokenizer.vocab_size == config.vocab_size
    assert smollm2.name == "SmolLM2-135M-Instruct.Q4_1"
    assert {leaf.dtype for leaf in jax.tree.leaves(smollm2.params)} == {np.dtype("float32")}


def test_chat_template(smollm2):
    text = smollm2.tokenizer.apply_chat_template(QUESTION)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith(
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_greedy_answer(smollm2):
    model, rows = Llama(smollm2.config), 56
    rotary = layers.rotary_table(inverse_frequencies(smollm2.config), rows)
    mask = jnp.tril(jnp.ones((rows, rows), bool))

    @jax.jit
    def pick(params, tokens, row):
        out = model.apply(
            params, tokens, rotary, lambda layer, q, k, v: layers.attention(q, k, v, mask)
        )
        return model.apply(params, out.hidden[row], method="logits").argmax()

    tokens = smollm2.tokenizer.encode_chat(QUESTION)
    start = len(tokens)
    while tokens[-1] not in smollm2.stop_token_ids:
        padded = jnp.asarray(tokens + [0] * (rows - len(tokens)), jnp.int32)
        tokens.append(int(pick(smollm2.params, padded, len(tokens) - 1)))
    assert smollm2.tokenizer.decode(tokens[start:]) == "The capital of France is Paris."


@pytest.mark.slow
def test_loading_stays_small(path):
    """Weights of 540 MB in float32, and no second copy of them."""
    code = (
        "from dflash_jax.checkpoints import load_target;"
        "load_target('embedded');"
        # Not ru_maxrss: it counts the memory of the process that this one was forked from.
        "lines = open('/proc/self/status').read().splitlines();"
        "print([line.split()[1] for line in lines if line.startswith('VmHWM')][0])"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert int(run.stdout.split()[-1]) / 1024 < 1500


# --- tokenization against llama.cpp -------------------------------------------------------------

FIXED_TEXTS = (
    "def f(x):\n    return {'a': x**2}  # comment\n\n\tif x != 3.14159e-10:\n",
    "1234567890 ١٢٣ ½ Ⅷ 12,345.67",
    "👩‍👩‍👧‍👦 🇫🇷 👍🏽 é e\u0301 naïve",
    "日本語のテキスト。中文文本，한국어",
    "   leading,   inner and trailing   \n\n\n \t \r\n",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><|im_end",
    "I'm they'LL we've don't 'S",
    "\u00a0\u3000\u200b\u2028\ufeff\x00\x07\x1b",
)
POOLS = (
    "abcXYZ",
    "0123456789",
    "  \t\n\r",
    "'s't're'LL",
    "éüñßΩжЩ",
    "日本語中文한국어",
    "😀👩‍👩‍👧🇫🇷🏽",
    "!?.,;:(){}[]<>=+-*/\\|_~`@#$%^&",
    "\u00a0\u3000\u200b\u2028\ufeff\u0301",
    "²½Ⅷ٣",
)


def varied_texts(count: int = 1000) -> list[str]:
    rng = random.Random(0)

    def piece() -> str:
        if rng.random() < 0.05:
            return "<|im_end|>"
        return "".join(rng.choices(rng.choice(POOLS), k=rng.randint(1, 5)))

    drawn = ("".join(piece() for _ in range(rng.randint(1, 25))) for _ in range(count))
    return [*FIXED_TEXTS, *drawn]


def write_vocabulary(source: GGUFFile, pre: str, path: pathlib.Path, merges: int = 4000):
    """A GGUF without tensors: the source's first merges, under another pre-tokenizer."""
    tokens = source.value("tokenizer.ggml.tokens", list)
    types = source.value("tokenizer.ggml.token_type", list)
    kept = source.value("tokenizer.ggml.merges", list)[:merges]
    made = {merge.replace(" ", "") for merge in kept}
    pairs = [
        (token, kind)
        for token, kind in zip(tokens, types, strict=True)
        if kind == 3 or len(token) == 1 or token in made
    ]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(pairs))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([token for token, _ in pairs])
    writer.add_token_types([kind for _, kind in pairs])
    writer.add_token_merges(kept)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def assert_same_tokens(file: pathlib.Path, tokenizer):
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    peer = llama_cpp.Llama(str(file), vocab_only=True, verbose=False)
    for text, add in itertools.product(varied_texts(), (False, True)):
        ours = tokenizer.encode(text, add_special=add)
        assert ours == peer.tokenize(text.encode(), add_bos=add, special=True), repr(text)


def test_tokens_equal_llama_cpp(path, smollm2):
    assert_same_tokens(path, smollm2.tokenizer)


@pytest.mark.parametrize("pre", sorted(gguf_tokenizer.PRE_TOKENIZERS))
def test_pre_tokenizers_equal_llama_cpp(source, pre, tmp_path):
    file = tmp_path / "vocabulary.gguf"
    write_vocabulary(source, pre, file)
    assert_same_tokens(file, gguf_tokenizer.from_gguf(GGUFFile(file)))


def test_decode_inverts_encode(smollm2):
    tokenizer = smollm2.tokenizer
    for text in varied_texts(200):
        assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text
