"""A chat request to what is decoded: a prompt, rules for the reply, and how to read it."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from dflash_jax.engine.grammars import Grammar, GrammarVocabulary
from dflash_jax.engine.rules import Thinking
from dflash_jax.errors import InputError
from dflash_jax.serve.call_grammar import call_grammar
from dflash_jax.serve.call_reader import CLOSE, OPEN, Functions, Syntax
from dflash_jax.serve.chat_format import ChatFormat
from dflash_jax.serve.chat_requests import ChatRequest, NamedTool
from dflash_jax.serve.errors import ApiError
from dflash_jax.serve.reply_parser import END_THINK, THINK, ReplyParser, Start

SWITCH = "enable_thinking"  # the variable by which templates are told not to think
EFFORT = "reasoning_effort"  # and that of those that can think more or less
# Most tokens of reasoning, for templates that know no effort; more effort has no limit.
EFFORT_TOKENS = {"low": 1024, "medium": 4096, "high": 16384}
TAGS = (THINK, END_THINK, OPEN, CLOSE)  # which a checkpoint may have as special tokens
_NO_EFFORT = ("none", "minimal")


@dataclasses.dataclass(frozen=True, eq=False)
class Chat:
    """A chat, ready to be decoded.

    Attributes:
      prompt: token ids.
      start: whether the reply begins with reasoning.
      syntax, functions: how calls are read; syntax None: there are none to be read.
      one_call: the reply ends with its first call.
      grammar: what the answer must match.
      thinking: the engine's rule of reasoning; None where the reply can have none.
    """

    prompt: list[int]
    start: Start
    syntax: Syntax | None
    functions: Functions
    one_call: bool
    grammar: Grammar | None
    thinking: Thinking | None

    def parser(self) -> ReplyParser:
        """A new parser, for one reply."""
        return ReplyParser(self.start, self.syntax, self.functions, self.one_call)


def prepare(body: ChatRequest, format_: ChatFormat, vocabulary: GrammarVocabulary) -> Chat:
    """Renders and checks a chat. Takes milliseconds; more for a long one.

    Raises:
      ApiError: 400, the template cannot do what is asked.
      InputError: the template refuses the messages.
    """
    settings = _thinking_settings(body, format_)
    if body.offered and format_.syntax is None:
        raise _refused(
            "tools", "this checkpoint's template has its model write calls in a way not known here"
        )
    text = format_.render(body.messages, body.offered, settings.variables)
    start = format_.start(text)
    functions = {tool.function.name: tool.function.parameters or {} for tool in body.offered}
    forced = isinstance(body.tool_choice, NamedTool) or body.tool_choice == "required"
    one_call = body.parallel_tool_calls is False or isinstance(body.tool_choice, NamedTool)
    grammar = body.grammar(vocabulary)
    if grammar is None:
        grammar = _call_grammar(body, format_, vocabulary, forced, several=not one_call)
    thinking = _thinking(format_, start, settings.budget)
    may_think = start in (Start.POSSIBLE, Start.OPEN)
    if may_think and thinking is None and (grammar or settings.budget is not None):
        name = body.grammar_field or ("tools" if grammar else "thinking_budget")
        raise _refused(name, f"this checkpoint has no tokens {THINK} and {END_THINK} to go by")
    return Chat(
        prompt=format_.tokenizer.encode(text),
        start=start,
        syntax=format_.syntax if functions else None,
        functions=functions,
        one_call=one_call,
        grammar=grammar,
        thinking=thinking,
    )


class _Settings(NamedTuple):
    variables: dict[str, Any]  # of the template
    budget: int | None  # tokens of reasoning


def _thinking_settings(body: ChatRequest, format_: ChatFormat) -> _Settings:
    """What a request asks of the template; ApiError for what the template does not have."""
    variables = dict(body.chat_template_kwargs or {})
    check_variables(variables, format_)
    effort, budget = body.reasoning_effort, body.thinking_budget
    for name, value in (("reasoning_effort", effort), ("thinking_budget", budget)):
        if value is not None and not format_.thinks:
            raise _refused(name, "this checkpoint's chat template does not think")
    if effort is None:
        return _Settings(variables, budget)
    if EFFORT in format_.variables and effort not in _NO_EFFORT:
        variables.setdefault(EFFORT, effort)
    elif budget is None:
        budget = EFFORT_TOKENS.get(effort)
    if SWITCH in format_.variables:
        wanted = effort not in _NO_EFFORT
        if variables.setdefault(SWITCH, wanted) is not wanted:
            raise _refused("reasoning_effort", f"{effort!r} contradicts {SWITCH}")
    elif effort in _NO_EFFORT:
        raise _refused("reasoning_effort", "this checkpoint's thinking cannot be switched off")
    return _Settings(variables, budget)


def check_variables(variables: dict[str, Any], format_: ChatFormat) -> None:
    """ApiError for a variable that the template does not read."""
    unknown = sorted(variables.keys() - format_.variables)
    if unknown:
        known = ", ".join(sorted(format_.variables)) or "none"
        raise ApiError(
            400,
            f"chat_template_kwargs: the chat template reads no {unknown[0][:100]!r}; what may be "
            f"set of it: {known}",
            param="chat_template_kwargs",
            code="unsupported_parameter",
        )
    if not isinstance(variables.get(SWITCH, True), bool):
        raise ApiError(
            400,
            f"chat_template_kwargs.{SWITCH} must be true or false",
            param=f"chat_template_kwargs.{SWITCH}",
            code="invalid_value",
        )


def _refused(param: str, reason: str) -> ApiError:
    return ApiError(400, f"{param}: {reason}", param=param, code="unsupported_parameter")


def _call_grammar(
    body: ChatRequest,
    format_: ChatFormat,
    vocabulary: GrammarVocabulary,
    forced: bool,
    several: bool,
) -> Grammar | None:
    """What the calls must match: all that are forced, else those of strict functions."""
    syntax = format_.syntax
    strict = any(tool.function.strict for tool in body.offered)
    if syntax is None or not (forced or strict):
        return None
    tools = body.offered
    if isinstance(body.tool_choice, NamedTool):
        tools = [tool for tool in tools if tool.function.name == body.tool_choice.function.name]
    schemas = {tool.function.name: tool.function.parameters or {} for tool in tools}
    try:
        text = call_grammar(
            syntax,
            schemas,
            format_.tokenizer,
            several=several,
            free_text=not forced,
            after_thinking=format_.thinks,
        )
        return Grammar(text, vocabulary)
    except InputError as error:
        raise ApiError(400, f"tools: {error}", param="tools", code="invalid_value") from error


def _thinking(format_: ChatFormat, start: Start, budget: int | None) -> Thinking | None:
    """The engine's rule, where the reply may think and its tags are tokens."""
    tokenizer = format_.tokenizer
    end, begin = tokenizer.token_id(END_THINK), tokenizer.token_id(THINK)
    if start not in (Start.POSSIBLE, Start.OPEN) or end is None or begin is None:
        return None
    closing = tuple(tokenizer.encode(f"\n{END_THINK}\n\n"))
    return Thinking(end, None if start is Start.OPEN else begin, budget, closing)
