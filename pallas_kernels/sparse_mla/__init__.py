"""Sparse MLA attention over a flat workspace."""

from pallas_kernels.sparse_mla.api import SparseMLAOutput, sparse_mla_attention

__all__ = ["SparseMLAOutput", "sparse_mla_attention"]
