"""DSAConfig: the static facts of the attention that every other module reads."""

import dataclasses

from pallas_kernels.common import check_int, check_real

LAYER_KINDS = {"c0": 0, "c4": 4, "c128": 128}
"""Layer kind -> compress ratio in tokens per entry; 0: no compressed KV (SWA only). c4 is CSA, c128 is HCA."""


def compress_ratio(kind: str) -> int:
    """Tokens per compressed entry of a layer kind, 0 for c0.

    Raises:
      ValueError: an unknown kind.
    """
    if not isinstance(kind, str) or kind not in LAYER_KINDS:
        raise ValueError(f"`kind` must be one of {', '.join(map(repr, LAYER_KINDS))}, got {kind!r}.")
    return LAYER_KINDS[kind]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DSAConfig:
    """Attention of a DeepSeek-V4 model, and the block around it. Frozen and hashable: a static argument.

    Attributes:
      h_q: query heads (all share one KV head).
      d_qk: width of a query head and of a KV row, RoPE part included.
      d_v: width of a value: the first d_v numbers of a KV row.
      d_rope: trailing numbers of a query head and KV row that carry RoPE.
      topk: compressed entries that the indexer of a c4 layer selects per query.
      sm_scale: factor of the logits; the default is DeepSeek-V4's, d_qk ** -0.5 for its d_qk of 512.
      swa_window: sliding window in tokens, the query's own included.
      swa_page_size, c4_page_size, c128_page_size: tokens (SWA) or entries (c4, c128) per page of a pool.
      hidden_size: width of the block's input and output.
      q_lora_rank: width of the latent that the queries, and the indexer's queries, are made from.
      o_groups, o_lora_rank: the output projection maps each of o_groups groups of heads to o_lora_rank numbers first.
      index_heads, index_head_dim: heads of the lightning indexer (c4).
      rope_theta: RoPE base of c0 layers.
      compress_rope_theta: RoPE base of c4 and c128 layers, which use YaRN:
      yarn_factor, yarn_original_len, yarn_beta_fast, yarn_beta_slow: context extension, the length in tokens that the
        model was first trained on, and the rotations over it between which frequencies are blended.
      norm_eps: epsilon of every RMS norm.

    The fields from hidden_size on serve the attention block only. Their defaults are those of DeepSeek-V4-Flash.

    Source: DeepSeek-V4 `config.json` as read by transformers 5.24.0 `deepseek_v4`.
    """

    h_q: int
    topk: int
    d_qk: int = 512
    d_v: int = 512
    d_rope: int = 64
    sm_scale: float = 512**-0.5
    swa_window: int = 128
    swa_page_size: int = 256
    c4_page_size: int = 64
    c128_page_size: int = 2
    hidden_size: int = 4096
    q_lora_rank: int = 1024
    o_groups: int = 8
    o_lora_rank: int = 1024
    index_heads: int = 64
    index_head_dim: int = 128
    rope_theta: float = 1e4
    compress_rope_theta: float = 1.6e5
    yarn_factor: float = 16.0
    yarn_original_len: int = 65536
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    norm_eps: float = 1e-6

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int:
                check_int(field.name, value, low=0 if field.name in ("topk", "d_rope") else 1)
            else:
                check_real(field.name, value)
        if self.d_rope % 2:
            raise ValueError(f"`d_rope` must be even (RoPE turns pairs), got {self.d_rope}.")
        if self.d_v > self.d_qk or self.d_rope > self.d_qk:
            raise ValueError(f"`d_v` and `d_rope` must be <= d_qk={self.d_qk}, got {self.d_v} and {self.d_rope}.")

    def compressed_page_size(self, kind: str) -> int:
        """Entries per page of the compressed pool of layer kind "c4" or "c128"; ValueError for "c0", which has none."""
        if not (ratio := compress_ratio(kind)):
            raise ValueError(f"`kind` must be 'c4' or 'c128', a {kind} layer has no compressed pool.")
        return {4: self.c4_page_size, 128: self.c128_page_size}[ratio]

    @classmethod
    def deepseek_v4_flash(cls) -> "DSAConfig":
        """DeepSeek-V4-Flash: hidden 4096, 64 heads, top-k 512."""
        return cls(h_q=64, topk=512)

    @classmethod
    def deepseek_v4_pro(cls) -> "DSAConfig":
        """DeepSeek-V4-Pro: hidden 7168, 128 heads, top-k 1024."""
        return cls(h_q=128, topk=1024, hidden_size=7168, q_lora_rank=1536, o_groups=16)

    @classmethod
    def tiny(cls) -> "DSAConfig":
        """Four heads, small pages and top-k: for tests and demonstrations; KV rows stay 512 wide."""
        return cls(
            h_q=4,
            topk=64,
            swa_page_size=64,
            c4_page_size=16,
            c128_page_size=2,
            hidden_size=64,
            q_lora_rank=32,
            o_groups=2,
            o_lora_rank=16,
            index_heads=4,
            index_head_dim=64,
        )
