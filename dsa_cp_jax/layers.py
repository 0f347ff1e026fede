"""What every part of the attention block shares: RMS norms, and RoPE by absolute position."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.typing import ArrayLike

from dsa_cp_jax.config import DSAConfig, compress_ratio


def rms_normalize(x: jax.Array, eps: float) -> jax.Array:
    """Divides x by sqrt(mean(x^2) + eps) over the last axis, in float32; x's dtype again."""
    y = x.astype(jnp.float32)
    return (y * lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + eps)).astype(x.dtype)


class RMSNorm(nnx.Module):
    """`rms_normalize` times a learned weight (float32)."""

    def __init__(self, d: int, eps: float):
        self.weight = nnx.Param(jnp.ones(d, jnp.float32))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises x [..., d]."""
        return (self.weight[...] * rms_normalize(x.astype(jnp.float32), self.eps)).astype(x.dtype)


def rope_frequencies(config: DSAConfig, kind: str) -> np.ndarray:
    """Radians per token of every pair of RoPE dimensions of a layer.

    c0 layers: theta^(-2i / d_rope) with rope_theta. c4 and c128 layers: the same with compress_rope_theta, then YaRN: a
    pair that turns less than yarn_beta_slow times over yarn_original_len is slowed down by yarn_factor, one that turns
    more than yarn_beta_fast times is kept, and those between are blended linearly over i. (YaRN's scale of the
    magnitude is not used by DeepSeek-V4.)

    Args:
      config: the model's DSAConfig.
      kind: "c0", "c4" or "c128".

    Returns:
      [d_rope / 2] float32.

    Source: transformers 5.24.0, `modeling_rope_utils.py` (yarn) and `deepseek_v4`.
    """
    d = config.d_rope
    compressed = compress_ratio(kind) > 0
    theta = np.float32(config.compress_rope_theta if compressed else config.rope_theta)
    frequencies = 1 / theta ** (np.arange(0, d, 2, dtype=np.float32) / np.float32(d))
    if not compressed:
        return frequencies

    def pair_with(rotations: float) -> float:
        """The (fractional) pair that turns so many times over the original length."""
        return d * math.log(config.yarn_original_len / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_with(config.yarn_beta_fast)), 0)
    high = min(math.ceil(pair_with(config.yarn_beta_slow)), d - 1)
    slowed = np.clip((np.arange(d // 2, dtype=np.float32) - low) / max(high - low, 1e-3), 0, 1).astype(np.float32)
    return frequencies / np.float32(config.yarn_factor) * slowed + frequencies * (1 - slowed)


def rope_angles(pos: jax.Array, frequencies: ArrayLike | Sequence[float]) -> jax.Array:
    """Angles [rows, d_rope / 2] float32 of absolute positions [rows] int32 (tokens); see `rope_frequencies`."""
    return pos.astype(jnp.float32)[:, None] * jnp.asarray(frequencies, jnp.float32)


def apply_rope(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Rotates the trailing RoPE numbers of every row, pair by pair of neighbours; the others pass.

    (a, b) -> (a cos - b sin, b cos + a sin), in float32. Negated angles give the inverse.

    Args:
      x: [rows, ..., d].
      angles: [rows, d_rope / 2], see `rope_angles`.

    Returns:
      As x.
    """
    rows, pairs = angles.shape
    angles = angles.reshape(rows, *[1] * (x.ndim - 2), pairs)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    plain, rope = jnp.split(x, [x.shape[-1] - 2 * pairs], axis=-1)
    a, b = jnp.moveaxis(rope.astype(jnp.float32).reshape(*rope.shape[:-1], pairs, 2), -1, 0)
    turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(rope.shape)
    return jnp.concatenate([plain, turned.astype(x.dtype)], axis=-1)
