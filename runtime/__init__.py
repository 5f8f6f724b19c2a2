"""Owns loading and running a model: model, expert stores, backends, text, generation, gates.

It writes no artifact and knows no checkpoint.
"""
