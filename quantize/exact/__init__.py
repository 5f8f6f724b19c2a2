"""Owns the exact encoder: FP4 source into lossy types by tables, far faster than by search.

``encode.py`` is the way in, ``rules.py`` says what each type makes of a value, ``tables.py`` lays
that out for ``kernel.py``, which is made of the instructions in ``vectors.py``.
"""

from __future__ import annotations

from ds4q.quantize.exact.encode import encode_fp4

__all__ = ["encode_fp4"]
