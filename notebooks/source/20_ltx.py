# ---
# jupyter:
#   course:
#     minutes: 40
#     module: reference/ltx
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown] lang="zh"
# # 20 · LTX-Video：用秒和像素说位置
#
# 读完这一章，LTX-Video 的网络就由你的零件搭成：块是现成的，新东西只有位置。一个词元站在哪一秒、哪个像素，旋转铺满全宽，再切成头。
#
# | 你会做出 | 你需要 | 时间 | 模块 |
# | --- | --- | --- | --- |
# | 秒与像素的位置、分数坐标的旋转、LTX 的对照表与网络 | 第 04 章的旋转，第 05 章的 `DiTBlock`，第 14 章的视频潜变量，第 15 章的 `load` | 40 分钟 | `diffusion_engine/reference/ltx.py` |

# %% [markdown] lang="en" twin="216d24e1"
# # 20 · LTX-Video: positions in seconds and pixels
#
# After this chapter LTX-Video's network stands on your parts: its block is yours already, only its positions are new. A token stands at a second and a pixel, and the rotation spans the full width before heads are cut.
#
# | You build | You need | Time | Module |
# | --- | --- | --- | --- |
# | positions in seconds and pixels, rotation by fractional coordinates, LTX's key map and network | the rotation of chapter 04, `DiTBlock` of chapter 05, video latents of chapter 14, `load` of chapter 15 | 40 minutes | `diffusion_engine/reference/ltx.py` |

# %% [markdown] lang="zh"
# **先想一想**：同一只球落地，拍成两段片子，一段每秒 25 帧，一段每秒 50 帧。第 14 章的位置数的是潜变量的帧号。两段里「球落地」的帧号一样吗？网络会以为哪只球落得更慢？位置该数什么？

# %% [markdown] lang="en" twin="c21a0ff3"
# **Think first:** one falling ball is filmed twice, at 25 and at 50 frames a second. Positions in chapter 14 count frames of latents. Does the ball land at the same number in both? Which ball will the network take for the slower one? What should positions count?

# %% tags=["export"]
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffusion_engine.attention import CrossAttention, Rope, grid_positions
from diffusion_engine.dit import Conditions
from diffusion_engine.reference.checkpoint import KeyMap, require
from diffusion_engine.reference.sana import BLOCK, last_mod, work_ahead
from diffusion_engine.timestep_embedding import TimestepEmbedder
from diffusion_engine.transformer_block import DiTBlock, modulate

# %% [markdown] lang="zh"
# ## 哪里不同
#
# | | 我们的 DiT | LTX-Video 2B |
# | --- | --- | --- |
# | 潜变量 | 图像，4 通道 | 128 通道，时间缩 8 倍，边长缩 32 倍 |
# | 图块 | 4×4 | 没有，一格就是一个词元 |
# | 块 | 双流，再并行 | 单流，28 块，宽 2048 |
# | 块里的归一化 | LayerNorm | RMSNorm |
# | QK 归一化 | 每个头各自 | 所有头一起 |
# | 文字 | 联合注意力 | 交叉注意力，带掩码 |
# | 旋钮 | 每块一个线性层 | 共用一个，每块一张表 |
# | 位置 | 加上一张表 | 按秒和像素旋转 |

# %% [markdown] lang="en" twin="68a9d31b"
# ## What differs
#
# | | Our DiT | LTX-Video 2B |
# | --- | --- | --- |
# | latents | pictures, 4 channels | 128 channels, time 8 and sides 32 times smaller |
# | patches | 4×4 | none, a cell is a token |
# | blocks | joint, then parallel | single-stream, 28 of width 2048 |
# | norm in a block | LayerNorm | RMSNorm |
# | QK-norm | each head alone | all heads together |
# | text | joint attention | cross-attention with a mask |
# | knobs | a linear layer a block | one shared, a table a block |
# | positions | a table, added | turns by seconds and pixels |


# %% tags=["export"]
@dataclass(frozen=True)
class LTXConfig:
    """``config.json`` of diffusers' ``LTXVideoTransformer3DModel``: its names, its defaults.

    Raises:
        ValueError: a variant that is not built here.
    """

    in_channels: int = 128
    out_channels: int | None = 128
    patch_size: int = 1
    patch_size_t: int = 1
    num_attention_heads: int = 32
    attention_head_dim: int = 64
    cross_attention_dim: int = 2048
    num_layers: int = 28
    activation_fn: str = "gelu-approximate"
    qk_norm: str = "rms_norm_across_heads"
    norm_elementwise_affine: bool = False
    norm_eps: float = 1e-6
    caption_channels: int = 4096
    attention_bias: bool = True
    attention_out_bias: bool = True

    @property
    def width(self) -> int:
        """D = heads · head_dim."""
        return self.num_attention_heads * self.attention_head_dim

    def __post_init__(self):
        require(self, patch_size=1, patch_size_t=1, activation_fn="gelu-approximate", norm_eps=1e-6)
        require(self, qk_norm="rms_norm_across_heads", norm_elementwise_affine=False, attention_out_bias=True)
        require(self, cross_attention_dim=self.width)
        if self.attention_head_dim % 2 or self.width < 6:
            head = max(6, self.attention_head_dim + self.attention_head_dim % 2)
            raise ValueError(f"attention_head_dim {self.attention_head_dim} does not turn in pairs; try {head}")


# %% [markdown] lang="zh"
# ## 词元站在哪儿
#
# 潜变量的格子 $(f, r, c)$ 换成真实的单位：VAE 把时间缩 8 倍、边长缩 32 倍，片子每秒 $s$ 帧：
#
# $$p = \Big(\frac{8 f}{s}\ \text{秒},\ 32\, r\ \text{像素},\ 32\, c\ \text{像素}\Big)$$
#
# VAE 是因果的（第 14 章）：第 0 格只有一帧，第 $f$ 格装着第 $8f - 7$ 到 $8f$ 帧。较新的流水线因此把时间改成格子里第一帧的：$\max(8f - 7, 0) / s$。

# %% [markdown] lang="en" twin="f82aa9a4"
# ## Where a token stands
#
# A cell $(f, r, c)$ of the latents gets real units; the VAE shrinks time by 8, sides by 32, and the clip has $s$ frames a second:
#
# $$p = \Big(\frac{8 f}{s}\ \text{seconds},\ 32\, r\ \text{pixels},\ 32\, c\ \text{pixels}\Big)$$
#
# The VAE is causal (chapter 14): cell 0 holds one frame, cell $f$ frames $8f - 7$ to $8f$. Newer pipelines therefore take a cell's first frame: $\max(8f - 7, 0) / s$.


# %% tags=["export"]
def ltx_positions(
    grid: tuple[int, int, int], frame_rate: float = 25.0, compression: tuple[int, int] = (8, 32), causal: bool = False
) -> Tensor:
    """Positions (f · h · w, 3), fp32, of every token: (8 · f / frame_rate seconds, 32 · row, 32 · column pixels).

    Args:
        grid: (f, h, w) of the latents. frame_rate: frames a second of the clip.
        compression: of the VAE, (time, space).
        causal: time of the first frame that a latent frame holds, max(8 · f − 7, 0) / frame_rate, as LTX's newer
            pipelines want it.

    Raises:
        ValueError: a grid without an axis of time, or a ``frame_rate`` that is no positive number.

    Source: diffusers ``pipeline_ltx.py`` (``rope_interpolation_scale``), ``pipeline_ltx_condition.py`` (causal).
    """
    if len(grid) != 3:
        raise ValueError(f"grid {tuple(grid)} is not (f, h, w); latents are (B, C, F, H, W), with F = 1 for a picture")
    if not 0 < frame_rate < math.inf:
        raise ValueError(f"frame_rate {frame_rate} is no positive number of frames a second; try 25")
    time, space = compression
    frame, row, column = grid_positions(*grid).float().unbind(-1)
    start = frame * time
    if causal:
        start = (start + 1 - time).clamp(min=0)
    return torch.stack([start * (1 / frame_rate), row * space, column * space], dim=-1)


# %% tags=["check"]
from diffusion_engine.video import latent_frames

slow, fast = (ltx_positions((latent_frames(frames, 8), 2, 3), s) for frames, s in ((17, 25), (33, 50)))
assert torch.equal(fast.unflatten(0, (5, 6))[::2], slow.unflatten(0, (3, 6)))  # one clock at both frame rates
assert torch.allclose(slow[-1], torch.tensor([16 / 25, 32.0, 64.0]))  # the last token: frame 16, row 1, column 2
held = torch.arange(17).split([1, 8, 8])  # which frames each latent frame holds
starts = 25 * ltx_positions((3, 2, 3), 25, causal=True)[::6, 0]
assert torch.allclose(starts, torch.stack([frames[0] for frames in held]).float())  # causal: the first frame held
ends = 25 * slow[::6, 0]
assert torch.allclose(ends, torch.stack([frames[-1] for frames in held]).float())  # plain: the last one

# %% tags=["hide"]
import matplotlib.pyplot as plt

from course.figures import COLORS, show

fig, ax = plt.subplots(figsize=(6.6, 2.2))
for y, frames, s in ((1, 17, 25), (0, 33, 50)):
    cells = latent_frames(frames, 8)
    for f in range(cells):
        first, last = max(8 * f - 7, 0), 8 * f
        bar = dict(height=0.34, color=COLORS[0], alpha=0.25 + 0.25 * (f % 2), edgecolor="white")
        ax.barh(y, (last - first + 1) / s, left=(first - 0.5) / s, **bar)
    for causal, mark, color in ((False, "o", COLORS[3]), (True, "^", COLORS[1])):
        seconds = ltx_positions((cells, 1, 1), s, causal=causal)[:, 0]
        label = ("position, plain", "position, causal")[causal] if y else None
        ax.plot(seconds, torch.full_like(seconds, y + (0.3, -0.32)[causal]), mark, color=color, label=label)
ax.set(yticks=[1, 0], yticklabels=["17 frames\nat 25 a second", "33 frames\nat 50 a second"], ylim=(-0.6, 1.6))
ax.set(xlabel="seconds", title="Latent frames on a clock: twice the frames, the same seconds")
ax.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
show(
    fig,
    alt="Two bars over 0.65 seconds, cut into 3 and 5 latent frames. Plain positions mark the last frame of each, causal ones the first.",
)

# %% [markdown] lang="zh"
# ## 从位置到角度
#
# 位置除以一个大范围（20 秒、2048 像素），成为分数 $g \in [0, 1]$；正中间的角度是零。三根轴共用 $n = \lfloor D / 6 \rfloor$ 个频率，最慢的从头到尾只转半圈，最快的再快一万倍：
#
# $$\theta_{i, a} = \omega_i\, (2 g_a - 1), \qquad \omega_i = \frac{\pi}{2} \cdot 10^{4\, i / (n - 1)}$$
#
# 先写最直白的：一个词元，一个频率接一个频率，每个频率里依次是时间、行、列。

# %% [markdown] lang="en" twin="14f50d27"
# ## From position to angle
#
# Divided by a wide range (20 seconds, 2048 pixels), positions are fractions $g \in [0, 1]$; the middle has angle zero. The axes share $n = \lfloor D / 6 \rfloor$ frequencies; the slowest turns half a circle from end to end, the fastest is ten thousand times faster:
#
# $$\theta_{i, a} = \omega_i\, (2 g_a - 1), \qquad \omega_i = \frac{\pi}{2} \cdot 10^{4\, i / (n - 1)}$$
#
# First the plain way: one token, frequency by frequency, in each of them time, row, column.


# %%
def plain_angles(position: list[float], width: int) -> list[float]:
    """The plain way: the angles of one token over the full width, in double precision."""
    n, angles = width // 6, [0.0] * (width // 2 - 3 * (width // 6))  # pairs left over stand first and stay
    for i in range(n):
        for place, span in zip(position, (20, 2048, 2048)):
            angles.append(math.pi / 2 * 10_000 ** (i / (n - 1)) * (2 * place / span - 1))
    return angles


print([round(angle, 2) for angle in plain_angles([5.0, 1024.0, 2048.0], 20)])

# %% [markdown] lang="zh"
# 一次算完所有词元，再把 $D / 2$ 对切给各个头。切在旋转之后：第 0 个头拿到最慢的一段，最后一个头拿到最快的一段。第 04 章的旋转每个头都一样，这里各不相同，所以 `Rope` 多一根头的轴。

# %% [markdown] lang="en" twin="e929cc31"
# Now all tokens at once, and then the $D / 2$ pairs are cut into heads. Cutting comes after turning: head 0 gets the slowest stretch, the last head the fastest. In chapter 04 all heads turned alike; here each turns its own way, so `Rope` carries an axis of heads.

# %% tags=["export"]
SPAN = (20, 2048, 2048)  # seconds and pixels that fractions are taken of


def fractional_rope(positions: Tensor, width: int, heads: int, theta: float = 10_000.0) -> Rope:
    """Angles ω_i · (2 · g − 1) with ω_i = π/2 · theta^(i / (n − 1)), g = positions / SPAN, n = width // 6; fp32.

    Over the full width the pairs are: those left over, which stay; then for each i time, row, column. Head by head they
    are cut last, so that every head has frequencies of its own.

    Args:
        positions: (N, 3) or (B, N, 3), seconds and pixels, see `ltx_positions`.
        width: D. heads: H.
        theta: how many times the fastest is faster than the slowest.

    Returns:
        cosines and sines (H, N, Dh/2) or (B, H, N, Dh/2).

    Source: HaCohen et al. 2024 (LTX-Video), §2; diffusers' ``LTXVideoRotaryPosEmbed``, operation by operation.
    """
    share = torch.stack([positions[..., axis] / span for axis, span in enumerate(SPAN)], dim=-1)
    omega = theta ** torch.linspace(0, 1, width // 6, device=positions.device) * math.pi / 2  # (n,)
    angle = (omega * (2 * share - 1).unsqueeze(-1)).mT.flatten(-2)  # (…, N, 3 · n), the axis runs fastest
    angle = F.pad(angle, (width // 2 - angle.shape[-1], 0)).unflatten(-1, (heads, -1))  # (…, N, H, Dh/2)
    return Rope(*(turn.transpose(-2, -3) for turn in (angle.cos(), angle.sin())))


# %% tags=["check"]
spots = torch.tensor([[0.0, 0.0, 0.0], [0.32, 32.0, 64.0], [10.0, 1024.0, 1024.0], [20.0, 2048.0, 704.0]])
rope = fractional_rope(spots, 40, 2)
angles = torch.tensor([plain_angles(spot, 40) for spot in spots.tolist()], dtype=torch.float64)
assert torch.allclose(rope.cos.transpose(0, 1).flatten(1), angles.cos().float(), atol=2e-3)  # the plain way's numbers
assert torch.allclose(rope.sin.transpose(0, 1).flatten(1), angles.sin().float(), atol=2e-3)
assert torch.equal(rope.cos[:, 2], torch.ones(2, 10))  # in the middle of everything nothing turns
assert torch.equal(rope.cos[0, :, :2], torch.ones(4, 2))  # 40 = 6 · 6 + 4: two pairs stay, the first of head 0

# %% [markdown] lang="zh"
# ## 尾数也是约定
#
# 为什么容差要放到 $2 \times 10^{-3}$？最快的角度有 15708 弧度，fp32 在那里每格约千分之一。权重是配着这些尾数用的，所以我们照着 diffusers 的次序一步步算：每一位都要相同。

# %% [markdown] lang="en" twin="e78791a3"
# ## The last digits belong to the convention
#
# Why allow $2 \times 10^{-3}$? The fastest angle is 15,708 radians, and there fp32 has one number in about a thousandth. diffusers turns with exactly these digits, so we take its operations in its order: every bit must agree.

# %% tags=["check"]
from diffusers.models.transformers.transformer_ltx import LTXVideoRotaryPosEmbed

cos, sin = LTXVideoRotaryPosEmbed(2048)(torch.zeros(1, 1, 1), 7, 16, 22, (8 / 24, 32, 32))
rope = fractional_rope(ltx_positions((7, 16, 22), frame_rate=24), 2048, 32)
assert torch.equal(rope.cos.transpose(0, 1).flatten(1), cos[0, :, ::2])  # bit for bit; each stands there twice
assert torch.equal(rope.sin.transpose(0, 1).flatten(1), sin[0, :, ::2])
print("fp32 near 15,708 has one number in", torch.tensor(15708.0).nextafter(torch.tensor(2e4)).item() - 15708)

# %% [markdown] lang="zh"
# ## 每个头有自己的远近
#
# 看一帧里的 16×22 个词元：它们的转角和正中那个有多合拍？慢的头觉得整帧都近；再快一些，一帧之内就转回原处，远处又像近处；最快的头只认得同一行、同一列。一半以上的频率，走一格就超过半圈。

# %% [markdown] lang="en" twin="5ff7b89d"
# ## Every head has its own reach
#
# Take the 16×22 tokens of a frame: how well do their turns agree with the middle one's? To a slow head the whole frame is near; faster ones come full circle in it, so that far looks near; the fastest know only their row and column. More than half of all frequencies pass half a circle a step.


# %% tags=["hide"]
def agreement(rope, token: int):
    """Mean cosine of the angle between each token and one of them, in every head: (H, N)."""
    return (rope.cos * rope.cos[:, token, None] + rope.sin * rope.sin[:, token, None]).mean(-1)


reach = agreement(fractional_rope(ltx_positions((1, 16, 22)), 2048, 32), 8 * 22 + 11).unflatten(-1, (16, 22))
fig, axes = plt.subplots(1, 4, figsize=(7.2, 2.1))
for ax, head in zip(axes, (0, 4, 8, 20)):
    drawn = ax.imshow(reach[head], cmap="viridis", vmin=0.3, vmax=1)
    ax.set_title(f"head {head}", fontsize=9)
    ax.set(xticks=[], yticks=[])
fig.colorbar(drawn, ax=axes, shrink=0.7, label="agreement")
fig.suptitle("Slow heads feel distance, fast ones only 'same row' and 'same column'", x=0.01, ha="left", fontsize=11)
show(
    fig,
    alt="Four maps of one frame: in head 0 all tokens agree with the middle one, in head 4 a large blob, in head 8 a small one that comes again at the edges, in head 20 a cross of one row and one column.",
)

# %% tags=["check"]
next_door = reach[:, 8, 12]
assert (next_door[:13].diff() < 0).all()  # slow heads first: a neighbour grows stranger from head to head
omega = math.pi / 2 * 10_000 ** torch.linspace(0, 1, 2048 // 6)
wild = 2 * omega * 32 / 2048 > math.pi  # one column further: 2 · 32 / 2048 of ω
print(f"{wild.sum()} of {len(omega)} frequencies turn more than half a circle from column to column")

# %% [markdown] lang="zh"
# ## 块：拨四个开关
#
# 第 05 章的 `DiTBlock` 早就留好了开关：`norm="rms"`、`table=True`、`cross=…`、QK 归一化 `"rms_across"`。RMSNorm 不减平均值，所以整体加一个数，它看得见。收尾却还是 LayerNorm，这一处最容易搬错。

# %% [markdown] lang="en" twin="b46cb93f"
# ## The block: four switches
#
# `DiTBlock` of chapter 05 has the switches already: `norm="rms"`, `table=True`, `cross=…`, and the QK-norm `"rms_across"`. RMSNorm takes no mean away, so it notices a number added to everything. Yet the end of the network is LayerNorm again, the easiest place to go wrong.

# %% tags=["check"]
from diffusion_engine.attention import Heads
from diffusion_engine.transformer_block import normalize

rng = torch.Generator().manual_seed(0)
x = torch.randn(2, 5, 24, generator=rng)
assert torch.allclose(normalize(x + 3), normalize(x), atol=1e-5)  # LayerNorm forgets the mean …
assert (normalize(x + 3, "rms") - normalize(x, "rms")).abs().mean() > 0.3  # … RMSNorm does not
softer = {}
for norm in ("rms", "rms_across"):
    heads = Heads(24, 4, norm).requires_grad_(False)
    before = heads.split(x)[0]
    heads.qkv.weight[:6] *= 10  # the queries of head 0 grow louder
    heads.qkv.bias[:6] *= 10
    softer[norm] = (heads.split(x)[0][:, 1:] / before[:, 1:]).mean()
assert abs(softer["rms"] - 1) < 1e-4 and softer["rms_across"] < 0.5  # across heads, the others grow softer


# %% tags=["export"]
def ltx_block(config: LTXConfig) -> DiTBlock:
    """`DiTBlock` with RMSNorm, knobs from a table, cross-attention, and QK-norms across heads in both attentions."""
    width, heads = config.width, config.num_attention_heads
    options = {"qk_norm": "rms_across", "bias": config.attention_bias, "eps": 1e-5}
    cross = CrossAttention(width, heads, **options)
    return DiTBlock(width, heads, norm="rms", table=True, cross=cross, **options)


# %% [markdown] lang="zh"
# ## 对照表与网络
#
# 没有一个张量要改形状；块里的名字和 Sana、Wan 的一样，只有前馈不同，所以第 18 章的表接着用。图块是 1×1×1，打包就是把格子排成一串：$(B, C, F, H, W) \to (B, FHW, C)$。`velocity` 打包、拆包，`run` 走词元；diffusers 的流水线从头到尾都用打包的，所以 `run_as_diffusers` 直接调 `run`。

# %% [markdown] lang="en" twin="8f5db379"
# ## The key map and the network
#
# No tensor changes its shape. Inside a block the names are Sana's and Wan's, but for the feed-forward network, so chapter 18's table serves again. Patches are 1×1×1, so packing puts the cells in one row: $(B, C, F, H, W) \to (B, FHW, C)$. `velocity` packs and unpacks, `run` walks over tokens; diffusers' pipeline holds packed latents throughout, so `run_as_diffusers` calls `run` itself.

# %% tags=["export"]
LTX_BLOCK = BLOCK | {"ff.0": "ff.net.0.proj", "ff.2": "ff.net.2"}


def ltx_keys(config: LTXConfig) -> KeyMap:
    """Where each tensor of `LTX` lies in diffusers' checkpoint."""
    names = {"image_in": "proj_in", "knobs": "time_embed.linear", "table": "scale_shift_table", "out": "proj_out"}
    for ours, theirs in {"time_in.mlp": "time_embed.emb.timestep_embedder", "text_in": "caption_projection"}.items():
        names |= {f"{ours}.{2 * i}": f"{theirs}.linear_{i + 1}" for i in (0, 1)}
    return KeyMap(names | {f"blocks.*.{ours}": f"transformer_blocks.*.{theirs}" for ours, theirs in LTX_BLOCK.items()})


# %% tags=["export"]
def run_as_diffusers(
    model,
    hidden_states,
    encoder_hidden_states,
    timestep,
    encoder_attention_mask=None,
    num_frames=None,
    height=None,
    width=None,
    rope_interpolation_scale=SPAN,
    video_coords=None,
) -> Tensor:
    """`LTX.run` under diffusers' names; positions are ``video_coords`` (B, 3, N), or grid · scale."""
    if video_coords is None:
        scale = torch.as_tensor(rope_interpolation_scale, dtype=torch.float32, device=hidden_states.device)
        positions = grid_positions(num_frames, height, width).to(hidden_states.device) * scale
    else:
        positions = video_coords.float().mT
    mask = None if encoder_attention_mask is None else encoder_attention_mask.bool()
    return model.run(hidden_states, model.conditions_at(positions, timestep.float(), encoder_hidden_states, mask))


# %% tags=["export"]
class LTX(nn.Module):
    """Velocity network of LTX-Video; the arguments are those of `DiT`, and where the clip stands in time and space.

    Source: HaCohen et al. 2024 (LTX-Video); diffusers ``transformer_ltx.py``.
    """

    Config, key_map, as_diffusers = LTXConfig, staticmethod(ltx_keys), run_as_diffusers
    min_multiple = 1  # latent height and width must be multiples of this

    def __init__(self, config: LTXConfig):
        super().__init__()
        self.config, c, width = config, config, config.width
        self.image_in, self.out = nn.Linear(c.in_channels, width), nn.Linear(width, c.out_channels or c.in_channels)
        self.text_in = nn.Sequential(nn.Linear(c.caption_channels, width), nn.GELU("tanh"), nn.Linear(width, width))
        self.time_in, self.knobs = TimestepEmbedder(width), nn.Linear(width, 6 * width)
        self.blocks = nn.ModuleList(ltx_block(c) for _ in range(c.num_layers))
        self.table = nn.Parameter(torch.zeros(2, width))

    def forward(self, latents, t, text, text_mask=None, pooled=None, **where) -> Tensor:
        """Velocity (B, C, F, H, W) at t = 1000 · σ under text (B, M, 4096), text_mask (B, M); pooled is unused.

        t may be (B, F · H · W), a time for every token; ``where`` is frame_rate, compression, causal of `ltx_positions`.
        """
        return self.velocity(latents, self.conditions(latents.shape[1:], t, text, text_mask, pooled, **where))

    def conditions(self, shape, t, text, text_mask=None, pooled=None, **where) -> Conditions:
        """All that `velocity` reads besides latents of ``shape`` (C, F, h, w); the rest as in `forward`."""
        return self.conditions_at(ltx_positions(shape[1:], **where).to(text.device), t, text, text_mask)

    def conditions_at(self, positions, t, text, text_mask=None) -> Conditions:
        """`conditions` of tokens at given positions (N, 3) or (B, N, 3), seconds and pixels."""
        c, cond = self.config, self.time_in(t.flatten()).unflatten(0, t.shape)  # (B, D) or (B, N, D)
        rope, shared = fractional_rope(positions, c.width, c.num_attention_heads), self.knobs(F.silu(cond))
        return Conditions([self.text_in(text)] * c.num_layers, text_mask, rope, [shared] * c.num_layers + [cond])

    def velocity(self, latents: Tensor, given: Conditions) -> Tensor:
        """The rest of `forward`: velocity of the latents under given conditions."""
        return self.run(latents.flatten(2).mT, given).mT.unflatten(2, latents.shape[2:])

    def run(self, tokens: Tensor, given: Conditions) -> Tensor:
        """Packed latents (B, N, C) → velocity, as packed."""
        x, rope, mask = self.image_in(tokens), given.positions, given.text_mask
        for block, shared, text in zip(self.blocks, given.cond, given.text):
            x = block(x, shared, rope=rope, text=text, text_mask=mask)
        return self.out(modulate(x, last_mod(self.table, given.cond[-1])))  # LayerNorm here

    def hoist(self, shape, times, text, text_mask=None, pooled=None, **where) -> list[Conditions]:
        """`conditions` for all times (S,), see `work_ahead`; ``shape`` is that of the latents without the batch."""
        given = self.conditions(shape, times.repeat_interleave(len(text)), text, text_mask, pooled, **where)
        return work_ahead(self, given, len(times))


# %%
import tempfile
from pathlib import Path

from diffusion_engine.reference.checkpoint import DropIn, load


def redraw(module: nn.Module) -> nn.Module:
    """Every weight anew, so that no table is zero and no norm is one: outputs of order one."""
    for weight in module.requires_grad_(False).parameters():
        weight.copy_(torch.randn(weight.shape, generator=rng) / (weight[0].numel() if weight.ndim > 1 else 4) ** 0.5)
    return module.eval()


SIZES = dict(in_channels=8, out_channels=8, num_attention_heads=4, attention_head_dim=16, cross_attention_dim=64)
SIZES |= dict(num_layers=2, caption_channels=24)
room, real = tempfile.TemporaryDirectory(), torch.arange(7) < torch.tensor([[4], [7]])
latents, text = torch.randn(2, 8, 3, 2, 4, generator=rng), torch.randn(2, 7, 24, generator=rng)
packed, t, places = latents.flatten(2).mT, torch.tensor([987.6, 3.2]), ltx_positions((3, 2, 4), 24)

# %% [markdown] lang="zh"
# ## 对一对
#
# diffusers 写下一个很小的检查点。短片有三帧潜变量，画面是长方形，第一句话有三个补位词元；帧率取 24，免得和默认的 25 分不清。

# %% [markdown] lang="en" twin="2a9135e5"
# ## Against diffusers
#
# diffusers writes one very small checkpoint. The clip has three frames of latents, its picture is a rectangle, the first prompt ends in three tokens of padding; the frame rate is 24, so as not to hide behind the default 25.

# %% tags=["check"]
from diffusers import LTXVideoTransformer3DModel

theirs = redraw(LTXVideoTransformer3DModel(**SIZES))
theirs.save_pretrained(room.name)
ltx = load(LTX, Path(room.name))
where = dict(num_frames=3, height=2, width=4, rope_interpolation_scale=(8 / 24, 32, 32))
expected = theirs(packed, text, t, real.long(), **where).sample
velocity = ltx(latents, t, text, real, frame_rate=24)
assert (velocity.flatten(2).mT - expected).abs().max() < 1e-5
assert (run_as_diffusers(ltx, packed, text, t, real.long(), **where) - expected).abs().max() < 1e-5  # packed
coords = ltx_positions((3, 2, 4), 24, causal=True).T.expand(2, 3, 24)  # as newer pipelines hand them over
expected_causal = theirs(packed, text, t, real.long(), video_coords=coords).sample
assert (ltx(latents, t, text, real, frame_rate=24, causal=True).flatten(2).mT - expected_causal).abs().max() < 1e-5
assert (run_as_diffusers(ltx, packed, text, t, real.long(), video_coords=coords) - expected_causal).abs().max() < 1e-5
print(f"velocities of size {expected.std():.1f} differ by less than 1e-5")

# %% tags=["check"]
noise = torch.where(real[..., None], text, 100.0)
assert torch.allclose(ltx(latents, t, noise, real, frame_rate=24), velocity, atol=1e-5)  # padding has no say
twice = ltx(latents, t, text, real, frame_rate=48)
assert (twice - velocity).abs().mean() > 1e-3  # the same latents as a faster clip
wide = ltx(latents, t, text, real, frame_rate=24, compression=(16, 32))
assert torch.allclose(ltx(latents, t, text, real, frame_rate=12), wide, atol=1e-5)  # half the rate, twice the time

# %% [markdown] lang="zh"
# ## 每个词元有自己的时间
#
# 图生视频时，第一帧是给定的，已经干净；别的帧还是噪声。LTX 的做法很直接：给每个词元自己的时间，$t$ 从 $(B,)$ 变成 $(B, N)$，旋钮也跟着每个词元各一套。第 05 章的调制表本来就收得下。

# %% [markdown] lang="en" twin="5f75d3fc"
# ## Every token has its own time
#
# When a picture is to become a clip, the first frame is given and clean, the others are still noise. LTX is direct about it: every token has a time of its own, $t$ is $(B, N)$ instead of $(B,)$, and knobs come per token. The modulation table of chapter 05 takes them as they are.

# %% tags=["check"]
cells = latents[0, 0].numel()
given = torch.arange(cells) < cells // 3  # the tokens of the first latent frame
times = torch.where(given, 0.0, t[:, None])  # (2, 24)
by_token = ltx.run(packed, ltx.conditions_at(places, times, text, real))
assert (by_token - theirs(packed, text, times, real.long(), **where).sample).abs().max() < 1e-5
alike = ltx(latents, t[:, None].expand(-1, cells), text, real, frame_rate=24)
assert torch.allclose(alike, velocity, atol=1e-5)  # all the same time: as with one a sample

# %% tags=["check"]
mine = DropIn(load(LTX, Path(room.name), dtype=torch.bfloat16))
half = LTXVideoTransformer3DModel.from_pretrained(room.name, torch_dtype=torch.bfloat16)
call = dict(timestep=t, encoder_attention_mask=real.long(), encoder_hidden_states=text.bfloat16(), **where)
errors = [(net(packed.bfloat16(), **call).sample - expected).square().mean().sqrt() for net in (mine, half)]
assert errors[0] < 1.1 * errors[1]  # in bf16 no further from the fp32 truth than diffusers itself

# %% [markdown] lang="zh"
# ## 与潜变量无关的
#
# 和 Wan 一样，文字只从旁边进来：旋钮，文字的键与值，秒和像素的旋转，都在第一步之前一次做完（第 13 章）。每个词元各有各的时间时不行：旋钮要跟着给定的帧走，而 `hoist` 一步只收一个时间。

# %% [markdown] lang="en" twin="6651fdd9"
# ## What no latent changes
#
# As in Wan, text enters at the side only: knobs, keys and values of the text, and the turns by seconds and pixels are all made before the first step (chapter 13). Not so where every token has its own time: knobs then follow the frames that are given, and `hoist` takes one time a step.

# %% tags=["check"]
road, told = torch.tensor([987.6, 500.0, 3.2]), dict(frame_rate=24, causal=True)
ahead = ltx.hoist(latents.shape[1:], road, text, real, **told)
for when, here in zip(road, ahead):
    assert torch.allclose(ltx.velocity(latents, here), ltx(latents, when.expand(2), text, real, **told), atol=1e-5)
assert ahead[0].text is ahead[2].text  # keys and values of all times are the same
assert ltx.hoist(latents.shape[1:], road, text, real | True)[0].text_mask is None  # nothing to hide

# %% tags=["hide"]
import re

weights = dict(ltx.requires_grad_(True).named_parameters())
arrived = torch.autograd.grad(ltx.velocity(latents, here).sum(), weights.values(), allow_unused=True)
unread = {re.sub(r"\d+", "*", name) for name, gradient in zip(weights, arrived) if gradient is None}
ltx.requires_grad_(False)
with torch.device("meta"):
    sizes = {name: weight.numel() for name, weight in LTX(LTXConfig()).named_parameters()}
count, once = sum(sizes.values()), sum(n for name, n in sizes.items() if re.sub(r"\d+", "*", name) in unread)
print(f"LTX-Video 2B: {count / 1e9:.2f} billion weights, {2 * count / 1e9:.1f} GB in bf16;", end=" ")
print(f"{once / 1e9:.2f} billion of them are read only ahead")
tokens = latent_frames(161, 8) * (512 // 32) * (704 // 32)
print(f"161 frames of 704×512: {tokens} tokens; with cells of 4 × 16 × 16, {latent_frames(161, 4) * 32 * 44}")

# %% [markdown] lang="zh"
# ## 我们的循环，LTX 的噪声表
#
# LTX 的配置要求动态移位，再把最后一个 $\sigma$ 拉到 $0.1$（第 02 章）。VAE 用 diffusers 自己的，权重很小很随机。提示词嵌入直接给；批里先无条件、后有条件。

# %% [markdown] lang="en" twin="2ee34e19"
# ## Our loop on LTX's schedule
#
# LTX's configuration asks for a dynamic shift, then stretches the last $\sigma$ to $0.1$ (chapter 02). The VAE is diffusers' own, very small and random. Prompt embeddings are handed in; in the batch uncond comes first.

# %% tags=["check"]
from diffusers import AutoencoderKLLTXVideo, FlowMatchEulerDiscreteScheduler, LTXPipeline

DYNAMIC = dict(use_dynamic_shifting=True, base_shift=0.95, max_shift=2.05, base_image_seq_len=1024, shift_terminal=0.1)
torch.manual_seed(0)
NARROW = dict(block_out_channels=(4,) * 4, decoder_block_out_channels=(4,) * 4)
NARROW |= dict(layers_per_block=(1,) * 5, decoder_layers_per_block=(1,) * 5, latent_channels=8)
vae = redraw(AutoencoderKLLTXVideo(**NARROW))
vae.latents_mean.normal_(generator=rng)
vae.latents_std.uniform_(0.5, 1.5, generator=rng)
pipe = LTXPipeline(FlowMatchEulerDiscreteScheduler(**DYNAMIC), vae, None, None, theirs)
pipe.set_progress_bar_config(disable=True)
assert (vae.temporal_compression_ratio, vae.spatial_compression_ratio) == (8, 32)  # what `ltx_positions` takes

# %%
words = dict(prompt_embeds=text[1:], prompt_attention_mask=real[1:].long())
words |= dict(negative_prompt_embeds=text[:1], negative_prompt_attention_mask=real[:1].long())
ask = dict(height=64, width=96, num_frames=9, frame_rate=24, num_inference_steps=4, guidance_scale=3.0, **words)
seed = lambda: torch.Generator().manual_seed(7)  # noqa: E731
z = pipe(**ask, output_type="latent", generator=seed()).frames  # packed, (1, 12, 8)
clip = torch.from_numpy(pipe(**ask, output_type="np", generator=seed()).frames)  # (1, 9, 64, 96, 3), 0 … 1
print(f"latents {tuple(z.shape)} of size {z.std():.1f}, clip {tuple(clip.shape)}, deviation {clip.std():.2f}")

# %% tags=["check"]
from diffusion_engine.guidance import guided_velocity
from diffusion_engine.pipeline import denoise, initial_noise
from diffusion_engine.scheduler import Schedule
from diffusion_engine.text_conditioning import PromptEmbeds

grid, prompt = (2, 2, 3), [PromptEmbeds(text[i : i + 1], real[i : i + 1], text[i : i + 1, 0, :0]) for i in (0, 1)]
settings = {**pipe.scheduler.config, "_class_name": "FlowMatchEulerDiscreteScheduler"}
schedule = Schedule.from_config(settings, 4, num_tokens=math.prod(grid))
network = lambda x, t, p: ltx(x, t, p.tokens, p.mask, frame_rate=24)  # noqa: E731
x = denoise(guided_velocity(network, prompt[1], prompt[0], 3.0), initial_noise([7], (8, *grid)), schedule).latents
assert (x.flatten(2).mT - z).abs().max() < 1e-4
scale, shift = vae.latents_std.reshape(-1, 1, 1, 1), vae.latents_mean.reshape(-1, 1, 1, 1)
drawn = (vae.decode(x * scale + shift, return_dict=False)[0] / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 4, 1)
assert (drawn - clip).abs().max() < 1 / 255
print("levels:", [round(sigma, 3) for sigma in schedule.values])
pipe.transformer = DropIn(ltx)
assert (pipe(**ask, output_type="latent", generator=seed()).frames - z).abs().max() < 1e-4

# %% [markdown] lang="zh"
# ## 在 diffusers 里，这些在哪儿
#
# | 我们 | diffusers |
# | --- | --- |
# | `ltx_positions` | `pipeline_ltx.py`，`rope_interpolation_scale` |
# | 其中的 `causal` | `pipeline_ltx_condition.py`，`_scale_video_ids` |
# | `fractional_rope` | `transformer_ltx.py`，`LTXVideoRotaryPosEmbed` |
# | `DiTBlock(norm="rms", …)` | `LTXVideoTransformerBlock`，`LTXVideoAttnProcessor` |
# | `time_in` 与 `knobs` | `normalization.py`，`AdaLayerNormSingle` |
# | `text_in` | `embeddings.py`，`PixArtAlphaTextProjection` |
# | 收尾的小表 | `LTXVideoTransformer3DModel.forward` 末尾 |
#
# **还缺什么**：较新的 VAE 带时间，最后一步去噪在解码器里做；我们只借用，不重写。一句话若没有一个真词元，diffusers 会照看补位，我们不看。
#
# ## 三个问题
#
# 1. 预测：把整段片子推后 5 秒、右移 512 像素，速度会变吗？
# 2. 修改：换一种切法，让每个头都分到快慢各样的频率。
# 3. 动手：写图生视频的循环：第一帧潜变量给定，一直不动。

# %% [markdown] lang="en" twin="419e06a5"
# ## Where this lives in diffusers
#
# | Ours | diffusers |
# | --- | --- |
# | `ltx_positions` | `pipeline_ltx.py`, `rope_interpolation_scale` |
# | its `causal` | `pipeline_ltx_condition.py`, `_scale_video_ids` |
# | `fractional_rope` | `transformer_ltx.py`, `LTXVideoRotaryPosEmbed` |
# | `DiTBlock(norm="rms", …)` | `LTXVideoTransformerBlock`, `LTXVideoAttnProcessor` |
# | `time_in` and `knobs` | `normalization.py`, `AdaLayerNormSingle` |
# | `text_in` | `embeddings.py`, `PixArtAlphaTextProjection` |
# | the small table at the end | the end of `LTXVideoTransformer3DModel.forward` |
#
# **What is missing:** newer VAEs are told a time, and the last denoising step happens in the decoder; we borrow it and do not rebuild it. If a prompt has not one real token, diffusers looks at the padding after all; we do not.
#
# ## Three questions
#
# 1. Predict: move the whole clip by 5 seconds and 512 pixels to the right. Does the velocity change?
# 2. Modify: cut the pairs another way, so that every head gets frequencies from slow to fast.
# 3. Build: write the loop that turns a picture into a clip: the first frame of latents is given and stays.

# %% tags=["solution"]
# 1 · no: turns compare tokens with each other, and the text is not turned at all; only rounding remains
moved = ltx.run(packed, ltx.conditions_at(places + torch.tensor([5.0, 0.0, 512.0]), t, text, real))
assert torch.allclose(moved, velocity.flatten(2).mT, atol=1e-4)

# %% tags=["solution"]
# 2 · pair i goes to head i mod 32: heads see alike now, and no trained head would find its frequencies
middle = fractional_rope(ltx_positions((1, 16, 22)), 2048, 32)
dealt = [turn.transpose(0, 1).flatten(1).unflatten(1, (-1, 32)).permute(2, 0, 1) for turn in middle[:2]]
spread = agreement(middle._replace(cos=dealt[0], sin=dealt[1]), 8 * 22 + 11)[:, 8 * 22 + 12]
assert spread.std() < 0.3 * next_door.std()

# %% tags=["solution"]
# 3 · the given tokens have time 0, and their velocity is not followed
picture, x = torch.randn(1, 8, 1, 2, 4, generator=rng), torch.randn(1, 8, 3, 2, 4, generator=rng)
x[:, :, :1] = picture
for sigma, sigma_next in schedule:
    times = torch.where(given, 0.0, 1000 * sigma)[None]
    v = ltx(x, times, text[1:], real[1:], frame_rate=24)
    x = torch.cat([picture, x[:, :, 1:] + (sigma_next - sigma) * v[:, :, 1:]], dim=2)
assert torch.equal(x[:, :, :1], picture) and x.isfinite().all()

# %% [markdown] lang="zh"
# ## 小结
#
# - LTX 的块就是 `DiTBlock` 拨好四个开关：RMSNorm、共用的旋钮加表、交叉注意力、跨头的 QK 归一化。
# - 位置是秒和像素：帧率不同，同一秒还是同一个位置。
# - 旋转铺满全宽，最后才切成头：慢的头看远近，快的头只认行和列。
# - 最快的角度上万弧度，fp32 的尾数也要一位不差。
# - 与 diffusers 相比，速度相差不到 $10^{-5}$，流水线的潜变量不到 $10^{-4}$，画面不到 $1/255$。
#
# 阅读卡片：LTX-Video（[`papers/11_ltx_video`](../../papers/11_ltx_video.zh.md)）。下一章：21。

# %% [markdown] lang="en" twin="502a082a"
# ## Recap
#
# - LTX's block is `DiTBlock` with four switches set: RMSNorm, shared knobs with a table, cross-attention, QK-norm across heads.
# - Positions are seconds and pixels: whatever the frame rate, the same second is the same place.
# - The rotation spans the full width and is cut into heads last: slow heads feel distance, fast ones only rows and columns.
# - The fastest angle is over ten thousand radians, so even fp32's last digits must agree.
# - Against diffusers the velocity is within $10^{-5}$, the pipeline's latents within $10^{-4}$, its pictures within $1/255$.
#
# Reading card: LTX-Video ([`papers/11_ltx_video`](../../papers/11_ltx_video.en.md)). Next: chapter 21.
