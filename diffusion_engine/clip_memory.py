"""Chapter 12's budget and tiles for clips: what one costs in bytes, how it is decoded in parts, and the plan that fits."""

import math

import torch
from torch import Tensor, nn

from diffusion_engine.memory_manager import RESERVE, Plan, format_bytes, latent_bytes, parse_bytes
from diffusion_engine.vae import even_tiles, tiled
from diffusion_engine.video import (
    Unfold,
    VideoDiTConfig,
    VideoVAE,
    VideoVAEConfig,
    latent_frames,
    video_decoder,
    video_grid,
)


def video_radius(decoder: nn.Module) -> float:
    """How far a border's zeros reach into a frame of a clip's decoder, in latents; 5.5 for the shipped one.

    Σ c · (k − 1) / 2 as in `receptive_radius`: k is a kernel's side in space, and c the side of a cell, which `Unfold` cuts.
    """
    reach, cell = 0.0, 1.0
    for layer in decoder.modules():
        if isinstance(layer, Unfold):
            cell /= layer.space
        elif isinstance(layer, nn.Conv3d):
            reach += cell * (layer.kernel_size[1] - 1) / 2
    return reach


def planned_video_decode(vae: VideoVAE, latents: Tensor, plan) -> Tensor:
    """``vae.decode(latents)`` in parts: latents (B, C, F, h, w) → clips (B, 3, T, H, W).

    ``vae_batch`` clips at a time, and in tiles of at most ``vae_tile`` latents a side, time's side included. Cuts in time
    are exact whatever ``vae_overlap`` is; tiles within a frame are equal to 1e-5 when it is ≥ 2 · radius + 1.

    Args:
        plan: a `Plan` or `Switches`.
    """
    tile, radius = plan.vae_tile, video_radius(vae.decoder)

    def frames(part: Tensor) -> Tensor:
        return vae.decode(part, tile).flatten(1, 2)  # (B, 3 · T, H, W), as `tiled` takes them

    def decode(part: Tensor) -> Tensor:
        if tile is None:
            return vae.decode(part)
        return tiled(frames, part, tile, plan.vae_overlap, radius, vae.config.factor).unflatten(1, (3, -1))

    clips = [decode(part) for part in latents.split(plan.vae_batch or len(latents))]
    return torch.cat(clips) if len(clips) > 1 else clips[0]


def video_activation_bytes(
    config: VideoDiTConfig, grid: tuple[int, int, int], text_tokens: int, batch: int = 1, itemsize: int = 4
) -> int:
    """Peak of what one forward of a `VideoDiT` makes, without gradients and with fused attention.

    B · s · D · (max(9 N, 6 N + 3 M, 3 N + 4 M) + M + 7) + 4 · N · Dh: queries and keys are turned, or the text answers,
    beside the text, the condition and the turns. In half precision 9 N, 7 N + 3 M, 3 N + 5 M: norms make fp32.

    Args:
        grid: (f, h, w), see `video_grid`; N = f · h · w. text_tokens: M. itemsize: s.
    """
    n, m, d = math.prod(grid), text_tokens, config.width
    stages = ((9, 0), (6, 3), (3, 4)) if itemsize == 4 else ((9, 0), (7, 3), (3, 5))
    widest = max(a * n + b * m for a, b in stages)
    return batch * itemsize * d * (widest + m + 7) + 4 * n * d // config.heads


def video_decode_bytes(
    config: VideoVAEConfig,
    sizes: tuple[int, int, int],
    batch: int = 1,
    itemsize: int = 4,
    tile: int | None = None,
    overlap: int = 8,
) -> int:
    """Peak of decoding (B, C, F, h, w) latents with `planned_video_decode`, for B clips at a time.

    Four maps of all frames of a part at half resolution, or of its latents; two frames that each causal layer remembers;
    and the frames that are done. In tiles the same for one tile, beside the whole clip, its weights and the last tile.

    Args:
        sizes: (F, h, w) in latents.
    """
    f, h, w = sizes
    area, tiles = h * w, 1
    if tile is not None:
        cuts = [even_tiles(side, tile, overlap) for side in (h, w)]
        area, tiles = math.prod(stop - start for (start, stop), *_ in cuts), math.prod(map(len, cuts))
    fine, coarse, pixels = 4 * config.narrow, config.width, 3 * config.factor**2  # numbers of a map; of a place's frame
    working, done = 0, 0  # frames done
    for start in range(0, f, tile or f):
        part = min(tile or f, f - start)
        frames = config.time_factor * part if start else config.time_factor * (part - 1) + 1
        maps = max((4 * frames + 9) * fine, (4 * part + 4) * coarse + (4 * fine if start else 0))
        working, done = max(working, maps + done * pixels), done + frames
    working = max(working, 4 * fine + 2 * done * pixels) + 2 * config.depth * coarse
    peak = batch * itemsize * area * working
    if tile is None:
        return peak
    whole, last = 4 * batch * done * pixels * h * w, batch * itemsize * area * done * pixels  # joined in fp32; one tile
    return max(peak + (whole + last if tiles > 1 else 0), whole + 2 * last) + 4 * h * w * config.factor**2


def _ways(dit, vae, sizes, text_tokens, batch, itemsize, guided, overlap) -> tuple[int, dict, dict]:
    """Peak of encoding, and of every way to denoise and to decode, from the fastest to the smallest."""
    f, h, w = sizes
    prompts = (1 + guided) * batch * (text_tokens + 1) * dit.text_width * itemsize
    encode = 3 * prompts + 14 * text_tokens * dit.text_width * itemsize  # one at a time
    latents = latent_bytes((dit.latent_channels, *sizes), batch)
    done = 4 * 3 * vae.factor**2 * h * w * batch * (vae.time_factor * (f - 1) + 1)  # all frames, fp32
    denoising = {}
    for batched in (True, False) if guided else (True,):
        sides, grid = 1 + (guided and batched), video_grid(sizes, dit.patch)
        forward = video_activation_bytes(dit, grid, text_tokens, sides * batch, itemsize)
        denoising[batched] = forward + 8 * latents + sides * prompts  # noise, the pair, velocities; prompts stacked
    shortest = max(overlap + 1, min(2 * overlap, max(h, w)))  # smaller ones would do most of the work again
    pieces = [(None, None), *((batch >> k, None) for k in range(1, batch.bit_length()))]
    pieces += [(1, tile) for tile in range(max(sizes) - 1, shortest - 1, -1)]
    decoding = {}
    for clips, tile in pieces:
        peak = video_decode_bytes(vae, sizes, clips or batch, itemsize, tile, overlap) + (done if clips else 0)
        decoding[clips, tile] = max(peak, 4 * done) + 2 * latents + prompts  # at the end they become bytes
    return encode, denoising, decoding


def plan_video_memory(
    budget: int | str,
    dit: VideoDiTConfig,
    vae: VideoVAEConfig,
    *,
    frames: int,
    height: int,
    width: int,
    text_tokens: int,
    batch: int = 1,
    weights: int = 0,
    itemsize: int = 4,
    guided: bool = True,
) -> Plan:
    """The fastest way to draw clips that fits, as `plan_memory` for pictures: every choice is exact.

    Denoising gives up batched guidance; decoding goes by fewer clips at a time, then by tiles, which first cut time alone.

    Args:
        budget: bytes, or a text for `parse_bytes`. frames, height, width: of a clip, in pixels. batch: clips.
        text_tokens: M of the longest prompt. weights: bytes that are always there. itemsize: bytes of an activation.
        guided: whether there is an unconditional side.

    Raises:
        ValueError: the budget is too small for every way (names the smallest that is enough); frames or sides that the
            model does not draw.
    """
    budget, sizes = (
        parse_bytes(budget),
        (latent_frames(frames, vae.time_factor), height // vae.factor, width // vae.factor),
    )
    with torch.device("meta"):  # no weights are made
        overlap = math.ceil(2 * video_radius(video_decoder(vae)) + 1)
    encode, denoising, decoding = _ways(dit, vae, sizes, text_tokens, batch, itemsize, guided, overlap)
    least = weights + math.ceil(RESERVE * max(encode, min(denoising.values()), min(decoding.values())))
    if budget < least:
        needs = f"{format_bytes(budget)} cannot hold {batch} × {frames} frames of {height}×{width} pixels"
        raise ValueError(f"{needs}; try {format_bytes(least)}, or fewer clips or frames")
    fits = [next(way for way in ways if RESERVE * ways[way] <= budget - weights) for ways in (denoising, decoding)]
    batched, (clips, tile) = fits
    how = f"guidance in {'one forward' if batched else 'two forwards'}" if guided else "no guidance"
    what = f"{clips or 'all'} of {batch} clips at a time"
    if tile and tile < sizes[0]:
        what += f", {tile} of {sizes[0]} frames of latents at a time"
    if tile and (cuts := [len(even_tiles(side, tile, overlap)) for side in sizes[1:]]) != [1, 1]:
        what += f", in {'×'.join(map(str, cuts))} tiles that share {overlap} latents"
    reasons = [
        f"budget {format_bytes(budget)}, of which weights {format_bytes(weights)}, and a tenth of the rest in reserve"
    ]
    for stage, said, way, ways in zip(("denoise", "decode"), (how, what), fits, (denoising, decoding)):
        fastest = next(iter(ways.values()))
        instead = "" if ways[way] == fastest else f", instead of {format_bytes(fastest)}"
        reasons.append(f"{stage} {format_bytes(ways[way])}: {said}{instead}")
    peaks = {"encode": encode, "denoise": denoising[batched], "decode": decoding[clips, tile]}
    return Plan(budget, weights, batched, None, clips, tile, overlap, peaks, tuple(reasons))
