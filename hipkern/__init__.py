"""Owns the way to a HIP device. Knows no layers, experts or files.

So far that is one question, whether a HIP library and a device are here; see ``probe``.
"""
