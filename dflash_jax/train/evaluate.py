"""A drafter's evaluation in one way of decoding (greedy, or sampled with keyed draws)."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from jax.sharding import Mesh

from dflash_jax.checkpoints.target import Target
from dflash_jax.decode.sampling import Sampling
from dflash_jax.errors import InputError
from dflash_jax.train import calibrate
from dflash_jax.train.calibrate import Reliability
from dflash_jax.train.loop import corpus_head
from dflash_jax.train.replies import LatticeReader, Reply
from dflash_jax.train.step import DRAFT_VOCAB, Models
from dflash_jax.train.walks import Judged, judge_reply, recall, tokens_a_round, walk
from dflash_jax.tree.growth import CAP


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What was found. Rates are tokens a round at widths 0..CAP."""

    tokens: int  # of the replies
    ways: dict[str, list[float]]  # tree or chain, with and without the selector
    kinds: dict[str, list[float]]  # of prompts; trees with the selector
    recall: dict[int, list[float]]  # of the truth in the best k, by depth
    before: Reliability  # of landing chances, on replies that the calibration has not seen
    after: Reliability
    calibration: dict[str, Any]  # one half of a LandingModel record, from all replies

    def to_json(self) -> dict[str, Any]:
        fields = dataclasses.asdict(self)
        return fields | {"before": self.before._asdict(), "after": self.after._asdict()}


def evaluate(
    target: Target,
    models: Models,
    params: dict[str, Any],
    replies: list[Reply],
    sampling: Sampling,
    mesh: Mesh,
    rows: int,
    anchors: int,
) -> Evaluation:
    """Drafts at every anchor of the target's replies and replays the decodes.

    Args:
      target: as serving loads it.
      models: configs.
      params: the drafter's, as loaded.
      replies: from `write_replies`.
      sampling: how they were drawn.
      mesh: of one device.
      rows: replies read together.
      anchors: blocks of a reply drafted together.

    Raises:
      InputError: fewer than two replies.
    """
    if len(replies) < 2:
        raise InputError("evaluation: fewer than two prompts got a reply; give more, or shorter")
    trained = {name: value for name, value in params.items() if name != DRAFT_VOCAB}
    vocabulary = params.get(DRAFT_VOCAB)
    ids = None if vocabulary is None else np.asarray(vocabulary)
    frozen = corpus_head(target.params["params"], ids, mesh)
    lattices = LatticeReader(models, trained, frozen, rows, anchors).read(replies)
    temperature = 0.0 if sampling.greedy else sampling.temperature

    def judged(selector: bool, trees: bool) -> list[list[Judged]]:
        return [
            judge_reply(lattice, reply, temperature, selector, trees)
            for lattice, reply in zip(lattices, replies, strict=True)
        ]

    best = judged(selector=True, trees=True)
    ways = {"tree": tokens_a_round(best), "chain": tokens_a_round(judged(True, trees=False))}
    if models.drafter.has_selector:
        ways["tree, no selector"] = tokens_a_round(judged(False, trees=True))
        ways["chain, no selector"] = tokens_a_round(judged(False, trees=False))
    kinds = {
        kind: tokens_a_round([b for b, r in zip(best, replies, strict=True) if r.kind == kind])
        for kind in sorted({reply.kind for reply in replies})
    }
    rounds = [[trees[offset] for offset in walk(trees, CAP).visited] for trees in best]
    before, after = honesty(rounds)
    return Evaluation(
        sum(reply.end - reply.start + 1 for reply in replies),
        ways,
        kinds,
        recall(lattices, replies),
        before,
        after,
        calibrate.fit([judged for trees in rounds for judged in trees]),
    )


def honesty(rounds: list[list[Judged]]) -> tuple[Reliability, Reliability]:
    """Reliability before and after a calibration fitted on the other half of the replies."""
    halves = [[j for trees in rounds[side::2] for j in trees] for side in (0, 1)]
    raw: list[np.ndarray] = []
    fitted: list[np.ndarray] = []
    landed: list[np.ndarray] = []
    for fit_on, tested in (halves, halves[::-1]):
        record = calibrate.fit(fit_on)
        chance, hit = calibrate.chances(None, tested)
        raw.append(chance)
        landed.append(hit)
        fitted.append(calibrate.chances(record, tested)[0])
    hits = np.concatenate(landed)
    return (
        calibrate.reliability(np.concatenate(raw), hits),
        calibrate.reliability(np.concatenate(fitted), hits),
    )
