"""Tokenizers and chat templates, of a tiny checkpoint; the real one is in test_embedded.py."""

from __future__ import annotations

import json

import pytest

from dflash_jax.checkpoints import hf_tokenizer
from dflash_jax.checkpoints.chat import ChatTemplate
from dflash_jax.errors import InputError

pytest.importorskip("transformers", reason="the oracle is in the test extra")
from tests import tiny_llama

USER = [{"role": "user", "content": "hello"}]


@pytest.fixture
def directory(tmp_path):
    """A directory's tokenizer files, without a model."""
    tiny_llama.byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": "<|endoftext|>", "chat_template": tiny_llama.TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.fixture
def tokenizer(directory):
    return hf_tokenizer.from_directory(directory)


TEXTS = [
    "",
    "hello world",
    "tab\tand\n\n\nlines  ",
    "héllo 日本語 👩‍👩‍👧 \u200b",
    "a<|im_end|>b",
    "0123456789",
]


@pytest.mark.parametrize("text", TEXTS)
def test_decode_inverts_encode(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text


@pytest.mark.parametrize("text", TEXTS)
def test_stream_gives_the_text_and_no_broken_characters(tokenizer, text):
    stream = tokenizer.stream()
    pieces = [stream.push(token) for token in tokenizer.encode(text)]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + stream.finish() == text.replace("<|im_end|>", "")


def test_stream_keeps_a_cut_character_until_the_end(tokenizer):
    ids = tokenizer.encode("a👩")[:-1]
    stream = tokenizer.stream()
    assert "".join(stream.push(token) for token in ids) == "a"
    assert stream.finish() == tokenizer.decode(ids)[1:] == "\ufffd"


def test_special_tokens(tokenizer):
    assert tokenizer.encode("<|im_start|>") == [257]
    assert tokenizer.special_ids == {256, 257, 258}
    assert tokenizer.end_of_turn_ids() == {258}
    assert (tokenizer.bos_id, tokenizer.eos_id) == (None, 256)
    assert tokenizer.decode([257, 258]) == ""
    assert tokenizer.token_id("nothing") is None


def test_truncation_and_padding_saved_with_the_file_are_dropped(directory):
    backend = tiny_llama.byte_tokenizer()
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    backend.save(str(directory / "tokenizer.json"))
    assert len(hf_tokenizer.from_directory(directory).encode("123456")) == 6


def test_lone_surrogates_are_refused(tokenizer):
    with pytest.raises(InputError, match=r"lone surrogate \(\\ud83d\) at character 2"):
        tokenizer.encode("ab\ud83dc")
    with pytest.raises(InputError, match="lone surrogate"):
        tokenizer.encode_chat([{"role": "user", "content": "\udc00"}])


def test_chat_equals_the_template(tokenizer):
    text = tokenizer.apply_chat_template(USER)
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode_chat(USER) == tokenizer.encode(text)
    assert not tokenizer.apply_chat_template(USER, add_generation_prompt=False).endswith("nt\n")


def test_chat_template_file_wins_and_lists_give_the_default(directory):
    named = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert hf_tokenizer.from_directory(directory).apply_chat_template(USER) == "d"
    (directory / "chat_template.jinja").write_text("f{{ eos_token }}|{{ extra }}")
    tokenizer = hf_tokenizer.from_directory(directory)
    assert tokenizer.apply_chat_template(USER, extra=3) == "f|3"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one"),
        ([{"content": "x"}], r"messages\[0\]"),
        (["x"], r"messages\[0\]"),
        ([{"role": None, "content": "x"}], r"messages\[0\]"),
    ],
)
def test_messages_that_are_none_are_refused(tokenizer, messages, message):
    with pytest.raises(InputError, match=message):
        tokenizer.apply_chat_template(messages)


def test_no_template_is_refused(directory):
    (directory / "tokenizer_config.json").unlink()
    with pytest.raises(InputError, match="no chat template"):
        hf_tokenizer.from_directory(directory).encode_chat(USER)


def test_unknown_eos_is_refused(directory):
    (directory / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    with pytest.raises(InputError, match="eos_token '</s>' is not in"):
        hf_tokenizer.from_directory(directory)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ [1, 2] | tojson(indent=1) }}", "[\n 1,\n 2\n]"),
        ("{% for m in messages %}{% break %}{% endfor %}x", "x"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("  {% if true %}\nx{% endif %}\n", "x"),
    ],
)
def test_what_templates_may_use(source, expected):
    assert ChatTemplate(source, "here").render(USER) == expected


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "here.*roles must alternate"),
        ("{{ messages[0]['content'] + 3 }}", "refused"),
        ("{{ messages.append(1) }}", "refused"),
        ("{{ ''.__class__.__mro__ }}", "refused"),
        ("{{ messages[7].content }}", "refused"),
    ],
)
def test_what_templates_refuse(source, message):
    with pytest.raises(InputError, match=message):
        ChatTemplate(source, "here").render(USER)


def test_broken_template_is_refused():
    with pytest.raises(InputError, match="not valid"):
        ChatTemplate("{% if %}", "here")
