"""The OpenAI-compatible server: `python -m dflash_jax.serve`; docs/serving.md."""
