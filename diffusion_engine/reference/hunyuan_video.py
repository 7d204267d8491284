# Generated from notebooks/source/22_hunyuan_video.py by `course export`.
# Do not edit: change the chapter and export again.

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffusion_engine.attention import Rope, SelfAttention, axial_rope, grid_positions, joint_mask, key_mask, pad_rope
from diffusion_engine.dit import Conditions, FinalLayer
from diffusion_engine.optimizations import by_step
from diffusion_engine.reference.checkpoint import KeyMap, flatten_patches, require, swap_halves
from diffusion_engine.reference.cogvideox import channels_last
from diffusion_engine.reference.flux import CONDITION, PARALLEL, ConditionEmbedder
from diffusion_engine.reference.sd3 import JOINT
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

    def __post_init__(self):
        require(self, mlp_ratio=4.0, qk_norm="rms_norm")
        require(self, image_condition_type=None, in_channels=self.out_channels or self.in_channels)  # from text alone
        if sum(self.rope_axes_dim) != self.attention_head_dim:
            raise ValueError(f"rope_axes_dim {self.rope_axes_dim} must add up to a head's {self.attention_head_dim}")


def video_rope(grid: tuple[int, int, int], config: HunyuanVideoConfig, text_tokens: int, device=None) -> Rope:
    """Turns of f · h · w + M tokens: the video's by frame, row and column; the M of the text behind it stay."""
    rope = axial_rope(grid_positions(*grid).to(device), config.rope_axes_dim, config.rope_theta)
    return pad_rope(rope, after=text_tokens)


class RefinerBlock(nn.Module):
    """x ← x + α₁ · attn(LN(x)); x ← x + α₂ · ff(LN(x)): text tokens (B, M, D) → (B, M, D), gated by cond (B, D).

    ``width`` is D, ``heads`` H. Source: HunyuanVideo ``token_refiner.py``, ``IndividualTokenRefinerBlock``.
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
        self.text_in, self.cond_in = nn.Linear(text_width, width), ConditionEmbedder(width, text_width, guidance=False)
        self.blocks = nn.ModuleList(RefinerBlock(width, heads) for _ in range(depth))

    def forward(self, text: Tensor, t: Tensor, real: Tensor | None = None) -> Tensor:
        shares = torch.ones(text.shape[:2], device=text.device) if real is None else real.float()
        mean = (text * shares.unsqueeze(-1)).sum(1) / shares.sum(1, keepdim=True)  # (B, Dt), in fp32
        cond = self.cond_in(t, mean.to(text.dtype))
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


REFINER = {"gates": "norm_out.linear", "norm1": "norm1", "norm2": "norm2", "attn.stream.out": "attn.to_out.0"}
REFINER |= {"attn.stream.qkv": "attn.{to_q,to_k,to_v}", "ff.0": "ff.net.0.proj", "ff.2": "ff.net.2"}


def hunyuan_video_keys(config: HunyuanVideoConfig) -> KeyMap:
    """Where each tensor of `HunyuanVideo` lies in diffusers' checkpoint."""
    names = {"image_in": "x_embedder.proj", "refiner.text_in": "context_embedder.proj_in"}
    parts = {
        "cond_in": ("time_text_embed", CONDITION),
        "refiner.cond_in": ("context_embedder.time_text_embed", CONDITION),
        "refiner.blocks.*": ("context_embedder.token_refiner.refiner_blocks.*", REFINER),
        "joint_blocks.*": ("transformer_blocks.*", JOINT),
        "parallel_blocks.*": ("single_transformer_blocks.*", PARALLEL),
    }
    for ours, (theirs, inside) in parts.items():
        names |= {f"{ours}.{here}": f"{theirs}.{there}" for here, there in inside.items()}
    names |= {"final.modulation": "norm_out.linear", "final.linear": "proj_out"}
    changes = {"image_in.weight": flatten_patches, "final.modulation": swap_halves}
    return KeyMap(names, changes | {"final.linear": partial(channels_last, channels=config.in_channels)})


def run_as_diffusers(
    model, hidden_states, timestep, encoder_hidden_states, encoder_attention_mask, pooled_projections, guidance=None
) -> Tensor:
    """`HunyuanVideo` under diffusers' names; timestep is t, guidance 1000 · w, not read without an embedder."""
    scale, shape = guidance if model.config.guidance_embeds else None, hidden_states.shape[1:]
    rest = encoder_hidden_states, encoder_attention_mask.bool(), pooled_projections, scale
    return model.velocity(hidden_states, model.conditions(shape, timestep.float(), *rest, unit=1))


class HunyuanVideo(nn.Module):
    """Velocity network of HunyuanVideo; the arguments are those of chapter 06's `DiT`, and ``guidance``.

    Source: Kong et al. 2024; Tencent, HunyuanVideo ``models.py``; diffusers ``transformer_hunyuan_video.py``.
    """

    Config, key_map, as_diffusers = HunyuanVideoConfig, staticmethod(hunyuan_video_keys), run_as_diffusers

    def __init__(self, config: HunyuanVideoConfig):
        super().__init__()
        self.config, c, heads = config, config, config.num_attention_heads
        self.patch = (c.patch_size_t, c.patch_size, c.patch_size)
        self.min_multiple = c.patch_size  # latent height and width must be multiples of this
        width, patch_dim = heads * c.attention_head_dim, c.patch_size_t * c.patch_size**2 * c.in_channels
        self.image_in, self.final = nn.Linear(patch_dim, width), FinalLayer(width, patch_dim)
        self.refiner = TokenRefiner(c.text_embed_dim, width, heads, c.num_refiner_layers)
        self.cond_in = ConditionEmbedder(width, c.pooled_projection_dim, c.guidance_embeds)
        self.joint_blocks = nn.ModuleList(JointBlock(width, heads) for _ in range(c.num_layers))
        self.parallel_blocks = nn.ModuleList(ParallelBlock(width, heads) for _ in range(c.num_single_layers))

    def forward(self, latents, t, text, text_mask=None, pooled=None, guidance=None) -> Tensor:
        """Velocity (B, C, F, H, W) at t = 1000 · σ, (B,), under text (B, M, 4096), pooled (B, 768), guidance w, (B,)."""
        return self.velocity(latents, self.conditions(latents.shape[1:], t, text, text_mask, pooled, guidance))

    def conditions(self, shape, t, text, text_mask=None, pooled=None, guidance=None, unit: float = 1000) -> Conditions:
        """All that `velocity` reads besides latents of ``shape`` (C, F, h, w); ``unit`` · guidance is embedded."""
        cond, (text, mask) = self.cond_in(t, pooled, guidance, unit), trim_padding(text, text_mask)
        text = self.refiner(text, t, mask)
        rope = video_rope(video_grid(shape[1:], self.patch), self.config, text.shape[1], text.device)
        return Conditions(text, mask, rope, [cond] * (len(self.joint_blocks) + len(self.parallel_blocks) + 1))

    def velocity(self, latents: Tensor, given: Conditions) -> Tensor:
        """The rest of `forward`: velocity of the latents under given conditions."""
        x, (text, mask, rope, cond) = self.image_in(video_patchify(latents, self.patch)), given
        n, cond = x.shape[1], iter(cond)
        del given  # the text that the first block rewrites ends there
        for block in self.joint_blocks:
            x, text = block(x, text, next(cond), mask, rope)
        x, mask = torch.cat([x, text], dim=1), joint_mask(mask, n)  # (B, N + M, D)
        for block in self.parallel_blocks:
            x = block(x, next(cond), mask, rope)
        return video_unpatchify(self.final(x[:, :n], next(cond)), self.patch, video_grid(latents.shape[2:], self.patch))

    def hoist(self, shape, times, text, text_mask=None, pooled=None, guidance=None) -> list[Conditions]:
        """`conditions` for all times (S,), equal to 1e-5: prompts refined in one batch of S · B, one product a layer.

        Keeps S · B · (M · D + all knobs) numbers; row s · B + b is sample b at step s.
        """
        words = (text, text_mask, pooled, guidance)
        many = [x if x is None else x.repeat(len(times), *[1] * (x.ndim - 1)) for x in words]
        given = self.conditions(shape, times.repeat_interleave(len(text)), *many)
        cond = given.cond[-1]  # (S · B, D)
        knobs = [(block.image_modulation(cond), block.text_modulation(cond)) for block in self.joint_blocks]
        knobs += [*(block.modulation(cond) for block in self.parallel_blocks), self.final.knobs(cond)]
        rows = by_step((given.text, given.text_mask, knobs), len(times))
        return [given._replace(text=text, text_mask=mask, cond=cond) for text, mask, cond in rows]
