"""Owns text in and text out: tokenizer, prompt format, decoding. Knows no weights and no logits."""
