# Generated from notebooks/source/19_wan.py by `course export`.
# Do not edit: change the chapter and export again.

import math
from dataclasses import dataclass
from operator import itemgetter

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffusion_engine.attention import CrossAttention, attention, axial_rope, grid_positions, qk_norm_layer
from diffusion_engine.dit import Conditions
from diffusion_engine.reference.checkpoint import KeyMap, flatten_patches, require
from diffusion_engine.reference.sana import BLOCK, last_mod, work_ahead
from diffusion_engine.timestep_embedding import TimestepEmbedder
from diffusion_engine.transformer_block import DiTBlock, FeedForward, Mod, modulate
from diffusion_engine.video import rope_axes, video_grid, video_patchify, video_unpatchify


@dataclass(frozen=True)
class WanConfig:
    """``config.json`` of diffusers' ``WanTransformer3DModel``: its names, its defaults (the 14B).

    Raises:
        ValueError: a variant that is not built here, or a head that three axes cannot share.
    """

    patch_size: tuple[int, int, int] = (1, 2, 2)
    num_attention_heads: int = 40
    attention_head_dim: int = 128
    in_channels: int = 16
    out_channels: int | None = 16
    text_dim: int = 4096
    freq_dim: int = 256
    ffn_dim: int = 13824
    num_layers: int = 40
    cross_attn_norm: bool = True
    qk_norm: str | None = "rms_norm_across_heads"
    eps: float = 1e-6
    image_dim: int | None = None
    added_kv_proj_dim: int | None = None
    rope_max_seq_len: int = 1024
    pos_embed_seq_len: int | None = None

    @property
    def width(self) -> int:
        """D = heads · head_dim."""
        return self.num_attention_heads * self.attention_head_dim

    def __post_init__(self):
        rope_axes(self.attention_head_dim)
        require(self, qk_norm="rms_norm_across_heads", eps=1e-6, pos_embed_seq_len=None)
        require(self, added_kv_proj_dim=self.image_dim and self.width)  # an image has the width of the model


class WanCross(CrossAttention):
    """Video tokens x (B, N, D) ask the text (B, M, D) and the image (B, K, D): two attentions, their answers added.

    Args:
        width: D. heads: H. with_image: whether there are keys and values of an image, too.

    forward(x, text): a tensor; or text and image, a list; or what `keys_values` made of them, a tuple. Nothing is hidden.

    Source: Wan2.1, ``WanI2VCrossAttention``; diffusers' ``WanAttnProcessor``.
    """

    def __init__(self, width: int, heads: int, with_image: bool = False):
        super().__init__(width, heads, qk_norm="rms_across")
        self.image_kv = nn.Linear(width, 2 * width) if with_image else None
        self.norm_image_k = qk_norm_layer("rms_across", heads, width // heads) if with_image else None

    def keys_values(self, text: Tensor | list[Tensor]) -> tuple[Tensor, ...]:
        """Keys and values of the text, (B, H, M, Dh) each, and behind them those of the image, (B, H, K, Dh) each."""
        if not isinstance(text, list):
            return super().keys_values(text)
        k, v = self.image_kv(text[1]).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return *super().keys_values(text[0]), self.norm_image_k(k), v

    def forward(self, x: Tensor, text, text_mask: None = None) -> Tensor:
        k, v, *of_image = text if isinstance(text, tuple) else self.keys_values(text)
        q = self.norm_q(self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2))  # (B, H, N, Dh)
        heads = attention(q, k, v)
        if of_image:
            heads = heads + attention(q, *of_image)
        return self.out(heads.transpose(1, 2).flatten(-2))


class ExactNorm(nn.LayerNorm):
    """LayerNorm with weights over the last axis, in fp32 whatever the dtype of x: (…, D) → the same."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).to(x.dtype)


def exactly(x: Tensor, mod: Mod) -> Tensor:
    """(1 + γ) · LN(x) + β in fp32, then back to x's dtype: tokens (B, N, D) → the same."""
    return modulate(x.float(), mod).to(x.dtype)


class WanBlock(DiTBlock):
    """Self-attention, cross-attention behind a norm with weights, feed-forward; knobs from a table, all in fp32.

    forward(x (B, N, D), shared knobs (B, 6·D), or (B, N, 6·D), or a list of `Mod`, the turns, text as `WanCross` takes it).

    Source: Wan team 2025; diffusers' ``WanTransformerBlock``.
    """

    def __init__(self, c: WanConfig):
        width, heads = c.width, c.num_attention_heads
        parts = {"cross": WanCross(width, heads, c.image_dim is not None), "ff": FeedForward(width, hidden=c.ffn_dim)}
        super().__init__(width, heads, "rms_across", table=True, **parts)
        self.cross_norm = ExactNorm(width, eps=1e-6) if c.cross_attn_norm else nn.Identity()

    def forward(self, x, shared, rope, text) -> Tensor:
        for_attn, for_ff = self.modulation(shared)  # fp32, as the table is
        x = torch.addcmul(x, for_attn.gate, self.attn(exactly(x, for_attn), rope=rope)).to(x.dtype)
        x = x + self.cross(self.cross_norm(x), text)
        return torch.addcmul(x, for_ff.gate, self.ff(exactly(x, for_ff))).to(x.dtype)


WAN_BLOCK = BLOCK | {"cross_norm": "norm2", "ff.0": "ffn.net.0.proj", "ff.2": "ffn.net.2"}
WAN_BLOCK |= {"cross.image_kv": "attn2.{add_k_proj,add_v_proj}", "cross.norm_image_k": "attn2.norm_added_k"}


def wan_keys(config: WanConfig) -> KeyMap:
    """Where each tensor of `Wan` lies in diffusers' checkpoint; tables, norms and the time's layers stay fp32."""
    home, tables = "condition_embedder.", ("table", "blocks.*.modulation.table")
    names = {"patch_in": "patch_embedding", "knobs": f"{home}time_proj"}
    names |= {"table": "scale_shift_table", "out": "proj_out"}
    for ours, theirs in {"time_in.mlp": "time_embedder", "text_in": "text_embedder"}.items():
        names |= {f"{ours}.{2 * i}": f"{home}{theirs}.linear_{i + 1}" for i in (0, 1)}
    for i, theirs in {0: "norm1", 1: "ff.net.0.proj", 3: "ff.net.2", 4: "norm2"}.items():
        names[f"image_in.{i}"] = f"{home}image_embedder.{theirs}"
    names |= {f"blocks.*.{ours}": f"blocks.*.{theirs}" for ours, theirs in WAN_BLOCK.items()}
    return KeyMap(
        names,
        changes={"patch_in.weight": flatten_patches} | dict.fromkeys(tables, itemgetter(0)),  # (1, k, D) → (k, D)
        unused=("blocks.*.attn2.norm_added_q",),  # in old files, read by nobody
        fp32=(*tables, "time_in.mlp.*", "blocks.*.cross_norm", "image_in.0", "image_in.4"),
    )


class Wan(nn.Module):
    """Velocity network of Wan2.1, text-to-video and image-to-video; the arguments are those of `VideoDiT`.

    Source: Wan team 2025; diffusers ``transformer_wan.py``.
    """

    Config, key_map = WanConfig, staticmethod(wan_keys)

    def __init__(self, config: WanConfig):
        super().__init__()
        self.config, c, width, patch = config, config, config.width, math.prod(config.patch_size)
        self.min_multiple = max(c.patch_size[1:])  # latent height and width must be multiples of this
        self.patch_in = nn.Linear(patch * c.in_channels, width)
        self.text_in = nn.Sequential(nn.Linear(c.text_dim, width), nn.GELU("tanh"), nn.Linear(width, width))
        self.time_in, self.knobs, self.image_in = TimestepEmbedder(width, c.freq_dim), nn.Linear(width, 6 * width), None
        if d := c.image_dim:
            layers = nn.Linear(d, d), nn.GELU(), nn.Linear(d, width)
            self.image_in = nn.Sequential(ExactNorm(d), *layers, ExactNorm(width))
        self.blocks = nn.ModuleList(WanBlock(c) for _ in range(c.num_layers))
        self.table = nn.Parameter(torch.zeros(2, width))
        self.out = nn.Linear(width, patch * (c.out_channels or c.in_channels))

    def forward(self, latents, t, text, text_mask=None, pooled=None, image=None) -> Tensor:
        """Velocity (B, C, F, H, W) of latents at t = 1000 · σ under text (B, M, 4096); pooled is unused.

        Args:
            t: (B,), or (B, N), one time a token (Wan2.2 5B).
            text_mask: (B, M) bool; where it is False the text is zero, as in training, and still seen.
            image: (B, K, 1280), image-to-video only; its latents are noise, mask and image latents, 36 channels.

        Raises:
            ValueError: latents that do not fit channels or patch, or an image where none belongs (or the reverse).
        """
        return self.velocity(latents, self.conditions(latents.shape[1:], t, text, text_mask, pooled, image))

    def conditions(self, shape, t, text, text_mask=None, pooled=None, image=None) -> Conditions:
        """All that `velocity` reads besides latents of ``shape`` (C, F, h, w); the rest as in `forward`."""
        c = self.config
        if len(shape) != 4 or shape[0] != c.in_channels:
            raise ValueError(f"latents have shape (B, {str([*shape])[1:-1]}); expected (B, {c.in_channels}, F, H, W)")
        if (image is None) != (c.image_dim is None):
            raise ValueError(f"image {'is missing' if image is None else 'given'}; image_dim {c.image_dim} decides")
        places = grid_positions(*video_grid(shape[1:], c.patch_size)).to(text.device)
        text = self.text_in(text if text_mask is None else text.masked_fill(~text_mask.unsqueeze(-1), 0))
        given = text if image is None else [text, self.image_in(image)]  # as `WanCross` takes them
        cond = self.time_in(t.flatten()).unflatten(0, t.shape).to(text.dtype)  # (B, D), or (B, N, D)
        rope, shared = axial_rope(places, rope_axes(c.attention_head_dim)), self.knobs(F.silu(cond))
        return Conditions([given] * c.num_layers, None, rope, [shared] * c.num_layers + [cond])

    def velocity(self, latents: Tensor, given: Conditions) -> Tensor:
        """The rest of `forward`: velocity of the latents under given conditions."""
        x = self.patch_in(video_patchify(latents, self.config.patch_size))  # (B, N, D)
        for block, shared, text in zip(self.blocks, given.cond, given.text):
            x = block(x, shared, given.positions, text)
        x = self.out(exactly(x, last_mod(self.table, given.cond[-1])))
        return video_unpatchify(x, self.config.patch_size, video_grid(latents.shape[2:], self.config.patch_size))

    def hoist(self, shape, times, text, text_mask=None, pooled=None, image=None) -> list[Conditions]:
        """`conditions` for all times (S,), see `work_ahead`; ``shape`` is that of the latents without the batch."""
        t = times.repeat_interleave(len(text))
        return work_ahead(self, self.conditions(shape, t, text, text_mask, pooled, image), len(times))

    def as_diffusers(self, hidden_states, timestep, encoder_hidden_states, encoder_hidden_states_image=None) -> Tensor:
        """The same under diffusers' names; ``timestep`` is t."""
        return self(hidden_states, timestep.float(), encoder_hidden_states, image=encoder_hidden_states_image)
