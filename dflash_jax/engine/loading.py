"""From a config's names to a decoder: the target, its drafter, and what is compiled for them."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterable
from typing import Any

import jax

from dflash_jax import pricing
from dflash_jax.checkpoints.drafter import Drafter, check_target, load_drafter
from dflash_jax.checkpoints.drafter_config import CONFIG, read_config
from dflash_jax.checkpoints.target import EMBEDDED, WEIGHTS, Target, load_target
from dflash_jax.decode.executables import Progress
from dflash_jax.decode.rows import RowPolicy
from dflash_jax.engine import memory
from dflash_jax.engine.decoder import Decoder, Say, prepare
from dflash_jax.errors import InputError
from dflash_jax.models.targets import TargetConfig
from dflash_jax.tree.growth import CAP

# The drafter that this project trained for the embedded target.
EMBEDDED_DRAFTER = pathlib.Path(__file__).parent.parent / "assets" / "smollm2_135m_dflash2"
AUTO = "auto"
INT8 = "int8"
SIZES = "sizes"
CALIBRATION_FILE = "calibration.json"


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """What an entry point's config says of the models.

    target: "embedded", a .gguf file, or a Hugging Face folder. drafter: "embedded", a folder, or
    "" for none. weights: how they live on the device, one of `target.WEIGHTS`, or "auto".
    context_limit: most tokens of prompt and reply together. A config's `sizes` are not the models':
    scripts/bench_target.py makes up weights of those shapes.
    """

    target: str = EMBEDDED
    drafter: str = EMBEDDED
    weights: str = AUTO
    context_limit: int = 8192

    def __post_init__(self) -> None:
        for name, kind in (("target", str), ("drafter", str), ("weights", str)):
            if not isinstance(getattr(self, name), kind):
                raise InputError(f"config {name}={getattr(self, name)!r} must be a {kind.__name__}")
        if not self.target:
            raise InputError("the config names no target: give --config.target=FOLDER")
        if self.weights not in (AUTO, *WEIGHTS):
            raise InputError(f"config weights={self.weights!r} are none of {(AUTO, *WEIGHTS)}")
        if not isinstance(self.context_limit, int) or self.context_limit < 1:
            raise InputError(f"config context_limit={self.context_limit!r} must be a whole number")

    def weights_here(self) -> str:
        """One of `target.WEIGHTS`: "auto" is int8 on a CPU whose XLA multiplies int8 fast."""
        if self.weights != AUTO:
            return self.weights
        fast = jax.default_backend() == "cpu" and jax.__version_info__ >= (0, 10)
        return INT8 if fast else "float32"

    @classmethod
    def from_config(cls, config: Any) -> ModelConfig:
        """From an ml_collections config; unknown names are an error, not ignored."""
        names = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(config) - names - {SIZES})
        if unknown:
            raise InputError(f"config: unknown {', '.join(unknown)}; it takes {sorted(names)}")
        return cls(**{name: value for name, value in config.items() if name != SIZES})


@dataclasses.dataclass(frozen=True, eq=False)
class Models:
    """A target, its drafter if any, and the drafter's calibration."""

    target: Target
    drafter: Drafter | None
    landing_prior: Any  # a record of `pricing.LandingModel`, or None

    def landing(self) -> pricing.LandingModel:
        """A fresh landing model, starting at the drafter's evaluation."""
        return pricing.LandingModel(prior=self.landing_prior)


def load_models(config: ModelConfig, prompt_cache_mib: int = 0) -> Models:
    """Loads the checkpoints.

    Args:
      prompt_cache_mib: memory that `prepare_models` will be asked to keep prompts in.

    Raises:
      InputError: one is missing, damaged, does not fit the other, or not the device's memory.
    """
    weights = config.weights_here()
    folder = EMBEDDED_DRAFTER if config.drafter == EMBEDDED else pathlib.Path(config.drafter)

    def accept(target: TargetConfig) -> None:
        """What can be known before gigabytes are read."""
        memory.require_context(target, config.context_limit)
        drafter = None
        if config.drafter:
            drafter = read_config(folder / CONFIG, target.dtype)
            check_target(drafter, target, str(folder))
        free = memory.free_bytes()
        memory.require_fit(target, drafter, weights, config.context_limit, free, prompt_cache_mib)

    target = load_target(config.target, weights, accept)
    if not config.drafter:
        return Models(target, None, None)
    drafter = load_drafter(folder, target.config, target.config.dtype, int8=weights == INT8)
    return Models(target, drafter, _calibration(folder / CALIBRATION_FILE))


def _calibration(path: pathlib.Path) -> Any:
    """The landing record that the drafter's evaluation left, or None."""
    if not path.exists():
        return None
    try:
        record = json.loads(path.read_text())
        pricing.LandingModel(prior=record)
    except (OSError, ValueError, RecursionError, InputError) as error:
        raise InputError(f"{path} is no calibration record ({error}): evaluate again") from error
    return record


def prepare_models(
    models: Models,
    context_limit: int,
    *,
    widths: Iterable[int] = range(CAP + 1),
    policy: RowPolicy | None = None,
    time_widths: bool = True,
    prompt_cache_mib: int = 0,
    say: Say = lambda line: None,
    progress: Progress = lambda done, total, anew: None,
) -> Decoder:
    """`engine.prepare` for loaded models."""
    target = models.target
    return prepare(
        target.config,
        target.params["params"],
        models.drafter,
        vocab_size=target.tokenizer.vocab_size,
        context_limit=context_limit,
        widths=widths,
        policy=policy,
        time_widths=time_widths,
        prompt_cache_mib=prompt_cache_mib,
        say=say,
        progress=progress,
    )
