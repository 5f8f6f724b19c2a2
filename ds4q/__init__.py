"""Quantize, verify and run DeepSeek-V4 checkpoints as HFQ artifacts."""

from pathlib import Path

__version__ = "0.1.0"

if not (Path(__file__).parent / "quantize").is_dir():
    raise ImportError("ds4q/quantize is not a folder: symlinks were lost; run 'make links'")
