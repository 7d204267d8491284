# Generated from notebooks/source/14_video_latents.py by `course export`.
# Do not edit: change the chapter and export again.

from collections.abc import Callable
from dataclasses import dataclass
from operator import call
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffusion_engine.attention import CrossAttention, Rope, SelfAttention, axial_rope, grid_positions
from diffusion_engine.dit import FinalLayer
from diffusion_engine.optimizations import Accelerated, by_step
from diffusion_engine.text_conditioning import EncoderBlock, PromptEmbeds, TextEncoderConfig
from diffusion_engine.timestep_embedding import TimestepEmbedder
from diffusion_engine.transformer_block import DiTBlock, modulate
from diffusion_engine.vae import ChannelNorm, Gaussian, check_pictures


def latent_frames(frames: int, factor: int = 4) -> int:
    """1 + (T − 1) / factor: frames of latents for T = factor · k + 1 frames; the first one stands alone.

    Raises:
        ValueError: another T; names the nearest lengths.

    Source: Wan2.1, CogVideoX, HunyuanVideo (factor 4); LTX-Video (8).
    """
    if frames < 1 or (frames - 1) % factor:
        below = max(frames - 1, 0) // factor * factor + 1
        near = f"{below} or {below + factor}" if frames > 0 else "1"
        raise ValueError(f"{frames} frames are not {factor}k + 1; try {near}")
    return (frames - 1) // factor + 1


class CausalConv3d(nn.Conv3d):
    """Convolution over (B, C, T, H, W) that pads time in front only: y_t depends on x_s with s ≤ t.

    Args:
        channels, out: of input and output.
        time, space: sides of the kernel; ``space`` is odd and keeps H and W.

    forward(x, memory): ``memory`` is one dict for one stream cut into parts; the layer keeps its last time − 1 input
    frames there and puts them before the next part, where otherwise zeros stand.

    Source: Yu et al. 2023 (MAGVIT-v2); Wan2.1 (``CausalConv3d`` with ``feat_cache``).
    """

    def __init__(self, channels: int, out: int, time: int = 3, space: int = 3):
        super().__init__(channels, out, (time, space, space), padding=(0, space // 2, space // 2))

    def forward(self, x: Tensor, memory: dict | None = None) -> Tensor:
        if reach := self.kernel_size[0] - 1:
            past = None if memory is None else memory.get(self)
            past = x.new_zeros(*x.shape[:2], reach, *x.shape[3:]) if past is None else past
            x = torch.cat([past, x], dim=2)
            if memory is not None:
                memory[self] = x[:, :, -reach:].clone()  # a view would keep all of x alive
        return super().forward(x)


class Fold(nn.Module):
    """Blocks of time × space × space become channels, the first frame alone, filled up by copies of itself.

    (B, C, T, H, W) → (B, C · t · s · s, 1 + (T − 1) / t, H / s, W / s); channels in the order (c, t, row, column).
    With a memory only the first part of a stream has a first frame.
    """

    def __init__(self, time: int, space: int):
        super().__init__()
        self.time, self.space = time, space

    def at_start(self, memory: dict | None) -> bool:
        """Whether this is the first part of a stream; without a memory every call is."""
        first = memory is None or self not in memory
        if memory is not None:
            memory[self] = True
        return first

    def forward(self, x: Tensor, memory: dict | None = None) -> Tensor:
        if self.at_start(memory):
            x = torch.cat([x[:, :, :1].expand(-1, -1, self.time - 1, -1, -1), x], dim=2)
        x = x.unflatten(4, (-1, self.space)).unflatten(3, (-1, self.space)).unflatten(2, (-1, self.time))
        return x.permute(0, 1, 3, 5, 7, 2, 4, 6).flatten(1, 4)  # from (B, C, F, t, H / s, s, W / s, s)


class Unfold(Fold):
    """The inverse of `Fold`: (B, C · t · s · s, F, H, W) → (B, C, 1 + (F − 1) · t, H · s, W · s)."""

    def forward(self, x: Tensor, memory: dict | None = None) -> Tensor:
        x = x.unflatten(1, (-1, self.time, self.space, self.space)).permute(0, 1, 5, 2, 6, 3, 7, 4)
        x = x.flatten(6).flatten(4, 5).flatten(2, 3)
        return x[:, :, self.time - 1 :] if self.at_start(memory) else x


class FrameNorm(ChannelNorm):
    """`ChannelNorm` of each position of each frame: (B, C, T, H, W) → the same."""

    def forward(self, x: Tensor, memory: dict | None = None) -> Tensor:
        return super().forward(x.flatten(3)).unflatten(3, x.shape[3:])


class CausalResBlock(nn.Module):
    """x + conv1(SiLU(conv3(norm(x)))), the 3×3×3 causal, the 1×1×1 zero at the start; (B, C, T, H, W) → the same."""

    def __init__(self, channels: int):
        super().__init__()
        self.norm = FrameNorm(channels)
        self.conv1, self.conv2 = CausalConv3d(channels, channels), CausalConv3d(channels, channels, 1, 1)
        nn.init.zeros_(self.conv2.weight)
        nn.init.zeros_(self.conv2.bias)

    def forward(self, x: Tensor, memory: dict | None = None) -> Tensor:
        return x + self.conv2(F.silu(self.conv1(self.norm(x), memory)))


class CausalSequential(nn.Sequential):
    """Layers one after the other, each called as layer(x, memory)."""

    def forward(self, x: Tensor, memory: dict | None = None) -> Tensor:
        for layer in self:
            x = layer(x, memory)
        return x


@dataclass(frozen=True)
class VideoVAEConfig:
    """Sizes of the video VAE; ``narrow`` is the width of the layers that run at every frame.

    Raises:
        ValueError: ``factor`` is odd: the decoder unfolds space in two strides.
    """

    latent_channels: int = 8
    width: int = 96
    narrow: int = 32
    depth: int = 3
    factor: int = 4
    time_factor: int = 4

    def __post_init__(self):
        if self.factor < 2 or self.factor % 2:
            raise ValueError(f"factor {self.factor} is not a positive even number; try {max(self.factor // 2, 1) * 2}")


def video_encoder(c: VideoVAEConfig) -> CausalSequential:
    """Clips (B, 3, T, H, W) → (B, 2 · latent_channels, 1 + (T − 1) / 4, H / 4, W / 4): mean, then log-variance."""
    return CausalSequential(
        Fold(c.time_factor, c.factor),
        CausalConv3d(3 * c.time_factor * c.factor**2, c.width, 1),
        *[CausalResBlock(c.width) for _ in range(c.depth)],
        FrameNorm(c.width),
        CausalConv3d(c.width, 2 * c.latent_channels, 1),
    )


def video_decoder(c: VideoVAEConfig) -> CausalSequential:
    """Unscaled latents (B, latent_channels, F, h, w) → clips (B, 3, 1 + 4 (F − 1), 4h, 4w)."""
    return CausalSequential(
        CausalConv3d(c.latent_channels, c.width),
        *[CausalResBlock(c.width) for _ in range(c.depth)],
        CausalConv3d(c.width, c.narrow * c.time_factor * 4, 1, 1),
        Unfold(c.time_factor, 2),  # every frame, half its size
        *[CausalResBlock(c.narrow) for _ in range(2)],
        FrameNorm(c.narrow),
        CausalConv3d(c.narrow, 3 * (c.factor // 2) ** 2, 1),
        Unfold(1, c.factor // 2),
    )


class VideoVAE(nn.Module):
    """Causal video autoencoder; ``encode`` and ``decode`` speak scaled latents, z = (mean − shift) / scale per channel.

    Frame j of the latents depends on frames 0 … 4j alone, frame t of the clip on latents 0 … ⌈t / 4⌉ alone.

    Raises:
        ValueError: no clip (B, 3, T, H, W) with T = 4k + 1 and sides that are multiples of 4; latents of other channels.
    """

    def __init__(self, config: VideoVAEConfig = VideoVAEConfig()):
        super().__init__()
        self.config = config
        self.encoder, self.decoder = video_encoder(config), video_decoder(config)
        self.register_buffer("shift", torch.zeros(config.latent_channels))
        self.register_buffer("scale", torch.ones(config.latent_channels))

    def posterior(self, clips: Tensor) -> Gaussian:
        """Clips (B, 3, T, H, W) in −1…1 → the unscaled Gaussian of their latents."""
        if clips.ndim != 5 or clips.shape[1] != 3:
            raise ValueError(f"clips have shape {tuple(clips.shape)}; expected (B, 3, T, H, W)")
        latent_frames(clips.shape[2], self.config.time_factor)
        check_pictures(clips[:, :, 0], self.config.factor)
        mean, logvar = self.encoder(clips).chunk(2, dim=1)
        return Gaussian(mean, logvar.clamp(-30, 20))

    def encode(self, clips: Tensor) -> Tensor:
        """Clips → scaled latents (B, C, 1 + (T − 1) / 4, H / 4, W / 4): the mean, no sampling."""
        return (self.posterior(clips).mean - self.shift.reshape(-1, 1, 1, 1)) / self.scale.reshape(-1, 1, 1, 1)

    def decode(self, latents: Tensor, chunk: int | None = None) -> Tensor:
        """Scaled latents (B, C, F, h, w) → clips, about −1…1; ``chunk`` latent frames at a time give the same clip."""
        channels = self.config.latent_channels
        if latents.ndim != 5 or latents.shape[1] != channels:
            raise ValueError(f"latents have shape {tuple(latents.shape)}; expected (B, {channels}, F, h, w)")
        if chunk is not None and chunk < 1:
            raise ValueError(f"chunk {chunk} is not a positive number of latent frames; try 1")
        z = latents * self.scale.reshape(-1, 1, 1, 1) + self.shift.reshape(-1, 1, 1, 1)
        memory: dict = {}  # of this call alone
        return torch.cat([self.decoder(part, memory) for part in z.split(chunk or z.shape[2], dim=2)], dim=2)


def video_grid(sizes: tuple[int, int, int], patch: tuple[int, int, int]) -> tuple[int, int, int]:
    """(F / pt, H / ph, W / pw), the grid of tokens.

    Raises:
        ValueError: not three sizes, or one that is no positive multiple of its side of the patch; names the nearest ones.
    """
    if len(sizes) != 3:
        raise ValueError(f"sizes {tuple(sizes)} are not (F, H, W); latents of a clip are (B, C, F, H, W)")
    for name, size, side in zip(("frames", "height", "width"), sizes, patch):
        if size < 1 or size % side:
            below, above = size // side * side, -(-max(size, 1) // side) * side
            near = f"{below} or {above}" if below else f"{above}"
            raise ValueError(f"latent {name} {size} is not a multiple of patch {side}; try {near}")
    return tuple(size // side for size, side in zip(sizes, patch))


def video_patchify(latents: Tensor, patch: tuple[int, int, int]) -> Tensor:
    """(B, C, F, H, W) → tokens (B, f · h · w, pt · ph · pw · C), frame by frame, row by row; inside: (pt, ph, pw, c).

    Raises:
        ValueError: not five axes, or a size that is no multiple of its side of the patch.
    """
    (f, h, w), (pt, ph, pw) = video_grid(latents.shape[2:], patch), patch
    x = latents.reshape(*latents.shape[:2], f, pt, h, ph, w, pw)
    return x.permute(0, 2, 4, 6, 3, 5, 7, 1).flatten(4).flatten(1, 3)


def video_unpatchify(tokens: Tensor, patch: tuple[int, int, int], grid: tuple[int, int, int]) -> Tensor:
    """The inverse of `video_patchify`, for ``grid`` = (f, h, w).

    Raises:
        ValueError: the tokens do not fill the grid.
    """
    (b, n, _), (f, h, w), (pt, ph, pw) = tokens.shape, grid, patch
    if n != f * h * w:
        raise ValueError(f"{n} tokens do not fill a grid of {f}×{h}×{w} = {f * h * w}")
    x = tokens.reshape(b, f, h, w, pt, ph, pw, -1)
    return x.permute(0, 7, 1, 4, 2, 5, 3, 6).reshape(b, -1, f * pt, h * ph, w * pw)


def rope_axes(head_dim: int) -> tuple[int, int, int]:
    """Components of a head for time, row and column: two thirds to space, in equal even parts, the rest to time.

    Raises:
        ValueError: ``head_dim`` is odd or below 6. Source: Wan2.1.
    """
    if head_dim < 6 or head_dim % 2:
        raise ValueError(f"head_dim {head_dim} is not an even number from 6 on; try {max(6, head_dim // 2 * 2)}")
    space = 2 * (head_dim // 6)
    return head_dim - 2 * space, space, space


def attend_along(
    axes: str, attn: SelfAttention, x: Tensor, grid: tuple, rope: Rope, chunk: int | None = None
) -> Tensor:
    """Self-attention of video tokens x (B, f · h · w, D) along "full", "space" (one frame) or "time" (one place).

    Rotation speaks of differences alone, so within one frame (place) the turns of the first frame (place) serve all.

    Raises:
        ValueError: other axes. Source: Bertasius et al. 2021 (TimeSformer), "divided" attention.
    """
    b, (f, h, w) = len(x), grid
    if axes == "full":
        return attn(x, rope=rope, chunk=chunk)
    if axes == "space":
        frames = x.reshape(b * f, h * w, -1)
        return attn(frames, None, rope._replace(cos=rope.cos[: h * w], sin=rope.sin[: h * w]), chunk).reshape(x.shape)
    if axes == "time":
        places = x.unflatten(1, (f, h * w)).transpose(1, 2).flatten(0, 1)  # (B · h · w, f, D)
        seen = attn(places, None, rope._replace(cos=rope.cos[:: h * w], sin=rope.sin[:: h * w]), chunk)
        return seen.unflatten(0, (b, h * w)).transpose(1, 2).reshape(x.shape)
    raise ValueError(f"axes {axes!r} are unknown; try 'full', 'space' or 'time'")


class TextRefiner(nn.Module):
    """Frozen prompt embeddings → embeddings that know new words: encoder blocks over the tokens; pooled is token 0.

    Args:
        config: width, heads and depth; the rest of it speaks of the encoder below.

    Source: HunyuanVideo's token refiner.
    """

    def __init__(self, config: TextEncoderConfig = TextEncoderConfig(depth=1)):
        super().__init__()
        self.config, self.norm = config, nn.LayerNorm(config.width)
        self.blocks = nn.ModuleList(EncoderBlock(config.width, config.heads) for _ in range(config.depth))

    def forward(self, prompt: PromptEmbeds) -> PromptEmbeds:
        x, mask = prompt.tokens, prompt.mask
        for block in self.blocks:
            x = block(x, mask[:, None, None, :])
        return PromptEmbeds(self.norm(x), mask, self.norm(x[:, 0]))


@dataclass(frozen=True)
class VideoDiTConfig:
    """Sizes of a video DiT; with ``factorised`` its blocks look along space and time in turns."""

    latent_channels: int = 8
    patch: tuple[int, int, int] = (1, 4, 4)
    width: int = 256
    heads: int = 8
    depth: int = 5
    text_width: int = 256
    factorised: bool = False

    def __post_init__(self):
        object.__setattr__(self, "patch", tuple(self.patch))  # JSON has lists only


class VideoConditions(NamedTuple):
    """All that a forward reads besides the latents, as chapter 06's `Conditions`; ``text`` and ``cond`` block by block."""

    text: list  # (B, M, D), or a tuple of keys and values, for every block
    text_mask: Tensor | None  # (B, M)
    rope: Rope  # of the N tokens
    cond: list  # (B, D), or knobs made from it ahead, for every block and for the final layer


class VideoBlock(DiTBlock):
    """AdaLN-Zero block with text through cross-attention; its self-attention looks along ``axes``, see `attend_along`.

    forward(x (B, N, D), cond (B, D) or knobs made from it ahead, the grid of the N tokens and their turns, text (B, M, D)
    or a tuple of keys and values made from it ahead, text_mask (B, M), chunk).
    """

    def __init__(self, width: int, heads: int, axes: str = "full"):
        super().__init__(width, heads, cross=CrossAttention(width, heads))
        self.axes = axes

    def forward(self, x, cond, grid, rope: Rope, text, text_mask=None, chunk: int | None = None) -> Tensor:
        for_attn, for_ff = self.modulation(cond)
        seen = attend_along(self.axes, self.attn, modulate(x, for_attn), grid, rope, chunk)
        x = torch.addcmul(x, for_attn.gate, seen)
        x = x + self.cross(x, text, text_mask, chunk)
        return torch.addcmul(x, for_ff.gate, self.ff(modulate(x, for_ff)))


class VideoDiT(nn.Module):
    """Velocity network v(x_σ, t, prompt) of video latents (B, C, F, H, W), any F, H, W that the patch divides.

    forward takes what `DiT.forward` of chapter 06 takes. Source: Peebles & Xie 2023 (DiT); Wan2.1.
    """

    joint_blocks, parallel_blocks = (), property(lambda self: self.blocks)  # chapter 13 asks a DiT for both kinds

    def __init__(self, config: VideoDiTConfig = VideoDiTConfig()):
        super().__init__()
        self.config = c = config
        pt, ph, pw = c.patch
        patch_dim = pt * ph * pw * c.latent_channels
        self.patch_in, self.text_in = nn.Linear(patch_dim, c.width), nn.Linear(c.text_width, c.width)
        self.time_in = TimestepEmbedder(c.width)
        self.pooled_in = nn.Sequential(nn.Linear(c.text_width, c.width), nn.SiLU(), nn.Linear(c.width, c.width))
        axes = ("space", "time") if c.factorised else ("full", "full")
        self.blocks = nn.ModuleList(VideoBlock(c.width, c.heads, axes[i % 2]) for i in range(c.depth))
        self.final = FinalLayer(c.width, patch_dim)

    def forward(self, latents, t, text, text_mask, pooled, chunk: int | None = None, run_block: Callable = call):
        channels = self.config.latent_channels
        if latents.ndim != 5 or latents.shape[1] != channels:
            raise ValueError(f"latents have shape {tuple(latents.shape)}; expected (B, {channels}, F, H, W)")
        grid = video_grid(latents.shape[2:], self.config.patch)
        return self.velocity(latents, self.conditions(grid, t, text, text_mask, pooled), chunk, run_block)

    def conditions(self, grid: tuple, t: Tensor, text: Tensor, text_mask: Tensor | None, pooled: Tensor):
        """All of a forward that looks at no latent, see `VideoConditions`; ``grid`` from `video_grid`."""
        cond, c = self.time_in(t) + self.pooled_in(pooled), self.config  # (B, D)
        rope = axial_rope(grid_positions(*grid).to(text.device), rope_axes(c.width // c.heads))
        return VideoConditions([self.text_in(text)] * c.depth, text_mask, rope, [cond] * (c.depth + 1))

    def velocity(self, latents: Tensor, given: VideoConditions, chunk: int | None = None, run_block: Callable = call):
        """The rest of `forward`: velocity (B, C, F, H, W) of the latents under given conditions."""
        patch, grid = self.config.patch, video_grid(latents.shape[2:], self.config.patch)
        x = self.patch_in(video_patchify(latents, patch))  # (B, N, D)
        for block, cond, text in zip(self.blocks, given.cond, given.text):
            x = run_block(block, x, cond, grid, given.rope, text, given.text_mask, chunk)
        return video_unpatchify(self.final(x, given.cond[-1]), patch, grid)


def hoist_video(dit: VideoDiT, grid: tuple, sigmas: Tensor, prompt: PromptEmbeds) -> list[VideoConditions]:
    """What `VideoDiT.velocity` reads besides the latents, for every noise level of a schedule; equal to 1e-5.

    Knobs of all levels are one product a block; each block's keys and values of the text are made once.

    Args:
        grid: see `video_grid`. sigmas: (S,). prompt: the B prompts of one forward.

    Returns:
        S × `VideoConditions`.
    """
    cond = (dit.time_in(1000 * sigmas.float())[:, None] + dit.pooled_in(prompt.pooled)).flatten(0, 1)  # (S · B, D)
    knobs = [*(block.modulation(cond) for block in dit.blocks), dit.final.knobs(cond)]
    mask = None if bool(prompt.mask.all()) else prompt.mask
    given = dit.conditions(grid, 1000 * sigmas[:1], prompt.tokens, mask, prompt.pooled)
    text = [block.cross.keys_values(text) for block, text in zip(dit.blocks, given.text)]
    return [given._replace(text=text, cond=row) for row in by_step(knobs, len(sigmas))]


class AcceleratedVideo(Accelerated):
    """`Accelerated` of chapter 13 for a `VideoDiT`: hoisting, step cache, chunks and another ``run_block``."""

    def _ahead(self, x: Tensor, prompt: PromptEmbeds) -> dict[float, VideoConditions]:
        ahead = hoist_video(self.dit, video_grid(x.shape[2:], self.dit.config.patch), self.sigmas.to(x.device), prompt)
        return dict(zip((1000 * self.sigmas).tolist(), ahead))


def video_flops(config: VideoDiTConfig, grid: tuple, text_tokens: int, batch: int = 1) -> tuple[int, int]:
    """Operations of one forward in matrix products (a multiply-add is two): (in self-attention's products, in the rest).

    Args:
        grid: (f, h, w), see `video_grid`. text_tokens: M, padding included.
    """
    c, d, (f, h, w), m = config, config.width, grid, text_tokens
    n, patch_dim = f * h * w, c.patch[0] * c.patch[1] * c.patch[2] * c.latent_channels
    seen = [(h * w, f)[i % 2] if c.factorised else n for i in range(c.depth)]  # keys of one query, block by block
    once = 256 * d + d * d + c.text_width * d + d * d + (6 * c.depth + 2) * d * d
    linear = n * (2 * patch_dim * d + 14 * d * d * c.depth) + m * (c.text_width * d + 2 * d * d * c.depth)
    return batch * 4 * n * d * sum(seen), batch * (2 * (once + linear) + 4 * n * m * d * c.depth)
