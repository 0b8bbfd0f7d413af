"""A grammar of calls, for llguidance: the tags, the functions' names, their arguments' schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dflash_jax.checkpoints import Tokenizer
from dflash_jax.errors import InputError
from dflash_jax.serve.call_reader import (
    CLOSE,
    END_FUNCTION,
    END_PARAMETER,
    FUNCTION,
    OPEN,
    PARAMETER,
    Functions,
    Syntax,
    choices_of,
    kinds_of,
    listed,
)

# As templates write JSON, so that the model continues what it was trained on.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_COMBINED = ("$ref", "anyOf", "oneOf", "allOf")


def call_grammar(
    syntax: Syntax,
    functions: Functions,
    tokenizer: Tokenizer,
    several: bool,
    free_text: bool = False,
    after_thinking: bool = False,
) -> str:
    """Lark text that matches one call, or also `several`.

    `free_text`: between calls, and instead of them, any text may stand. `after_thinking`: empty
    lines may come first.

    Raises:
      InputError: a schema that the syntax has no form for.
    """
    opening, closing = (_marker(tag, tokenizer) for tag in (OPEN, CLOSE))
    rules = []
    for number, (name, schema) in enumerate(functions.items()):
        if syntax is Syntax.HERMES:
            rules.append(_hermes(f"function{number}", name, schema))
        else:
            rules += _xml(f"function{number}", name, schema)
    alternatives = " | ".join(f"function{number}" for number in range(len(functions)))
    if free_text:
        start = "start: free* TEXT" if several else "start: free? TEXT"
        rules += [f"free: before function {closing}", "TEXT: /(?s:.*)/"]
        # A tag that is a token of its own is no text; one of several is where it first occurs.
        lazy = "" if opening.startswith("<") else "[lazy]"
        rules.append(f"before{lazy}: TEXT {opening}")
    else:
        start = f"start: {'LINES? ' if after_thinking else ''}call"
        start += r' ("\n" call)*' if several else ""
        rules += [r"LINES: /\n{1,2}/"] if after_thinking else []
        rules.append(f"call: {opening} function {closing}")
    return "\n".join(["%llguidance {}", start, f"function: {alternatives}", *rules, ""])


def _marker(tag: str, tokenizer: Tokenizer) -> str:
    """A tag's token where it has one, which is no text to llguidance; else its text."""
    token = tokenizer.token_id(tag)
    return _text(tag) if token is None else f"<[{token}]>"


def _text(text: str) -> str:
    return json.dumps(text)


def _schema(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': _JSON_STYLE})}"


def _hermes(rule: str, name: str, schema: Mapping[str, Any]) -> str:
    before = f'\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
    arguments = _schema({"type": "object", **schema})
    return f"{rule}: {_text(before)} {arguments} {_text('}' + chr(10))}"


def _xml(rule: str, name: str, schema: Mapping[str, Any]) -> list[str]:
    """Parameters in the schema's order, each that is not required as an option."""
    combined = [key for key in _COMBINED if key in schema]
    if combined:
        raise InputError(f'{name}: "{combined[0]}" cannot be enforced in this template\'s calls')
    required = listed(schema, "required")
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    body, rules = [], []
    for number, (parameter, kind) in enumerate(schema.get("properties", {}).items()):
        if set(parameter) & set("<>\n"):
            raise InputError(f"{name}: this template's calls cannot have a parameter {parameter!r}")
        part = f"{rule}_{number}"
        body.append(part if parameter in required else f"{part}?")
        rules.append(f"{part}: {_text(f'{PARAMETER}{parameter}>{chr(10)}')} {part}_value {_LINE}")
        rules.append(_value(f"{part}_value", f"{name}: {parameter}", kind, definitions))
    opening = _text(f"\n{FUNCTION}{name}>\n")
    parameters = " ".join([*body, _text(f"{END_FUNCTION}\n")])
    return [f"{rule}: {opening} {parameters}", *rules]


_LINE = _text("\n")
_END_VALUE = _text(f"\n{END_PARAMETER}")


def _value(rule: str, label: str, schema: Any, definitions: Mapping[str, Any]) -> str:
    """A parameter's value with its closing tag: strings are bare, all else is JSON."""
    if not isinstance(schema, Mapping):
        schema = {}
    kinds = kinds_of(schema)
    if (kinds and "string" not in kinds) or "$ref" in schema or "allOf" in schema:
        return f"{rule}: {_schema({**definitions, **schema})} {_END_VALUE}"
    if values := choices_of(schema):
        written = [value if isinstance(value, str) else json.dumps(value) for value in values]
        return f"{rule}: ({' | '.join(map(_text, written))}) {_END_VALUE}"
    if "pattern" in schema:
        raise InputError(f'{label}: "pattern" cannot be enforced in this template\'s calls')
    least, most = _length(schema, "minLength", 0), _length(schema, "maxLength", "")
    # Lazy: it ends at the first closing tag.
    return rf"{rule}[lazy]: /(?s:.{{{least},{most}}})\n?<\/parameter>/"


def _length(schema: Mapping[str, Any], key: str, default: int | str) -> int | str:
    value = schema.get(key)
    return value if isinstance(value, int) and value >= 0 else default
