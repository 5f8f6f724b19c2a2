"""Owns serving: many requests through one model, and HTTP around them. No command line."""
