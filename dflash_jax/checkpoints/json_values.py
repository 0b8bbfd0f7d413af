"""Values of a checkpoint's JSON files: of the kind that they must have, or refused by name."""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from dflash_jax.errors import InputError

REQUIRED = object()
_KINDS = {
    bool: "true or false",
    dict: "an object",
    float: "a number",
    int: "a whole number",
    list: "a list",
    str: "a text",
}


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """A JSON object. InputError when the file is missing, unreadable or something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def typed(
    values: Mapping[str, Any], name: str, kind: type, label: str, default: Any = REQUIRED
) -> Any:
    """The value of a name; `default` where it is missing or null.

    Args:
      kind: bool, dict, float (a whole number does too), int, list or str.
      label: the file, for messages.

    Raises:
      InputError: it is of another kind, or missing without a default.
    """
    value = values.get(name)
    if value is None:
        if default is REQUIRED:
            raise InputError(f"{label}: {name} is missing")
        return default
    kinds = (int, float) if kind is float else kind
    if not isinstance(value, kinds) or (isinstance(value, bool) and kind is not bool):
        raise InputError(f"{label}: {name} must be {_KINDS[kind]}, not {value!r}")
    return value


@contextlib.contextmanager
def refused_kinds(path: pathlib.Path) -> Iterator[None]:
    """Reading a file's values inside: one that it cannot have is an InputError that names it."""
    try:
        yield
    except InputError as error:
        if str(error).startswith((str(path), str(path.parent))):
            raise
        raise InputError(f"{path}: {error}") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise InputError(f"{path}: a value of the wrong kind ({error})") from error
