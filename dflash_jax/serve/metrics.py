"""Counters for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from dflash_jax.serve.replies import Replies
from dflash_jax.serve.service import Service

_SECONDS = (0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 180, 600)


class Metrics:
    """One server's, in a registry of their own."""

    def __init__(self, service: Service) -> None:
        turns = service.turns
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "dflash_requests", "Requests.", ["path", "status"], registry=self.registry
        )
        self._seconds = Histogram(
            "dflash_request_seconds",
            "Whole requests.",
            ["path"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._first_token = Histogram(
            "dflash_first_token_seconds",
            "From a request to its first token, waiting included.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._tokens = {
            name: Counter(f"dflash_{name}", what, registry=self.registry)
            for name, what in (
                ("prompt_tokens", "Tokens of prompts."),
                ("cached_tokens", "Of them, those that earlier prompts had left."),
                ("completion_tokens", "Tokens of replies."),
                ("drafted", "Nodes verified."),
                ("accepted", "Nodes that became tokens of a reply."),
                ("rounds", "Verifications."),
            )
        }
        waiting = Gauge("dflash_waiting", "Replies that wait.", registry=self.registry)
        waiting.set_function(lambda: turns.waiting)
        running = Gauge("dflash_running", "Replies being decoded.", registry=self.registry)
        running.set_function(lambda: turns.running)
        cache = Gauge("dflash_prompt_cache_bytes", "Held for prompts.", registry=self.registry)
        cache.set_function(service.prompt_cache_bytes)

    def on_request(self, path: str, status: int, seconds: float) -> None:
        """`path` is a route's, of which there are few."""
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def on_replies(self, replies: Replies) -> None:
        usage = replies.usage().model_dump()
        usage.update(usage["prompt_tokens_details"])
        for name, counter in self._tokens.items():
            counter.inc(usage[name])
        first = replies.first_token_s()
        if first is not None:
            self._first_token.observe(first)
