"""Owns a model on a HIP device: memory, loading, launches, sequences. Kernels are in ``hipkern``."""
