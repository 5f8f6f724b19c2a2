"""Owns the multiplication of packed weights: the CPU backend. Knows no layers and no files."""

from ds4q.runtime.backend.weights import Expert, Weight

__all__ = ["Expert", "Weight"]
