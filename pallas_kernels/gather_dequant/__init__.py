"""Paged gather + dequantisation."""

from pallas_kernels.gather_dequant.api import gather_dequant, gather_workspace

__all__ = ["gather_dequant", "gather_workspace"]
