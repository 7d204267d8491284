# Generated from notebooks/source/20_ltx.py by `course export`.
# Do not edit: change the chapter and export again.

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffusion_engine.attention import CrossAttention, Rope, grid_positions
from diffusion_engine.dit import Conditions
from diffusion_engine.reference.checkpoint import KeyMap, require
from diffusion_engine.reference.sana import BLOCK, last_mod, work_ahead
from diffusion_engine.timestep_embedding import TimestepEmbedder
from diffusion_engine.transformer_block import DiTBlock, modulate


@dataclass(frozen=True)
class LTXConfig:
    """``config.json`` of diffusers' ``LTXVideoTransformer3DModel``: its names, its defaults.

    Raises:
        ValueError: a variant that is not built here.
    """

    in_channels: int = 128
    out_channels: int | None = 128
    patch_size: int = 1
    patch_size_t: int = 1
    num_attention_heads: int = 32
    attention_head_dim: int = 64
    cross_attention_dim: int = 2048
    num_layers: int = 28
    activation_fn: str = "gelu-approximate"
    qk_norm: str = "rms_norm_across_heads"
    norm_elementwise_affine: bool = False
    norm_eps: float = 1e-6
    caption_channels: int = 4096
    attention_bias: bool = True
    attention_out_bias: bool = True

    @property
    def width(self) -> int:
        """D = heads · head_dim."""
        return self.num_attention_heads * self.attention_head_dim

    def __post_init__(self):
        require(self, patch_size=1, patch_size_t=1, activation_fn="gelu-approximate", norm_eps=1e-6)
        require(self, qk_norm="rms_norm_across_heads", norm_elementwise_affine=False, attention_out_bias=True)
        require(self, cross_attention_dim=self.width)
        if self.attention_head_dim % 2 or self.width < 6:
            head = max(6, self.attention_head_dim + self.attention_head_dim % 2)
            raise ValueError(f"attention_head_dim {self.attention_head_dim} does not turn in pairs; try {head}")


def ltx_positions(
    grid: tuple[int, int, int], frame_rate: float = 25.0, compression: tuple[int, int] = (8, 32), causal: bool = False
) -> Tensor:
    """Positions (f · h · w, 3), fp32, of every token: (8 · f / frame_rate seconds, 32 · row, 32 · column pixels).

    Args:
        grid: (f, h, w) of the latents. frame_rate: frames a second of the clip.
        compression: of the VAE, (time, space).
        causal: time of the first frame that a latent frame holds, max(8 · f − 7, 0) / frame_rate, as LTX's newer
            pipelines want it.

    Raises:
        ValueError: a grid without an axis of time, or a ``frame_rate`` that is no positive number.

    Source: diffusers ``pipeline_ltx.py`` (``rope_interpolation_scale``), ``pipeline_ltx_condition.py`` (causal).
    """
    if len(grid) != 3:
        raise ValueError(f"grid {tuple(grid)} is not (f, h, w); latents are (B, C, F, H, W), with F = 1 for a picture")
    if not 0 < frame_rate < math.inf:
        raise ValueError(f"frame_rate {frame_rate} is no positive number of frames a second; try 25")
    time, space = compression
    frame, row, column = grid_positions(*grid).float().unbind(-1)
    start = frame * time
    if causal:
        start = (start + 1 - time).clamp(min=0)
    return torch.stack([start * (1 / frame_rate), row * space, column * space], dim=-1)


SPAN = (20, 2048, 2048)  # seconds and pixels that fractions are taken of


def fractional_rope(positions: Tensor, width: int, heads: int, theta: float = 10_000.0) -> Rope:
    """Angles ω_i · (2 · g − 1) with ω_i = π/2 · theta^(i / (n − 1)), g = positions / SPAN, n = width // 6; fp32.

    Over the full width the pairs are: those left over, which stay; then for each i time, row, column. Head by head they
    are cut last, so that every head has frequencies of its own.

    Args:
        positions: (N, 3) or (B, N, 3), seconds and pixels, see `ltx_positions`.
        width: D. heads: H.
        theta: how many times the fastest is faster than the slowest.

    Returns:
        cosines and sines (H, N, Dh/2) or (B, H, N, Dh/2).

    Source: HaCohen et al. 2024 (LTX-Video), §2; diffusers' ``LTXVideoRotaryPosEmbed``, operation by operation.
    """
    share = torch.stack([positions[..., axis] / span for axis, span in enumerate(SPAN)], dim=-1)
    omega = theta ** torch.linspace(0, 1, width // 6, device=positions.device) * math.pi / 2  # (n,)
    angle = (omega * (2 * share - 1).unsqueeze(-1)).mT.flatten(-2)  # (…, N, 3 · n), the axis runs fastest
    angle = F.pad(angle, (width // 2 - angle.shape[-1], 0)).unflatten(-1, (heads, -1))  # (…, N, H, Dh/2)
    return Rope(*(turn.transpose(-2, -3) for turn in (angle.cos(), angle.sin())))


def ltx_block(config: LTXConfig) -> DiTBlock:
    """`DiTBlock` with RMSNorm, knobs from a table, cross-attention, and QK-norms across heads in both attentions."""
    width, heads = config.width, config.num_attention_heads
    options = {"qk_norm": "rms_across", "bias": config.attention_bias, "eps": 1e-5}
    cross = CrossAttention(width, heads, **options)
    return DiTBlock(width, heads, norm="rms", table=True, cross=cross, **options)


LTX_BLOCK = BLOCK | {"ff.0": "ff.net.0.proj", "ff.2": "ff.net.2"}


def ltx_keys(config: LTXConfig) -> KeyMap:
    """Where each tensor of `LTX` lies in diffusers' checkpoint."""
    names = {"image_in": "proj_in", "knobs": "time_embed.linear", "table": "scale_shift_table", "out": "proj_out"}
    for ours, theirs in {"time_in.mlp": "time_embed.emb.timestep_embedder", "text_in": "caption_projection"}.items():
        names |= {f"{ours}.{2 * i}": f"{theirs}.linear_{i + 1}" for i in (0, 1)}
    return KeyMap(names | {f"blocks.*.{ours}": f"transformer_blocks.*.{theirs}" for ours, theirs in LTX_BLOCK.items()})


def run_as_diffusers(
    model,
    hidden_states,
    encoder_hidden_states,
    timestep,
    encoder_attention_mask=None,
    num_frames=None,
    height=None,
    width=None,
    rope_interpolation_scale=SPAN,
    video_coords=None,
) -> Tensor:
    """`LTX.run` under diffusers' names; positions are ``video_coords`` (B, 3, N), or grid · scale."""
    if video_coords is None:
        scale = torch.as_tensor(rope_interpolation_scale, dtype=torch.float32, device=hidden_states.device)
        positions = grid_positions(num_frames, height, width).to(hidden_states.device) * scale
    else:
        positions = video_coords.float().mT
    mask = None if encoder_attention_mask is None else encoder_attention_mask.bool()
    return model.run(hidden_states, model.conditions_at(positions, timestep.float(), encoder_hidden_states, mask))


class LTX(nn.Module):
    """Velocity network of LTX-Video; the arguments are those of `DiT`, and where the clip stands in time and space.

    Source: HaCohen et al. 2024 (LTX-Video); diffusers ``transformer_ltx.py``.
    """

    Config, key_map, as_diffusers = LTXConfig, staticmethod(ltx_keys), run_as_diffusers
    min_multiple = 1  # latent height and width must be multiples of this

    def __init__(self, config: LTXConfig):
        super().__init__()
        self.config, c, width = config, config, config.width
        self.image_in, self.out = nn.Linear(c.in_channels, width), nn.Linear(width, c.out_channels or c.in_channels)
        self.text_in = nn.Sequential(nn.Linear(c.caption_channels, width), nn.GELU("tanh"), nn.Linear(width, width))
        self.time_in, self.knobs = TimestepEmbedder(width), nn.Linear(width, 6 * width)
        self.blocks = nn.ModuleList(ltx_block(c) for _ in range(c.num_layers))
        self.table = nn.Parameter(torch.zeros(2, width))

    def forward(self, latents, t, text, text_mask=None, pooled=None, **where) -> Tensor:
        """Velocity (B, C, F, H, W) at t = 1000 · σ under text (B, M, 4096), text_mask (B, M); pooled is unused.

        t may be (B, F · H · W), a time for every token; ``where`` is frame_rate, compression, causal of `ltx_positions`.
        """
        return self.velocity(latents, self.conditions(latents.shape[1:], t, text, text_mask, pooled, **where))

    def conditions(self, shape, t, text, text_mask=None, pooled=None, **where) -> Conditions:
        """All that `velocity` reads besides latents of ``shape`` (C, F, h, w); the rest as in `forward`."""
        return self.conditions_at(ltx_positions(shape[1:], **where).to(text.device), t, text, text_mask)

    def conditions_at(self, positions, t, text, text_mask=None) -> Conditions:
        """`conditions` of tokens at given positions (N, 3) or (B, N, 3), seconds and pixels."""
        c, cond = self.config, self.time_in(t.flatten()).unflatten(0, t.shape)  # (B, D) or (B, N, D)
        rope, shared = fractional_rope(positions, c.width, c.num_attention_heads), self.knobs(F.silu(cond))
        return Conditions([self.text_in(text)] * c.num_layers, text_mask, rope, [shared] * c.num_layers + [cond])

    def velocity(self, latents: Tensor, given: Conditions) -> Tensor:
        """The rest of `forward`: velocity of the latents under given conditions."""
        return self.run(latents.flatten(2).mT, given).mT.unflatten(2, latents.shape[2:])

    def run(self, tokens: Tensor, given: Conditions) -> Tensor:
        """Packed latents (B, N, C) → velocity, as packed."""
        x, rope, mask = self.image_in(tokens), given.positions, given.text_mask
        for block, shared, text in zip(self.blocks, given.cond, given.text):
            x = block(x, shared, rope=rope, text=text, text_mask=mask)
        return self.out(modulate(x, last_mod(self.table, given.cond[-1])))  # LayerNorm here

    def hoist(self, shape, times, text, text_mask=None, pooled=None, **where) -> list[Conditions]:
        """`conditions` for all times (S,), see `work_ahead`; ``shape`` is that of the latents without the batch."""
        given = self.conditions(shape, times.repeat_interleave(len(text)), text, text_mask, pooled, **where)
        return work_ahead(self, given, len(times))
