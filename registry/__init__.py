"""Owns identity and distribution: which artifacts exist, where, under which tag. Opens no tensor.

Empty in this version: an artifact is identified by its receipt alone.
"""
