# Generated from notebooks/source/09_vae.py by `course export`.
# Do not edit: change the chapter and export again.

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ChannelNorm(nn.Module):
    """RMS norm over the channels of each position alone: y = w · x / sqrt(mean_c x² + eps), the mean in fp32.

    No mean over space is taken, so a tile is normalised exactly as it is inside the whole picture.

    Args:
        channels: C of the input (B, C, H, W).
        eps: keeps an all-zero position finite.

    Source: Wan2.1's VAE (``WanRMS_norm``).
    """

    def __init__(self, channels: int, eps: float = 1e-6):
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:  # (B, C, H, W)
        scale = torch.rsqrt(x.float().square().mean(dim=1, keepdim=True) + self.eps)  # (B, 1, H, W)
        return x * scale.to(x.dtype) * self.weight.reshape(-1, 1, 1)


class ResBlock(nn.Module):
    """x + conv1×1(SiLU(conv3×3(norm(x)))): the 3×3 looks at neighbours, the 1×1 mixes channels; (B, C, H, W) → same.

    The 1×1 is zero at the start, so the block begins as the identity.
    """

    def __init__(self, channels: int):
        super().__init__()
        self.norm, self.conv1 = ChannelNorm(channels), nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 1)
        nn.init.zeros_(self.conv2.weight)
        nn.init.zeros_(self.conv2.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.silu(self.conv1(self.norm(x))))


@dataclass(frozen=True)
class VAEConfig:
    """Sizes of the VAE: pictures (B, 3, H, W) in −1…1 to latents (B, latent_channels, H/4, W/4).

    Raises:
        ValueError: ``factor`` is not 4 (the decoder doubles twice), or ``width`` is no even number.
    """

    latent_channels: int = 4
    width: int = 128
    encoder_depth: int = 2
    decoder_depth: int = 4
    factor: int = 4  # two pixel shuffles of 2

    def __post_init__(self):
        if self.factor != 4 or self.width < 2 or self.width % 2:
            fault = f"factor {self.factor} with width {self.width} cannot be built: the decoder doubles twice"
            raise ValueError(
                f"{fault}, and halves the width once; try factor 4 and width {max(self.width // 2, 1) * 2}"
            )


def check_pictures(images: Tensor, factor: int) -> None:
    """Refuse what is no batch of pictures (B, 3, H, W) with sides that are multiples of ``factor``."""
    if images.ndim != 4 or images.shape[1] != 3:
        raise ValueError(f"pictures have shape {tuple(images.shape)}; expected (B, 3, H, W)")
    for name, side in zip(("height", "width"), images.shape[-2:]):
        if side % factor or side == 0:
            near = max(side // factor, 1) * factor
            raise ValueError(f"{name} {side} is not a positive multiple of {factor}; try {near} or {near + factor}")


class Encoder(nn.Sequential):
    """Pictures (B, 3, H, W) → (B, 2 · latent_channels, H/4, W/4): mean, then log-variance."""

    def __init__(self, config: VAEConfig):
        width, f = config.width, config.factor
        super().__init__(
            nn.PixelUnshuffle(f),  # (B, 3·f², H/f, W/f)
            nn.Conv2d(3 * f * f, width, 3, padding=1),
            *[ResBlock(width) for _ in range(config.encoder_depth)],
            ChannelNorm(width),
            nn.Conv2d(width, 2 * config.latent_channels, 3, padding=1),
        )


class Decoder(nn.Sequential):
    """Unscaled latents (B, latent_channels, H/4, W/4) → pictures (B, 3, H, W)."""

    def __init__(self, config: VAEConfig):
        width = config.width
        super().__init__(
            nn.Conv2d(config.latent_channels, width, 3, padding=1),
            *[ResBlock(width) for _ in range(config.decoder_depth)],
            nn.Conv2d(width, 2 * width, 1),
            nn.PixelShuffle(2),  # (B, width/2, H/2, W/2)
            *[ResBlock(width // 2) for _ in range(2)],
            ChannelNorm(width // 2),
            nn.Conv2d(width // 2, 12, 3, padding=1),
            nn.PixelShuffle(2),  # (B, 3, H, W)
        )


class Gaussian(NamedTuple):
    """The encoder's answer: a diagonal Gaussian, mean and log-variance of the latents' shape (B, C, H/4, W/4)."""

    mean: Tensor
    logvar: Tensor

    def sample(self, noise: Tensor) -> Tensor:
        """mean + exp(logvar / 2) · noise, with the caller's standard normal noise."""
        return self.mean + (0.5 * self.logvar).exp() * noise

    def kl(self) -> Tensor:
        """KL(N(mean, exp(logvar)) ‖ N(0, 1)) = (mean² + exp(logvar) − 1 − logvar) / 2, mean over all elements."""
        return 0.5 * (self.mean.square() + self.logvar.exp() - 1 - self.logvar).mean()


class VAE(nn.Module):
    """Variational autoencoder. ``encode`` and ``decode`` speak *scaled* latents, unit variance per channel:

    z = (mean − shift) / scale. SD3 and FLUX write the same as (mean − shift_factor) · scaling_factor.

    Raises:
        ValueError: pictures without 3 channels or with sides that are no multiple of 4; latents of other channels.
    """

    def __init__(self, config: VAEConfig = VAEConfig()):
        super().__init__()
        self.config = config
        self.encoder, self.decoder = Encoder(config), Decoder(config)
        self.register_buffer("shift", torch.zeros(config.latent_channels))
        self.register_buffer("scale", torch.ones(config.latent_channels))

    def posterior(self, images: Tensor) -> Gaussian:
        """Pictures (B, 3, H, W) in −1…1 → the unscaled Gaussian of their latents."""
        check_pictures(images, self.config.factor)
        mean, logvar = self.encoder(images).chunk(2, dim=1)
        return Gaussian(mean, logvar.clamp(-30, 20))

    def encode(self, images: Tensor) -> Tensor:
        """Pictures (B, 3, H, W) in −1…1 → scaled latents (B, C, H/4, W/4): the mean, no sampling."""
        mean = self.posterior(images).mean
        return (mean - self.shift.reshape(-1, 1, 1)) / self.scale.reshape(-1, 1, 1)

    def decode(self, latents: Tensor) -> Tensor:
        """Scaled latents (B, C, h, w) → pictures (B, 3, 4h, 4w), about −1…1 (clamp before showing)."""
        channels = self.config.latent_channels
        if latents.ndim != 4 or latents.shape[1] != channels:
            raise ValueError(f"latents have shape {tuple(latents.shape)}; expected (B, {channels}, h, w)")
        return self.decoder(latents * self.scale.reshape(-1, 1, 1) + self.shift.reshape(-1, 1, 1))


def vae_loss(vae: VAE, images: Tensor, noise: Tensor, kl_weight: float = 1e-3) -> Tensor:
    """L1 + 2 · MSE + ¼ · L1 of the differences between neighbours (down + across) + kl_weight · KL; every term a mean.

    Args:
        images: (B, 3, H, W) in −1…1.
        noise: standard normal, (B, C, H/4, W/4): what the latents are sampled with.
    """
    posterior = vae.posterior(images)
    error = vae.decoder(posterior.sample(noise)) - images
    lines = error.diff(dim=-2).abs().mean() + error.diff(dim=-1).abs().mean()
    return error.abs().mean() + 2 * error.square().mean() + 0.25 * lines + kl_weight * posterior.kl()


def psnr(images: Tensor, reference: Tensor) -> Tensor:
    """Peak signal-to-noise ratio of each picture, −10 log10 mean((a − b)² / 4) in dB, values in −1…1: (B, …) → (B,).

    Raises:
        ValueError: shapes differ, or whole numbers (bytes, say) in place of −1…1.
    """
    if images.shape != reference.shape:
        raise ValueError(f"images {tuple(images.shape)} and reference {tuple(reference.shape)} differ in shape")
    if not (images.is_floating_point() and reference.is_floating_point()):
        raise ValueError(f"images are {images.dtype}, {reference.dtype}; expected floats in −1…1: bytes / 127.5 − 1")
    error = ((images.clamp(-1, 1) - reference) / 2).square().flatten(1).mean(dim=1)
    return -10 * error.clamp_min(1e-10).log10()


@torch.no_grad()
def calibrate(vae: VAE, images: Tensor, batch: int = 64) -> VAE:
    """Set ``shift`` and ``scale`` to mean and standard deviation of each latent channel; return the VAE.

    Args:
        images: (N, 3, H, W) in −1…1; taken ``batch`` at a time.
    """
    latents = torch.cat([vae.posterior(part).mean for part in images.split(batch)])  # (N, C, H/4, W/4)
    vae.shift.copy_(latents.mean(dim=(0, 2, 3)))
    vae.scale.copy_(latents.std(dim=(0, 2, 3)))
    return vae


def receptive_radius(network: nn.Module) -> float:
    """How far a border's zeros reach into the output of an encoder or decoder, in latents; 6.5 for the shipped decoder.

    Σ c · (k − 1) / 2 over the convolutions in order; c is the side of a layer's cell, which pixel shuffles change.
    """
    reach, cell = 0.0, 1.0  # in positions of the input
    for layer in network.modules():
        if isinstance(layer, nn.PixelUnshuffle):
            cell *= layer.downscale_factor
        elif isinstance(layer, nn.PixelShuffle):
            cell /= layer.upscale_factor
        elif isinstance(layer, nn.Conv2d):
            reach += cell * (layer.kernel_size[0] - 1) / 2
    return reach / max(cell, 1.0)


def even_tiles(length: int, tile: int, overlap: int) -> list[tuple[int, int]]:
    """Cover 0…length by the fewest tiles of one size ≤ ``tile``, neighbours sharing at least ``overlap``.

    n = ⌈(L − o) / (t − o)⌉ tiles of ⌈(L + (n − 1) o) / n⌉, evenly spaced.

    Returns:
        (start, stop) of each tile.

    Raises:
        ValueError: ``overlap`` outside 0…tile − 1, which also refuses tiles below 1.
    """
    if not 0 <= overlap < tile:
        raise ValueError(f"overlap {overlap} is outside 0…tile − 1 for tile {tile}; try tile 32 and overlap 8")
    count = max(1, -(-(length - overlap) // (tile - overlap)))
    size = min(length, -(-(length + (count - 1) * overlap) // count))
    starts = [i * (length - size) // max(count - 1, 1) for i in range(count)]
    return [(start, start + size) for start in starts]


def tile_weight(tile: tuple[int, int], length: int, overlap: int, ramp: float, per_cell: int) -> Tensor:
    """Weight of each output position of one tile along one axis: 0 on the rim, 1 inside, a ``ramp`` between.

    Args:
        tile: (start, stop) in latents; an end that is the picture's own border keeps weight 1.
        overlap, ramp: in latents; rim = (overlap − ramp) / 2.
        per_cell: output positions of a latent: 4 pixels when decoding, 1 when encoding.
    """
    start, stop = tile
    middle = torch.arange((stop - start) * per_cell) + 0.5
    left = middle if start > 0 else torch.full_like(middle, torch.inf)
    right = middle.flip(0) if stop < length else torch.full_like(middle, torch.inf)
    distance = torch.minimum(left, right) / per_cell  # to the nearest cut edge, in latents
    return ((distance - (overlap - ramp) / 2) / ramp).clamp(0, 1) if overlap else torch.ones_like(middle)


def tiled(run: Callable[[Tensor], Tensor], x: Tensor, tile: int, overlap: int, radius: float, factor: int) -> Tensor:
    """Σ w · run(part) / Σ w over even tiles; equal to run(x) when overlap ≥ 2 · radius + 1 and no layer looks further.

    Args:
        run: pictures to latents when ``factor`` < 0, latents to pictures when ``factor`` > 0.
        x: (B, C, H, W).
        tile, overlap, radius: in latents; the largest tile, what neighbours share at least, `receptive_radius`.
        factor: pixels a latent, negative for encoding.
    """
    into, out = (1, factor) if factor > 0 else (-factor, 1)  # positions of input and output a latent
    height, width = (side // into for side in x.shape[-2:])
    ramp = max(1.0, overlap - 2 * radius)
    result, total = None, torch.zeros(height * out, width * out, device=x.device)
    for top, bottom in even_tiles(height, tile, overlap):
        for left, right in even_tiles(width, tile, overlap):
            part = run(x[..., top * into : bottom * into, left * into : right * into])
            down = tile_weight((top, bottom), height, overlap, ramp, out).to(x.device)
            weight = down[:, None] * tile_weight((left, right), width, overlap, ramp, out).to(x.device)
            if result is None:
                result = torch.zeros(*part.shape[:2], height * out, width * out, device=x.device)
            place = (..., slice(top * out, bottom * out), slice(left * out, right * out))
            result[place] += part * weight
            total[place] += weight
    return result.div_(total).to(part.dtype)


def tiled_decode(vae: VAE, latents: Tensor, tile: int = 32, overlap: int = 8) -> Tensor:
    """``vae.decode`` in tiles of at most ``tile`` latents a side; equal to it to 1e-5 when overlap ≥ 2 · radius + 1."""
    return tiled(vae.decode, latents, tile, overlap, receptive_radius(vae.decoder), vae.config.factor)


def tiled_encode(vae: VAE, images: Tensor, tile: int = 32, overlap: int = 8) -> Tensor:
    """``vae.encode`` in tiles of at most ``tile`` latents a side; equal to it to 1e-5 when overlap ≥ 2 · radius + 1."""
    check_pictures(images, vae.config.factor)
    return tiled(vae.encode, images, tile, overlap, receptive_radius(vae.encoder), -vae.config.factor)
