"""Reading one call of a function, after its opening tag.

Two ways to write it are known, each named after the models that brought it:

    HERMES                                       QWEN_XML
    <tool_call>                                  <tool_call>
    {"name": "f", "arguments": {"city": "x"}}    <function=f>
    </tool_call>                                 <parameter=city>
                                                 x
                                                 </parameter>
                                                 </function>
                                                 </tool_call>

A call begins when the name of a function that was offered has been read and its arguments open;
from there on they are handed on as they come. What is no call before that point is content. What
breaks after it stays in the arguments, as the model wrote it.
"""

from __future__ import annotations

import contextlib
import enum
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from dflash_jax.serve.reply_parts import Arguments, CallStart, Part
from dflash_jax.serve.scanner import Scanner, Waiting

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"

# By name, the JSON schema of each offered function's arguments.
Functions = Mapping[str, Mapping[str, Any]]

_ARGUMENTS = ("arguments", "parameters")  # models write either
_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_XML_HEAD = re.compile(r"\s*<function=([^<>\n]*)>")
_OPEN_TAG = re.compile(r"<function=[^<>\n]*")
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


class Syntax(enum.Enum):
    """How a template has its model write calls."""

    HERMES = "hermes"
    QWEN_XML = "qwen_xml"


class CallReader:
    """Reads calls from a scanner and hands on their parts.

    Attributes:
      begun: calls of which the beginning was handed on.
      complete: of them, those that were read to their end and whose arguments are JSON.
    """

    def __init__(
        self, syntax: Syntax, functions: Functions, scanner: Scanner, emit: Callable[[Part], object]
    ) -> None:
        self.begun = self.complete = 0
        self._syntax = syntax
        self._functions = functions
        self._scanner = scanner
        self._emit = emit
        self._written: list[str] = []  # of the last call's arguments

    def read(self) -> Waiting[bool]:
        """Reads what follows an opening tag.

        False, with nothing read, if that is no call of an offered function.
        """
        if self._syntax is Syntax.HERMES:
            return (yield from self._hermes())
        return (yield from self._xml())

    def _begin(self, name: str) -> None:
        self._emit(CallStart(self.begun, name))
        self.begun += 1
        self._written.clear()

    def _add(self, arguments: str) -> None:
        self._emit(Arguments(self.begun - 1, arguments))
        self._written.append(arguments)

    def _end(self) -> None:
        with contextlib.suppress(ValueError, RecursionError):
            json.loads("".join(self._written))
            self.complete += 1

    # Hermes --------------------------------------------------------------------------------

    def _hermes(self) -> Waiting[bool]:
        scanner = self._scanner
        while True:
            head = _HEAD.match(scanner.text)
            if head:
                break
            body, closed, rest = scanner.text.partition(CLOSE)
            if closed or scanner.ended:
                calls = self._whole_calls(body)
                if calls:
                    scanner.text = rest
                    for name, arguments in calls:
                        self._begin(name)
                        self._add(json.dumps(arguments, ensure_ascii=False))
                        self._end()
                return bool(calls)
            if not body.lstrip().startswith(("{", "[")) and body.strip():
                return False
            yield
        if head[1] not in self._functions:
            return False
        scanner.drop(head.end())
        self._begin(head[1])
        if (yield from self._object()):
            self._end()
            yield from scanner.skip("}")
            yield from scanner.skip(CLOSE)
        else:
            yield from scanner.pass_until(CLOSE, self._add)
        return True

    def _object(self) -> Waiting[bool]:
        """Hands on one JSON object; False if it breaks off or the reply ends before it does."""
        scanner = self._scanner
        state = _JsonObject()
        while True:
            written, read = state.push(scanner.text)
            self._add(written)
            scanner.drop(read)
            if state.ended:
                return True
            if scanner.text or scanner.ended:  # a character that cannot be there
                return False
            yield

    def _whole_calls(self, body: str) -> list[tuple[str, dict[str, Any]]]:
        """Calls written in another order than usual, or as a list; none if one is malformed."""
        written = _loads(body)
        calls: list[tuple[str, dict[str, Any]]] = []
        for one in written if isinstance(written, list) else [written]:
            if not isinstance(one, dict) or one.get("name") not in self._functions:
                return []
            arguments: Any = next((one[key] for key in _ARGUMENTS if key in one), {})
            if isinstance(arguments, str):  # JSON in JSON
                arguments = _loads(arguments)
            if not isinstance(arguments, dict):
                return []
            calls.append((one["name"], arguments))
        return calls

    # XML -----------------------------------------------------------------------------------

    def _xml(self) -> Waiting[bool]:
        scanner = self._scanner
        while not (head := _XML_HEAD.match(scanner.text)):
            rest = scanner.text.lstrip()
            if scanner.ended or not (FUNCTION.startswith(rest) or _OPEN_TAG.fullmatch(rest)):
                return False
            yield
        if head[1] not in self._functions:
            return False
        scanner.drop(head.end())
        self._begin(head[1])
        properties = self._functions[head[1]].get("properties", {})
        before = "{"
        while True:
            tag = yield from scanner.skip(PARAMETER, END_FUNCTION, CLOSE)
            if tag != PARAMETER:
                break
            name, ended = yield from self._collect(">")
            if not ended:
                return True
            self._add(f"{before}{_json(name)}: ")
            before = ", "
            if not (yield from self._value(properties.get(name))):
                return True
        if tag:
            self._add("{}" if before == "{" else "}")
            self._end()
        if tag == END_FUNCTION:
            yield from scanner.skip(CLOSE)
        elif not tag:
            yield from scanner.pass_until(CLOSE, self._add)
        return True

    def _value(self, schema: Any) -> Waiting[bool]:
        """Hands on a parameter's value as JSON; whether its end came."""
        if not is_text(schema):
            text, ended = yield from self._collect(END_PARAMETER)
            self._add(as_json(text, schema) if ended else text)
            return ended
        lines = _Lines(lambda text: self._add(_json(text)[1:-1]))
        self._add('"')
        if (yield from self._scanner.pass_until(END_PARAMETER, lines.push)):
            self._add('"')
            return True
        return False

    def _collect(self, marker: str) -> Waiting[tuple[str, bool]]:
        """The text before a marker, and whether the marker came."""
        pieces: list[str] = []
        found = yield from self._scanner.pass_until(marker, pieces.append)
        return "".join(pieces), found


_KINDS: dict[type, tuple[str, ...]] = {
    type(None): ("null",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    str: ("string",),
    list: ("array",),
    dict: ("object",),
}


def kinds_of(schema: Any) -> frozenset[str]:
    """JSON types that a schema names for its values; none where it names no type."""
    if not isinstance(schema, Mapping):
        return frozenset()
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset({kind})
    kinds = {one for one in listed(schema, "type") if isinstance(one, str)}
    for value in choices_of(schema):
        kinds.update(_KINDS[type(value)])
    for branch in [*listed(schema, "anyOf"), *listed(schema, "oneOf")]:
        kinds |= kinds_of(branch)
    return frozenset(kinds)


def choices_of(schema: Mapping[str, Any]) -> list[Any]:
    """The values that a schema allows, where it lists them."""
    return listed(schema, "enum") or ([schema["const"]] if "const" in schema else [])


def listed(schema: Mapping[str, Any], key: str) -> list[Any]:
    """A schema's list; empty where it has none or something else, for schemas are a client's."""
    value = schema.get(key)
    return value if isinstance(value, list) else []


def is_text(schema: Any) -> bool:
    """Whether values of this JSON schema are strings and nothing else."""
    return kinds_of(schema) == {"string"}


def as_json(text: str, schema: Any) -> str:
    """A parameter's text as JSON: as it is, where that is valid and of the schema's type."""
    written = text.strip()
    written = _PYTHON_WORDS.get(written, written)  # models write these too
    try:
        value = json.loads(written, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return _json(text.removeprefix("\n").removesuffix("\n"))
    kinds = kinds_of(schema)
    if "string" in kinds and not kinds.intersection(_KINDS[type(value)]):
        return _json(text.removeprefix("\n").removesuffix("\n"))
    return written


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _loads(text: str) -> Any:
    """A JSON value, also with raw line breaks in strings; None for what is no JSON."""
    try:
        return json.loads(text, strict=False, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return None


def _no_constant(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


class _Lines:
    """A value stands on lines of its own: the line breaks around it are not part of it."""

    def __init__(self, emit: Callable[[str], object]) -> None:
        self._emit = emit
        self._at_start = True
        self._held = ""

    def push(self, text: str) -> None:
        if text and self._at_start:
            text = text.removeprefix("\n")
            self._at_start = False
        text = self._held + text
        kept = text.removesuffix("\n")
        self._held = text[len(kept) :]
        if kept:
            self._emit(kept)


_CLOSES = {"{": "}", "[": "]"}
_BETWEEN = frozenset(" \t\r\n,:+-.0123456789eEtrufalsn")  # strings and brackets


class _JsonObject:
    """Follows a JSON object to its closing bracket.

    Line breaks and other control characters inside strings, which JSON does not allow but models
    write, are escaped.
    """

    def __init__(self) -> None:
        self.ended = False
        self._open: list[str] = []  # the brackets that will close
        self._in_string = self._escaped = False

    def push(self, text: str) -> tuple[str, int]:
        """(the object's text, characters read): fewer than there are at its end or if it breaks."""
        written: list[str] = []
        for count, character in enumerate(text):
            if self.ended or not self._take(character):
                return "".join(written), count
            raw = self._in_string and character < " "
            written.append(_json(character)[1:-1] if raw else character)
        return "".join(written), len(text)

    def _take(self, character: str) -> bool:
        """Whether the object may go on with this character."""
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
        elif character == '"':
            self._in_string = True
        elif character in _CLOSES:
            self._open.append(_CLOSES[character])
        elif character in "}]":
            if character != self._open.pop():
                return False
            self.ended = not self._open
        else:
            return character in _BETWEEN
        return True
