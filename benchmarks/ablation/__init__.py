"""Strategies of the literature against the library's own, in one run: ``python -m benchmarks.ablation``."""
