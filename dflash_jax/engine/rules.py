"""What changes a reply's picks besides the sampling: penalties, biases, grammars, budgets."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from dflash_jax.errors import InputError

if TYPE_CHECKING:  # llguidance is installed with the server alone
    from dflash_jax.engine.grammars import Grammar

MAX_PENALTY = 2.0
MAX_BIAS = 100.0
# Wide enough for every use; beyond, logits could overflow.
MIN_REPETITION, MAX_REPETITION = 0.01, 100.0


@dataclasses.dataclass(frozen=True)
class Thinking:
    """The part of a reply in which the model thinks, before its answer.

    It ends with the token `end`. A grammar applies from the token behind it on. Once `budget`
    tokens have been thought without it, the tokens `closing` are forced.

    Attributes:
      end: id of the token that ends the thinking.
      begin: id of the token that begins it when it is the reply's first; any other first token
        begins the answer. None: the prompt has begun it.
      budget: most tokens between the two; None is no limit.
      closing: ids, `end` among them.

    Raises InputError.
    """

    end: int
    begin: int | None = None
    budget: int | None = None
    closing: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.budget is not None and self.budget < 0:
            raise InputError(f"thinking budget {self.budget} must be at least 0")
        if self.budget is not None and self.end not in self.closing:
            raise InputError(f"a thinking budget needs closing tokens with {self.end} among them")


@dataclasses.dataclass(frozen=True)
class Rules:
    """What changes a request's picks, checked.

    The logit of a token that prompt or reply have is divided by `repetition_penalty` where
    positive, else multiplied by it. Then `frequency_penalty` is taken off for each time that the
    reply has the token, `presence_penalty` once, and the token's bias is added. Last, what grammar,
    thinking budget and `min_tokens` forbid is masked. Temperature and filters come after that.

    Attributes:
      logit_bias: (token id, bias) pairs.
      min_tokens: stop tokens are not picked before so many tokens.
      logprobs: whether to report log-probabilities: of the model's own logits, before all of this.

    Raises InputError.
    """

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    grammar: Grammar | None = None
    thinking: Thinking | None = None
    logprobs: bool = False

    def __post_init__(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            if not abs(getattr(self, name)) <= MAX_PENALTY:
                raise InputError(f"{name} {getattr(self, name)} must be between -2 and 2")
        if not MIN_REPETITION <= self.repetition_penalty <= MAX_REPETITION:
            raise InputError(
                f"repetition_penalty {self.repetition_penalty} must be between {MIN_REPETITION} "
                f"and {MAX_REPETITION:g}; 1 is off"
            )
        for token, bias in self.logit_bias:
            if token < 0 or not (math.isfinite(bias) and abs(bias) <= MAX_BIAS):
                raise InputError(
                    f"logit_bias {token}: {bias} must be between -100 and 100, of a token id"
                )
        if self.min_tokens < 0:
            raise InputError(f"min_tokens {self.min_tokens} must be at least 0")


NO_RULES = Rules()
