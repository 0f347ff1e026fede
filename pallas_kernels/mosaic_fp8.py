"""e4m3 values to bf16, exactly, in registers: PTX for the producers of `pallas_kernels/mosaic_paged.py`.

Integer instructions move the bits of two values at a time, one multiplication scales them: four instructions for two
values, where conversion over float16 and float32 takes twelve. It is exact for every value and every scale that a
quantiser writes; whether there is another one in a piece is found out on the side.
"""

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

utils = mgpu.utils


def _i32():
    return ir.IntegerType.get_signless(32)


def _c(x: int) -> ir.Value:
    """A 32-bit constant."""
    return utils.c(x, _i32())


# Sixteen e4m3 values, $8..$11, times 2^(byte $12 - 127), to bf16. The bits of a value, moved into place, are a bf16
# 2^120 times smaller, subnormal ones included; one product with 2^(byte - 7) makes up for both. It is exact, unless a
# value is NaN, whose code looks like 480 here, or the byte is above 134 and 2^(byte - 7) no bf16: see `is_odd`.
_T = [f"t{i}" for i in range(8)]
_PLACE = [
    *(f"prmt.b32 {t}, ${8 + i // 2}, 0, {(0x9180, 0xB3A2)[i % 2]};" for i, t in enumerate(_T)),  # sign-extended bytes
    *(f"shl.b32 {t}, {t}, 4; and.b32 {t}, {t}, 0x87f087f0;" for t in _T),
    "mad.lo.u32 m, $12, 0x00800080, 0x3c003c00;",
]
_MULTIPLY = [f"mul.rn.bf16x2 ${i}, {t}, m;" for i, t in enumerate(_T)]
_CONVERT_E8M0 = "\n".join(["{ .reg .b32 m, t<8>;", *_PLACE, *_MULTIPLY, "}"])

# The same for any value and byte: NaN where it belongs, and two products, 2^(byte - 134) being the other factor.
_CONVERT_ODD = "\n".join([
    "{ .reg .pred large, nan; .reg .b32 m, k, n, t<8>;",
    *_PLACE,
    "setp.gt.u32 large, $12, 134; setp.eq.u32 nan, $12, 255;",
    "mad.lo.u32 k, $12, 0x00800080, 0xfc7ffc80;",
    "selp.b32 k, 0x7fff7fff, k, nan; selp.b32 k, k, 0x3f803f80, large; selp.b32 m, 0x7f007f00, m, large;",
    *[
        f"and.b32 n, {t}, 0x07f007f0; add.u32 n, n, 0x00100010; and.b32 n, n, 0x08000800; shr.u32 n, n, 11;"
        f" mul.lo.u32 n, n, 0x7fff; or.b32 {t}, {t}, n; mul.rn.bf16x2 {t}, {t}, k;"
        for t in _T
    ],
    *_MULTIPLY,
    "}",
])  # fmt: skip

# Four e4m3 values, $2, times the float32 $3: e4m3 is exact in f16, f16 in f32; the product is rounded once.
_CONVERT_F32 = """{
.reg .b16 low, high, h0, h1, h2, h3;
.reg .b32 p, q;
.reg .f32 f0, f1, f2, f3;
mov.b32 {low, high}, $2;
cvt.rn.f16x2.e4m3x2 p, low; cvt.rn.f16x2.e4m3x2 q, high;
mov.b32 {h0, h1}, p; mov.b32 {h2, h3}, q;
cvt.f32.f16 f0, h0; cvt.f32.f16 f1, h1; cvt.f32.f16 f2, h2; cvt.f32.f16 f3, h3;
mul.rn.f32 f0, f0, $3; mul.rn.f32 f1, f1, $3; mul.rn.f32 f2, f2, $3; mul.rn.f32 f3, f3, $3;
cvt.rn.bf16x2.f32 p, f1, f0; cvt.rn.bf16x2.f32 q, f3, f2;
mov.b32 $0, p; mov.b32 $1, q;
}"""


def dequantize(words, scale, scale_bits: int) -> list[ir.Value]:
    """The 8 words of 16 bf16 values from the 4 of their FP8 bytes; scale: the byte, or the bits of a float32."""
    i32 = _i32()
    if scale_bits == 8:
        return list(utils.inline_ptx(_CONVERT_ODD, *words, scale, result_types=[i32] * 8))
    scale = arith.bitcast(ir.F32Type.get(), scale)
    return [v for w in words for v in utils.inline_ptx(_CONVERT_F32, w, scale, result_types=[i32] * 2)]


def dequantize_even(words, scale) -> list[ir.Value]:
    """`dequantize` for what is not odd."""
    return list(utils.inline_ptx(_CONVERT_E8M0, *words, scale, result_types=[_i32()] * 8))


def is_odd(values, scales, scale_mask: int) -> ir.Value:
    """Whether a thread has the code of NaN, or a scale above 134, which `_CONVERT_E8M0` does not serve.

    Args:
      values: words of e4m3 bytes; scales: words of scale bytes, of which those in scale_mask count.
    """
    odd = _c(0)
    for word in values:
        odd = arith.ori(odd, arith.addi(arith.andi(word, _c(0x7F7F7F7F)), _c(0x01010101)))
    for word in scales:
        above_6 = arith.addi(arith.andi(word, _c(0x7F7F7F7F)), _c(0x79797979))
        odd = arith.ori(odd, arith.andi(arith.andi(above_6, word), _c(scale_mask)))
    return arith.andi(odd, _c(0x80808080 - 2**32))
