"""Owns writing an artifact in other formats: safetensors and GGUF. Encodes and rounds nothing."""

from ds4q.quantize.export.job import Exported, export

__all__ = ["Exported", "export"]
