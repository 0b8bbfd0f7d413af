"""What a request says of its rules: penalties, biases, log-probabilities, grammars."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import Field

from dflash_jax.engine import grammars
from dflash_jax.engine.grammars import Grammar, GrammarVocabulary
from dflash_jax.engine.rules import (
    MAX_BIAS,
    MAX_PENALTY,
    MAX_REPETITION,
    MIN_REPETITION,
    Rules,
    Thinking,
)
from dflash_jax.errors import InputError
from dflash_jax.serve.body import Body
from dflash_jax.serve.errors import ApiError

MAX_CHOICE_TEXTS = 1024
MAX_STOP_TOKENS = 1024

Neutral = dict[str, tuple[Any, ...]]
JsonSchema = dict[str, Any]


class TextFormat(Body):
    """No format."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(Body):
    """OpenAI's envelope of a JSON Schema. The reply matches it, `strict` or not."""

    name: str | None = Field(None, max_length=64)
    description: str | None = None
    schema_: JsonSchema = Field(alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Body):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


class StructuredOutputs(Body):
    """vLLM's field: one of these, which the whole reply matches."""

    not_here: ClassVar[Neutral] = {
        "structural_tag": (),
        "disable_any_whitespace": (False,),
        "disable_additional_properties": (False,),
        "whitespace_pattern": (),
        "disable_fallback": (False, True),
        "backend": ("auto", "guidance"),
    }
    json_: JsonSchema | None = Field(None, alias="json", description="A JSON Schema.")
    regex: str | None = Field(None, min_length=1, description="In Rust's syntax.")
    choice: Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICE_TEXTS)] | None = Field(
        None, description="One of these texts."
    )
    grammar: str | None = Field(None, min_length=1, description="llguidance's Lark, or GBNF.")
    json_object: bool | None = Field(None, description="Any JSON object.")

    @pydantic.model_validator(mode="after")
    def _one_kind(self) -> StructuredOutputs:
        kinds = (self.json_, self.regex, self.choice, self.grammar, self.json_object or None)
        if sum(kind is not None for kind in kinds) != 1:
            raise ValueError("give one of json, regex, choice, grammar, json_object")
        return self

    def text(self) -> str:
        """llguidance's; InputError."""
        if self.json_ is not None:
            return grammars.of_json_schema(self.json_)
        if self.regex is not None:
            return grammars.of_regex(self.regex)
        if self.choice is not None:
            return grammars.of_choices(self.choice)
        if self.grammar is not None:
            return grammars.of_grammar(self.grammar)
        return grammars.of_json_schema(_ANY_OBJECT)


_ANY_OBJECT = {"type": "object"}
Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]
TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]


class RuleFields(Body):
    """The fields of completions and chats alike."""

    presence_penalty: float | None = Field(
        None, ge=-MAX_PENALTY, le=MAX_PENALTY, description="Off the logit of a token of the reply."
    )
    frequency_penalty: float | None = Field(
        None, ge=-MAX_PENALTY, le=MAX_PENALTY, description="The same, once for each time."
    )
    repetition_penalty: float | None = Field(
        None,
        ge=MIN_REPETITION,
        le=MAX_REPETITION,
        description="Divides the positive logit of a token of prompt or reply; 1 is off.",
    )
    logit_bias: dict[TokenId, Bias] | None = Field(
        None, description="Added to the logits of these token ids."
    )
    min_tokens: int | None = Field(
        None, ge=0, le=2**31 - 1, description="Nothing ends the reply before so many tokens."
    )
    stop_token_ids: (
        Annotated[
            list[Annotated[int, Field(ge=0)]], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)
        ]
        | None
    ) = Field(None, description="These end the reply too.")
    ignore_eos: bool | None = Field(None, description="The checkpoint's own stop tokens do not.")
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @pydantic.model_validator(mode="after")
    def _one_grammar(self) -> RuleFields:
        if self.grammar_field is not None and self.ignore_eos:
            raise ValueError(f"{self.grammar_field} and ignore_eos contradict each other")
        if self.structured_outputs is not None and self.grammar_field != "structured_outputs":
            raise ValueError("give response_format or structured_outputs, one of the two")
        return self

    @property
    def grammar_field(self) -> str | None:
        """The field that has the reply's grammar."""
        if self.response_format is not None and self.response_format.type != "text":
            return "response_format"
        return None if self.structured_outputs is None else "structured_outputs"

    def grammar(self, vocabulary: GrammarVocabulary) -> Grammar | None:
        """The reply's grammar, compiled: milliseconds, more for a large one.

        Raises:
          ApiError: 400, it is malformed, or no text matches it.
        """
        if self.grammar_field is None:
            return None
        try:
            return Grammar(self._grammar_text(), vocabulary)
        except InputError as error:
            raise ApiError(
                400,
                f"{self.grammar_field}: {str(error)[:1000]}",
                param=self.grammar_field,
                code="invalid_value",
            ) from error

    def _grammar_text(self) -> str:
        if self.structured_outputs is not None:
            return self.structured_outputs.text()
        wanted = self.response_format
        schema: JsonSchema = _ANY_OBJECT
        if isinstance(wanted, JsonSchemaFormat):
            schema = wanted.json_schema.schema_
        return grammars.of_json_schema(schema)

    def stop_ids(self, own: frozenset[int]) -> frozenset[int]:
        """The stop tokens; `own` are the checkpoint's."""
        return frozenset(self.stop_token_ids or ()) | (frozenset() if self.ignore_eos else own)

    def rules(self, grammar: Grammar | None, thinking: Thinking | None, logprobs: bool) -> Rules:
        """For the engine."""
        bias = self.logit_bias or {}
        if grammar is None and thinking is not None and thinking.budget is None:
            thinking = None  # it forces nothing
        return Rules(
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            logit_bias=tuple((int(token), value) for token, value in bias.items()),
            min_tokens=self.min_tokens or 0,
            grammar=grammar,
            thinking=thinking,
            logprobs=logprobs,
        )
