"""Sparse MLA attention over paged pools."""

from pallas_kernels.paged_mla.api import PagedMLAOutput, paged_mla_attention

__all__ = ["PagedMLAOutput", "paged_mla_attention"]
