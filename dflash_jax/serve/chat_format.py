"""What a checkpoint's chat template can do, and chats as it wants them."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_jax.checkpoints import Tokenizer
from dflash_jax.errors import InputError
from dflash_jax.serve.call_reader import CLOSE, FUNCTION, OPEN, Syntax
from dflash_jax.serve.chat_requests import Message, Tool, ToolCall
from dflash_jax.serve.reply_parser import END_THINK, THINK, Start

# What a template is always given, so that nobody may set it otherwise.
RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})

# A call's JSON in a template's source, where quotes may be escaped.
_JSON_CALL = re.compile(r"""\{\\?["'](name|arguments)\\?["']""")

# For templates without tools. The call's form is the one most widely trained on.
_OFFER = """You can call functions. These are their JSON descriptions, one a line:
<tools>
{tools}
</tools>
To call one, reply with its name and its arguments as a JSON object between tags, like this:
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument's name": "its value"}}}}
</tool_call>
Each call has tags of its own."""


class ArgumentsObject(dict[str, Any]):
    """A call's arguments. Templates take an object; one that prints it gets JSON."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)


@dataclasses.dataclass(frozen=True, eq=False)
class ChatFormat:
    """The format of one checkpoint's chats."""

    tokenizer: Tokenizer

    @functools.cached_property
    def _source(self) -> str:
        template = self.tokenizer.chat_template
        return "" if template is None else template.source

    @functools.cached_property
    def variables(self) -> frozenset[str]:
        """What a client may set of the template."""
        template = self.tokenizer.chat_template
        return frozenset() if template is None else template.variables - RESERVED

    @property
    def thinks(self) -> bool:
        """Whether replies may begin with reasoning."""
        return THINK in self._source

    @functools.cached_property
    def offers_tools(self) -> bool:
        """Whether the template itself writes the functions."""
        template = self.tokenizer.chat_template
        return template is not None and "tools" in template.variables

    @property
    def syntax(self) -> Syntax | None:
        """How calls are written; None: in a way that is not known here."""
        if not self.offers_tools:
            return Syntax.HERMES
        if OPEN in self._source and FUNCTION in self._source:
            return Syntax.QWEN_XML
        return Syntax.HERMES if OPEN in self._source and _JSON_CALL.search(self._source) else None

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool], variables: Mapping[str, Any]
    ) -> str:
        """The prompt's text.

        Raises:
          InputError: the template refuses it; a tool's message answers no call.
        """
        turns = _answers_in_order(messages)
        if not self.offers_tools:
            return self.tokenizer.apply_chat_template(_as_texts(turns, tools), **variables)
        offered: dict[str, Any] = {"tools": [_described(tool) for tool in tools]} if tools else {}
        return self.tokenizer.apply_chat_template(list(map(_turn, turns)), **offered, **variables)

    def start(self, prompt: str) -> Start:
        """Where the reply to a rendered prompt stands when it begins."""
        if not self.thinks:
            return Start.NEVER
        ends = {THINK: Start.OPEN, END_THINK: Start.ENDED}
        prompt = prompt.rstrip()
        return next((ends[tag] for tag in ends if prompt.endswith(tag)), Start.POSSIBLE)


def _answers_in_order(messages: Sequence[Message]) -> list[Message]:
    """Tools' messages in the order of the calls that they answer.

    Templates write no ids, so that a model can only tell the answers by their order.
    """
    turns: list[Message] = []
    calls: list[str] = []  # ids of the last assistant's message
    answers: list[Message] = []
    for index, message in enumerate(messages):
        if message.tool_call_id is None:
            turns += sorted(answers, key=lambda answer: calls.index(answer.tool_call_id or ""))
            answers = []
            calls = [call.id for call in message.tool_calls or ()]
            turns.append(message)
        elif message.tool_call_id in calls:
            answers.append(message)
        else:
            raise InputError(
                f"messages[{index}].tool_call_id: {message.tool_call_id[:100]!r} is the id of no "
                "call in the assistant's message before it"
            )
    return turns + sorted(answers, key=lambda answer: calls.index(answer.tool_call_id or ""))


def _described(tool: Tool) -> dict[str, Any]:
    """A function as models were trained to read it."""
    function = tool.function
    described: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        described["description"] = function.description
    described["parameters"] = function.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": described}


def _turn(message: Message) -> dict[str, Any]:
    """A message with what it has; `developer` is the template's `system`."""
    role = "system" if message.role == "developer" else message.role
    turn: dict[str, Any] = {"role": role, "content": message.text}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            turn[name] = value
    if message.tool_calls:
        turn["tool_calls"] = [
            {"id": call.id, "type": "function", "function": _called(call)}
            for call in message.tool_calls
        ]
    return turn


def _called(call: ToolCall) -> dict[str, Any]:
    arguments = ArgumentsObject(json.loads(call.function.arguments or "{}"))
    return {"name": call.function.name, "arguments": arguments}


def _as_texts(messages: Sequence[Message], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Functions, calls and answers as the text of turns that every template knows."""
    turns: list[dict[str, Any]] = []
    answered = False  # whether the last turn is one of answers
    for message in messages:
        turn = _turn(message)
        if calls := turn.pop("tool_calls", ()):
            written = [
                f"{OPEN}\n{json.dumps(call['function'], ensure_ascii=False)}\n{CLOSE}"
                for call in calls
            ]
            turn["content"] = "\n".join([*filter(None, [turn["content"]]), *written])
        if turn.pop("tool_call_id", None) is not None:
            answer = f"<tool_response>\n{turn['content']}\n</tool_response>"
            if answered:
                turns[-1]["content"] += f"\n{answer}"
                continue
            turn = {"role": "user", "content": answer}
        answered = message.role == "tool"
        turns.append(turn)
    if tools:
        described = [json.dumps(_described(tool), ensure_ascii=False) for tool in tools]
        offer = _OFFER.format(tools="\n".join(described))
        if turns[0]["role"] == "system":
            turns[0] = {**turns[0], "content": f"{turns[0]['content']}\n\n{offer}"}
        else:
            turns.insert(0, {"role": "system", "content": offer})
    return turns
