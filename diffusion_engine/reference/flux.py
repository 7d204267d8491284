# Generated from notebooks/source/17_flux.py by `course export`.
# Do not edit: change the chapter and export again.

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from diffusion_engine.attention import axial_rope, grid_positions, joint_mask
from diffusion_engine.dit import FinalLayer, patch_grid, patchify, unpatchify
from diffusion_engine.reference.checkpoint import KeyMap, swap_halves
from diffusion_engine.timestep_embedding import TimestepEmbedder
from diffusion_engine.transformer_block import JointBlock, ParallelBlock


@dataclass(frozen=True)
class FluxConfig:
    """``config.json`` of diffusers' ``FluxTransformer2DModel``: its names, its defaults.

    Raises:
        ValueError: axes that do not add up to a head, or another packing.
    """

    patch_size: int = 1  # of packed latents, which are 2×2 patches already
    in_channels: int = 64
    out_channels: int | None = None
    num_layers: int = 19
    num_single_layers: int = 38
    attention_head_dim: int = 128
    num_attention_heads: int = 24
    joint_attention_dim: int = 4096
    pooled_projection_dim: int = 768
    guidance_embeds: bool = False
    axes_dims_rope: tuple[int, ...] = (16, 56, 56)

    def __post_init__(self):
        if sum(self.axes_dims_rope) != self.attention_head_dim:
            raise ValueError(f"axes_dims_rope {self.axes_dims_rope} must add up to a head's {self.attention_head_dim}")
        if self.patch_size != 1 or self.in_channels % 4:
            raise ValueError(f"patch_size {self.patch_size}, in_channels {self.in_channels}: expected 1 and 4 · C")


def flux_positions(text_tokens: int, grid: tuple[int, int]) -> Tensor:
    """Coordinates (M + h · w, 3) of text and image in FLUX's order: M zeros, then (0, row, column)."""
    return torch.cat([torch.zeros(text_tokens, 3), grid_positions(1, *grid).float()])


JOINT = {
    "image_modulation.linear": "norm1.linear",
    "text_modulation.linear": "norm1_context.linear",
    "attn.image.qkv": "attn.{to_q,to_k,to_v}",
    "attn.image.out": "attn.to_out.0",
    "attn.text.qkv": "attn.{add_q_proj,add_k_proj,add_v_proj}",
    "attn.text.out": "attn.to_add_out",
    **{f"attn.image.norm_{a}": f"attn.norm_{a}" for a in "qk"},
    **{f"attn.text.norm_{a}": f"attn.norm_added_{a}" for a in "qk"},
    **{f"image_ff.{i}": f"ff.net.{name}" for i, name in {0: "0.proj", 2: "2"}.items()},
    **{f"text_ff.{i}": f"ff_context.net.{name}" for i, name in {0: "0.proj", 2: "2"}.items()},
}
PARALLEL = {"modulation.linear": "norm.linear", "stream.qkv": "attn.{to_q,to_k,to_v}", "ff_in": "proj_mlp"}
PARALLEL |= {"stream.norm_q": "attn.norm_q", "stream.norm_k": "attn.norm_k", "out": "proj_out"}


def flux_keys(config: FluxConfig) -> KeyMap:
    """Where each tensor of `Flux` lies in diffusers' checkpoint."""
    names = {"image_in": "x_embedder", "text_in": "context_embedder"}
    mlps = {"time_in.mlp": "timestep_embedder", "pooled_in": "text_embedder", "guidance_in.mlp": "guidance_embedder"}
    for ours, theirs in mlps.items():
        names |= {f"{ours}.{2 * i}": f"time_text_embed.{theirs}.linear_{i + 1}" for i in (0, 1)}
    names |= {f"joint_blocks.*.{ours}": f"transformer_blocks.*.{theirs}" for ours, theirs in JOINT.items()}
    names |= {f"parallel_blocks.*.{ours}": f"single_transformer_blocks.*.{theirs}" for ours, theirs in PARALLEL.items()}
    names |= {"final.modulation": "norm_out.linear", "final.linear": "proj_out"}
    return KeyMap(names, changes={"final.modulation": swap_halves})


class Flux(nn.Module):
    """Velocity network of FLUX.1; the arguments are those of chapter 06's `DiT`, and ``guidance`` for dev.

    Source: Black Forest Labs, flux ``model.py``; diffusers ``transformer_flux.py``.
    """

    Config, key_map = FluxConfig, staticmethod(flux_keys)
    min_multiple = 2  # latent height and width must be multiples of this

    def __init__(self, config: FluxConfig):
        super().__init__()
        self.config, c, heads = config, config, config.num_attention_heads
        width = heads * c.attention_head_dim
        self.image_in, self.text_in = nn.Linear(c.in_channels, width), nn.Linear(c.joint_attention_dim, width)
        self.time_in = TimestepEmbedder(width)
        self.guidance_in = TimestepEmbedder(width) if c.guidance_embeds else None
        self.pooled_in = nn.Sequential(nn.Linear(c.pooled_projection_dim, width), nn.SiLU(), nn.Linear(width, width))
        self.joint_blocks = nn.ModuleList(JointBlock(width, heads, text_first=True) for _ in range(c.num_layers))
        self.parallel_blocks = nn.ModuleList(ParallelBlock(width, heads) for _ in range(c.num_single_layers))
        self.final = FinalLayer(width, c.out_channels or c.in_channels)

    def forward(self, latents, t, text, text_mask=None, pooled=None, guidance=None) -> Tensor:
        """Velocity (B, C, H, W) at t = 1000 · σ, (B,), under text (B, M, 4096), pooled (B, 768), guidance w, (B,)."""
        grid = patch_grid(*latents.shape[-2:], 2)
        tokens, positions = patchify(latents, 2, channels_first=True), flux_positions(text.shape[1], grid)
        tokens = self.run(tokens, positions.to(latents.device), t, text, pooled, guidance, text_mask)
        return unpatchify(tokens, 2, grid, channels_first=True)

    def run(self, tokens, positions, t, text, pooled, guidance=None, text_mask=None) -> Tensor:
        """Packed latents (B, N, 4 · C) → velocity, as packed; positions (M + N, 3), text first."""
        if (guidance is None) != (self.guidance_in is None):
            raise ValueError(
                f"guidance is {guidance}; FLUX.1 dev needs a scale such as 3.5 per sample, schnell takes none"
            )
        m, rope = text.shape[1], axial_rope(positions, self.config.axes_dims_rope)
        x, text, cond = self.image_in(tokens), self.text_in(text), self.time_in(t) + self.pooled_in(pooled)
        if guidance is not None:
            cond = cond + self.guidance_in(1000 * guidance.float())
        for block in self.joint_blocks:
            x, text = block(x, text, cond, text_mask, rope)
        x, mask = torch.cat([text, x], dim=1), joint_mask(text_mask, x.shape[1], text_first=True)
        for block in self.parallel_blocks:
            x = block(x, cond, mask, rope)
        return self.final(x[:, m:], cond)

    def as_diffusers(
        self, hidden_states, encoder_hidden_states, pooled_projections, timestep, img_ids, txt_ids, guidance=None
    ) -> Tensor:
        """The same under diffusers' names; its ``timestep`` is σ."""
        positions = torch.cat([txt_ids, img_ids]).float()
        t = 1000 * timestep.float()
        return self.run(hidden_states, positions, t, encoder_hidden_states, pooled_projections, guidance)
