# Generated from notebooks/source/06_dit.py by `course export`.
# Do not edit: change the chapter and export again.

import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import call
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffusion_engine.attention import joint_mask
from diffusion_engine.timestep_embedding import TimestepEmbedder, timestep_embedding
from diffusion_engine.transformer_block import JointBlock, Mod, ParallelBlock, modulate


def patch_grid(height: int, width: int, patch: int) -> tuple[int, int]:
    """(height / patch, width / patch), the grid of tokens.

    Raises:
        ValueError: a side is not a positive multiple of ``patch``; names the nearest ones.
    """
    for name, side in (("height", height), ("width", width)):
        if side < 1 or side % patch:
            below, above = side // patch * patch, -(-max(side, 1) // patch) * patch
            near = f"{below} or {above}" if below else f"{above}"
            raise ValueError(f"latent {name} {side} is not a multiple of patch {patch}; try {near}")
    return height // patch, width // patch


def patchify(latents: Tensor, patch: int, channels_first: bool = False) -> Tensor:
    """(B, C, H, W) → tokens (B, H/p · W/p, p · p · C), row by row; inside a token the order is (ph, pw, c).

    Args:
        latents: any rectangle whose sides are multiples of ``patch``.
        patch: p.
        channels_first: order (c, ph, pw) inside a token, as FLUX packs its latents.

    Raises:
        ValueError: not four axes, a patch below 1, or a side that is no multiple of ``patch``.
    """
    if latents.ndim != 4:
        raise ValueError(f"latents have shape {tuple(latents.shape)}; expected (B, C, H, W)")
    if patch < 1:
        raise ValueError(f"patch {patch} is below 1; try 1")
    b, c, height, width = latents.shape
    h, w = patch_grid(height, width, patch)
    x = latents.reshape(b, c, h, patch, w, patch)  # (B, C, h, ph, w, pw)
    order = (0, 2, 4, 1, 3, 5) if channels_first else (0, 2, 4, 3, 5, 1)
    return x.permute(order).reshape(b, h * w, patch * patch * c)


def unpatchify(tokens: Tensor, patch: int, grid: tuple[int, int], channels_first: bool = False) -> Tensor:
    """The inverse of `patchify`: tokens (B, h · w, p · p · C) → (B, C, h · p, w · p), for ``grid`` = (h, w).

    Raises:
        ValueError: the tokens do not fill the grid, or do not hold whole patches.
    """
    b, n, d = tokens.shape
    h, w = grid
    if patch < 1:
        raise ValueError(f"patch {patch} is below 1; try 1")
    if n != h * w:
        raise ValueError(f"{n} tokens do not fill a grid of {h}×{w} = {h * w}")
    if d % patch**2:
        raise ValueError(f"tokens of {d} numbers are not whole {patch}×{patch} patches; try {d // patch**2 * patch**2}")
    inner = (d // patch**2, patch, patch) if channels_first else (patch, patch, d // patch**2)
    order = (0, 3, 1, 4, 2, 5) if channels_first else (0, 5, 1, 3, 2, 4)
    return tokens.reshape(b, h, w, *inner).permute(order).reshape(b, d // patch**2, h * patch, w * patch)


def sincos_2d(
    grid: tuple[int, int], width: int, origin: tuple[float, float] = (0.0, 0.0), scale: float = 1.0
) -> Tensor:
    """Fixed positions (h · w, width), fp32: e(row) then e(column), each cosines first, as in `timestep_embedding`.

    Args:
        grid: (h, w), any rectangle.
        width: D, a multiple of 4.
        origin: row and column of the first token (SD3 crops the centre out of a larger table).
        scale: distance between neighbours (SD3: base size / largest size).

    Raises:
        ValueError: ``width`` is not a multiple of 4, or the grid is empty.

    Source: Dosovitskiy et al. 2020, appendix D.4; Peebles & Xie 2023 (DiT). diffusers stores the four quarters in
    reverse: sin(column), cos(column), sin(row), cos(row).
    """
    if width % 4 or width < 4:
        near = f"{width // 4 * 4} or {-(-width // 4) * 4}" if width > 4 else "4"
        raise ValueError(f"width {width} is not a multiple of 4; try {near}")
    if min(grid) < 1:
        raise ValueError(f"grid {grid[0]}×{grid[1]} is empty; try {max(1, grid[0])}×{max(1, grid[1])}")
    axes = [(first + torch.arange(n).float()) * scale for first, n in zip(origin, grid)]
    halves = [timestep_embedding(axis.flatten(), width // 2) for axis in torch.meshgrid(*axes, indexing="ij")]
    return torch.cat(halves, dim=-1)


class FinalLayer(nn.Module):
    """v = W · ((1 + γ) · LN(x) + β) + b: tokens (B, N, D) → (B, N, out_dim); zero at init, so v = 0.

    forward(x, cond): the condition (B, D), or β and γ, (B, 1, D) each, as a tuple.

    Source: Peebles & Xie 2023 (DiT), ``FinalLayer``.
    """

    def __init__(self, width: int, out_dim: int):
        super().__init__()
        self.modulation = nn.Linear(width, 2 * width)
        self.linear = nn.Linear(width, out_dim)
        for layer in (self.modulation, self.linear):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def knobs(self, cond: Tensor) -> tuple[Tensor, Tensor]:
        """β and γ, (B, 1, D) each, of a condition (B, D)."""
        return self.modulation(F.silu(cond)).unsqueeze(1).chunk(2, dim=-1)

    def forward(self, x: Tensor, cond: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        shift, scale = cond if isinstance(cond, tuple) else self.knobs(cond)
        return self.linear(modulate(x, Mod(shift, scale)))


@dataclass(frozen=True)
class DiTConfig:
    """Sizes of a DiT: joint_depth blocks as in SD3 come first, parallel_depth blocks as in FLUX follow.

    Raises:
        ValueError: a size below 1, no block at all, or a width that heads (or 4, for positions) do not divide.
    """

    latent_channels: int = 4
    patch: int = 4
    width: int = 256
    heads: int = 8
    joint_depth: int = 2
    parallel_depth: int = 5
    text_width: int = 256

    def __post_init__(self):
        for name in ("latent_channels", "patch", "width", "heads", "text_width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is not a positive number; try 1")
        if min(self.joint_depth, self.parallel_depth) < 0 or self.joint_depth + self.parallel_depth == 0:
            raise ValueError(f"depths {self.joint_depth} and {self.parallel_depth}: a DiT needs a block; try 1 and 0")
        rule = math.lcm(self.heads, 4)  # whole heads, and two sinusoids for positions
        if self.width % rule:
            near = f"{self.width // rule * rule or rule} or {-(-self.width // rule) * rule}"
            raise ValueError(f"width {self.width} is not a multiple of {rule} (heads {self.heads}, 4); try {near}")


def check_inputs(
    config: DiTConfig, latents: Tensor, t: Tensor, text: Tensor, text_mask: Tensor | None, pooled: Tensor
) -> None:
    """Refuse what would otherwise fail deep inside, or broadcast in silence; see `DiT.forward`.

    Raises:
        ValueError: a shape that does not fit the config or the batch.
    """
    if latents.ndim != 4 or latents.shape[1] != config.latent_channels:
        raise ValueError(f"latents have shape {tuple(latents.shape)}; expected (B, {config.latent_channels}, H, W)")
    b, m, width = latents.shape[0], text.shape[1] if text.ndim == 3 else 1, config.text_width
    wanted = {"t": (t, (b,)), "text": (text, (b, m, width)), "pooled": (pooled, (b, width))}
    if text_mask is not None:
        wanted["text_mask"] = (text_mask, (b, m))
    for name, (given, shape) in wanted.items():
        if given.shape != shape:
            raise ValueError(f"{name} has shape {tuple(given.shape)}; expected {shape} for {b} latents")


class Conditions(NamedTuple):
    """All that a forward reads besides the latents.

    text (B, M, D), text_mask (B, M) or None, positions (N, D), and ``cond``: for every block, and for the final layer at
    the end, the condition (B, D), or knobs that were made from it ahead.
    """

    text: Tensor
    text_mask: Tensor | None
    positions: Tensor
    cond: list


class DiT(nn.Module):
    """Velocity network v(x_σ, t, prompt): patchify → joint blocks → parallel blocks → unpatchify.

    Without parallel blocks the last joint block lets the text go (`JointBlock` with ``last``), as in SD3.
    Source: Peebles & Xie 2023 (DiT); Esser et al. 2024 (SD3); Black Forest Labs, FLUX.1.
    """

    def __init__(self, config: DiTConfig = DiTConfig()):
        super().__init__()
        self.config = c = config
        patch_dim = c.patch**2 * c.latent_channels
        self.image_in = nn.Linear(patch_dim, c.width)
        self.text_in = nn.Linear(c.text_width, c.width)
        self.time_in = TimestepEmbedder(c.width)
        self.pooled_in = nn.Sequential(nn.Linear(c.text_width, c.width), nn.SiLU(), nn.Linear(c.width, c.width))
        last = None if c.parallel_depth else c.joint_depth - 1
        self.joint_blocks = nn.ModuleList(JointBlock(c.width, c.heads, last=i == last) for i in range(c.joint_depth))
        self.parallel_blocks = nn.ModuleList(ParallelBlock(c.width, c.heads) for _ in range(c.parallel_depth))
        self.final = FinalLayer(c.width, patch_dim)

    @property
    def min_multiple(self) -> int:
        """Latent height and width must be multiples of this."""
        return self.config.patch

    def forward(self, latents, t, text, text_mask, pooled, chunk: int | None = None, run_block: Callable = call):
        """Velocity (B, C, H, W) of latents at time t under a prompt.

        Args:
            latents: x_σ (B, C, H, W), any rectangle whose sides are multiples of `min_multiple`.
            t: 1000 · σ, (B,).
            text: prompt tokens (B, M, Dt).
            text_mask: (B, M) bool, True where a token is real; None when all are.
            pooled: the prompt as one vector (B, Dt).
            chunk: queries that attention handles at a time, see `attention`; exact.
            run_block: called as run_block(block, *arguments) for every block; another way to run the same blocks.

        Raises:
            ValueError: a shape that does not fit the config or the batch.
        """
        check_inputs(self.config, latents, t, text, text_mask, pooled)
        grid = patch_grid(*latents.shape[-2:], self.config.patch)
        return self.velocity(latents, self.conditions(grid, t, text, text_mask, pooled), chunk, run_block)

    def conditions(self, grid: tuple[int, int], t: Tensor, text: Tensor, text_mask: Tensor | None, pooled: Tensor):
        """All of a forward that looks at no latent, see `Conditions`; arguments as in `forward`."""
        cond = self.time_in(t) + self.pooled_in(pooled)  # (B, D)
        parts = len(self.joint_blocks) + len(self.parallel_blocks) + 1
        return Conditions(self.text_in(text), text_mask, sincos_2d(grid, self.config.width).to(text), [cond] * parts)

    def velocity(self, latents: Tensor, given: Conditions, chunk: int | None = None, run_block: Callable = call):
        """The rest of `forward`: velocity (B, C, H, W) of the latents under given conditions."""
        p, text, mask, cond = self.config.patch, given.text, given.text_mask, iter(given.cond)
        x = self.image_in(patchify(latents, p)) + given.positions  # (B, N, D)
        for block in self.joint_blocks:
            x, text = run_block(block, x, text, next(cond), mask, None, chunk)
        n = x.shape[1]
        if self.parallel_blocks:
            x, mask = torch.cat([x, text], dim=1), joint_mask(mask, n)  # (B, N + M, D)
        for block in self.parallel_blocks:
            x = run_block(block, x, next(cond), mask, None, chunk)
        return unpatchify(self.final(x[:, :n], next(cond)), p, patch_grid(*latents.shape[-2:], p))


def parameter_count(config: DiTConfig) -> int:
    """Parameters of `DiT(config)` in closed form; a linear layer a → b has a·b + b."""
    c, d = config, config.width
    patch_dim, norms = c.patch**2 * c.latent_channels, 2 * (d // c.heads)

    def linear(*sizes: int) -> int:
        return sum(a * b + b for a, b in zip(sizes, sizes[1:]))

    stream = linear(d, 6 * d) + linear(d, 3 * d) + norms + linear(d, d) + linear(d, 4 * d, d)
    feeder = linear(d, 2 * d) + linear(d, 3 * d) + norms  # the text of a last joint block
    parallel = linear(d, 3 * d) + linear(d, 3 * d) + norms + linear(d, 4 * d) + linear(5 * d, d)
    joint = 2 * c.joint_depth * stream + (0 if c.parallel_depth else feeder - stream)
    ends = linear(patch_dim, d) + linear(c.text_width, d) + linear(256, d, d) + linear(c.text_width, d, d)
    return ends + joint + c.parallel_depth * parallel + linear(d, 2 * d) + linear(d, patch_dim)


def flop_count(config: DiTConfig, grid: tuple[int, int], text_tokens: int, batch: int = 1) -> int:
    """Floating-point operations of one forward in matrix products (a multiply-add is two), attention included.

    Args:
        config: the sizes.
        grid: (h, w), the grid of image tokens, see `patch_grid`.
        text_tokens: M, padding included.
        batch: B; the work is proportional to it.
    """
    c, d = config, config.width
    n, m, depth = grid[0] * grid[1], text_tokens, c.joint_depth + c.parallel_depth
    patch_dim = c.patch**2 * c.latent_channels
    once = (256 + c.text_width + 2 * d) * d + (12 * c.joint_depth + 3 * c.parallel_depth + 2) * d * d
    tokens = n * 2 * patch_dim * d + m * c.text_width * d + 12 * d * d * (n + m) * depth
    if not c.parallel_depth:  # the text of the last joint block: two knobs of six, no output, no feed-forward
        once, tokens = once - 4 * d * d, tokens - 9 * d * d * m
    return batch * (2 * (once + tokens) + 4 * (n + m) ** 2 * d * depth)
