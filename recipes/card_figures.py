"""The reading cards' figures, each computed from the engine's own parts: ``python -m recipes.card_figures [NAME …]``.

Each function draws one card's figure and gives it back; the command writes ``papers/img/NAME.png``. Same code, same picture:
seeds are fixed, nothing is measured.
"""

import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from torch import Tensor

from course.figures import COLORS, plt, png
from diffusion_engine.attention import Rope, SelfAttention, axial_rope, grid_positions
from diffusion_engine.guidance import guide, guided_velocity
from diffusion_engine.model_folder import load_model
from diffusion_engine.pipeline import denoise, initial_noise
from diffusion_engine.rectified_flow import integrate, interpolate, straightness
from diffusion_engine.scheduler import dynamic_mu, make_schedule, shift_sigmas
from diffusion_engine.text_conditioning import encode_prompt
from diffusion_engine.transformer_block import DiTBlock, modulate
from diffusion_engine.video import VideoVAE, VideoVAEConfig, attend_along, latent_frames

FOLDER = Path(__file__).parents[1] / "papers" / "img"
MODES, WIDTH, SHARES = torch.tensor([-1.3, 1.1]), 0.12, torch.tensor([0.5, 0.5])


def titled(fig: Figure, message: str) -> Figure:
    """The message over all panels, at the left."""
    fig.suptitle(message, fontsize=11, x=0.01, ha="left")
    return fig


# --- 01 rectified flow -----------------------------------------------------------------------------------------------


def mixture_velocity(x: Tensor, sigma: float) -> Tensor:
    """E[ε − x0 | x_σ = x] for x0 from a mixture of two narrow Gaussians on a line, ε standard normal; (B, 1) → (B, 1)."""
    s = max(sigma, 1e-4)
    variance = (1 - s) ** 2 * WIDTH**2 + s**2
    away = x - (1 - s) * MODES  # (B, 2)
    weight = (SHARES.log() - away.square() / (2 * variance)).softmax(-1)
    data = MODES + (1 - s) * WIDTH**2 / variance * away
    noise = s / variance * away
    return (weight * (noise - data)).sum(-1, keepdim=True)


def paired_velocity(noise: Tensor, data: Tensor) -> Callable[[Tensor, float], Tensor]:
    """The flow of pairs on a line whose roads do not cross: each place is passed by one pair."""
    order = noise[:, 0].argsort()
    noise, data = noise[order], data[order]

    def velocity(x: Tensor, sigma: float) -> Tensor:
        places, slopes = interpolate(data, noise, sigma)[:, 0].numpy(), (noise - data)[:, 0].numpy()
        return torch.from_numpy(np.interp(x[:, 0].numpy(), places, slopes)).float()[:, None]

    return velocity


def rectified_flow() -> Figure:
    """Crossing roads, the flow that mends them, and the flow of the new pairs."""
    sigmas, draw = torch.linspace(1, 0, 101).tolist(), torch.Generator().manual_seed(3)
    many = torch.linspace(-2.6, 2.6, 801)[:, None]
    landed = integrate(mixture_velocity, many, sigmas)
    noise = torch.linspace(-1.9, 1.9, 14)[:, None]
    chosen = MODES[torch.randint(2, (14,), generator=draw)][:, None] + WIDTH * torch.randn(14, 1, generator=draw)
    roads = torch.stack([interpolate(chosen, noise, s) for s in sigmas])
    first = integrate(mixture_velocity, noise, sigmas, return_path=True)
    second = integrate(paired_velocity(many, landed), noise, sigmas, return_path=True)
    fig, axes = plt.subplots(1, 3, figsize=(6.4, 2.6), sharey=True)
    panels = [(roads, "random pairs"), (first, "flow 1"), (second, "flow 2")]
    for ax, (path, name) in zip(axes, panels):
        for way in path[..., 0].T:
            ax.plot(sigmas, way, color=COLORS[0] if way[-1] < 0 else COLORS[1], lw=1)
        bend = f": S = {straightness(path).mean():.2f}" if path is not roads else ""
        ax.set(title=name + bend, xlabel="σ", xlim=(1, 0), xticks=[1, 0.5, 0])
    axes[0].set_ylabel("x")
    return titled(fig, "Pairing anew straightens the ways: then one step is enough")


# --- 02 flow matching ------------------------------------------------------------------------------------------------

DATA = torch.tensor([[1.6, 0.9], [1.9, -0.7], [-0.2, -1.7], [-1.8, 0.6]])


def point_weights(x: Tensor, sigma: float) -> Tensor:
    """P(x0 = k-th data point | x_σ = x), (B, 2) → (B, K)."""
    apart = x[:, None] - (1 - sigma) * DATA
    return (-apart.square().sum(-1) / (2 * sigma**2)).softmax(-1)


def points_velocity(x: Tensor, sigma: float) -> Tensor:
    """E[(x − x0) / σ | x_σ = x]: the mean of the conditional velocities."""
    s = max(sigma, 1e-3)
    return (x - point_weights(x, s) @ DATA) / s


def flow_matching() -> Figure:
    """Conditional paths on the left; at one place, conditional velocities and their mean on the right."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(6.4, 3))
    noise = torch.randn(7, 2, generator=torch.Generator().manual_seed(8)) * 0.9
    levels = torch.linspace(1, 0, 41)
    for eps in noise:
        straight = torch.stack([interpolate(DATA[:1], eps[None], s.item())[0] for s in levels])
        angle = levels[:, None] * math.pi / 2
        bent = angle.cos() * DATA[0] + angle.sin() * eps
        left.plot(*straight.T, color=COLORS[0], lw=1.4)
        left.plot(*bent.T, color=COLORS[1], lw=1.1, ls="--")
    left.plot(*DATA[0], "*", ms=13, color="black")
    left.plot([], [], color=COLORS[0], label="straight (OT)")
    left.plot([], [], color=COLORS[1], ls="--", label="variance-preserving")
    left.legend(loc="lower left", fontsize=8)
    left.set(title="given one data point")
    starts = torch.randn(26, 2, generator=torch.Generator().manual_seed(5))
    path = integrate(points_velocity, starts, torch.linspace(1, 0, 61).tolist(), return_path=True)
    for way in path.unbind(1):
        right.plot(*way.T, color="#cbd5e0", lw=0.8)
    here, sigma = torch.tensor([[0.25, -0.1]]), 0.6
    weights, each = point_weights(here, sigma)[0], (DATA - here) / sigma
    for weight, arrow in zip(weights, each * 0.3):
        right.annotate("", (here[0] + arrow).tolist(), here[0].tolist(), arrowprops=arrow_style(COLORS[0], 5 * weight))
        spot = (here[0] + arrow * 1.3).tolist()
        right.text(*spot, f"{weight:.2f}", ha="center", va="center", fontsize=8, color=COLORS[0])
    mean = -points_velocity(here, sigma)[0] * 0.3
    right.annotate("", (here[0] + mean).tolist(), here[0].tolist(), arrowprops=arrow_style(COLORS[3], 2.4))
    right.plot(*DATA.T, "*", ms=11, color="black")
    right.set(title=f"σ = {sigma}: four velocities, one mean")
    for ax in (left, right):
        ax.title.set_fontsize(9)
        ax.set(xlim=(-2.5, 2.5), ylim=(-2.2, 2.4), xticks=[], yticks=[])
    return titled(fig, "Learn each pair's velocity, and you have learnt their mean")


def arrow_style(color: str, width: float) -> dict:
    return dict(arrowstyle="-|>", color=color, lw=max(0.7, float(width)), shrinkA=0, shrinkB=0, mutation_scale=11)


# --- 03 DiT ----------------------------------------------------------------------------------------------------------

DIT_SIZES = {"S": (12, 384), "B": (12, 768), "L": (24, 1024), "XL": (28, 1152)}


def dit_cost(depth: int, width: int, patch: int) -> tuple[float, float]:
    """Millions of weights in blocks, and Gflops (multiply-adds, as the paper counts) for a latent of 32×32."""
    tokens = (32 // patch) ** 2
    products = depth * (6 * width**2 + tokens * 12 * width**2 + 2 * tokens**2 * width)
    return depth * 18 * width**2 / 1e6, products / 1e9


@torch.no_grad()
def dit() -> Figure:
    """Closed and open gates through a stack at birth; weights against work for the paper's twelve models."""
    torch.manual_seed(0)
    fig, (left, right) = plt.subplots(1, 2, figsize=(6.4, 2.8))
    cond = torch.randn(1, 96)
    for gate, label in ((0.0, "gates 0: AdaLN-Zero"), (1.0, "gates 1: plain AdaLN")):
        x = start = torch.randn(1, 32, 96)
        change = [0.0]
        for _ in range(28):
            block = DiTBlock(96, 6)
            block.modulation.linear.bias.view(6, 96)[[2, 5]] = gate
            x = block(x, cond)
            change.append(((x - start).norm() / start.norm()).item())
        left.plot(change, label=label)
    left.set(title="what 28 new blocks do", xlabel="block", ylabel="relative change of x")
    left.legend(fontsize=8)
    for (name, (depth, width)), color in zip(DIT_SIZES.items(), COLORS):
        weights, work = zip(*(dit_cost(depth, width, patch) for patch in (8, 4, 2)))
        right.plot(weights, work, "o-", color=color, ms=4)
        right.annotate(
            f"{name}/2", (weights[-1], work[-1]), (0, 5), textcoords="offset points", ha="center", fontsize=8
        )
    right.set(xscale="log", yscale="log", xlabel="million weights in blocks", ylabel="Gflops", ylim=(0.2, 320))
    right.set_xticks([30, 100, 300, 600], ["30", "100", "300", "600"])
    right.minorticks_off()
    right.set(title="patch 8, 4, 2: equal weights")
    return titled(fig, "Born as the identity; and work, not weights, is what a small patch buys")


# --- 04 guidance -----------------------------------------------------------------------------------------------------


def cfg() -> Figure:
    """p(x) · p(c|x)^w of three Gaussian classes on a grid, each normalised, for growing w."""
    angle = torch.tensor([90.0, 210.0, 330.0]).deg2rad()
    centres = 0.9 * torch.stack([angle.cos(), angle.sin()], dim=-1)
    axis = torch.linspace(-4.2, 4.2, 150)
    place = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), dim=-1)  # (H, W, 2)
    log_cond = -(place[..., None, :] - centres).square().sum(-1) / 2  # (H, W, 3), up to a constant
    log_uncond = log_cond.logsumexp(-1, keepdim=True)
    fig, axes = plt.subplots(1, 4, figsize=(6.4, 2.1))
    inks = torch.tensor([[0.17, 0.42, 0.69], [0.87, 0.42, 0.13], [0.18, 0.52, 0.35]])
    for ax, w in zip(axes, (1.0, 2.0, 4.0, 8.0)):
        density = guide(log_uncond.expand_as(log_cond), log_cond, w).flatten(0, 1).softmax(0).reshape(log_cond.shape)
        ink = (density / density.amax(dim=(0, 1)))[..., None]  # (H, W, 3 classes, 1)
        ax.imshow((1 - ink * (1 - inks)).prod(dim=2).clamp(0, 1), origin="lower", extent=(-4.2, 4.2, -4.2, 4.2))
        ax.plot(*centres.T, "+", color="black", ms=6)
        ax.set(title=f"w = {w:g}", xticks=[], yticks=[])
        ax.spines[:].set_visible(False)
    return titled(fig, "Guidance pushes each class away from the others, past its own centre (+)")


# --- 05 SD3 ----------------------------------------------------------------------------------------------------------


def heart(side: int) -> Tensor:
    """A heart of −1 and 1, (side, side)."""
    axis = torch.linspace(-1.35, 1.35, side)
    y, x = torch.meshgrid(-axis + 0.1, axis, indexing="ij")
    return torch.where((x**2 + y**2 - 0.75) ** 3 < x**2 * y**3 * 1.6, 1.0, -1.0)


def sd3() -> Figure:
    """One noise level at three resolutions, then the level that each needs."""
    fig, axes = plt.subplots(2, 3, figsize=(6.4, 4.3))
    base, draw = 0.6, torch.Generator().manual_seed(1)
    for column, side in enumerate((16, 64, 256)):
        picture, noise = heart(side), torch.randn(side, side, generator=draw)
        for row, sigma in enumerate((base, float(shift_sigmas(base, side / 16)))):
            seen = interpolate(picture[None], noise[None], sigma)
            small = F.adaptive_avg_pool2d(seen[None], 16)[0, 0] / (1 - sigma)
            axes[row, column].imshow(small, cmap="RdBu_r", vmin=-2.2, vmax=2.2)
            axes[row, column].set(xticks=[], yticks=[])
            axes[row, column].spines[:].set_visible(False)
            axes[row, column].set_title(f"{side}×{side}, σ = {sigma:.3f}", fontsize=9)
    axes[0, 0].set_ylabel("the same σ")
    axes[1, 0].set_ylabel("σ shifted, k = side / 16")
    return titled(fig, "Seen at 16×16: a larger picture hides less; the shift makes them equal")


# --- 06 FLUX.1 -------------------------------------------------------------------------------------------------------


def likeness(rope: Rope, query: int) -> Tensor:
    """q·k / |q||k| of equal vectors turned to their places, (N,): the mean of cos(angle_query − angle_n)."""
    return (rope.cos[query] * rope.cos + rope.sin[query] * rope.sin).mean(-1)


def flux() -> Figure:
    """How like its own place every token of a 64×64 grid looks to one query; and the schedule by picture size."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(6.4, 2.8), width_ratios=(1, 1.25))
    places = grid_positions(1, 64, 64)
    seen = likeness(axial_rope(places, (16, 56, 56)), 20 * 64 + 40).reshape(64, 64)
    shown = left.imshow(seen, cmap="viridis", vmin=0.4, vmax=1)
    fig.colorbar(shown, ax=left, shrink=0.8)
    left.set(title="RoPE 16/56/56: likeness to ●", xticks=[0, 63], yticks=[0, 63])
    left.plot(40, 20, "o", color="white", ms=4)
    for side, color in zip((256, 512, 1024, 2048), COLORS):
        mu = dynamic_mu((side // 16) ** 2)
        right.plot(make_schedule(28, mu=mu).sigmas, color=color, label=f"{side}²: k = {math.exp(mu):.1f}")
    right.set(title="28 steps by picture size", xlabel="step", ylabel="σ")
    right.legend(fontsize=8)
    return titled(fig, "A token knows row and column; a large picture lingers in the noise")


# --- 07 Sana ---------------------------------------------------------------------------------------------------------


def sana() -> Figure:
    """Work of attention's products against picture size; weights of one query, softmax and linear."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(6.4, 2.8))
    sides, width, head = np.array([512, 1024, 2048, 4096]), 2240, 32
    for factor, name, color in ((16, "16 pixels a token", COLORS[0]), (32, "32 pixels a token", COLORS[1])):
        n = (sides / factor) ** 2
        left.plot(sides, 4 * n**2 * width / 1e9, "o-", color=color, ms=4, label=f"softmax, {name}")
        left.plot(sides, 4 * n * width * head / 1e9, "o--", color=color, ms=4, label=f"linear, {name}")
    left.set(xscale="log", yscale="log", xlabel="side of the picture", ylabel="GFLOP a layer", xticks=sides)
    left.set_xticks(sides, [str(side) for side in sides])
    left.minorticks_off()
    left.set_ylim(0.04, 1e8)
    left.legend(fontsize=7)
    torch.manual_seed(2)
    q, k = torch.randn(1, head), torch.randn(64, head)
    k[9] = 1.4 * q[0]  # one key that fits
    soft = (q @ k.T / head**0.5).softmax(-1)[0]
    line = (q.relu() @ k.relu().T)[0]
    right.plot(soft.sort(descending=True).values, label="softmax")
    right.plot((line / line.sum()).sort(descending=True).values, label="ReLU, linear")
    right.set(title="64 keys, one of them fits", xlabel="key, by weight", ylabel="weight", ylim=(0, None))
    right.legend(fontsize=8)
    return titled(fig, "Linear in tokens, but it cannot single one out")


# --- 08 CogVideoX ----------------------------------------------------------------------------------------------------


def cogvideox() -> Figure:
    """Which tokens one token's output depends on, by its gradient: all, its frame, its place."""
    torch.manual_seed(0)
    grid, attn = (5, 7, 7), SelfAttention(24, 2)
    rope = axial_rope(grid_positions(*grid), (4, 4, 4))
    x = torch.randn(1, math.prod(grid), 24)
    query = (2 * 7 + 3) * 7 + 2  # frame 2, row 3, column 2
    fig, axes = plt.subplots(3, 5, figsize=(6.4, 4.1))
    for row, (axes_name, label) in zip(axes, (("full", "3-D full"), ("space", "space"), ("time", "time"))):
        tokens = x.clone().requires_grad_()
        attend_along(axes_name, attn, tokens, grid, rope)[0, query].square().sum().backward()
        felt = tokens.grad[0].norm(dim=-1).reshape(grid)
        for frame, ax in enumerate(row):
            ax.imshow(
                (felt[frame] > 0).float() * (0.45 + 0.55 * felt[frame] / felt.max()), cmap="Blues", vmin=0, vmax=1
            )
            ax.set(xticks=[], yticks=[])
            if row is axes[0]:
                ax.set_title(f"frame {frame}", fontsize=9)
        row[2].plot(2, 3, "s", mec=COLORS[3], mfc="none", ms=9, mew=1.6)
        row[0].set_ylabel(label)
    return titled(fig, "Only full attention looks straight at what has moved elsewhere")


# --- 09 Wan ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def wan() -> Figure:
    """Change one frame of a clip, or one latent, and see what else changes: never the past."""
    torch.manual_seed(0)
    vae = VideoVAE(VideoVAEConfig(latent_channels=4, width=8, narrow=8, depth=1)).eval()
    for weight in vae.parameters():  # a new block is the identity: give every layer a voice
        weight.copy_(0.25 * torch.randn(weight.shape))
    clip = torch.randn(1, 3, 17, 8, 8)
    latents = vae.encode(clip)
    frames = vae.decode(latents)
    into = torch.zeros(latents.shape[2], 17)
    for j in range(17):
        other = clip.clone()
        other[:, :, j] += 1
        into[:, j] = (vae.encode(other) - latents).abs().amax(dim=(0, 1, 3, 4))
    out = torch.zeros(17, latents.shape[2])
    for j in range(latents.shape[2]):
        other = latents.clone()
        other[:, :, j] += 1
        out[:, j] = (vae.decode(other) - frames).abs().amax(dim=(0, 1, 3, 4))
    fig, (left, right) = plt.subplots(1, 2, figsize=(6.4, 2.7), width_ratios=(2, 1))
    cmap = ListedColormap(["#edf2f7", COLORS[0]])
    left.pcolormesh(into > 1e-6, cmap=cmap, edgecolors="white", lw=1)
    left.set(title="encoder", xlabel="frame that was changed", ylabel="latent that moved")
    right.pcolormesh(out > 1e-6, cmap=cmap, edgecolors="white", lw=1)
    right.set(title="decoder", xlabel="latent changed", ylabel="frame that moved")
    left.set(xticks=np.arange(0, 17, 4) + 0.5, xticklabels=np.arange(0, 17, 4))
    left.set(yticks=np.arange(5) + 0.5, yticklabels=np.arange(5))
    right.set(yticks=np.arange(0, 17, 4) + 0.5, yticklabels=np.arange(0, 17, 4))
    right.set(xticks=np.arange(5) + 0.5, xticklabels=np.arange(5))
    for ax in (left, right):
        ax.invert_yaxis()
    return titled(fig, "17 frames, 5 latents: nothing ever reaches back")


# --- 10 HunyuanVideo -------------------------------------------------------------------------------------------------


def hunyuan_video() -> Figure:
    """Likeness against distance for two scales of RoPE; where the weights of two hybrid models lie."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(6.4, 2.8))
    steps = torch.arange(0, 81)[:, None]
    for theta, color in ((10_000.0, COLORS[0]), (256.0, COLORS[1])):
        left.plot(likeness(axial_rope(steps, (56,), theta), 0), color=color, label=f"θ = {theta:,.0f}")
    left.axvline(80, color="#718096", lw=0.8, ls=":")
    left.set(title="one space axis, 56 components", xlabel="patches apart (80 = 1280 pixels)", ylabel="likeness")
    left.set(ylim=(-0.35, 1.02))
    left.legend(fontsize=8)
    d2 = 3072**2 / 1e9
    parts = {"double-stream": 24, "their knobs": 12, "single-stream": 12, "their knobs ": 3}
    for name, (double, single) in {"FLUX.1": (19, 38), "HunyuanVideo": (20, 40)}.items():
        start = 0.0
        for (part, each), color in zip(parts.items(), (COLORS[0], "#a3bfdf", COLORS[1], "#f2c49b")):
            size = each * d2 * (double if "double" in part or part == "their knobs" else single)
            right.barh(name, size, left=start, color=color, label=part.strip() if name == "FLUX.1" else None)
            right.text(start + size / 2, name, f"{size:.1f}", ha="center", va="center", fontsize=8)
            start += size
    right.set(title="billions of weights in blocks", xlabel="", ylim=(-0.6, 2.6))
    right.legend(fontsize=7, ncol=2, loc="upper left")
    return titled(fig, "FLUX's body, twenty and forty; a shorter ruler for its turns")


# --- 11 LTX-Video ----------------------------------------------------------------------------------------------------

LATTICES = {  # who cuts so → (pixels a token is wide, frames a latent spans)
    "every frame alone": (16, 1),
    "CogVideoX, Wan2.1,\nHunyuanVideo": (16, 4),
    "LTX-Video": (32, 8),
}


def clip_tokens(frames: int, height: int, width: int, pixels: int, factor: int) -> int:
    """Tokens of a clip: latent frames × rows × columns."""
    return latent_frames(frames, factor) * (height // pixels) * (width // pixels)


def ltx_video() -> Figure:
    """Tokens of 121 frames of 768×512, and the work of attention's products, relative to LTX-Video's."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(6.4, 2.2), sharey=True)
    tokens = {name: clip_tokens(121, 512, 768, *lattice) for name, lattice in LATTICES.items()}
    for (name, count), color in zip(tokens.items(), (COLORS[5], COLORS[0], COLORS[1])):
        work = (count / tokens["LTX-Video"]) ** 2
        left.barh(name, count, color=color)
        left.text(count, name, f" {count:,}", va="center", fontsize=8)
        right.barh(name, work, color=color)
        right.text(work, name, f" {work:,.0f}×", va="center", fontsize=8)
    left.set(title="tokens", xscale="log", xlim=(1e3, 2e6))
    right.set(title="work of attention, as tokens²", xscale="log", xlim=(0.5, 8e3))
    left.invert_yaxis()
    return titled(fig, "121 frames of 768×512: an eighth of the tokens, a sixtieth of the work")


# --- 12 step caching -------------------------------------------------------------------------------------------------


@torch.no_grad()
def step_caching() -> Figure:
    """On the shipped model: how much each step's output differs from the last, and what two cheap signs say of it."""
    model = load_model()
    prompt = encode_prompt(model.text_encoder, model.tokenizer, "red apple")
    found: dict[str, list[Tensor]] = {"output": [], "first block": [], "modulated input": []}

    def network(x: Tensor, t: Tensor, prompt) -> Tensor:
        seen = []

        def run(block, tokens, *rest):
            out = block(tokens, *rest)
            if not seen:
                seen.append(modulate(tokens, block.image_modulation(rest[1])[0]))
                seen.append(out[0] - tokens)
            return out

        v = model.dit(x, t, *prompt, run_block=run)
        for name, value in zip(found, (v, seen[1], seen[0])):
            found[name].append(value)
        return v

    denoise(guided_velocity(network, prompt, None, 1.0), initial_noise([0], (4, 16, 16)), make_schedule(28))
    fig, ax = plt.subplots(figsize=(6.4, 2.8))
    styles = {"output": ("-", 2.2), "first block": ("--", 1.5), "modulated input": (":", 1.8)}
    labels = {"output": "velocity (known too late)", "first block": "first block's change (FBCache)"}
    for (name, values), color in zip(found.items(), (COLORS[5], COLORS[0], COLORS[1])):
        change = [((b - a).abs().mean() / a.abs().mean()).item() for a, b in zip(values, values[1:])]
        dash, width = styles[name]
        ax.plot(range(1, 28), change, dash, lw=width, color=color, label=labels.get(name, "modulated input (TeaCache)"))
    ax.set(xlabel="step", ylabel="relative change", yscale="log")
    ax.set_yticks([0.02, 0.05, 0.1], ["0.02", "0.05", "0.1"])
    ax.minorticks_off()
    ax.set_title("Two cheap signs: right at the ends, too anxious in the middle")
    ax.legend(fontsize=8, loc="lower right")
    return fig


FIGURES: dict[str, Callable[[], Figure]] = {
    "01_rectified_flow": rectified_flow,
    "02_flow_matching": flow_matching,
    "03_dit": dit,
    "04_cfg": cfg,
    "05_sd3": sd3,
    "06_flux": flux,
    "07_sana": sana,
    "08_cogvideox": cogvideox,
    "09_wan": wan,
    "10_hunyuan_video": hunyuan_video,
    "11_ltx_video": ltx_video,
    "12_step_caching": step_caching,
}


def picture(name: str) -> bytes:
    """One card's figure as PNG.

    Raises:
        ValueError: no card of that name.
    """
    if name not in FIGURES:
        raise ValueError(f"no figure {name!r}; try one of {', '.join(FIGURES)}")
    fig = FIGURES[name]()
    data = png(fig)
    plt.close(fig)
    return data


def main(names: list[str]) -> None:
    """Write the figures of these cards, or of all."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in names or FIGURES:
        path = FOLDER / f"{name}.png"
        path.write_bytes(picture(name))
        print(f"{path.relative_to(FOLDER.parents[1])}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
