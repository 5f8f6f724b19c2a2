"""Owns the way to a HIP device: its library, driver, kernels and code objects, and two libraries
that stand in for ROCm (``sim``, ``cuda``). Knows no layers, experts or files.

Start at ``driver.Device`` and ``kernels.Kernels``. Nothing here has run on AMD hardware.
"""
