"""KVLayout: where a token's bytes sit in a page of a KV pool. Integers only.

A pool is `pages [num_pages, stride] uint8`; token `t` of a page (0 <= t < page_size) has its parts at

    fp8 values   t * data_bytes                                  d_fp8 x e4m3fn
    scales       scale_offset(page_size) + t * scale_stride      one per `tile` values
    plain values t * data_bytes + plain_offset                   the other d - d_fp8 values, in `dtype`

Source: FlashMLA `flash_mla/flash_mla_interface.py` (layouts "MODEL1" and "V32" of `flash_mla_with_kvcache`) and
`tests/quant.py`, https://github.com/deepseek-ai/FlashMLA.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from pallas_kernels.common import cdiv, check_array, check_int


@dataclasses.dataclass(frozen=True)
class KVLayout:
    """Byte layout of one token of a paged KV pool.

    Attributes:
      name: what errors and logs call it.
      d: values per token.
      dtype: dtype of a gathered (dequantised) row: float32 for F32, else bfloat16. Plain values are stored in it.
      d_fp8: how many leading values are stored as e4m3fn with a scale (0: none).
      tile: values that share a scale.
      scale_bits: bits of a scale: 8 is ue8m0 (byte b is 2^(b - 127), 0xFF is NaN), 32 is float32.
      scales_behind_page: scales follow the data of the whole page (V4), not the values of each token (V32).
      stride_multiple: a page's stride is the next multiple of this many bytes.
    """

    name: str
    d: int
    dtype: np.dtype
    d_fp8: int = 0
    tile: int = 64
    scale_bits: int = 8
    scales_behind_page: bool = False
    stride_multiple: int = 16

    V4: ClassVar["KVLayout"]
    V32: ClassVar["KVLayout"]
    BF16: ClassVar["KVLayout"]
    F32: ClassVar["KVLayout"]

    def __repr__(self) -> str:
        return f"KVLayout.{self.name}" + (".with_d(576)" if not self.d_fp8 and self.d != 512 else "")

    @property
    def num_scales(self) -> int:
        """Scales per token."""
        return self.d_fp8 // self.tile

    @property
    def plain_bytes(self) -> int:
        """Bytes of a token's plain (not FP8) values."""
        return (self.d - self.d_fp8) * self.dtype.itemsize

    @property
    def scale_stride(self) -> int:
        """Bytes between the scales of neighbouring tokens."""
        return cdiv(self.num_scales, 8) * 8 if self.scales_behind_page else self.data_bytes

    @property
    def plain_offset(self) -> int:
        """Byte of a token's data at which its plain (not FP8) values start."""
        return self.d_fp8 + (0 if self.scales_behind_page else self.num_scales * self.scale_bits // 8)

    @property
    def data_bytes(self) -> int:
        """Bytes between the data of neighbouring tokens of a page."""
        return self.plain_offset + self.plain_bytes

    @property
    def bytes_per_token(self) -> int:
        """Bytes a token takes: V4 584, V32 656, BF16 2 d, F32 4 d."""
        return self.data_bytes + (self.scale_stride if self.scales_behind_page else 0)

    def scale_offset(self, page_size: int) -> int:
        """Byte of the page at which token 0's scales start."""
        return page_size * self.data_bytes if self.scales_behind_page else self.d_fp8

    def page_stride(self, page_size: int) -> int:
        """Bytes per page of `page_size` tokens, slack included (the smallest one that the layout allows)."""
        return cdiv(page_size * self.bytes_per_token, self.stride_multiple) * self.stride_multiple

    def with_d(self, d: int) -> "KVLayout":
        """This layout with `d` values per token, 512 or 576; BF16 and F32 only (V4 and V32 fix theirs).

        Raises:
          ValueError: another `d`, or a layout with a fixed one.
        """
        if d not in (512, 576) or (self.d_fp8 and d != self.d):
            raise ValueError(f"`d` of {self!r} must be {self.d if self.d_fp8 else '512 or 576'}, got {d}.")
        return dataclasses.replace(self, d=d)

    def check_pages(self, name: str, pages, page_size: int) -> None:
        """Raises ValueError unless `pages` is `[num_pages, stride] uint8` with a stride that this layout allows."""
        _, stride = check_array(name, pages, jnp.uint8, num_pages=None, stride=None)
        needed, fixed = self.page_stride(check_int(f"page_size` of `{name}", page_size)), self.scales_behind_page
        if stride != needed if fixed else stride < needed or stride % self.stride_multiple:
            rule = f"{needed}" if fixed else f"{needed} or more, a multiple of {self.stride_multiple}"
            raise ValueError(
                f"`{name}` must have a page stride of {rule} bytes ({self!r}, page_size={page_size}), got {stride}."
            )


def check_layout(name: str, layout) -> KVLayout:
    """`layout`; ValueError, naming the argument, unless it is a KVLayout."""
    if not isinstance(layout, KVLayout):
        raise ValueError(f"`{name}` must be a KVLayout (KVLayout.V4, V32, BF16 or F32), got {layout!r}.")
    return layout


_BF16, _F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
KVLayout.V4 = KVLayout("V4", 512, _BF16, d_fp8=448, tile=64, scales_behind_page=True, stride_multiple=576)
KVLayout.V32 = KVLayout("V32", 576, _BF16, d_fp8=512, tile=128, scale_bits=32)
KVLayout.BF16 = KVLayout("BF16", 512, _BF16)
KVLayout.F32 = KVLayout("F32", 512, _F32)
