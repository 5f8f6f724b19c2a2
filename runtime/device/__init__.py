"""Owns a model on a HIP device: memory, loading, launches, sequences. Holds no kernel."""
