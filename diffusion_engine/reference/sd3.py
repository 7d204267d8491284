# Generated from notebooks/source/16_sd3.py by `course export`.
# Do not edit: change the chapter and export again.

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from diffusion_engine.attention import SelfAttention
from diffusion_engine.dit import Conditions, FinalLayer, patch_grid, patchify, unpatchify
from diffusion_engine.optimizations import by_step
from diffusion_engine.reference.checkpoint import KeyMap, flatten_patches, swap_halves
from diffusion_engine.timestep_embedding import TimestepEmbedder
from diffusion_engine.transformer_block import JointBlock, Modulation, modulate


@dataclass(frozen=True)
class SD3Config:
    """``config.json`` of diffusers' ``SD3Transformer2DModel``: its names, its defaults.

    Raises:
        ValueError: a text width that is not the model's, or an unknown QK norm.
    """

    sample_size: int = 128
    patch_size: int = 2
    in_channels: int = 16
    num_layers: int = 18
    attention_head_dim: int = 64
    num_attention_heads: int = 18
    joint_attention_dim: int = 4096
    caption_projection_dim: int = 1152
    pooled_projection_dim: int = 2048
    out_channels: int | None = 16
    pos_embed_max_size: int = 96
    dual_attention_layers: tuple[int, ...] = ()
    qk_norm: str | None = None

    @property
    def width(self) -> int:
        """D = heads · head_dim."""
        return self.num_attention_heads * self.attention_head_dim

    def __post_init__(self):
        if self.caption_projection_dim != self.width:
            raise ValueError(f"caption_projection_dim {self.caption_projection_dim} is not the width; try {self.width}")
        if self.qk_norm not in (None, "rms_norm"):
            raise ValueError(f"qk_norm {self.qk_norm!r} is unknown; try 'rms_norm' or None")


def middle_of(table: Tensor, grid: tuple[int, int]) -> Tensor:
    """The middle (h, w) of a square table (1, M², D) of positions: (1, h · w, D).

    Raises:
        ValueError: the grid is larger than the table.
    """
    size = round(table.shape[1] ** 0.5)
    if max(grid) > size:
        raise ValueError(f"a grid of {grid[0]}×{grid[1]} patches is larger than the table of {size}×{size}; try {size}")
    top, left = (size - grid[0]) // 2, (size - grid[1]) // 2
    square = table.unflatten(1, (size, size))  # (1, M, M, D)
    return square[:, top : top + grid[0], left : left + grid[1]].flatten(1, 2)


class DualBlock(JointBlock):
    """A `JointBlock` whose image also attends to itself: x ← x + α₁ · joint(x, text) + α₃ · attn2(x); then the feed-forward.

    Args:
        width: D. heads: H. qk_norm, last: as in `JointBlock`.

    Source: Stability AI, Stable Diffusion 3.5 medium (MMDiT-X).
    """

    def __init__(self, width: int, heads: int, qk_norm=True, last: bool = False):
        super().__init__(width, heads, qk_norm, last)
        self.image_modulation = Modulation(width, 3)  # joint attention, feed-forward, own attention
        self.attn2 = SelfAttention(width, heads, qk_norm)

    def forward(self, x, text, cond, text_mask=None, rope=None, chunk=None):
        for_image, for_text = cond if isinstance(cond, tuple) else (cond, cond)
        for_joint, for_ff, for_own = self.image_modulation(for_image)
        text_mods = self.text_modulation(for_text)
        a, b = self.attn(modulate(x, for_joint), modulate(text, text_mods[0]), text_mask, rope, chunk)
        own = self.attn2(modulate(x, for_own), chunk=chunk)
        x = torch.addcmul(torch.addcmul(x, for_joint.gate, a), for_own.gate, own)
        x = torch.addcmul(x, for_ff.gate, self.image_ff(modulate(x, for_ff)))
        if self.last:
            return x, None
        text = torch.addcmul(text, text_mods[0].gate, b)
        return x, torch.addcmul(text, text_mods[1].gate, self.text_ff(modulate(text, text_mods[1])))


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
OWN = {"attn2.stream.qkv": "attn2.{to_q,to_k,to_v}", "attn2.stream.out": "attn2.to_out.0"}
OWN |= {f"attn2.stream.norm_{a}": f"attn2.norm_{a}" for a in "qk"}


def sd3_keys(config: SD3Config) -> KeyMap:
    """Where each tensor of `SD3` lies in diffusers' checkpoint."""
    names = {"image_in": "pos_embed.proj", "table": "pos_embed.pos_embed", "text_in": "context_embedder"}
    for ours, theirs in {"time_in.mlp": "timestep_embedder", "pooled_in": "text_embedder"}.items():
        names |= {f"{ours}.{2 * i}": f"time_text_embed.{theirs}.linear_{i + 1}" for i in (0, 1)}
    names |= {f"blocks.*.{ours}": f"transformer_blocks.*.{theirs}" for ours, theirs in (JOINT | OWN).items()}
    names |= {"final.modulation": "norm_out.linear", "final.linear": "proj_out"}
    last = f"blocks.{config.num_layers - 1}.text_modulation.linear"
    return KeyMap(names, {"image_in.weight": flatten_patches, "final.modulation": swap_halves, last: swap_halves})


class SD3(nn.Module):
    """Velocity network of Stable Diffusion 3 and 3.5; the arguments are those of chapter 06's `DiT`.

    Source: Esser et al. 2024; Stability AI, sd3-ref; diffusers ``transformer_sd3.py``.
    """

    Config, key_map = SD3Config, staticmethod(sd3_keys)

    def __init__(self, config: SD3Config):
        super().__init__()
        self.config, c, width = config, config, config.width
        self.image_in = nn.Linear(c.patch_size**2 * c.in_channels, width)
        self.register_buffer("table", torch.zeros(1, c.pos_embed_max_size**2, width))
        self.text_in = nn.Linear(c.joint_attention_dim, width)
        self.time_in = TimestepEmbedder(width)
        self.pooled_in = nn.Sequential(nn.Linear(c.pooled_projection_dim, width), nn.SiLU(), nn.Linear(width, width))
        kinds = [DualBlock if i in c.dual_attention_layers else JointBlock for i in range(c.num_layers)]
        options = {"heads": c.num_attention_heads, "qk_norm": c.qk_norm is not None}
        blocks = (kind(width, **options, last=i == c.num_layers - 1) for i, kind in enumerate(kinds))
        self.blocks = nn.ModuleList(blocks)
        self.final = FinalLayer(width, c.patch_size**2 * (c.out_channels or c.in_channels))

    @property
    def min_multiple(self) -> int:
        """Latent height and width must be multiples of this."""
        return self.config.patch_size

    def forward(self, latents, t, text, text_mask=None, pooled=None) -> Tensor:
        """Velocity (B, C, H, W) of latents at t = 1000 · σ, (B,), under text (B, M, 4096) and pooled (B, 2048)."""
        return self.velocity(latents, self.conditions(latents.shape[1:], t, text, text_mask, pooled))

    def conditions(self, shape, t, text, text_mask=None, pooled=None) -> Conditions:
        """All of a forward that looks at no latent; the latents will be ``shape`` (C, H, W). Knobs are left to the blocks."""
        cond = self.time_in(t) + self.pooled_in(pooled)  # (B, D)
        positions = middle_of(self.table, patch_grid(*shape[-2:], self.config.patch_size))
        return Conditions(self.text_in(text), text_mask, positions, [cond] * (len(self.blocks) + 1))

    def velocity(self, latents, given: Conditions) -> Tensor:
        """The rest of `forward`: velocity (B, C, H, W) of the latents under given conditions."""
        p, (text, mask, positions, cond) = self.config.patch_size, given
        x = self.image_in(patchify(latents, p)) + positions  # (B, N, D)
        del given, positions  # nothing below reads them
        for block, steer in zip(self.blocks, cond):
            x, text = block(x, text, steer, mask)
        return unpatchify(self.final(x, cond[-1]), p, patch_grid(*latents.shape[-2:], p))

    def hoist(self, shape, times, text, text_mask=None, pooled=None) -> list[Conditions]:
        """`conditions` at each of the times (S,) for the B prompts of one forward, with every knob made: S × `Conditions`.

        One product a layer serves all S · B conditions, step after step; text and positions are shared by all.
        """
        steps = len(times)
        given = self.conditions(shape, times.repeat_interleave(len(text)), text, text_mask, pooled.repeat(steps, 1))
        cond = given.cond[-1]  # (S · B, D)
        knobs = [(block.image_modulation(cond), block.text_modulation(cond)) for block in self.blocks]
        return at_each_step(given, [*knobs, self.final.knobs(cond)], steps)

    def as_diffusers(self, hidden_states, encoder_hidden_states, pooled_projections, timestep) -> Tensor:
        """The same under diffusers' names; ``timestep`` is t."""
        return self(hidden_states, timestep.float(), encoder_hidden_states, None, pooled_projections)


def at_each_step(given: Conditions, knobs: list, steps: int) -> list[Conditions]:
    """`Conditions` of S · B times, step after step, as S `Conditions` of B, all else shared by them.

    A mask that hides nothing is dropped, so that attention is free to run its fastest way.

    Args:
        knobs: made for S · B samples, see `by_step`. steps: S.
    """
    mask = None if given.text_mask is None or bool(given.text_mask.all()) else given.text_mask
    return [given._replace(text_mask=mask, cond=cond) for cond in by_step(knobs, steps)]
