"""Owns identity and distribution: which artifacts exist, where, under which tag. No tensors."""
