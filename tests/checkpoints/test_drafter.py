"""Drafter checkpoints: what is written is read, by us and by the reference; the rest is refused."""

from __future__ import annotations

import dataclasses
import functools
import json
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dflash_jax.checkpoints.drafter import load_drafter, name_table, save_drafter
from dflash_jax.errors import InputError
from dflash_jax.models.dflash2 import DFlash2, init_params
from dflash_jax.models.dflash2_config import FULL, SLIDING, DrafterConfig

CONFIG = DrafterConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-6,
    rope_theta=1e7,
    max_position_embeddings=128,
    num_target_layers=6,
    target_layer_ids=(1, 4),
    mask_token_id=63,
    block_size=4,
    layer_types=(SLIDING, FULL),
    sliding_window=5,
    is_causal=False,
    conv_kernel_size=2,
    conv_group_size=8,
    selector_rank=6,
    selector_top_k=3,
    input_embedding_scale=2.0,
    output_multiplier=0.5,
    final_logit_softcapping=30.0,
)
PLAIN = dataclasses.replace(
    CONFIG, conv_kernel_size=0, conv_group_size=0, selector_rank=0, selector_top_k=0
)
VARIANTS = {
    "DFlash2": CONFIG,
    "DFlash": PLAIN,
    "is_causal absent": dataclasses.replace(CONFIG, is_causal=None),
    "causal, biased": dataclasses.replace(CONFIG, is_causal=True, attention_bias=True),
    "full": dataclasses.replace(CONFIG, layer_types=(FULL, FULL), sliding_window=None),
    "uncapped": dataclasses.replace(CONFIG, final_logit_softcapping=None),
}
TARGET = types.SimpleNamespace(hidden_size=32, vocab_size=64, num_layers=6)


@functools.cache
def random_params(config: DrafterConfig) -> dict:
    """Noise around 1 for the norms and 0 for the rest, so that no part is the identity."""
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        if leaf.dtype == jnp.int32:  # draft_vocab
            return jnp.arange(*leaf.shape, dtype=jnp.int32)
        around = float("norm" in path[-2].key)
        return jnp.asarray(around + 0.2 * rng.standard_normal(leaf.shape, np.float32))

    return jax.tree_util.tree_map_with_path(draw, shapes)


def saved(path: Path, config: DrafterConfig = CONFIG, dtype: str = "float32") -> Path:
    save_drafter(path, config, random_params(config), dtype)
    return path


def edit(path: Path, change) -> None:
    """Applies `change` to the parsed config.json."""
    config = json.loads((path / "config.json").read_text())
    change(config)
    (path / "config.json").write_text(json.dumps(config))


def edit_tensors(path: Path, change) -> None:
    tensors = dict(load_file(path / "model.safetensors"))
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def assert_trees_equal(got, want) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("variant", VARIANTS)
def test_saved_is_loaded(tmp_path, variant):
    config = VARIANTS[variant]
    drafter = load_drafter(saved(tmp_path, config), TARGET)
    assert drafter.config == config
    assert_trees_equal(drafter.params, random_params(config))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_parts_of_dflash2_may_be_left_out_aloud(tmp_path):
    config = dataclasses.replace(CONFIG, selector_rank=0, selector_top_k=0)
    assert load_drafter(saved(tmp_path, config)).config == config


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_table_is_the_modules_parameters(variant):
    config = VARIANTS[variant]
    leaves = jax.tree_util.tree_flatten_with_path(random_params(config))[0]
    shapes = {tuple(key.key for key in path): leaf.shape for path, leaf in leaves}
    assert {entry.path: entry.shape for entry in name_table(config)} == shapes


def test_names_are_the_publishers(tmp_path):
    names = set(load_file(saved(tmp_path) / "model.safetensors"))
    assert {
        "fc.weight",
        "hidden_norm.weight",
        "norm.weight",
        "layers.0.self_attn.q_norm.weight",
        "layers.1.mlp.gate_proj.weight",
        "layers.1.attention_conv.base_kernel",
        "layers.1.mlp_conv.kernel_projection.weight",
        "candidate_selector.predecessor_codebook",
        "candidate_selector.hidden_projection.weight",
    } <= names


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_rounds_once(tmp_path, dtype):
    drafter = load_drafter(saved(tmp_path, dtype=dtype))
    rounded = jax.tree.map(lambda x: x.astype(dtype).astype(jnp.float32), random_params(CONFIG))
    assert_trees_equal(drafter.params, rounded)


def test_loaded_dtype_is_the_computations(tmp_path):
    drafter = load_drafter(saved(tmp_path), dtype="bfloat16")
    assert drafter.config.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(drafter.params)} == {jnp.dtype("bfloat16")}
    with pytest.raises(InputError, match="dtype float16"):
        load_drafter(tmp_path, dtype="float16")


def test_int8_is_within_half_a_step_and_smaller(tmp_path):
    saved(tmp_path / "whole")
    drafter = load_drafter(saved(tmp_path / "int8", dtype="int8"), TARGET)
    assert drafter.config == CONFIG
    flat = jax.tree.leaves(random_params(CONFIG))
    for got, want in zip(jax.tree.leaves(drafter.params), flat, strict=True):
        if want.ndim == 2:
            step = jnp.abs(want).max(axis=1, keepdims=True) / 127
            assert bool(jnp.all(jnp.abs(got - want) <= step * 0.501))
        else:
            np.testing.assert_array_equal(got, want)
    sizes = [(tmp_path / at / "model.safetensors").stat().st_size for at in ("int8", "whole")]
    assert sizes[0] < 0.5 * sizes[1]


def test_int8_rows_of_zeros_stay_zeros(tmp_path):
    params = init_params(CONFIG, jax.random.key(0))  # kernel projections are zero
    save_drafter(tmp_path, CONFIG, params, "int8")
    loaded = load_drafter(tmp_path).params["layers_0"]["mlp_conv"]["kernel_projection"]["weight"]
    assert not np.any(loaded)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_draft_vocabulary_is_kept_as_integers(tmp_path, dtype):
    config = dataclasses.replace(CONFIG, draft_vocab_size=5)
    ids = jnp.array([0, 3, 4, 60, 63], jnp.int32)
    save_drafter(tmp_path, config, random_params(CONFIG) | {"draft_vocab": ids}, dtype)
    drafter = load_drafter(tmp_path, dtype="bfloat16")
    assert drafter.config.draft_vocab_size == 5
    assert drafter.params["draft_vocab"].dtype == jnp.int32
    np.testing.assert_array_equal(drafter.params["draft_vocab"], ids)


@pytest.mark.parametrize("ids", [[1, 1, 2], [2, 1, 3], [-1, 2, 3], [1, 2, 64]])
def test_draft_vocabulary_must_rise_within_the_vocabulary(tmp_path, ids):
    config = dataclasses.replace(CONFIG, draft_vocab_size=3)
    good = random_params(CONFIG) | {"draft_vocab": jnp.array([1, 2, 3], jnp.int32)}
    save_drafter(tmp_path, config, good)
    edit_tensors(tmp_path, lambda t: t.update(draft_vocab=np.array(ids, np.int32)))
    with pytest.raises(InputError, match=r"draft_vocab must rise within 0\.\.63"):
        load_drafter(tmp_path)
    with pytest.raises(InputError, match="draft_vocab must rise"):
        save_drafter(tmp_path, config, good | {"draft_vocab": jnp.array(ids, jnp.int32)})


def test_flat_config_equals_nested(tmp_path):
    def flatten(config):
        config.update(config.pop("dflash_config"))
        config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]

    saved(tmp_path)
    edit(tmp_path, flatten)
    assert load_drafter(tmp_path, TARGET).config == CONFIG


def test_nested_value_wins_over_the_roots(tmp_path):
    saved(tmp_path)
    edit(tmp_path, lambda config: config.update(block_size=9, target_layer_ids=[0]))
    assert load_drafter(tmp_path).config == CONFIG


@pytest.mark.parametrize("scope", ["dflash_config", "root"])
@pytest.mark.parametrize("inside", [True, False])
def test_rope_base_is_read_at_every_nesting(tmp_path, scope, inside):
    def move(config):
        del config["rope_parameters"]
        place = config["dflash_config"] if scope == "dflash_config" else config
        place.update({"rope_parameters": {"rope_theta": 5e5}} if inside else {"rope_theta": 5e5})

    saved(tmp_path)
    edit(tmp_path, move)
    assert load_drafter(tmp_path).config.rope_theta == 5e5


def test_layer_types_absent_are_full_only_without_a_window(tmp_path):
    saved(tmp_path)
    edit(tmp_path, lambda config: config.pop("layer_types"))
    with pytest.raises(InputError, match="layer_types is missing"):
        load_drafter(tmp_path)
    edit(tmp_path, lambda config: config.update(sliding_window=None))
    assert load_drafter(tmp_path).config.layer_types == (FULL, FULL)


@pytest.mark.parametrize(
    "name",
    [
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
        *("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps"),
        *("max_position_embeddings", "num_target_layers", "architectures"),
        *("target_layer_ids", "mask_token_id", "block_size", "rope_theta"),
        *("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
    ],
)
def test_a_missing_value_is_an_error_that_names_it(tmp_path, name):
    def remove(config):
        for place in (config, config["dflash_config"], config["rope_parameters"]):
            place.pop(name, None)

    saved(tmp_path)
    edit(tmp_path, remove)
    with pytest.raises(InputError, match=f"{name} is missing") as error:
        load_drafter(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architectures is"),
        ({"architectures": ["DFlashDraftModel"]}, "does not have conv_kernel_size"),
        ({"use_sliding_window": False}, "but use_sliding_window is false"),
        ({"sliding_window": None}, "sliding_window is None"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "only plain full RoPE"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "only plain full RoPE"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"hidden_size": "32"}, "hidden_size is '32'"),
        ({"dflash_config": [1]}, "dflash_config is not an object"),
        ({"layer_types": "full_attention"}, "layer_types is not a list"),
        ({"num_hidden_layers": 1, "layer_types": [FULL]}, "unexpected tensors layers.1."),
        ({"num_hidden_layers": 3, "layer_types": [FULL] * 3}, "missing tensors layers.2."),
        ({"intermediate_size": 40}, r"layers.0.mlp.gate_proj.weight has shape \(48, 32\)"),
    ],
)
def test_a_wrong_config_is_refused(tmp_path, change, message):
    saved(tmp_path)
    edit(tmp_path, lambda config: config.update(change))
    with pytest.raises(InputError, match=message):
        load_drafter(tmp_path)


def test_a_selector_is_never_dropped(tmp_path):
    """DFlash2's tensors under DFlash's config: refused, whichever of the two is wrong."""

    def to_dflash(config):
        config["architectures"] = ["DFlashDraftModel"]
        for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
            del config["dflash_config"][name]

    saved(tmp_path)
    edit(tmp_path, to_dflash)
    with pytest.raises(InputError, match=r"unexpected tensors .*conv"):
        load_drafter(tmp_path)


def test_dflash_tensors_do_not_load_as_dflash2(tmp_path):
    saved(tmp_path, PLAIN)
    names = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    edit(tmp_path, lambda config: config.update(architectures=["DFlash2DraftModel"],
         **{name: getattr(CONFIG, name) for name in names}))  # fmt: skip
    with pytest.raises(InputError, match=r"missing tensors .*conv"):
        load_drafter(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("fc.weight"), "missing tensor fc.weight"),
        (lambda t: t.update(extra=np.zeros(3, np.float32)), "unexpected tensor extra"),
        (lambda t: t.update({"norm.weight": np.zeros(31, np.float32)}), "norm.weight has shape"),
        (lambda t: t.update({"norm.weight": np.zeros(32, np.int32)}), "norm.weight is stored as"),
        (lambda t: t.update({"norm.weight": np.zeros(32, np.int8)}), "int8 tensor norm.weight"),
        (lambda t: t.update({"fc.weight": np.zeros((32, 64), np.int8)}), "int8 tensor fc.weight"),
        (lambda t: t.clear(), "the checkpoint holds no tensors"),
    ],
)
def test_wrong_tensors_are_refused(tmp_path, change, message):
    saved(tmp_path)
    edit_tensors(tmp_path, change)
    with pytest.raises(InputError, match=message):
        load_drafter(tmp_path)


def test_missing_and_broken_files_are_one_line(tmp_path):
    with pytest.raises(InputError, match="no such folder"):
        load_drafter(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"config\.json"):
        load_drafter(tmp_path)
    saved(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"model\.safetensors"):
        load_drafter(tmp_path)
    file.unlink()
    with pytest.raises(InputError, match=r"neither model\.safetensors nor"):
        load_drafter(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="not valid JSON"):
        load_drafter(tmp_path)


def test_shards_load_like_one_file(tmp_path):
    saved(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    weight_map = {name: f"part-{index % 2}.safetensors" for index, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        shard = {name: tensors[name] for name in tensors if weight_map[name] == file}
        save_file(shard, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert_trees_equal(load_drafter(tmp_path).params, random_params(CONFIG))
    with pytest.raises(InputError, match="sharded"):
        saved(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 48}, "its hidden size is 32, but the target's is 48"),
        ({"vocab_size": 65}, "its vocabulary is 64, but the target's is 65"),
        ({"num_layers": 5}, "its number of target layers is 6, but the target's is 5"),
    ],
)
def test_a_drafter_for_another_target_is_refused(tmp_path, change, message):
    target = types.SimpleNamespace(**(vars(TARGET) | change))
    with pytest.raises(InputError, match=message):
        load_drafter(saved(tmp_path), target)


def test_taps_beyond_the_target_are_refused(tmp_path):
    saved(tmp_path)
    edit(tmp_path, lambda config: config["dflash_config"].update(target_layer_ids=[1, 6]))
    with pytest.raises(InputError, match=r"target_layer_ids \[1, 6\] must be within 0..5"):
        load_drafter(tmp_path)


def test_fingerprint_tells_checkpoints_apart(tmp_path):
    first = load_drafter(saved(tmp_path / "a")).fingerprint
    assert first == load_drafter(saved(tmp_path / "b")).fingerprint
    edit_tensors(tmp_path / "b", lambda t: t.update({"norm.weight": t["norm.weight"] + 1}))
    second = load_drafter(tmp_path / "b").fingerprint
    edit(tmp_path / "a", lambda config: config["dflash_config"].update(block_size=3))
    assert len({first, second, load_drafter(tmp_path / "a").fingerprint}) == 3


def test_what_cannot_be_saved_leaves_the_old_file(tmp_path):
    saved(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    params = random_params(CONFIG)
    huge = params | {"norm": {"weight": params["norm"]["weight"] * 1e6}}
    nan = params | {"fc": {"weight": params["fc"]["weight"] * jnp.nan}}
    lacking = {key: value for key, value in params.items() if key != "norm"}
    for bad, dtype, message in (
        (huge, "float16", "norm.weight has values that float16 cannot hold"),
        (nan, "int8", "fc.weight has values that int8 cannot hold"),
        (lacking, "float32", "missing tensor norm.weight"),
        (params | {"draft_vocab": jnp.zeros(3)}, "float32", "unexpected tensor draft_vocab"),
        (params, "float8", "drafter dtype 'float8'"),
    ):
        with pytest.raises(InputError, match=message):
            save_drafter(tmp_path, CONFIG, bad, dtype)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_reference_loads_what_we_save(tmp_path, variant, dtype):
    torch = pytest.importorskip("torch")
    dflash = pytest.importorskip("dflash.model")
    config = VARIANTS[variant]
    saved(tmp_path, config, dtype)
    kind = dflash.DFlash2DraftModel if config.has_selector else dflash.DFlashDraftModel
    model, info = kind.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.dtype == getattr(torch, dtype)
    assert model.block_size == config.block_size
    assert list(model.target_layer_ids) == list(config.target_layer_ids)
    model = model.float().eval()

    drafter = load_drafter(tmp_path, TARGET)
    rng = np.random.default_rng(2)
    taps, embeds, head = (
        rng.standard_normal(shape, np.float32) for shape in ((9, 64), (4, 32), (64, 32))
    )
    with torch.no_grad():
        hidden = model(
            target_hidden=torch.from_numpy(taps[None]),
            noise_embedding=torch.from_numpy(embeds[None]),
            position_ids=torch.arange(13)[None],
        )[:, 1:]
        linear = torch.nn.Linear(32, 64, bias=False)
        linear.weight.copy_(torch.from_numpy(head))
        logits = model.compute_logits(hidden, linear)
        unary = logits.topk(3).values[0].numpy()
        if config.has_selector:
            path = model.propose(hidden, torch.tensor([7]), linear, 0.0)[0]
        else:
            path = logits.argmax(-1)
    arrays = tuple(map(jnp.asarray, (taps, embeds, np.int32(7), head)))
    lattice = jax.jit(
        lambda params: DFlash2(drafter.config).apply({"params": params}, *arrays, top_k=3)
    )(drafter.params)
    np.testing.assert_allclose(lattice.unary, unary, atol=1e-5, rtol=1e-5)
    before, ours = 0, []
    for candidates, scores, edge in zip(*map(np.asarray, lattice), strict=True):
        before = int(np.argmax(scores + edge[before]))
        ours.append(int(candidates[before]))
    assert ours == path[0].tolist()


def test_we_load_what_the_reference_saves(tmp_path):
    pytest.importorskip("torch")
    dflash = pytest.importorskip("dflash.model")
    saved(tmp_path / "ours")
    model = dflash.DFlash2DraftModel.from_pretrained(tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    drafter = load_drafter(tmp_path / "theirs", TARGET)
    assert drafter.config == CONFIG
    assert_trees_equal(drafter.params, random_params(CONFIG))
