"""Which width to verify: prices, landing chances, rules. Host code without JAX.

`make_rule` makes a rule, `LandingModel` the landing chances that it chooses by.
"""

from dflash_jax.pricing.landing import LandingModel as LandingModel
from dflash_jax.pricing.make import RULES as RULES
from dflash_jax.pricing.make import make_rule as make_rule
from dflash_jax.pricing.rule import CLOCKS as CLOCKS
from dflash_jax.pricing.rule import LEARN_ROUNDS as LEARN_ROUNDS
from dflash_jax.pricing.rule import PriorRow as PriorRow
from dflash_jax.pricing.rule import Rule as Rule
