# Generated from notebooks/source/21_cogvideox.py by `course export`.
# Do not edit: change the chapter and export again.

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffusion_engine.attention import Rope, SelfAttention, axial_rope, grid_positions, joint_mask, pad_rope
from diffusion_engine.dit import Conditions
from diffusion_engine.reference.checkpoint import KeyMap, flatten_patches, require
from diffusion_engine.reference.sd3 import at_each_step
from diffusion_engine.timestep_embedding import TimestepEmbedder, timestep_embedding
from diffusion_engine.transformer_block import FeedForward, Mod, split_mods
from diffusion_engine.video import video_grid, video_patchify, video_unpatchify


@dataclass(frozen=True)
class CogVideoXConfig:
    """``config.json`` of diffusers' ``CogVideoXTransformer3DModel``: its names, its defaults.

    Raises:
        ValueError: the image-to-video models' entries, another activation, or sizes that the positions cannot share out.
    """

    num_attention_heads: int = 30
    attention_head_dim: int = 64
    in_channels: int = 16
    out_channels: int | None = 16
    flip_sin_to_cos: bool = True
    freq_shift: int = 0
    time_embed_dim: int = 512
    ofs_embed_dim: int | None = None
    text_embed_dim: int = 4096
    num_layers: int = 30
    dropout: float = 0.0
    attention_bias: bool = True
    sample_width: int = 90
    sample_height: int = 60
    sample_frames: int = 49
    patch_size: int = 2
    patch_size_t: int | None = None
    temporal_compression_ratio: int = 4
    max_text_seq_length: int = 226
    activation_fn: str = "gelu-approximate"
    timestep_activation_fn: str = "silu"
    norm_elementwise_affine: bool = True
    norm_eps: float = 1e-5
    spatial_interpolation_scale: float = 1.875
    temporal_interpolation_scale: float = 1.0
    use_rotary_positional_embeddings: bool = False
    use_learned_positional_embeddings: bool = False
    patch_bias: bool = True

    @property
    def width(self) -> int:
        """D = heads · head_dim."""
        return self.num_attention_heads * self.attention_head_dim

    def __post_init__(self):
        require(self, flip_sin_to_cos=True, freq_shift=0, activation_fn="gelu-approximate", ofs_embed_dim=None)
        require(self, timestep_activation_fn="silu", use_learned_positional_embeddings=False)
        name = "attention_head_dim" if self.use_rotary_positional_embeddings else "width"
        if (size := getattr(self, name)) % 16:
            raise ValueError(f"{name} {size} is not a multiple of 16, for three axes; try {max(1, size // 16) * 16}")


def sincos_3d(grid: tuple[int, int, int], width: int, space: float = 1.0, time: float = 1.0, device=None) -> Tensor:
    """Fixed positions (f · h · w, width), fp32: e(t / time), e(column / space), e(row / space), each sines first.

    Args:
        grid: (f, h, w). width: D, a multiple of 16: D/4 for time, 3D/8 for column and for row.
        space, time: how many tokens make one unit of position.

    Source: diffusers' ``get_3d_sincos_pos_embed``; Yang et al. 2024 (CogVideoX).
    """
    t, row, column = grid_positions(*grid).to(device).float().unbind(-1)
    axes = ((t / time, width // 4), (column / space, 3 * width // 8), (row / space, 3 * width // 8))
    cosines_first = [timestep_embedding(position, dim).chunk(2, dim=-1) for position, dim in axes]
    return torch.cat([half for cos, sin in cosines_first for half in (sin, cos)], dim=-1)


def centred_positions(grid: tuple[int, int, int], base: tuple[int, int]) -> Tensor:
    """Positions (f · h · w, 3), float64: frames 0, 1, 2, …; n rows in even steps from top to (top + height) · (n − 1) / n.

    Columns alike; top and height are those of the largest centred rectangle of shape h : w in ``base``, the grid (rows,
    columns) that was trained on.

    Source: diffusers' ``get_resize_crop_region_for_grid`` and ``get_3d_rotary_pos_embed``.
    """
    scale = min(base[0] / grid[1], base[1] / grid[2])
    lines = [torch.arange(grid[0], dtype=torch.float64)]
    for n, whole in zip(grid[1:], base):
        first = round((whole - round(scale * n)) / 2)
        lines.append(torch.linspace(first, (first + round(scale * n)) * (n - 1) / n, n, dtype=torch.float64))
    return torch.stack(torch.meshgrid(*lines, indexing="ij"), dim=-1).flatten(0, -2)


def video_positions(c: CogVideoXConfig, grid: tuple[int, int, int], like: Tensor) -> Rope | Tensor:
    """Where the video tokens of ``grid`` stand, on the device of ``like``: what is added to them (N, D), or their turns.

    2B adds `sincos_3d`, in the dtype of ``like``; 5B turns by `centred_positions`, 1.5 by whole numbers from 0.

    Raises:
        ValueError: a grid without an axis of time.
    """
    if len(grid) != 3:
        raise ValueError(f"grid {grid} is not (f, h, w); latents are expected as (B, C, F, H, W)")
    if not c.use_rotary_positional_embeddings:
        scales = c.spatial_interpolation_scale, c.temporal_interpolation_scale
        return sincos_3d(grid, c.width, *scales, device=like.device).to(like)
    base, head = (c.sample_height // c.patch_size, c.sample_width // c.patch_size), c.attention_head_dim
    positions = centred_positions(grid, base) if c.patch_size_t is None else grid_positions(*grid)
    return axial_rope(positions.to(like.device), (head // 4, 3 * head // 8, 3 * head // 8))


def steer(x: Tensor, mod: Mod) -> Tensor:
    """(1 + γ) · x + β: `modulate` for tokens (B, N, D) that were normalised already."""
    return torch.addcmul(mod.shift, x, 1 + mod.scale)


class ExpertNorm(nn.Module):
    """One LayerNorm with weights for both kinds of token, then a shift, a scale and a gate for each.

    forward(x (B, N, D), text (B, M, D), cond (B, Dc), or the `knobs` of it) → both normalised and steered, and their gates
    (B, 1, D), video first.

    Source: Yang et al. 2024 (CogVideoX), "expert adaptive LayerNorm"; diffusers' ``CogVideoXLayerNormZero``.
    """

    def __init__(self, c: CogVideoXConfig):
        super().__init__()
        self.linear = nn.Linear(c.time_embed_dim, 6 * c.width)
        self.norm = nn.LayerNorm(c.width, c.norm_eps, c.norm_elementwise_affine)

    def knobs(self, cond: Tensor | list[Mod]) -> list[Mod]:
        """Of video and text, from cond (B, Dc); those made ahead pass unchanged."""
        return cond if isinstance(cond, list) else split_mods(self.linear(F.silu(cond)), 2)

    def forward(self, x: Tensor, text: Tensor, cond: Tensor | list[Mod]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        for_video, for_text = self.knobs(cond)
        return steer(self.norm(x), for_video), steer(self.norm(text), for_text), for_video.gate, for_text.gate


class CogVideoXBlock(nn.Module):
    """Attention, then a feed-forward network, each over text and video in one row with shared weights.

    forward(x (B, N, D), text (B, M, D), cond (B, Dc), or the `knobs` of it, mask and rope over M + N tokens, text first) →
    x and text anew.
    """

    def __init__(self, c: CogVideoXConfig):
        super().__init__()
        heads = {"bias": c.attention_bias, "head_dim": c.attention_head_dim, "eps": 1e-6}
        self.norm1, self.norm2 = ExpertNorm(c), ExpertNorm(c)
        self.attn = SelfAttention(c.width, c.num_attention_heads, "layer", **heads)
        self.ff = FeedForward(c.width)

    def knobs(self, cond: Tensor) -> tuple[list[Mod], list[Mod]]:
        """Of both norms, from cond (B, Dc)."""
        return self.norm1.knobs(cond), self.norm2.knobs(cond)

    def forward(self, x, text, cond, mask=None, rope: Rope | None = None) -> tuple[Tensor, Tensor]:
        attend, m = partial(self.attn, mask=mask, rope=rope), text.shape[1]
        for_attn, for_ff = cond if isinstance(cond, tuple) else (cond, cond)
        for norm, layer, knobs in ((self.norm1, attend, for_attn), (self.norm2, self.ff, for_ff)):
            h, h_text, gate, text_gate = norm(x, text, knobs)
            both = layer(torch.cat([h_text, h], dim=1))  # (B, M + N, D)
            x, text = torch.addcmul(x, gate, both[:, m:]), torch.addcmul(text, text_gate, both[:, :m])
        return x, text


def channels_last(rows: Tensor, channels: int) -> Tensor:
    """Rows in the order (c, pt, ph, pw) as rows in the order (pt, ph, pw, c); other counts of rows stay as they are."""
    if len(rows) % channels:
        return rows  # the check of shapes will name it
    return rows.unflatten(0, (channels, -1)).transpose(0, 1).flatten(0, 1)


BLOCK = {"attn.stream.qkv": "attn1.{to_q,to_k,to_v}", "attn.stream.out": "attn1.to_out.0"}
BLOCK |= {"ff.0": "ff.net.0.proj", "ff.2": "ff.net.2"}
BLOCK |= {f"attn.stream.norm_{a}": f"attn1.norm_{a}" for a in "qk"}
BLOCK |= {f"norm{i}.{part}": f"norm{i}.{part}" for i in (1, 2) for part in ("linear", "norm")}


def cogvideox_keys(config: CogVideoXConfig) -> KeyMap:
    """Where each tensor of `CogVideoX` lies in diffusers' checkpoint."""
    names = {"video_in": "patch_embed.proj", "text_in": "patch_embed.text_proj"}
    names |= {f"time_in.mlp.{2 * i}": f"time_embedding.linear_{i + 1}" for i in (0, 1)}
    names |= {f"blocks.*.{ours}": f"transformer_blocks.*.{theirs}" for ours, theirs in BLOCK.items()}
    names |= {"final_norms.0": "norm_final", "final_norms.1": "norm_out.norm", "final_knobs": "norm_out.linear"}
    changes = {"out": partial(channels_last, channels=config.out_channels or config.in_channels)}
    changes["video_in.weight"] = flatten_patches
    if config.patch_size_t is not None:  # 1.5: a linear layer already
        changes["video_in.weight"] = lambda weight: channels_last(weight.mT, config.in_channels).mT
    return KeyMap(names | {"out": "proj_out"}, changes)


class CogVideoX(nn.Module):
    """CogVideoX from text (2B, 5B, 1.5): v-prediction of video latents; the order of arguments is that of `DiT`.

    Its output is **not** a velocity; chapter 23 makes one of it. Source: Yang et al. 2024; diffusers
    ``cogvideox_transformer_3d.py``.
    """

    Config, key_map = CogVideoXConfig, staticmethod(cogvideox_keys)

    def __init__(self, config: CogVideoXConfig):
        super().__init__()
        self.config, c, width = config, config, config.width
        pt, ph, pw = self.patch = (c.patch_size_t or 1, c.patch_size, c.patch_size)
        self.min_multiple = c.patch_size  # latent height and width must be multiples of this; frames of patch[0]
        self.video_in = nn.Linear(pt * ph * pw * c.in_channels, width, bias=c.patch_bias or c.patch_size_t is not None)
        self.text_in, self.time_in = nn.Linear(c.text_embed_dim, width), TimestepEmbedder(c.time_embed_dim, width)
        self.blocks = nn.ModuleList(CogVideoXBlock(c) for _ in range(c.num_layers))
        norms = (nn.LayerNorm(width, c.norm_eps, c.norm_elementwise_affine) for _ in range(2))
        self.final_norms, self.final_knobs = nn.Sequential(*norms), nn.Linear(c.time_embed_dim, 2 * width)
        self.out = nn.Linear(width, pt * ph * pw * (c.out_channels or c.in_channels))

    def forward(self, latents, t, text, text_mask=None, pooled=None, rope: Rope | None = None) -> Tensor:
        """v = √ᾱ · ε − √(1 − ᾱ) · x0, (B, C, T, H, W), at t = 0 … 999, (B,), under text (B, M, 4096).

        Args:
            text_mask: (B, M) bool; the family was trained without, padding is seen. pooled: unused.
            rope: of the video tokens, where another than `video_positions` makes is wanted.
        """
        return self.velocity(latents, self.conditions(latents.shape[1:], t, text, text_mask, pooled, rope))

    def conditions(self, shape, t, text, text_mask=None, pooled=None, rope: Rope | None = None) -> Conditions:
        """All that `velocity` reads besides latents of ``shape`` (C, T, h, w); the rest as in `forward`."""
        text = self.text_in(text)
        places = rope or video_positions(self.config, video_grid(shape[1:], self.patch), text)
        if isinstance(places, Rope):
            places = pad_rope(places, before=text.shape[1])
        return Conditions(text, text_mask, places, [self.time_in(t)] * (self.config.num_layers + 1))

    def velocity(self, latents: Tensor, given: Conditions) -> Tensor:
        """The rest of `forward`: v of the latents under given conditions."""
        x, (text, mask, rope, conds) = self.video_in(video_patchify(latents, self.patch)), given
        del given  # a table of places ends with its reader
        if not isinstance(rope, Rope):
            x, rope = x + rope, None
        mask = joint_mask(mask, x.shape[1], text_first=True)
        for block, cond in zip(self.blocks, conds):
            x, text = block(x, text, cond, mask, rope)
        x = self.out(steer(self.final_norms(x), *self.end(conds[-1])))
        return video_unpatchify(x, self.patch, video_grid(latents.shape[2:], self.patch))

    def end(self, cond: Tensor | list[Mod]) -> list[Mod]:
        """Shift and scale before the last layer, one `Mod`, of cond (B, Dc); one made ahead passes unchanged."""
        return cond if isinstance(cond, list) else split_mods(self.final_knobs(F.silu(cond)), 1, gate=False)

    def hoist(self, shape, times, text, text_mask=None, pooled=None, rope: Rope | None = None) -> list[Conditions]:
        """`conditions` for all training steps ``times`` (S,), one product a layer; S · B · (all knobs) numbers."""
        given = self.conditions(shape, times.repeat_interleave(len(text)), text, text_mask, pooled, rope)
        knobs = [block.knobs(cond) for block, cond in zip(self.blocks, given.cond)] + [self.end(given.cond[-1])]
        return at_each_step(given, knobs, len(times))

    def as_diffusers(self, hidden_states, encoder_hidden_states, timestep, image_rotary_emb=None) -> Tensor:
        """The same under diffusers' names: latents (B, T, C, H, W), rotations (N, head_dim) with each number twice."""
        rope = None if image_rotary_emb is None else Rope(*(table[:, ::2] for table in image_rotary_emb))
        return self(hidden_states.transpose(1, 2), timestep.float(), encoder_hidden_states, rope=rope).transpose(1, 2)
