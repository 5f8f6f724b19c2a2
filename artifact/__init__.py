"""Owns what an artifact's bytes mean: number codes, types, codecs, container, receipts, checks.

It reads no checkpoint and runs no model. ``FORMAT.md`` states the format.
"""
