"""Owns measurements, each runnable as ``python -m benchmarks.NAME``. The product imports none."""
