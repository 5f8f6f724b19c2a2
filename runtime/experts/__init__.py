"""Owns where routed experts are kept and how the model asks for them. Multiplies nothing."""
