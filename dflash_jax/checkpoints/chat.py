"""The chat template that a checkpoint carries, rendered in Jinja's sandbox."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.meta
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dflash_jax.errors import InputError

Message = Mapping[str, Any]


class ChatTemplate:
    """A compiled template.

    Attributes:
      variables: names it reads that are not its own: messages, tools, enable_thinking, ...

    Raises:
      InputError: the source is no valid template.
    """

    def __init__(self, source: str, label: str):
        self.source = source
        self._label = label
        # The settings with which Hugging Face renders, so that templates keep their whitespace.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
            read = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise InputError(f"{label}: the chat template is not valid ({error})") from error
        self.variables = frozenset(read) - environment.globals.keys()

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt's text. `variables` (tools, bos_token, ...) are the template's.

        Raises:
          InputError: no messages, one without a role, or the template refuses them.
        """
        if not messages:
            raise InputError("messages: at least one is needed")
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise InputError(f"messages[{index}]: needs a role and a content")
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **variables
            )
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as error:
            # A template is a program: content of a kind that it does not expect raises anything.
            reason = " ".join(str(error).split())  # a template's message may span lines
            raise InputError(f"{self._label}: the chat template refused: {reason}") from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which no model was trained on."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
