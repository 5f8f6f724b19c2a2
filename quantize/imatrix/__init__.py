"""Owns files of activation statistics: ours read and written, those of llama.cpp read."""

from ds4q.quantize.imatrix.own import LayerStatistics
from ds4q.quantize.imatrix.reading import Imatrix, read_imatrix
from ds4q.quantize.imatrix.writing import claim_place, write_imatrix

__all__ = ["Imatrix", "LayerStatistics", "claim_place", "read_imatrix", "write_imatrix"]
