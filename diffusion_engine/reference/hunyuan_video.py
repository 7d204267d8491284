# Generated from notebooks/source/22_hunyuan_video.py by `course export`.
# Do not edit: change the chapter and export again.

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffusion_engine.attention import Rope, SelfAttention, axial_rope, grid_positions, joint_mask, key_mask, pad_rope
from diffusion_engine.dit import FinalLayer
from diffusion_engine.reference.checkpoint import KeyMap, flatten_patches, swap_halves
from diffusion_engine.timestep_embedding import TimestepEmbedder
from diffusion_engine.transformer_block import JointBlock, ParallelBlock
from diffusion_engine.video import video_grid, video_patchify, video_unpatchify


@dataclass(frozen=True)
class HunyuanVideoConfig:
    """``config.json`` of diffusers' ``HunyuanVideoTransformer3DModel``: its names, its defaults.

    Raises:
        ValueError: a model that starts from a picture, axes that do not add up to a head, another MLP or QK norm.
    """

    in_channels: int = 16
    out_channels: int | None = 16
    num_attention_heads: int = 24
    attention_head_dim: int = 128
    num_layers: int = 20
    num_single_layers: int = 40
    num_refiner_layers: int = 2
    mlp_ratio: float = 4.0
    patch_size: int = 2
    patch_size_t: int = 1
    qk_norm: str = "rms_norm"
    guidance_embeds: bool = True
    text_embed_dim: int = 4096
    pooled_projection_dim: int = 768
    rope_theta: float = 256.0
    rope_axes_dim: tuple[int, ...] = (16, 56, 56)
    image_condition_type: str | None = None

    @property
    def patch(self) -> tuple[int, int, int]:
        """(pt, ph, pw)."""
        return self.patch_size_t, self.patch_size, self.patch_size

    def __post_init__(self):
        kind, out = self.image_condition_type, self.out_channels or self.in_channels
        if kind is not None or out != self.in_channels:
            found = f"image_condition_type {kind!r}, in_channels {self.in_channels}, out_channels {out}"
            raise ValueError(f"{found}: it starts from a picture, not built here; expected None and equal channels")
        if sum(self.rope_axes_dim) != self.attention_head_dim:
            raise ValueError(f"rope_axes_dim {self.rope_axes_dim} must add up to a head's {self.attention_head_dim}")
        if self.mlp_ratio != 4 or self.qk_norm != "rms_norm":
            raise ValueError(f"mlp_ratio {self.mlp_ratio}, qk_norm {self.qk_norm!r}: expected 4.0 and 'rms_norm'")


def video_rope(grid: tuple[int, int, int], config: HunyuanVideoConfig, text_tokens: int, device=None) -> Rope:
    """Turns of f · h · w + M tokens: the video's by frame, row and column; the M of the text behind it stay."""
    rope = axial_rope(grid_positions(*grid).to(device), config.rope_axes_dim, config.rope_theta)
    return pad_rope(rope, after=text_tokens)


def channels_last(rows: Tensor, channels: int) -> Tensor:
    """Rows of a last layer from (C · pt · ph · pw, …) to (pt · ph · pw · C, …); a bias has rows alone."""
    return rows.unflatten(0, (channels, -1)).transpose(0, 1).flatten(0, 1)


class RefinerBlock(nn.Module):
    """x ← x + α₁ · attn(LN(x)); x ← x + α₂ · ff(LN(x)): text tokens (B, M, D) → (B, M, D), gated by cond (B, D).

    Args:
        width: D. heads: H.

    Source: HunyuanVideo ``token_refiner.py``, ``IndividualTokenRefinerBlock``.
    """

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.gates = nn.Linear(width, 2 * width)
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.attn = SelfAttention(width, heads, qk_norm=None)
        self.ff = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, cond: Tensor, mask: Tensor | None = None) -> Tensor:
        for_attn, for_ff = self.gates(F.silu(cond)).unsqueeze(1).chunk(2, dim=-1)  # (B, 1, D) each
        x = torch.addcmul(x, for_attn, self.attn(self.norm1(x), mask))
        return torch.addcmul(x, for_ff, self.ff(self.norm2(x)))


class TokenRefiner(nn.Module):
    """Tokens of a causal language model (B, M, Dt) → tokens that saw the whole sentence (B, M, D), at t (B,).

    Args:
        text_width: Dt. width: D. heads: H. depth: number of `RefinerBlock`.

    forward(text, t, real): ``real`` (B, M) bool is True where a token is no padding; None: all are.

    Source: HunyuanVideo ``token_refiner.py``, ``SingleTokenRefiner``.
    """

    def __init__(self, text_width: int, width: int, heads: int, depth: int):
        super().__init__()
        self.text_in, self.time_in = nn.Linear(text_width, width), TimestepEmbedder(width)
        self.pooled_in = nn.Sequential(nn.Linear(text_width, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(RefinerBlock(width, heads) for _ in range(depth))

    def forward(self, text: Tensor, t: Tensor, real: Tensor | None = None) -> Tensor:
        shares = torch.ones(text.shape[:2], device=text.device) if real is None else real.float()
        mean = (text * shares.unsqueeze(-1)).sum(1) / shares.sum(1, keepdim=True)  # (B, Dt), in fp32
        cond = self.time_in(t) + self.pooled_in(mean.to(text.dtype))
        x, mask = self.text_in(text), None if real is None else key_mask(real)
        for block in self.blocks:
            x = block(x, cond, mask)
        return x


def trim_padding(text: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Text (B, M, D) and mask (B, M) without the columns that are padding everywhere; no mask where all is real.

    Exact: padding is never seen. One prompt alone needs no mask at all, and attention is free to run its fastest way.

    Raises:
        ValueError: a sample without a real token.
    """
    if real is None:
        return text, None
    empty = (~real.any(dim=1)).nonzero().flatten().tolist()
    if empty:
        raise ValueError(f"text_mask hides all {real.shape[1]} tokens of sample {empty[0]}; leave at least one")
    used = real.any(dim=0)
    text, real = text[:, used], real[:, used]
    return text, None if real.all() else real


QKV = "attn.{to_q,to_k,to_v}"
JOINT = {
    "image_modulation.linear": "norm1.linear",
    "text_modulation.linear": "norm1_context.linear",
    "attn.image.qkv": QKV,
    "attn.image.out": "attn.to_out.0",
    "attn.text.qkv": "attn.{add_q_proj,add_k_proj,add_v_proj}",
    "attn.text.out": "attn.to_add_out",
    **{f"attn.image.norm_{a}": f"attn.norm_{a}" for a in "qk"},
    **{f"attn.text.norm_{a}": f"attn.norm_added_{a}" for a in "qk"},
    **{f"image_ff.{i}": f"ff.net.{name}" for i, name in {0: "0.proj", 2: "2"}.items()},
    **{f"text_ff.{i}": f"ff_context.net.{name}" for i, name in {0: "0.proj", 2: "2"}.items()},
}
PARALLEL = {"modulation.linear": "norm.linear", "stream.qkv": QKV, "ff_in": "proj_mlp", "out": "proj_out"}
PARALLEL |= {"stream.norm_q": "attn.norm_q", "stream.norm_k": "attn.norm_k"}
REFINER = {"gates": "norm_out.linear", "norm1": "norm1", "norm2": "norm2", "attn.stream.qkv": QKV}
REFINER |= {"attn.stream.out": "attn.to_out.0", "ff.0": "ff.net.0.proj", "ff.2": "ff.net.2"}
EMBEDDERS = {"time_in.mlp": "timestep_embedder", "pooled_in": "text_embedder", "guidance_in.mlp": "guidance_embedder"}


def hunyuan_video_keys(config: HunyuanVideoConfig) -> KeyMap:
    """Where each tensor of `HunyuanVideo` lies in diffusers' checkpoint."""
    names = {"image_in": "x_embedder.proj", "refiner.text_in": "context_embedder.proj_in"}
    for ours, theirs in EMBEDDERS.items():
        for here, there in {"": "", "refiner.": "context_embedder."}.items():
            names |= {f"{here}{ours}.{2 * i}": f"{there}time_text_embed.{theirs}.linear_{i + 1}" for i in (0, 1)}
    blocks = {
        "refiner.blocks": ("context_embedder.token_refiner.refiner_blocks", REFINER),
        "joint_blocks": ("transformer_blocks", JOINT),
        "parallel_blocks": ("single_transformer_blocks", PARALLEL),
    }
    for ours, (theirs, inside) in blocks.items():
        names |= {f"{ours}.*.{here}": f"{theirs}.*.{there}" for here, there in inside.items()}
    names |= {"final.modulation": "norm_out.linear", "final.linear": "proj_out"}
    changes = {"image_in.weight": flatten_patches, "final.modulation": swap_halves}
    return KeyMap(names, changes | {"final.linear": partial(channels_last, channels=config.in_channels)})


class HunyuanVideo(nn.Module):
    """Velocity network of HunyuanVideo; the arguments are those of chapter 06's `DiT`, and ``guidance``.

    Source: Kong et al. 2024; Tencent, HunyuanVideo ``models.py``; diffusers ``transformer_hunyuan_video.py``.
    """

    Config, key_map = HunyuanVideoConfig, staticmethod(hunyuan_video_keys)

    def __init__(self, config: HunyuanVideoConfig):
        super().__init__()
        self.config, c, heads = config, config, config.num_attention_heads
        width, patch_dim = heads * c.attention_head_dim, c.patch_size_t * c.patch_size**2 * c.in_channels
        self.image_in, self.final = nn.Linear(patch_dim, width), FinalLayer(width, patch_dim)
        self.refiner = TokenRefiner(c.text_embed_dim, width, heads, c.num_refiner_layers)
        self.time_in, self.guidance_in = TimestepEmbedder(width), TimestepEmbedder(width) if c.guidance_embeds else None
        self.pooled_in = nn.Sequential(nn.Linear(c.pooled_projection_dim, width), nn.SiLU(), nn.Linear(width, width))
        self.joint_blocks = nn.ModuleList(JointBlock(width, heads) for _ in range(c.num_layers))
        self.parallel_blocks = nn.ModuleList(ParallelBlock(width, heads) for _ in range(c.num_single_layers))

    @property
    def min_multiple(self) -> int:
        """Latent height and width must be multiples of this."""
        return self.config.patch_size

    def forward(self, latents, t, text, text_mask=None, pooled=None, guidance=None) -> Tensor:
        """Velocity (B, C, F, H, W) at t = 1000 · σ, (B,), under text (B, M, 4096), pooled (B, 768), guidance w, (B,)."""
        return self.run(latents, t, text, text_mask, pooled, None if guidance is None else 1000 * guidance.float())

    def run(self, latents, t, text, text_mask, pooled, guidance) -> Tensor:
        """`forward` with guidance as 1000 · w."""
        if (guidance is None) != (self.guidance_in is None):
            wants = "a scale such as 6.0 per sample" if guidance is None else "None: it has no embedder for it"
            raise ValueError(f"guidance is {'missing' if guidance is None else 'given'}; this checkpoint wants {wants}")
        grid = video_grid(latents.shape[2:], self.config.patch)
        x, (text, mask) = self.image_in(video_patchify(latents, self.config.patch)), trim_padding(text, text_mask)
        text, cond = self.refiner(text, t, mask), self.time_in(t) + self.pooled_in(pooled)
        if guidance is not None:
            cond = cond + self.guidance_in(guidance.float())
        rope = video_rope(grid, self.config, text.shape[1], x.device)
        for block in self.joint_blocks:
            x, text = block(x, text, cond, mask, rope)
        n = x.shape[1]
        x, mask = torch.cat([x, text], dim=1), joint_mask(mask, n)  # (B, N + M, D)
        for block in self.parallel_blocks:
            x = block(x, cond, mask, rope)
        return video_unpatchify(self.final(x[:, :n], cond), self.config.patch, grid)

    def as_diffusers(
        self, hidden_states, timestep, encoder_hidden_states, encoder_attention_mask, pooled_projections, guidance=None
    ) -> Tensor:
        """The same under diffusers' names; ``timestep`` is t, ``guidance`` 1000 · w, not read without an embedder."""
        mask, scale = encoder_attention_mask.bool(), guidance if self.config.guidance_embeds else None
        return self.run(hidden_states, timestep.float(), encoder_hidden_states, mask, pooled_projections, scale)
