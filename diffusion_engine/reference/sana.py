# Generated from notebooks/source/18_sana.py by `course export`.
# Do not edit: change the chapter and export again.

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffusion_engine.attention import CrossAttention, RMSNorm, SelfAttention
from diffusion_engine.dit import Conditions, patch_grid, patchify, unpatchify
from diffusion_engine.reference.checkpoint import KeyMap, flatten_patches, require
from diffusion_engine.reference.sd3 import at_each_step
from diffusion_engine.timestep_embedding import TimestepEmbedder
from diffusion_engine.transformer_block import Mod, ModulationTable, modulate


@dataclass(frozen=True)
class SanaConfig:
    """``config.json`` of diffusers' ``SanaTransformer2DModel``: its names, its defaults.

    Raises:
        ValueError: a variant that is not built here.
    """

    in_channels: int = 32
    out_channels: int | None = 32
    num_attention_heads: int = 70
    attention_head_dim: int = 32
    num_layers: int = 20
    num_cross_attention_heads: int = 20
    cross_attention_head_dim: int = 112
    cross_attention_dim: int = 2240
    caption_channels: int = 2304
    mlp_ratio: float = 2.5
    dropout: float = 0.0
    attention_bias: bool = False
    sample_size: int = 32
    patch_size: int = 1
    norm_elementwise_affine: bool = False
    norm_eps: float = 1e-6
    interpolation_scale: int | None = None
    guidance_embeds: bool = False
    guidance_embeds_scale: float = 0.1
    qk_norm: str | None = None
    timestep_scale: float = 1.0

    @property
    def width(self) -> int:
        """D = heads · head_dim."""
        return self.num_attention_heads * self.attention_head_dim

    def __post_init__(self):
        if self.qk_norm not in (None, "rms_norm_across_heads"):
            raise ValueError(f"qk_norm {self.qk_norm!r} is unknown; try 'rms_norm_across_heads' or None")
        require(self, norm_elementwise_affine=False, norm_eps=1e-6, interpolation_scale=None)


def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """φ(q) Σ φ(k)ᵀ v / φ(q) Σ φ(k)ᵀ with φ = ReLU, in every head, in fp32.

    q, k, v (B, H, N, Dh) → the same shape, fp32; zeros for a query that no key answers.
    Source: Katharopoulos et al. 2020; Xie et al. 2024 (Sana); diffusers' ``SanaLinearAttnProcessor2_0``.
    """
    q, k, v = q.relu().float(), k.relu().float(), v.float()
    v = F.pad(v, (0, 1), value=1.0)  # one more column: the sum of the weights
    both = q @ (k.mT @ v)  # (B, H, N, Dh + 1)
    return both[..., :-1] / (both[..., -1:] + 1e-15)


class LinearAttention(SelfAttention):
    """`SelfAttention` with ReLU in place of softmax: (B, N, D) → (B, N, D) at a cost that grows with N."""

    def forward(self, x: Tensor, mask=None, rope=None, chunk=None) -> Tensor:
        return self.stream.merge(linear_attention(*self.stream.split(x)).to(x.dtype))


class ConvFeedForward(nn.Module):
    """Expand → 3×3 convolution of each channel alone, over the grid → u ⊙ SiLU(g) → project: (B, N, D) → (B, N, D).

    hidden = ratio · width, twice that wide before the gate.
    Source: Xie et al. 2024 (Sana), "Mix-FFN"; diffusers' ``GLUMBConv``.
    """

    def __init__(self, width: int, ratio: float):
        super().__init__()
        hidden = int(ratio * width)
        self.expand = nn.Linear(width, 2 * hidden)
        self.depthwise = nn.Conv2d(2 * hidden, 2 * hidden, 3, padding=1, groups=2 * hidden)
        self.out = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        weight, bias = self.expand.weight.expand(len(x), -1, -1), self.expand.bias.unsqueeze(-1)
        x = torch.baddbmm(bias, weight, x.mT)  # (B, 2·hidden, N): channels first, as the convolution wants them
        x = self.depthwise(F.silu(x, inplace=not x.requires_grad).unflatten(-1, grid)).flatten(2)
        value, gate = x.chunk(2, dim=1)  # (B, hidden, N) each
        return self.out((value * F.silu(gate)).mT)


class SanaBlock(nn.Module):
    """Linear self-attention, cross-attention to the text without a gate, gated convolution; knobs from a table.

    forward(x (B, N, D), shared knobs (B, 6 · D), text (B, M, Dt), text_mask (B, M) bool, grid); shared knobs may be two
    `Mod` made before, and text the keys and values that `CrossAttention.keys_values` made.
    Source: Xie et al. 2024 (Sana); diffusers' ``SanaTransformerBlock``.
    """

    def __init__(self, c: SanaConfig):
        super().__init__()
        norm, width = "rms_across" if c.qk_norm else None, c.width
        options = {"head_dim": c.cross_attention_head_dim, "eps": 1e-5}
        self.modulation = ModulationTable(width, 2)
        self.attn = LinearAttention(width, c.num_attention_heads, norm, bias=c.attention_bias, eps=1e-5)
        self.cross = CrossAttention(width, c.num_cross_attention_heads, c.cross_attention_dim, norm, **options)
        self.ff = ConvFeedForward(width, c.mlp_ratio)

    def forward(self, x, shared, text, text_mask, grid):
        for_attn, for_ff = self.modulation(shared)
        x = torch.addcmul(x, for_attn.gate, self.attn(modulate(x, for_attn)))
        x = x + self.cross(x, text, text_mask)
        return torch.addcmul(x, for_ff.gate, self.ff(modulate(x, for_ff), grid))


BLOCK = {"modulation.table": "scale_shift_table"}
BLOCK |= {"attn.stream.qkv": "attn1.{to_q,to_k,to_v}", "attn.stream.out": "attn1.to_out.0"}
BLOCK |= {"cross.q": "attn2.to_q", "cross.kv": "attn2.{to_k,to_v}", "cross.out": "attn2.to_out.0"}
BLOCK |= {f"attn.stream.norm_{a}": f"attn1.norm_{a}" for a in "qk"}
BLOCK |= {f"cross.norm_{a}": f"attn2.norm_{a}" for a in "qk"}
SANA_BLOCK = BLOCK | {"ff.expand": "ff.conv_inverted", "ff.depthwise": "ff.conv_depth", "ff.out": "ff.conv_point"}


def sana_keys(config: SanaConfig) -> KeyMap:
    """Where each tensor of `Sana` lies in diffusers' checkpoint."""
    names = {"image_in": "patch_embed.proj", "knobs": "time_embed.linear", "text_norm": "caption_norm"}
    time = "time_embed." + "emb." * (not config.guidance_embeds)
    mlps = {"time_in.mlp": f"{time}timestep_embedder", "guidance_in.mlp": f"{time}guidance_embedder"}
    for ours, theirs in (mlps | {"text_in": "caption_projection"}).items():
        names |= {f"{ours}.{2 * i}": f"{theirs}.linear_{i + 1}" for i in (0, 1)}
    names |= {f"blocks.*.{ours}": f"transformer_blocks.*.{theirs}" for ours, theirs in SANA_BLOCK.items()}
    names |= {"table": "scale_shift_table", "out": "proj_out"}
    flat = ("image_in.weight", "blocks.*.ff.expand.weight", "blocks.*.ff.out.weight")
    return KeyMap(names, changes=dict.fromkeys(flat, flatten_patches))


def last_mod(table: Tensor, cond: Tensor | Mod) -> Mod:
    """Shift and scale before the last layer: table (2, D) + cond (B, D) or (B, N, D); a `Mod` passes unchanged."""
    if isinstance(cond, Mod):
        return cond
    return Mod(*(table + cond.reshape(len(cond), -1, 1, cond.shape[-1])).unbind(-2))  # (B, 1 or N, D) each


class Sana(nn.Module):
    """Velocity network of Sana, and of Sana-Sprint with QK norms and guidance; the arguments are those of `DiT`.

    Source: Xie et al. 2024; diffusers ``sana_transformer.py``.
    """

    Config, key_map = SanaConfig, staticmethod(sana_keys)

    def __init__(self, config: SanaConfig):
        super().__init__()
        self.config, c, width = config, config, config.width
        self.min_multiple = c.patch_size  # latent height and width must be multiples of this
        self.image_in = nn.Linear(c.patch_size**2 * c.in_channels, width)
        self.text_in = nn.Sequential(nn.Linear(c.caption_channels, width), nn.GELU("tanh"), nn.Linear(width, width))
        self.text_norm = RMSNorm(width, eps=1e-5)
        self.time_in, self.guidance_in = TimestepEmbedder(width), TimestepEmbedder(width) if c.guidance_embeds else None
        self.knobs, self.table = nn.Linear(width, 6 * width), nn.Parameter(torch.zeros(2, width))
        self.blocks = nn.ModuleList(SanaBlock(c) for _ in range(c.num_layers))
        self.out = nn.Linear(width, c.patch_size**2 * (c.out_channels or c.in_channels))

    def forward(self, latents, t, text, text_mask=None, pooled=None, guidance=None) -> Tensor:
        """Velocity (B, C, H, W) at t = 1000 · σ, (B,), under text (B, M, 2304), text_mask (B, M); pooled is unused."""
        return self.velocity(latents, self.conditions(latents.shape[1:], t, text, text_mask, pooled, guidance))

    def conditions(self, shape, t, text, text_mask=None, pooled=None, guidance=None) -> Conditions:
        """All of a forward that looks at no latent, whatever their ``shape``; every block's text is the same tokens."""
        cond = self.time_in(t * self.config.timestep_scale)  # (B, D)
        if guidance is not None:
            cond = cond + self.guidance_in(guidance.float())
        text, shared, depth = self.text_norm(self.text_in(text)), self.knobs(F.silu(cond)), len(self.blocks)
        return Conditions([text] * depth, text_mask, None, [shared] * depth + [cond])

    def velocity(self, latents, given: Conditions) -> Tensor:
        """The rest of `forward`: velocity (B, C, H, W) of the latents under given conditions."""
        p, grid = self.config.patch_size, patch_grid(*latents.shape[-2:], self.config.patch_size)
        x = self.image_in(patchify(latents, p))  # (B, N, D)
        for block, shared, text in zip(self.blocks, given.cond, given.text):
            x = block(x, shared, text, given.text_mask, grid)
        return unpatchify(self.out(modulate(x, last_mod(self.table, given.cond[-1]))), p, grid)

    def hoist(self, shape, times, text, text_mask=None, pooled=None, guidance=None) -> list[Conditions]:
        """`conditions` for all times (S,), see `work_ahead`; ``shape`` is that of the latents without the batch."""
        guidance = None if guidance is None else guidance.repeat(len(times))
        given = self.conditions(shape, times.repeat_interleave(len(text)), text, text_mask, pooled, guidance)
        return work_ahead(self, given, len(times))

    def as_diffusers(self, hidden_states, encoder_hidden_states, timestep, guidance=None, encoder_attention_mask=None):
        """The same under diffusers' names; its ``timestep`` is already scaled."""
        mask = None if encoder_attention_mask is None else encoder_attention_mask.bool()
        t = timestep.float() / self.config.timestep_scale
        return self(hidden_states, t, encoder_hidden_states, mask, None, guidance)


def work_ahead(model: nn.Module, given: Conditions, steps: int) -> list[Conditions]:
    """`Conditions` of S · B times as S `Conditions` of B, see `at_each_step`, whose knobs, keys and values are made.

    One product a layer for all times. Knobs take S · B · blocks · 6 · D numbers, keys and values B · blocks · 2 · M · D.
    ``model`` has ``blocks`` with ``modulation`` and ``cross``, and a ``table`` at the end.
    """
    knobs = [block.modulation(shared) for block, shared in zip(model.blocks, given.cond)]
    text = [block.cross.keys_values(text) for block, text in zip(model.blocks, given.text)]
    return at_each_step(given._replace(text=text), [*knobs, last_mod(model.table, given.cond[-1])], steps)
