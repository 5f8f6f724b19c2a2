"""Owns the arithmetic of the DeepSeek-V4 forward pass, one module per operator.

Matrix products go through the backend; everything else is here, as a numba kernel beside its numpy
reference. No module opens a file.

Every kernel treats a token by itself and in a fixed order of operations, so a token's values do not
depend, bit for bit, on how the prompt was cut into pieces or on the number of threads.
"""
