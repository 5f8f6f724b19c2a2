"""Owns what the bytes mean: codes, types, codecs, the HFQ container, receipts, checks, the report.

It reads no checkpoint and runs no model.
"""
