"""Loading hybrids: the official layout and its quantised kin, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from typing import NamedTuple

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dflash_jax.checkpoints import hybrid, qwen3_5_config, qwen3_5_names
from dflash_jax.checkpoints.gguf_file import GGUFFile
from dflash_jax.checkpoints.names import as_floats, as_int8
from dflash_jax.checkpoints.quantised_files import open_tensors
from dflash_jax.errors import InputError
from dflash_jax.models.qwen3_5 import FULL, LINEAR, Qwen35Config
from tests import tiny_llama
from tests import tiny_qwen3_5 as tiny

CONFIG = tiny.CONFIG
TENSORS = tiny.random_tensors(CONFIG)
OFFICIAL, PLAIN = qwen3_5_names.PREFIXES
UNWANTED = {  # present in every official checkpoint
    "mtp.fc.weight": np.zeros((4, 4), np.float32),
    "mtp.layers.0.input_layernorm.weight": np.zeros(4, np.float32),
    "model.visual.blocks.0.attn.qkv.weight": np.zeros((4, 4), np.float32),
}
TEXT_CONFIG = {
    **{k: v for k, v in tiny.SIZES.items() if k != "tie_word_embeddings"},
    "model_type": "qwen3_5_text",
    "hidden_act": "silu",
    "attn_output_gate": True,
    "output_gate_type": "swish",
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "layer_types": list(CONFIG.layer_types),
}
CONFIG_JSON = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "tie_word_embeddings": False,
    "text_config": TEXT_CONFIG,
    "vision_config": {"depth": 2},
}


class Loaded(NamedTuple):
    config: Qwen35Config
    params: dict


def load_hybrid(path, weights="float32") -> Loaded:
    """Without a tokenizer, which `load_target` would want too."""
    dtype = np.dtype("float32" if weights == "int8" else weights)
    store = as_int8(dtype) if weights == "int8" else as_floats(dtype)
    if path.suffix == ".gguf":
        opened = hybrid.open_gguf(GGUFFile(path), dtype, store)
    else:
        opened = hybrid.open_directory(path, dtype, store)
    return Loaded(opened.config, opened.read())


def write(directory, tensors=None, config=None, shards=1):
    """A checkpoint as publishers lay it out; `tensors` in NumPy's dtypes or ml_dtypes'."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config or CONFIG_JSON))
    tensors = TENSORS | UNWANTED if tensors is None else tensors
    names = sorted(tensors)
    if shards == 1:
        save(directory / "model.safetensors", tensors)
        return directory
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = names[shard::shards]
        save(directory / file, {name: tensors[name] for name in part})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


DTYPES = {
    "float32": "F32",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
}


def save(path, tensors):
    """The documented format; `safetensors.numpy` writes no eight-bit floats."""
    header, data = {}, b""
    for name, value in tensors.items():
        piece = np.ascontiguousarray(value).tobytes()
        offsets = [len(data), len(data) + len(piece)]
        dtype = DTYPES[str(value.dtype)]
        header[name] = {"dtype": dtype, "shape": value.shape, "data_offsets": offsets}
        data += piece
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def text_only(tensors):
    return {name.replace(OFFICIAL, PLAIN): value for name, value in tensors.items()}


def expected(tensors=None):
    return tiny.load(tiny.Tensors(tensors or TENSORS), CONFIG)["params"]


def assert_equal(left, right, tolerance=0.0):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(left), jax.tree.leaves(right), strict=True
    ):
        assert a.dtype == b.dtype, path
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance, err_msg=str(path))


@pytest.fixture
def official(tmp_path):
    return write(tmp_path / "tiny")


# --- the official layout ------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
def test_official_layout(tmp_path, shards):
    loaded = load_hybrid(write(tmp_path / "tiny", shards=shards))
    assert loaded.config == CONFIG
    assert_equal(loaded.params, expected())


def test_text_only_layout_and_interval(tmp_path):
    description = {
        **TEXT_CONFIG,
        "architectures": ["Qwen3_5ForCausalLM"],
        "layer_types": None,
        "full_attention_interval": 4,
        "rope_parameters": None,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    }
    loaded = load_hybrid(write(tmp_path / "tiny", text_only(TENSORS), description))
    assert loaded.config == CONFIG
    assert_equal(loaded.params, expected())


def test_what_transformers_saves(tmp_path):
    pytest.importorskip("transformers", reason="the oracle is in the test extra")
    model = tiny.hf_model()
    model.save_pretrained(tmp_path / "tiny", max_shard_size="60KB")
    loaded = load_hybrid(tmp_path / "tiny")
    tokens = tiny.some_tokens(40, batch=1)
    logits, _ = tiny.forward(loaded.config, {"params": loaded.params}, tokens)
    np.testing.assert_allclose(logits, tiny.hf_outputs(model, tokens)[0], rtol=0, atol=1e-4)


def test_tied_head(tmp_path):
    tensors = {name: value for name, value in TENSORS.items() if name != "lm_head.weight"}
    description = CONFIG_JSON | {"tie_word_embeddings": True}
    loaded = load_hybrid(write(tmp_path / "tiny", tensors, description))
    assert loaded.config.tie_word_embeddings
    assert "lm_head" not in loaded.params
    again = load_hybrid(write(tmp_path / "tiny", TENSORS, description))  # a copy may be there
    assert_equal(again.params, loaded.params)


def test_dtypes(tmp_path):
    stored = {name: value.astype(ml_dtypes.bfloat16) for name, value in TENSORS.items()}
    directory = write(tmp_path / "tiny", stored)
    loaded = load_hybrid(directory, "bfloat16")
    assert loaded.config.dtype == jnp.bfloat16
    mixer = loaded.params["layers_0"]["linear_attn"]
    assert mixer["in_proj"]["weight"].dtype == jnp.bfloat16
    assert mixer["A_log"].dtype == mixer["norm"]["weight"].dtype == jnp.float32
    int8 = load_hybrid(directory, "int8").params["layers_0"]["linear_attn"]
    assert int8["in_proj"]["weight"].values.dtype == jnp.int8
    assert int8["conv1d"]["weight"].dtype == jnp.float32


def test_the_released_sizes_give_the_released_tensors():
    """851 text tensors, with the shapes of the 27B checkpoint."""
    text = TEXT_CONFIG | {
        "vocab_size": 248320,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "layer_types": ([LINEAR] * 3 + [FULL]) * 16,
        "rope_parameters": tiny.ROPE | {"rope_theta": 1e7, "mrope_section": [11, 11, 10]},
    }
    description = CONFIG_JSON | {"text_config": text}
    config = qwen3_5_config.from_hugging_face(description, "config", np.dtype("float32"))
    table = {e.name: e.shape for e in qwen3_5_names.hugging_face_table(config)}
    assert len(table) == 851
    assert config.rotary_dim == 64
    first, fourth = (f"model.language_model.layers.{i}." for i in (0, 3))
    assert table[first + "linear_attn.in_proj_qkv.weight"] == (10240, 5120)
    assert table[first + "linear_attn.in_proj_z.weight"] == (6144, 5120)
    assert table[first + "linear_attn.in_proj_a.weight"] == (48, 5120)
    assert table[first + "linear_attn.conv1d.weight"] == (10240, 1, 4)
    assert table[first + "linear_attn.out_proj.weight"] == (5120, 6144)
    assert table[fourth + "self_attn.q_proj.weight"] == (12288, 5120)
    assert table[fourth + "self_attn.o_proj.weight"] == (5120, 6144)
    assert table["lm_head.weight"] == (248320, 5120)


_PEAK = """
import gc, sys
import pathlib
import ml_dtypes
from dflash_jax.checkpoints import hybrid, names
def mib(key):
    lines = open("/proc/self/status")
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024
store = names.as_floats(ml_dtypes.bfloat16)
loaded = hybrid.open_directory(pathlib.Path(sys.argv[1]), ml_dtypes.bfloat16, store).read()
gc.collect()
print(mib("VmHWM") - mib("VmRSS"))
"""


@pytest.mark.slow
def test_loading_streams(tmp_path):
    """A process that loads 320 MiB never holds half a shard beside what stays."""
    sizes = {"vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 3072}
    layers = list(CONFIG.layer_types * 4)
    text = TEXT_CONFIG | sizes | {"num_hidden_layers": len(layers), "layer_types": layers}
    description = CONFIG_JSON | {"text_config": text}
    config = qwen3_5_config.from_hugging_face(description, "config", np.dtype("float32"))
    tensors = {
        entry.name: np.zeros(entry.shape, ml_dtypes.bfloat16)
        for entry in qwen3_5_names.hugging_face_table(config)
    }
    directory = write(tmp_path / "large", tensors, description, shards=3)
    shard = max(file.stat().st_size for file in directory.glob("*.safetensors")) / 2**20
    command = [sys.executable, "-c", _PEAK, str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert shard > 90
    assert float(done.stdout) < 0.5 * shard


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["Qwen3_5MoeForConditionalGeneration"]}, "mixture-of-experts"),
        ({"text_config": TEXT_CONFIG | {"num_experts": 8}}, "mixture-of-experts"),
        ({"architectures": ["Qwen3NextForCausalLM"]}, "is none of"),
        ({"architectures": None}, "is none of"),
        ({"text_config": [1]}, "text_config must be an object"),
        ({"model_type": "qwen3_5_moe"}, r"config\.json: model_type 'qwen3_5_moe' is not covered"),
        (
            {"text_config": TEXT_CONFIG | {"model_type": "qwen3_5_moe_text"}},
            "model_type 'qwen3_5_moe_text' of text_config is not covered",
        ),
        (
            {"text_config": TEXT_CONFIG | {"layer_types": None, "full_attention_interval": -4}},
            "full_attention_interval must be from 1 to 4, got -4",
        ),
        ({"text_config": TEXT_CONFIG | {"layer_types": "full"}}, "layer_types must be a list"),
        ({"text_config": TEXT_CONFIG | {"hidden_size": "x"}}, "hidden_size must be a whole"),
        ({"text_config": TEXT_CONFIG | {"hidden_size": True}}, "hidden_size must be a whole"),
        ({"text_config": TEXT_CONFIG | {"rms_norm_eps": [1]}}, "rms_norm_eps must be a number"),
        ({"text_config": TEXT_CONFIG | {"rope_parameters": "x"}}, "rope_parameters must be an obj"),
        (
            {"text_config": TEXT_CONFIG | {"num_attention_heads": 7}},
            "model config: num_heads 7 is no multiple",
        ),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false"),
        ({"text_config": TEXT_CONFIG | {"attn_output_gate": False}}, "attn_output_gate False"),
        ({"text_config": TEXT_CONFIG | {"output_gate_type": "sigmoid"}}, "output_gate_type"),
        ({"text_config": TEXT_CONFIG | {"hidden_act": "gelu"}}, "hidden_act"),
        ({"text_config": TEXT_CONFIG | {"head_dim": None}}, "head_dim is missing"),
        ({"text_config": TEXT_CONFIG | {"layer_types": None}}, "layer_types is missing"),
        ({"text_config": TEXT_CONFIG | {"layer_types": [FULL]}}, "1 layer_types"),
        ({"text_config": TEXT_CONFIG | {"num_hidden_layers": "4"}}, "num_hidden_layers"),
        ({"text_config": TEXT_CONFIG | {"rope_parameters": {"rope_theta": 1.0}}}, "partial_rotary"),
        (
            {"text_config": TEXT_CONFIG | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}},
            "rope_scaling and rope_parameters differ",
        ),
        (
            {"text_config": TEXT_CONFIG | {"rope_parameters": tiny.ROPE | {"rope_type": "yarn"}}},
            "'yarn' is not supported",
        ),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantisation 'gptq'"),
        ({"quantization_config": "fp8"}, "quantization_config must be an object, not 'fp8'"),
        ({"quantization": {"bits": 4, "group_size": "x"}}, "group_size must be a whole number"),
        ({"quantization": {"bits": 4, "group_size": 0}}, "group_size must be positive, not 0"),
    ],
)
def test_config_is_refused(official, change, message):
    write(official, config=CONFIG_JSON | change)
    with pytest.raises(InputError, match=message):
        load_hybrid(official)


NAME = f"{OFFICIAL}layers.0.linear_attn.in_proj_a.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NAME), f"missing tensor {NAME}"),
        (lambda t: t.update({"model.audio.x": np.zeros(1, np.float32)}), "unexpected tensor model"),
        (lambda t: t.update({NAME: t[NAME].T.copy()}), rf"{NAME} has shape \(64, 6\)"),
        (lambda t: t.update({NAME: t[NAME].astype(np.int32)}), "is stored as I32"),
        (lambda t: t.clear(), "layers, but 0 tensors"),
    ],
)
def test_tensors_are_refused(official, change, message):
    tensors = TENSORS | UNWANTED
    change(tensors)
    write(official, tensors)
    with pytest.raises(InputError, match=message):
        load_hybrid(official)


def test_shards_are_refused(tmp_path):
    whole = write(tmp_path / "whole", shards=3)
    second = "model-00002-of-00003.safetensors"
    for spoil, message in (
        (lambda path: path.unlink(), f"shard {second} is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), f"{second}: no readable"),
        (lambda path: path.write_bytes(b""), f"{second}: no readable"),
        (lambda path: shutil.copy(path.with_name(second.replace("02", "03", 1)), path), "is in"),
    ):
        spoilt = shutil.copytree(whole, tmp_path / "spoilt")
        spoil(spoilt / second)
        with pytest.raises(InputError, match=message):
            load_hybrid(spoilt)
        shutil.rmtree(spoilt)


def test_nothing_there(tmp_path):
    with pytest.raises(InputError, match=r"config\.json"):
        load_hybrid(tmp_path)
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(InputError, match="not a readable GGUF"):
        load_hybrid(tmp_path / "x.gguf")


# --- quantised ----------------------------------------------------------------------------------

QUANTISED = {
    name
    for name, value in TENSORS.items()
    if value.ndim == 2 and not any(part in name for part in ("in_proj_a", "in_proj_b", "embed"))
}


def test_fp8_with_block_scales(tmp_path):
    block, stored, values = 48, {}, {}
    for name, value in TENSORS.items():
        if name not in QUANTISED:
            stored[name] = values[name] = value
            continue
        rows, columns = value.shape
        scale = np.random.default_rng(0).uniform(
            0.01, 0.02, (-(-rows // block), -(-columns // block))
        )
        scale = scale.astype(ml_dtypes.bfloat16)
        spread = np.kron(scale.astype(np.float32), np.ones((block, block), np.float32))
        spread = spread[:rows, :columns]
        stored[name] = (value / spread).astype(ml_dtypes.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scale
        values[name] = stored[name].astype(np.float32) * spread
    description = CONFIG_JSON | {
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [block, block]}
    }
    directory = write(tmp_path / "tiny", stored, description, shards=2)
    assert_equal(load_hybrid(directory).params, expected(values))

    name = f"{OFFICIAL}layers.0.mlp.up_proj.weight"
    for change, message in (
        ({f"{name}_scale_inv": None}, "weight_scale_inv is missing"),
        ({f"{name}_scale_inv": np.ones((1, 1), np.float32)}, r"needs \(2, 2\)"),
    ):
        spoilt = {k: v for k, v in (stored | change).items() if v is not None}
        with pytest.raises(InputError, match=message):
            load_hybrid(write(tmp_path / "spoilt", spoilt, description))


def packed(numbers):
    """Rows of 0..15 to 32-bit words, by shifts rather than bytes."""
    words = np.zeros((numbers.shape[0], numbers.shape[1] // 8), np.uint32)
    for place in range(8):
        words |= numbers[:, place::8].astype(np.uint32) << np.uint32(4 * place)
    return words


def four_bit(tensors, group, symmetric=False):
    """(whole numbers 0..15, zeros 0..15, scales) of each quantised matrix."""
    rng = np.random.default_rng(0)
    for name in sorted(QUANTISED):
        rows, columns = tensors[name].shape
        numbers = rng.integers(0, 16, (rows, columns))
        zeros = np.full((rows, columns // group), 8)
        if not symmetric:
            zeros = rng.integers(0, 16, zeros.shape)
        yield name, numbers, zeros, rng.uniform(0.01, 0.02, zeros.shape).astype(np.float32)


@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors(tmp_path, symmetric):
    group = 32
    stored = {name: value for name, value in TENSORS.items() if name not in QUANTISED}
    values = dict(stored)
    for name, numbers, zeros, scale in four_bit(TENSORS, group, symmetric):
        module = name.removesuffix(".weight")
        stored[f"{module}.weight_packed"] = packed(numbers).view(np.int32)
        stored[f"{module}.weight_scale"] = scale
        stored[f"{module}.weight_shape"] = np.array(numbers.shape, np.int64)
        if not symmetric:
            rows = np.pad(zeros, ((0, -len(zeros) % 8), (0, 0)))
            stored[f"{module}.weight_zero_point"] = packed(rows.T).T.view(np.int32).copy()
        difference = (numbers - np.repeat(zeros, group, axis=1)).astype(np.float32)
        values[name] = difference * np.repeat(scale, group, axis=1)
    description = compressed(group, symmetric)
    directory = write(tmp_path / "tiny", stored, description)
    assert_equal(load_hybrid(directory).params, expected(values))

    module = f"{OFFICIAL}layers.0.mlp.up_proj"
    for change, message in (
        ({f"{module}.weight_scale": None}, "weight_scale is missing"),
        ({f"{module}.weight_shape": np.array([1, 2])}, r"weight_shape is \(1, 2\)"),
        ({f"{module}.weight_g_idx": np.zeros(64, np.int32)}, "unexpected tensor"),
    ):
        spoilt = {k: v for k, v in (stored | change).items() if v is not None}
        with pytest.raises(InputError, match=message):
            load_hybrid(write(tmp_path / "spoilt", spoilt, description))


@pytest.mark.parametrize(
    ("change", "message"),
    [({"num_bits": 8}, "num_bits 8"), ({"actorder": "group"}, "actorder 'group'")],
)
def test_compressed_tensors_refused(official, change, message):
    description = compressed(32, True)
    (group,) = description["quantization_config"]["config_groups"].values()
    group["weights"] |= change
    with pytest.raises(InputError, match=message):
        load_hybrid(write(official, config=description))


def compressed(group, symmetric):
    weights = {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": group,
        "symmetric": symmetric,
        "actorder": None,
    }
    quantisation = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    return CONFIG_JSON | {"quantization_config": quantisation}


def mlx_tensors(tensors):
    """As MLX renames and changes them, not quantised."""
    renamed = {}
    for name, value in text_only(tensors).items():
        if "conv1d" in name:
            value = np.moveaxis(value, 2, 1)
        elif name.endswith("norm.weight") and "linear_attn" not in name:
            value = value + 1
        renamed["language_model." + name] = value
    return renamed


def test_mlx(tmp_path):
    group, values = 32, dict(TENSORS)
    stored = mlx_tensors(TENSORS)
    for name, numbers, bias, scale in four_bit(TENSORS, group):
        module = "language_model." + name.replace(OFFICIAL, PLAIN).removesuffix(".weight")
        bias = (-0.01 * bias).astype(np.float32)
        stored[f"{module}.weight"] = packed(numbers)
        stored[f"{module}.scales"], stored[f"{module}.biases"] = scale, bias
        spread = (np.repeat(x, group, axis=1) for x in (scale, bias))
        values[name] = numbers.astype(np.float32) * next(spread) + next(spread)
    description = CONFIG_JSON | {"quantization": {"group_size": group, "bits": 4}}
    stored["vision_tower.blocks.0.norm.weight"] = np.zeros(3, np.float32)
    directory = write(tmp_path / "tiny", stored, description)
    assert_equal(load_hybrid(directory).params, expected(values), 1e-6)

    plain = write(tmp_path / "plain", mlx_tensors(TENSORS))
    assert_equal(load_hybrid(plain).params, expected(), 1e-6)
    for quantisation, message in (
        ({"group_size": 32, "bits": 6}, "4 bits"),
        ({"group_size": 32, "bits": 4, "mode": "mxfp4"}, "affine"),
        ({"group_size": 32, "bits": 4, "lm_head": {"bits": 8}}, "lm_head is quantised unlike"),
        ({"group_size": 64, "bits": 4}, r"scales is"),
    ):
        with pytest.raises(InputError, match=message):
            load_hybrid(write(directory, stored, CONFIG_JSON | {"quantization": quantisation}))


def test_mlx_by_its_own_tool(tmp_path):
    mx = pytest.importorskip("mlx.core", reason="pip install mlx[cpu]")
    tensors, values = {}, {}
    for name, value in {k: v for k, v in TENSORS.items() if k in QUANTISED}.items():
        module = name.removesuffix(".weight")
        parts = mx.quantize(mx.array(value), group_size=32, bits=4)
        tensors[f"{module}.weight"] = parts[0]
        tensors[f"{module}.scales"], tensors[f"{module}.biases"] = parts[1:]
        values[name] = np.array(mx.dequantize(*parts, group_size=32, bits=4))
    (tmp_path / "config.json").write_text("{}")
    mx.save_safetensors(str(tmp_path / "model.safetensors"), tensors)
    source = open_tensors(tmp_path, {"quantization": {"group_size": 32, "bits": 4}})
    assert set(source.shapes()) == set(values)
    for name, value in values.items():
        np.testing.assert_allclose(source.read(name), value, rtol=0, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors_by_its_own_tool(tmp_path, symmetric):
    tool = pytest.importorskip("compressed_tensors", reason="pip install compressed-tensors")
    torch = pytest.importorskip("torch")
    from compressed_tensors.compressors import PackedQuantizationCompressor as Compressor
    from safetensors.torch import save_file

    description = compressed(32, symmetric)
    (group,) = description["quantization_config"]["config_groups"].values()
    scheme = tool.quantization.QuantizationScheme.model_validate(group)
    tensors, values = {}, {}
    rng = np.random.default_rng(0)
    for name in sorted(QUANTISED):
        module = name.removesuffix(".weight")
        weight = torch.from_numpy(TENSORS[name])
        shape = (weight.shape[0], weight.shape[1] // 32)
        zeros = np.zeros(shape) if symmetric else rng.integers(-8, 8, shape)
        scale = rng.uniform(0.01, 0.02, shape).astype(np.float32)
        parts = {
            "weight": weight,
            "weight_scale": torch.from_numpy(scale),
            "weight_zero_point": torch.from_numpy(zeros.astype(np.int8)),
        }
        parts = Compressor.compress(parts, scheme)
        tensors |= {f"{module}.{part}": value for part, value in parts.items()}
        values[name] = Compressor.decompress(parts, scheme)["weight"].numpy()
    save_file(tensors, tmp_path / "model.safetensors")
    source = open_tensors(tmp_path, description)
    assert set(source.shapes()) == set(values)
    for name, value in values.items():
        np.testing.assert_allclose(source.read(name), value, rtol=0, atol=1e-7, err_msg=name)


# --- GGUF ---------------------------------------------------------------------------------------


def tiled(x, dim):
    """Rows of value heads from Hugging Face's order to GGUF's, one head at a time."""
    keys, heads = CONFIG.linear_num_key_heads, CONFIG.linear_num_value_heads
    each = heads // keys
    out = np.empty_like(x)
    for key in range(keys):
        for i in range(each):
            ours, theirs = (each * key + i) * dim, (keys * i + key) * dim
            out[theirs : theirs + dim] = x[ours : ours + dim]
    return out


def converted(name, x):
    """What llama.cpp's converter makes of a tensor."""
    dim, keys = CONFIG.linear_value_head_dim, 2 * CONFIG.linear_key_dim
    if name.endswith("norm.weight") and "linear_attn" not in name:
        return x + 1
    if "in_proj_qkv" in name:
        return np.concatenate([x[:keys], tiled(x[keys:], dim)])
    if "conv1d" in name:
        return np.concatenate([x[:keys], tiled(x[keys:], dim)])[:, 0]
    if "in_proj_z" in name:
        return tiled(x, dim)
    if "in_proj_a" in name or "in_proj_b" in name or "dt_bias" in name:
        return tiled(x, 1)
    if "A_log" in name:
        return tiled(-np.exp(x), 1)
    if "out_proj" in name:
        return np.ascontiguousarray(tiled(np.ascontiguousarray(x.T), dim).T)
    return x


def write_gguf(path, kind=gguf.GGMLQuantizationType.F32, skip=(), mtp=0, **changes):
    c = CONFIG
    writer = gguf.GGUFWriter(path, changes.get("arch", "qwen35"))
    writer.add_block_count(c.num_layers + mtp)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_heads)
    writer.add_head_count_kv(c.num_kv_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_rope_dimension_count(c.rotary_dim)
    writer.add_rope_dimension_sections([2, 1, 1, 0])
    writer.add_rope_freq_base(c.rope_theta)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_ssm_conv_kernel(c.linear_conv_kernel_dim)
    writer.add_ssm_state_size(c.linear_key_head_dim)
    writer.add_ssm_group_count(c.linear_num_key_heads)
    writer.add_ssm_time_step_rank(c.linear_num_value_heads)
    writer.add_ssm_inner_size(c.linear_value_dim)
    if "interval" not in skip:
        writer.add_full_attention_interval(4)
    if mtp:
        writer.add_nextn_predict_layers(mtp)
        writer.add_tensor(f"blk.{c.num_layers}.nextn.eh_proj.weight", np.zeros((4, 4), np.float32))
    if "experts" in changes:
        writer.add_expert_count(changes["experts"])
    if "tokenizer" in changes:
        tiny_llama.add_tokenizer(writer, c.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN35, c.num_layers)
    for name, value in TENSORS.items():
        plain = name.replace(OFFICIAL, PLAIN).replace(".dt_bias", ".dt_proj.bias")
        theirs = names.get_name(plain, try_suffixes=(".weight", ".bias"))
        assert theirs, name
        value = converted(name, value)
        if theirs in skip:
            continue
        if name in QUANTISED and kind != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(theirs, gguf.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(theirs, np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("mtp", [0, 1])
def test_gguf(tmp_path, mtp):
    loaded = load_hybrid(write_gguf(tmp_path / "tiny.gguf", mtp=mtp))
    epsilon = loaded.config.rms_norm_eps
    assert dataclasses.replace(loaded.config, rms_norm_eps=CONFIG.rms_norm_eps) == CONFIG
    np.testing.assert_allclose(epsilon, CONFIG.rms_norm_eps, rtol=1e-6)
    assert_equal(loaded.params, expected(), 1e-6)


def test_gguf_quantised(tmp_path):
    kind = gguf.GGMLQuantizationType.Q8_0
    loaded = load_hybrid(write_gguf(tmp_path / "tiny.gguf", kind))
    step = max(np.abs(TENSORS[name]).max() for name in QUANTISED) / 127
    assert_equal(loaded.params, expected(), step)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"skip": ("blk.0.ssm_a",)}, "missing tensor blk.0.ssm_a"),
        ({"skip": ("token_embd.weight",)}, "missing tensor token_embd.weight"),
        ({"skip": ("interval",)}, "full_attention_interval is missing"),
        ({"arch": "qwen3next"}, "architecture 'qwen3next'"),
        ({"experts": 8}, "mixture-of-experts"),
    ],
)
def test_gguf_is_refused(tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        load_hybrid(write_gguf(tmp_path / "tiny.gguf", **options))
