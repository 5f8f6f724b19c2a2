"""Owns the way from a checkpoint to an artifact: audit, recipe, plan, repack. Runs no model."""
