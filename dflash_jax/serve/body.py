"""What all requests have in common: what is not declared is refused by name, never ignored."""

from __future__ import annotations

from typing import Any, ClassVar

import pydantic
from pydantic_core import PydanticCustomError

from dflash_jax.serve.errors import sendable


class Body(pydantic.BaseModel):
    """Takes exactly the fields that are declared, of exactly their types."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    not_here: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @pydantic.model_validator(mode="before")
    @classmethod
    def _refuse_by_name(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        declared = {field.alias or name for name, field in cls.model_fields.items()}
        known = {}
        for name, value in data.items():
            if name in declared:
                known[name] = value
            elif name not in cls.not_here:
                raise PydanticCustomError(
                    "unknown_parameter", "unknown parameter: {name}", {"name": sendable(name[:100])}
                )
            elif not _asks_nothing(value, cls.not_here[name]):
                raise PydanticCustomError(
                    "unsupported_parameter", "{name} is not supported here", {"name": name}
                )
        return known


def _asks_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    """By type too: `false` is no 0."""
    return value is None or any(type(value) is type(one) and value == one for one in neutral)
