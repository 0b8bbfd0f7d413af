"""The devices that share the work."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh

from dflash_jax.errors import InputError

DATA = "data"  # the one axis: batches are split over it, parameters are on every device


def data_mesh(count: int = 0) -> Mesh:
    """A mesh of the first `count` devices; 0 takes all.

    Raises:
      InputError: fewer devices than asked for.
    """
    devices = jax.devices()
    if not 0 <= count <= len(devices):
        raise InputError(
            f"--devices={count}: JAX sees {len(devices)} {devices[0].platform} device(s)"
        )
    chosen = np.array(devices[: count or None])
    # The partitioner decides about everything but the inputs. Named only where jax knows other
    # kinds of axes, which jax 0.5 does not.
    kinds = getattr(jax.sharding, "AxisType", None)
    return Mesh(chosen, (DATA,), axis_types=(kinds.Auto,)) if kinds else Mesh(chosen, (DATA,))


def check_batch(batch: int, mesh: Mesh, name: str) -> None:
    """Raises InputError unless the batch divides over the devices."""
    if batch % mesh.size:
        raise InputError(f"{name} {batch} is no multiple of the {mesh.size} devices")
