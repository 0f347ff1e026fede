"""Strided combine of top-k entries and window positions."""

from pallas_kernels.swa_combine.api import CombinedIndices, combine_swa_indices

__all__ = ["CombinedIndices", "combine_swa_indices"]
