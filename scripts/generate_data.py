"""Has a target write its own training text, in shards.

  python scripts/generate_data.py --config=configs/train/smollm2.py --out=data/smollm2

Shards that are there already are skipped, so an interrupted run goes on where it stopped. Mix in
other prompts with --prompts=a.jsonl,b.jsonl (see dflash_jax/train/prompts.py for the format).
"""

from __future__ import annotations

from absl import flags, logging
from rich.console import Console

from dflash_jax import entry, platform
from dflash_jax.train import recipe
from dflash_jax.train.devices import check_batch, data_mesh
from dflash_jax.train.generate import Generator, generate
from dflash_jax.train.prompts import read_prompts

_CONFIG = entry.config_flag(None, "the recipe")
_OUT = flags.DEFINE_string("out", None, "folder of the shards", required=True)
_PROMPTS = flags.DEFINE_list("prompts", None, "prompt files beside those of the recipe")
_DEVICES = flags.DEFINE_integer("devices", 0, "devices to use; 0 is all", lower_bound=0)
_TIME_LIMIT_S = flags.DEFINE_float(
    "time_limit_s", 0, "begin no shard after so long; 0 is no limit", lower_bound=0
)
_PLATFORM = flags.DEFINE_enum("platform", "auto", platform.PLATFORMS, "where to run")
flags.mark_flag_as_required("config")


def main(_: list[str]) -> None:
    logging.set_verbosity(logging.WARNING)  # Orbax tells every file it writes
    platform.initialize(_PLATFORM.value)
    run(Console(soft_wrap=True))


def run(console: Console) -> None:
    config = recipe.data_config(_CONFIG.value, extra_prompts=tuple(_PROMPTS.value or ()))
    mesh = data_mesh(_DEVICES.value)
    check_batch(config.rollout.batch, mesh, "data.rollout.batch")
    target = recipe.load_target(_CONFIG.value)
    prompts = read_prompts(*config.prompt_files) if config.prompt_files else None
    generator = Generator(target, config, prompts, mesh)
    written = own = 0
    seconds = 0.0
    for done in generate(generator, config, _OUT.value, _TIME_LIMIT_S.value):
        written, own, seconds = written + done.tokens, own + done.own_tokens, seconds + done.seconds
        console.print(
            f"shard {done.shard}: {done.rows} rows, {done.own_tokens:,} of the target's own tokens,"
            f" {done.tokens / done.seconds:,.0f} tokens/s"
        )
    if not written:
        console.print(f"nothing to do: {config.shards} shards are in {_OUT.value}")
        return
    console.print(
        f"wrote {written:,} tokens in {seconds:.0f} s ({written / seconds:,.0f} tokens/s with"
        f" compilation), {own:,} of them the target's own"
    )


if __name__ == "__main__":
    entry.run(main)
