# Generated from notebooks/source/17_flux.py by `course export`.
# Do not edit: change the chapter and export again.

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from diffusion_engine.attention import axial_rope, grid_positions, joint_mask
from diffusion_engine.dit import Conditions, FinalLayer, patch_grid, patchify, unpatchify
from diffusion_engine.reference.checkpoint import KeyMap, swap_halves
from diffusion_engine.reference.sd3 import JOINT, at_each_step
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


class ConditionEmbedder(nn.Module):
    """c = MLP(e(t)) + MLP(e(1000 · w)) + MLP(pooled): t (B,), pooled (B, Dp), guidance w (B,) → (B, width).

    Args:
        width: D. pooled_width: Dp. guidance: whether there is a way in for w (dev), or none (schnell).

    forward(t, pooled, guidance, unit): ``unit`` is what w is multiplied by, 1 for a w that comes as 1000 · w.

    Raises:
        ValueError: at the call: w without a way in, or a way in without w.
    """

    def __init__(self, width: int, pooled_width: int, guidance: bool):
        super().__init__()
        self.time_in, self.guidance_in = TimestepEmbedder(width), TimestepEmbedder(width) if guidance else None
        self.pooled_in = nn.Sequential(nn.Linear(pooled_width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, t: Tensor, pooled: Tensor, guidance: Tensor | None = None, unit: float = 1000) -> Tensor:
        if (guidance is None) != (self.guidance_in is None):
            wants = "a scale such as 3.5 per sample" if guidance is None else "None: it has no embedder for it"
            raise ValueError(f"guidance is {'missing' if guidance is None else 'given'}; this checkpoint wants {wants}")
        cond = self.time_in(t) + self.pooled_in(pooled)
        return cond if guidance is None else cond + self.guidance_in(unit * guidance.float())


EMBEDDERS = {"time_in.mlp": "timestep_embedder", "pooled_in": "text_embedder", "guidance_in.mlp": "guidance_embedder"}
CONDITION = {f"{ours}.{2 * i}": f"{theirs}.linear_{i + 1}" for ours, theirs in EMBEDDERS.items() for i in (0, 1)}
PARALLEL = {"modulation.linear": "norm.linear", "stream.qkv": "attn.{to_q,to_k,to_v}", "ff_in": "proj_mlp"}
PARALLEL |= {"stream.norm_q": "attn.norm_q", "stream.norm_k": "attn.norm_k", "out": "proj_out"}


def flux_keys(config: FluxConfig) -> KeyMap:
    """Where each tensor of `Flux` lies in diffusers' checkpoint."""
    names = {"image_in": "x_embedder", "text_in": "context_embedder"}
    names |= {f"cond_in.{ours}": f"time_text_embed.{theirs}" for ours, theirs in CONDITION.items()}
    names |= {f"joint_blocks.*.{ours}": f"transformer_blocks.*.{theirs}" for ours, theirs in JOINT.items()}
    names |= {f"parallel_blocks.*.{ours}": f"single_transformer_blocks.*.{theirs}" for ours, theirs in PARALLEL.items()}
    names |= {"final.modulation": "norm_out.linear", "final.linear": "proj_out"}
    return KeyMap(names, changes={"final.modulation": swap_halves})


class FluxTokens(nn.Module):
    """What FLUX.1 does with tokens: the parts and the walk through them, latents packed, conditions given.

    Source: Black Forest Labs, flux ``model.py``; diffusers ``transformer_flux.py``.
    """

    def __init__(self, config: FluxConfig):
        super().__init__()
        self.config, c, heads = config, config, config.num_attention_heads
        width = heads * c.attention_head_dim
        self.image_in, self.text_in = nn.Linear(c.in_channels, width), nn.Linear(c.joint_attention_dim, width)
        self.cond_in = ConditionEmbedder(width, c.pooled_projection_dim, c.guidance_embeds)
        self.joint_blocks = nn.ModuleList(JointBlock(width, heads, text_first=True) for _ in range(c.num_layers))
        self.parallel_blocks = nn.ModuleList(ParallelBlock(width, heads) for _ in range(c.num_single_layers))
        self.final = FinalLayer(width, c.out_channels or c.in_channels)

    def run(self, tokens: Tensor, given: Conditions) -> Tensor:
        """Packed latents (B, N, 4 · C) → velocity, as packed; ``given.positions`` are the turns of all M + N tokens."""
        x, text, rope, cond = self.image_in(tokens), given.text, given.positions, iter(given.cond)
        for block in self.joint_blocks:
            x, text = block(x, text, next(cond), given.text_mask, rope)
        m, n = text.shape[1], x.shape[1]
        x, mask = torch.cat([text, x], dim=1), joint_mask(given.text_mask, n, text_first=True)
        for block in self.parallel_blocks:
            x = block(x, next(cond), mask, rope)
        return self.final(x[:, m:], next(cond))


class Flux(FluxTokens):
    """Velocity network of FLUX.1; the arguments are those of chapter 06's `DiT`, and ``guidance`` for dev."""

    Config, key_map = FluxConfig, staticmethod(flux_keys)
    min_multiple = 2  # latent height and width must be multiples of this

    def forward(self, latents, t, text, text_mask=None, pooled=None, guidance=None) -> Tensor:
        """Velocity (B, C, H, W) at t = 1000 · σ, (B,), under text (B, M, 4096), pooled (B, 768), guidance w, (B,)."""
        return self.velocity(latents, self.conditions(latents.shape[1:], t, text, text_mask, pooled, guidance))

    def conditions(self, shape, t, text, text_mask=None, pooled=None, guidance=None, positions=None) -> Conditions:
        """All of a forward that looks at no latent, for latents of ``shape`` (C, H, W), or tokens at positions (M + N, 3)."""
        if positions is None:
            positions = flux_positions(text.shape[1], patch_grid(*shape[-2:], 2)).to(text.device)
        c, rope = self.config, axial_rope(positions, self.config.axes_dims_rope)
        cond = [self.cond_in(t, pooled, guidance)] * (c.num_layers + c.num_single_layers + 1)
        return Conditions(self.text_in(text), text_mask, rope, cond)

    def velocity(self, latents, given: Conditions) -> Tensor:
        """The rest of `forward`: velocity (B, C, H, W) of the latents under given conditions."""
        tokens = self.run(patchify(latents, 2, channels_first=True), given)
        return unpatchify(tokens, 2, patch_grid(*latents.shape[-2:], 2), channels_first=True)

    def hoist(self, shape, times, text, text_mask=None, pooled=None, guidance=None) -> list[Conditions]:
        """`conditions` at each of the times (S,) for the B prompts of one forward, with every knob made: S × `Conditions`.

        One product a layer serves all S · B conditions, step after step; text and turns are shared by all.
        """
        steps, t = len(times), times.repeat_interleave(len(text))
        guidance = None if guidance is None else guidance.repeat(steps)
        given = self.conditions(shape, t, text, text_mask, pooled.repeat(steps, 1), guidance)
        cond = given.cond[-1]  # (S · B, D)
        knobs = [(block.image_modulation(cond), block.text_modulation(cond)) for block in self.joint_blocks]
        knobs += [block.modulation(cond) for block in self.parallel_blocks]
        return at_each_step(given, [*knobs, self.final.knobs(cond)], steps)

    def as_diffusers(
        self, hidden_states, encoder_hidden_states, pooled_projections, timestep, img_ids, txt_ids, guidance=None
    ) -> Tensor:
        """The same under diffusers' names; its ``timestep`` is σ."""
        t, positions = 1000 * timestep.float(), torch.cat([txt_ids, img_ids]).float()
        given = self.conditions(None, t, encoder_hidden_states, None, pooled_projections, guidance, positions)
        return self.run(hidden_states, given)
