# ---
# jupyter:
#   course:
#     minutes: 60
#     module: video
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown] lang="zh"
# # 14 · 视频潜变量（video latents）
#
# 读完这一章，潜变量多一根时间轴：一段短片变成几帧潜变量，又变回来；第 06 章的网络学会看三维图块，一句话画出一段会动的表情。
#
# | 你会做出 | 你需要 | 时间 | 模块 |
# | --- | --- | --- | --- |
# | 因果视频 VAE、按段解码、三维图块与三轴旋转、视频 DiT、运算量公式 | 第 04 至 10 章的零件 | 60 分钟 | `diffusion_engine/video.py` |

# %% [markdown] lang="en" twin="fb881300"
# # 14 · Video latents
#
# After this chapter latents have one more axis, time: a clip becomes a few frames of latents and a clip again; the network of chapter 06 learns to look at three-dimensional patches, and a sentence draws an emoji that moves.
#
# | You build | You need | Time | Module |
# | --- | --- | --- | --- |
# | a causal video VAE, decoding in parts, 3-D patches and three-axis rotation, a video DiT, FLOP formulas | the parts of chapters 04 to 10 | 60 minutes | `diffusion_engine/video.py` |

# %% [markdown] lang="zh"
# **先想一想**：一段 17 帧的短片，相邻两帧几乎一样。若每 4 帧压成 1 帧潜变量，17 不是 4 的倍数，多出来的那一帧该给谁？如果答案是「第一帧」，这样做有什么好处？

# %% [markdown] lang="en" twin="213a172d"
# **Think first:** in a clip of 17 frames neighbours are almost equal. If every 4 frames become one frame of latents, 17 is no multiple of 4: who gets the odd frame? And if the answer is "the first one", what is that good for?

# %% tags=["export", "hide"]
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

# %% tags=["hide"]
import json

import matplotlib.pyplot as plt
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode

from course.clips import play
from course.figures import show
from diffusion_engine.attention import apply_rope
from diffusion_engine.model_folder import SHIPPED_CLIP_MODEL, load_model
from diffusion_engine.guidance import guided_velocity
from diffusion_engine.optimizations import StepCache
from diffusion_engine.pipeline import generate, initial_noise
from diffusion_engine.scheduler import make_schedule
from diffusion_engine.text_conditioning import encode_prompt, stack_prompts
from diffusion_engine.vae import psnr
from recipes.clip_data import MOTIONS, as_floats, clips_of

unit = lambda clips: list((clips + 1) / 2)  # noqa: E731
examples = as_floats(clips_of(["🐱", "🚀"], ["spin", "left", "zoom", "bounce"]))  # (8, 3, 17, 32, 32)
names = ["cat face, spinning", "cat, left", "cat, zooming", "cat, bouncing"]
alt = "Four clips of a cat face: it spins, moves left, grows, and bounces."
play(unit(examples[:4]), names, alt=alt, columns=4, size=64)

# %% [markdown] lang="zh"
# 一个静止的表情，七条规则，就是我们的小世界：向左、向右、向上、弹跳、旋转、放大、闪烁。答案全都知道。
#
# | 记号 | 形状 | 含义 |
# | --- | --- | --- |
# | $x$ | $(B, 3, T, H, W)$ | 短片，数值在 $-1 \dots 1$ |
# | $z$ | $(B, C, 1 + \frac{T-1}{4}, \frac H4, \frac W4)$ | 视频潜变量 |
# | $f, h, w$ | 标量 | 词元网格，$N = f h w$ |
#
# 第一帧独占一帧潜变量，后面每 4 帧合成一帧。所以 $T = 4k + 1$，别的长度一律报错。一张图就是 $T = 1$ 的短片。

# %% [markdown] lang="en" twin="d6b9998b"
# A still emoji and seven rules make our small world: left, right, up, bounce, spin, zoom, blink. Every answer is known.
#
# | Symbol | Shape | Meaning |
# | --- | --- | --- |
# | $x$ | $(B, 3, T, H, W)$ | a clip, values in $-1 \dots 1$ |
# | $z$ | $(B, C, 1 + \frac{T-1}{4}, \frac H4, \frac W4)$ | video latents |
# | $f, h, w$ | scalars | the grid of tokens, $N = f h w$ |
#
# The first frame has a frame of latents to itself, then every four frames share one. So $T = 4k + 1$; any other length is an error. A picture is a clip with $T = 1$.


# %% [markdown] lang="zh"
# ## 不偷看后面的卷积
#
# 普通三维卷积前后各看一帧：改动最后一帧，前面的输出也变。要一段一段地解码，就不能这样。因果（causal）卷积把补零全放在前面：
#
# $$y_t = \sum_{j=0}^{k-1} W_j \, x_{t - (k-1) + j}$$
#
# $y_t$ 只用到 $x_{\le t}$。只有一帧时，前面全是零，只剩最后一片 $W_{k-1}$ 起作用：它就是一个普通的图像卷积。

# %% [markdown] lang="en" twin="ede194e1"
# ## A convolution that never looks ahead
#
# An ordinary 3-D convolution sees one frame back and one ahead: change the last frame and earlier outputs change too. Decoding part by part forbids that. A causal convolution puts all its padding in front:
#
# $$y_t = \sum_{j=0}^{k-1} W_j \, x_{t - (k-1) + j}$$
#
# $y_t$ uses $x_{\le t}$ alone. With a single frame all before it is zero, and only the last slice $W_{k-1}$ counts: an ordinary image convolution.


# %% tags=["export"]
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


# %% tags=["hide"]
def influence(layer, frames: int = 9) -> Tensor:
    """(T, T): does input frame s (column) reach output frame t (row)?"""
    x = torch.randn(1, 4, frames, 6, 6, generator=torch.Generator().manual_seed(0))
    pushed = x.expand(frames, -1, -1, -1, -1).clone()
    pushed[torch.arange(frames), :, torch.arange(frames)] += 1
    return (layer(pushed) - layer(x)).abs().amax(dim=(1, 3, 4)).T > 1e-4


torch.manual_seed(0)
ordinary, causal = nn.Conv3d(4, 4, 3, padding=1), CausalConv3d(4, 4)
stack = nn.Sequential(causal, nn.SiLU(), CausalConv3d(4, 4), nn.SiLU(), CausalConv3d(4, 4))
fig, axes = plt.subplots(1, 3, figsize=(6.4, 2.7))
titles = ("one ordinary layer", "one causal layer", "three causal layers")
for ax, layer, title in zip(axes, (ordinary, causal, stack), titles):
    ax.imshow(influence(layer).detach(), cmap="Blues", vmin=0, vmax=1.4)
    ax.axline((0, 0), slope=1, color="#c53030", lw=0.8)
    ax.set_title(title, fontsize=9)
    ax.set(xlabel="input frame", xticks=[0, 4, 8], yticks=[0, 4, 8])
axes[0].set_ylabel("output frame")
fig.suptitle("Who hears whom: a causal layer has nothing above the line, the future", fontsize=10, x=0.01, ha="left")
show(fig, "Which input frame reaches which output frame: a band on both sides of the diagonal, then only below it.")

x = torch.randn(1, 4, 9, 6, 6, generator=torch.Generator().manual_seed(1))
late = x.clone()
late[:, :, 6] += 1

# %% tags=["check"]
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d

assert torch.equal(causal(late)[:, :, :6], causal(x)[:, :, :6])  # frame 6 disturbed: earlier ones keep every bit
by_image = F.conv2d(x[:, :, 0], causal.weight[:, :, -1], causal.bias, padding=1)
assert torch.allclose(causal(x[:, :, :1])[:, :, 0], by_image, atol=1e-5)  # one frame: an image convolution
wan_conv = WanCausalConv3d(4, 4, 3, padding=1)
wan_conv.load_state_dict(causal.state_dict())
assert torch.allclose(wan_conv(x), causal(x), atol=1e-5)  # Wan's layer, on copied weights

# %% [markdown] lang="zh"
# ## 四帧叠成一帧
#
# 第 09 章用像素重排缩小空间，这里把时间也叠进去：$4 \times 4 \times 4$ 的小块变成通道。第一帧前面放它自己三份，凑成第一块；还原时丢掉。
#
# 其余照搬第 09 章：残差块换上因果卷积，归一化只看自己这一格，损失函数不改。解码器先在 $8 \times 8$ 的格子上想，再展开成 17 帧补细节。

# %% [markdown] lang="en" twin="0e89607f"
# ## Four frames fold into one
#
# Chapter 09 shuffles pixels into channels; here time is folded in too: a block of $4 \times 4 \times 4$ becomes channels. Three copies of the first frame fill the first block; unfolding drops them.
#
# The rest is chapter 09: its residual block with a causal convolution, its norm of one position, its loss. The decoder thinks on the $8 \times 8$ grid, then unfolds to 17 frames for the detail.


# %% tags=["export"]
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


# %% tags=["check"]
folded = Fold(4, 4)(examples)  # (8, 192, 5, 8, 8)
assert torch.equal(Unfold(4, 4)(folded), examples)
frames = F.pixel_unshuffle(examples.transpose(1, 2).flatten(0, 1), 4).unflatten(0, (8, 17))  # (8, 17, 48, 8, 8)
blocks = folded.unflatten(1, (3, 4, 16)).permute(0, 4, 2, 1, 3, 5, 6).flatten(3, 4)  # (8, 5, 4, 48, 8, 8)
assert torch.equal(blocks[:, 0], frames[:, :1].expand(-1, 4, -1, -1, -1))  # block 0: four times frame 0
assert torch.equal(blocks[:, 1:].flatten(1, 2), frames[:, 1:])  # block k: frames 4k − 3 … 4k


# %% tags=["export", "hide"]
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


# %% tags=["export"]
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


# %% tags=["export"]
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


# %% tags=["check"]
torch.manual_seed(0)
vae = VideoVAE(VideoVAEConfig(width=16, narrow=8, depth=2)).requires_grad_(False)
for p in vae.parameters():
    p.normal_(0, 0.1)  # the zero layers too: nothing may hide behind them
clip, late = examples[:2], examples[:2].clone()
late[:, :, 10] += 0.5  # frame 10 belongs to latent 3
z, z_late = vae.encode(clip), vae.encode(late)
assert torch.equal(z_late[:, :, :3], z[:, :, :3]) and not torch.equal(z_late[:, :, 3], z[:, :, 3])  # bit for bit
whole, whole_late = vae.decode(z), vae.decode(z_late)
assert torch.equal(whole_late[:, :, :9], whole[:, :, :9]) and not torch.equal(whole_late[:, :, 9], whole[:, :, 9])
assert torch.allclose(vae.encode(clip[:, :, :1]), z[:, :, :1], atol=1e-5)  # an image is a one-frame video
assert torch.allclose(vae.decode(z[:, :, :1]), whole[:, :, :1], atol=1e-5)
assert [vae.encode(clip[:, :, :frames]).shape[2] for frames in (1, 5, 17)] == [1, 2, 5]
try:
    vae.encode(clip[:, :, :16])
except ValueError as error:
    assert str(error) == "16 frames are not 4k + 1; try 13 or 17"
else:
    raise AssertionError("16 frames went through")

# %% [markdown] lang="zh"
# ## 一段一段地解码，再换上训练好的权重
#
# 解码长片时，每一层的结果都占内存。一段一段来，峰值就和段长成正比；但是直接切开会错：每段开头，卷积以为前面是零。让每层记住最后两帧输入，接给下一段，就和整段一样。
#
# 自带的短片模型也是这样一个 VAE：17 帧共 $52\,224$ 个数，潜变量只有 $8 \times 5 \times 8 \times 8 = 2560$ 个。

# %% [markdown] lang="en" twin="b9b97d7c"
# ## Decoding in parts, then with trained weights
#
# Decode a long clip and every layer's output sits in memory. In parts, the peak follows the length of a part; but plain cuts are wrong, for each part believes that zeros came before. Let every layer hand its last two input frames on, and the clip is the same.
#
# The shipped clip model has such a VAE: $52\,224$ numbers in 17 frames, $8 \times 5 \times 8 \times 8 = 2560$ latents.

# %%
weights = {p.stem: {k: v.float() for k, v in load_file(p).items()} for p in SHIPPED_CLIP_MODEL.glob("*.safetensors")}
trained = VideoVAE().requires_grad_(False)
trained.load_state_dict(weights["vae"])
latents = trained.encode(examples)
back = trained.decode(latents).clamp(-1, 1)
alt = "A spinning cat face, and beside it the same after encoding and decoding."
play(unit(torch.cat([examples[[0]], back[[0]]])), ["cat", "decoded"], alt=alt, size=64)

# %% tags=["check"]
for chunk in (1, 2, 3, 5, 9):
    assert torch.allclose(vae.decode(z, chunk), whole, atol=1e-5)
cut = [vae.decoder(part) for part in (z[:, :, :2], z[:, :, 2:])]  # naive: no memory
assert torch.equal(cut[0], whole[:, :, :5]) and not torch.allclose(cut[1][:, :, -4:], whole[:, :, -4:], atol=1e-3)
assert psnr(back, examples).min() > 20 and psnr(back, examples).mean() > 23  # the quality report has all clips
resting = trained.decode(latents[:, :, :1].expand(-1, -1, 5, -1, -1))  # five times the latent of the first frame
assert resting.diff(dim=2).abs().mean() < back.diff(dim=2).abs().mean()  # motion lives in the later latents

# %% [markdown] lang="zh"
# ## 三维图块，三根轴的旋转
#
# 图块多一条边：$p_t \times p_h \times p_w$，一行一行、一帧一帧地排队。Wan 用步长等于图块的三维卷积来切，权重按 $(c, p_t, p_h, p_w)$ 存，词元里却是 $(p_t, p_h, p_w, c)$，载入前要重排。
#
# 位置用第 04 章的旋转位置编码：头的分量分给时间、行、列。$D_h = 128$ 时 Wan 分成 $44, 42, 42$。

# %% [markdown] lang="en" twin="c08d977c"
# ## Patches with three sides, rotation with three axes
#
# A patch gains a side: $p_t \times p_h \times p_w$, queued row by row and frame by frame. Wan cuts with a 3-D convolution whose stride is the patch; its weights are stored as $(c, p_t, p_h, p_w)$ while a token holds $(p_t, p_h, p_w, c)$: reorder them on load.
#
# Positions are chapter 04's rotary position embedding: the components of a head are shared out to time, row and column. With $D_h = 128$ Wan takes $44, 42, 42$.


# %% tags=["export"]
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


# %% tags=["check"]
from diffusers import WanTransformer3DModel

small = {"num_attention_heads": 1, "attention_head_dim": 128, "in_channels": 4, "text_dim": 8, "ffn_dim": 8}
wan = WanTransformer3DModel(**small, num_layers=1, rope_max_seq_len=64).requires_grad_(False)
x, conv = torch.randn(2, 4, 3, 6, 8, generator=torch.Generator().manual_seed(0)), wan.patch_embedding
by_linear = F.linear(video_patchify(x, (1, 2, 2)), conv.weight.permute(0, 2, 3, 4, 1).flatten(1), conv.bias)
assert torch.allclose(by_linear, conv(x).flatten(2).mT, atol=1e-5)  # Wan's patch embedding, on copied weights

# %% tags=["check"]
for patch in ((1, 2, 2), (3, 2, 4)):
    tokens, grid = video_patchify(x, patch), video_grid(x.shape[2:], patch)
    assert torch.equal(video_unpatchify(tokens, patch, grid), x)
    corner = x[0, :, : patch[0], : patch[1], : patch[2]]  # (C, pt, ph, pw)
    assert torch.equal(tokens[0, 0], corner.permute(1, 2, 3, 0).flatten())  # the first token, number by number

# %% [markdown] lang="zh"
# ## 看全部，还是分开看
#
# 全注意力：每个词元看所有帧的所有位置，$N^2$ 对。分解注意力（factorised attention）轮流来：一层只看自己这一帧（$N \cdot hw$ 对），下一层只看自己这一格的各个时刻（$N \cdot f$ 对）。便宜得多，但「左上角的过去」要走两层才到得了「右下角的现在」。

# %% [markdown] lang="en" twin="e90a50a1"
# ## All at once, or in turns
#
# Full attention: every token sees every place of every frame, $N^2$ pairs. Factorised attention takes turns: one layer looks only within its own frame ($N \cdot hw$ pairs), the next only along the moments of its own place ($N \cdot f$ pairs). Far cheaper, but "the past of the upper left" needs two layers to reach "the present of the lower right".


# %% tags=["export"]
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


# %% tags=["check"]
grid, (cos, sin) = (3, 3, 4), (table[0, :, 0] for table in wan.rope(x))  # (36, 128), each pair twice
positions = grid_positions(*grid)
rope = axial_rope(positions, rope_axes(128))
assert torch.allclose(cos[:, ::2], rope.cos, atol=1e-5) and torch.allclose(sin[:, 1::2], rope.sin, atol=1e-5)  # Wan's
attn, tokens = SelfAttention(128, 1).requires_grad_(False), torch.randn(2, 36, 128)
q, k, v = (part if i == 2 else apply_rope(part, rope) for i, part in enumerate(attn.stream.split(tokens)))
seen = {"space": positions[:, None, 0] == positions[None, :, 0]}  # (N, N): the same frame
seen |= {"time": (positions[:, None, 1:] == positions[None, :, 1:]).all(dim=-1), "full": seen["space"] | True}
for axes, pairs in seen.items():  # the slow form: full attention under a mask
    slow = attn.stream.merge(F.scaled_dot_product_attention(q, k, v, attn_mask=pairs))
    assert torch.allclose(attend_along(axes, attn, tokens, grid, rope), slow, atol=1e-5)

# %% [markdown] lang="zh"
# ## 视频 DiT
#
# 骨架还是第 06 章的：切块、变换器块、零初始化的最后一层。改了三处：图块三维，位置三轴，文本像 Wan 那样从交叉注意力进来，于是自注意力里只有视频词元，可以分开看。
#
# 冻结的文本编码器认识表情，没学过「旋转」。像 HunyuanVideo 那样，我们在它后面加一个训练过的小精炼器（refiner）。

# %% [markdown] lang="en" twin="d55f08ca"
# ## The video DiT
#
# The skeleton is chapter 06's: patches, blocks, a last layer that starts at zero. Three things change: patches have three sides, positions three axes, and the text enters through cross-attention, as in Wan, so that self-attention holds video tokens alone and can be factorised.
#
# The frozen text encoder knows emoji but never learnt "spinning". Like HunyuanVideo we put a small trained refiner behind it.


# %% tags=["export", "hide"]
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


# %% tags=["export"]
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


# %% tags=["check"]
torch.manual_seed(0)
net = VideoDiT(VideoDiTConfig(patch=(1, 2, 2), width=48, heads=2, depth=2, text_width=16)).requires_grad_(False)
x, t, text, pooled = torch.randn(2, 8, 5, 4, 6), torch.tensor([700.0, 300.0]), torch.randn(2, 3, 16), torch.randn(2, 16)
assert not net(x, t, text, None, pooled).any()  # v = 0 at birth
for p in net.parameters():
    p.normal_(0, 0.3)
v, order = net(x, t, text, None, pooled), [0, 3, 1, 4, 2]
assert not torch.allclose(net(x[:, :, order], t, text, None, pooled), v[:, :, order], atol=0.01)  # frames have an order
mask = torch.tensor([[True, True, True, False]] * 2)
padded = torch.cat([text, 9 * torch.ones(2, 1, 16)], dim=1)
assert torch.allclose(net(x, t, padded, mask, pooled), v, atol=1e-5)  # padding is not seen
for other in ((t / 2, text, None, pooled), (t, text.flip(0), None, pooled), (t, text, None, pooled.flip(0))):
    assert not torch.allclose(net(x, *other), v, atol=0.05)  # time, words and the pooled prompt are heard
assert net(x[:, :, :1], t, text, None, pooled).shape == (2, 8, 1, 4, 6)  # a picture is a clip of one frame
refiner = TextRefiner(TextEncoderConfig(width=16, heads=2, depth=1)).requires_grad_(False)
prompt, short = PromptEmbeds(padded, mask, pooled), PromptEmbeds(text, mask[:, :3], pooled)
assert torch.allclose(refiner(prompt).tokens[:, :3], refiner(short).tokens, atol=1e-5)

# %% [markdown] lang="zh"
# ## 接上第 13 章的开关
#
# `forward` 和第 06 章一样分两半：`conditions` 不看潜变量，`velocity` 才看。前一半在开画前就能对全部 $\sigma$ 算好：每步的旋钮，每块文本的键和值。图像的网络没法提前算键和值，那里的文本也在自注意力里，一块一变。
#
# 步缓存、编译、分块注意力只要求一块一块地跑，第 13 章的代码直接可用。

# %% [markdown] lang="en" twin="bac78ff1"
# ## Plugging in the switches of chapter 13
#
# As in chapter 06, `forward` has two halves: `conditions` looks at no latent, `velocity` does. The first is made before drawing, for every $\sigma$: each step's knobs, each block's keys and values. A picture's network cannot make those ahead: its text joins self-attention and changes block by block.
#
# Step cache, compiling and chunks only ask for block after block.


# %% tags=["export"]
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


# %% tags=["check"]
sigmas, prompt = make_schedule(4).sigmas[:-1], PromptEmbeds(text, mask[:, :3], pooled)
for sigma, given in zip(sigmas, hoist_video(net, (5, 2, 3), sigmas, prompt)):
    each = net(x, 1000 * sigma.expand(2), *prompt)
    assert torch.allclose(net.velocity(x, given), each, atol=1e-4) and len(given.text[1]) == 2  # keys and values
fast = AcceleratedVideo(net, sigmas, StepCache(0.5), chunk=5)  # everything at once
full, reused = (fast(x + shift, 1000 * sigma.expand(2), prompt) for shift in (0, 0.001))
assert torch.allclose(full, each, atol=1e-4) and fast.cache.reused == 1 and 0 < (reused - full).abs().max() < 0.1

# %% [markdown] lang="zh"
# ## 账单
#
# 一层自注意力算 $4 N D K$ 次，$K$ 是一个词元看到几个：全看是 $N$，分开是 $hw$ 或 $f$。其余是线性层，只和 $N$ 成正比。Wan 在 480p、81 帧有 $21 \times 30 \times 52 = 32\,760$ 个词元，我们只有 $5 \times 2 \times 2 = 20$ 个。
#
# 质量要训练过才知道：下面右图是两种网络的开头 200 步（`python -m recipes.train_clip factorised`）。轮流看的损失略低；可按 `assets/clip_model` 的模型卡，动作却是全看的更对。

# %% [markdown] lang="en" twin="40a0e38c"
# ## The bill
#
# Self-attention costs $4 N D K$ operations a layer, $K$ being how many tokens one token sees: $N$ in full, $hw$ or $f$ in turns. The rest is linear layers, proportional to $N$. Wan at 480p and 81 frames has $21 \times 30 \times 52 = 32\,760$ tokens, ours $5 \times 2 \times 2 = 20$.
#
# Quality shows in training alone: the right panel below has the first 200 steps of both (`python -m recipes.train_clip factorised`). In turns the loss is a little lower; yet by the model card in `assets/clip_model`, motions are right more often in full.


# %% tags=["export"]
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


# %% tags=["check"]
for factorised in (False, True):
    config = VideoDiTConfig(patch=(1, 2, 2), width=48, heads=2, depth=3, text_width=16, factorised=factorised)
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        VideoDiT(config)(x, t, text, None, pooled)
    assert counter.get_total_flops() == sum(video_flops(config, (5, 2, 3), 3, batch=2))
wan_grid = video_grid((latent_frames(81), 480 // 8, 832 // 8), (1, 2, 2))
assert wan_grid == (21, 30, 52) and torch.tensor(wan_grid).prod() == 32_760

# %% tags=["hide"]
lengths = [1, 5, 17, 33, 49, 65, 81]
fig, axes = plt.subplots(1, 3, figsize=(6.4, 2.4))
for name, factorised in (("full", False), ("factorised", True)):
    config = VideoDiTConfig(16, (1, 2, 2), 1536, 12, 30, 4096, factorised)
    bills = [video_flops(config, (latent_frames(n), 30, 52), 512) for n in lengths]
    axes[0].plot(lengths, [sum(bill) / 1e12 for bill in bills], "o-", ms=3, label=name)
    axes[1].plot(lengths, [100 * a / (a + b) for a, b in bills], "o-", ms=3)
axes[0].set(xlabel="frames", ylabel="TFLOP")
axes[1].set(xlabel="frames", ylabel="%", ylim=(0, 100))
axes[0].legend()
log = json.loads((SHIPPED_CLIP_MODEL / "training.json").read_text(encoding="utf-8"))
curves = {part["name"]: part["curve"] for part in log["parts"]}
for name in ("clip_dit", "clip_dit_factorised"):
    axes[2].plot(*zip(*[(step, loss) for step, loss in curves[name] if 50 <= step <= 200]), "o-", ms=3)
axes[2].set(xlabel="steps of training", ylabel="loss")
for ax, title in zip(axes, ("Full curves up", "Attention's share", "In turns learns no slower")):
    ax.set_title(title, fontsize=9)
show(
    fig,
    "At 480×832, work against frames: full attention curves up, factorised is straight; attention's share of the work; and "
    "the loss over 200 steps of training, a little lower for factorised.",
)

pictures, config = load_model(), json.loads((SHIPPED_CLIP_MODEL / "config.json").read_text(encoding="utf-8"))
best, network, refine = config["recommended"], VideoDiT(VideoDiTConfig(**config["dit"])), TextRefiner()
network.load_state_dict(weights["dit"])
refine.load_state_dict(weights["refiner"])
prompts = ["cat face, spinning", "rocket, moving up", "猫脸，弹跳", "frog, blinking"]
names = ["cat face, spinning", "rocket, moving up", "cat face, bouncing (zh)", "frog, blinking"]
alt = "Four drawn clips: a cat face spins, a rocket rises, a cat face bounces, a frog fades in and out."

# %% [markdown] lang="zh"
# ## 噪声表一个字不改
#
# 第 02 章的欧拉步只做加法和乘法：$x \leftarrow x + (\sigma_{\text{next}} - \sigma) v$，不问有几根轴。第 08、10 章也一样。于是把四个零件递给同一个 `generate`，句子就动起来了：编码加精炼，速度，解码，形状 $(C, 5, 8, 8)$。

# %% [markdown] lang="en" twin="409649df"
# ## The schedule needs no change
#
# The Euler step of chapter 02 only adds and multiplies: $x \leftarrow x + (\sigma_{\text{next}} - \sigma) v$, whatever the number of axes. So do chapters 08 and 10. Hand the same `generate` four parts and a sentence moves: encoding with refinement, the velocity, decoding, the shape $(C, 5, 8, 8)$.

# %%
lookup = lambda words: refine(encode_prompt(pictures.text_encoder, pictures.tokenizer, words))  # noqa: E731


@torch.no_grad()
def draw(prompts: list[str], seeds: list[int], steps: int = 20):
    """Clips from prompts through chapter 10's pipeline, which sees their frames as pictures."""
    return generate(
        prompts,
        seeds,
        make_schedule(steps, shift=best["shift"]),
        encode=lambda texts: [stack_prompts([lookup(t) for t in some]) for some in (texts, [""] * len(texts))],
        velocity=lambda pair: guided_velocity(lambda x, t, p: network(x, t, *p), *pair, best["guidance_scale"]),
        decode=lambda z: trained.decode(z).transpose(1, 2).flatten(0, 1),  # (B · T, 3, H, W)
        shape=(8, 5, 8, 8),
    )


drawn = draw(prompts, [0, 1, 2, 3])
play([drawn.images[17 * i : 17 * i + 17] for i in range(4)], names, alt=alt, columns=4, size=64)

# %% tags=["check"]
noise, as_images = initial_noise([0], (8, 5, 8, 8)), initial_noise([0], (8, 5, 8, 8))[0].transpose(0, 1)
for s, s_next in make_schedule(6, shift=3.0):  # a step does not know what an axis means
    noise, as_images = noise + (s_next - s) * noise.sin(), as_images + (s_next - s) * as_images.sin()
assert torch.equal(noise[0].transpose(0, 1), as_images)
bank = torch.cat([trained.encode(as_floats(clips_of(["🐱", "🚀", "🐸"], [m.name]))) for m in MOTIONS])
nearest = torch.cdist(drawn.latents.flatten(1), bank.flatten(1)).argmin(dim=1).tolist()
assert [(i % 3, MOTIONS[i // 3].name) for i in nearest] == [(0, "spin"), (1, "up"), (0, "bounce"), (2, "blink")]

# %% [markdown] lang="zh"
# **到了这里**，引擎会画短片了：`TextToVideo` 把这些零件装起来，命令是 `diffusion-engine animate`。还缺的是规模：真正的模型有几万个词元、十亿以上的权重。第 15 章起，把它们的权重装进我们的零件。
#
# ## 三个问题
#
# 1. 预测：因果卷积的补零改成「重复第一帧」，一张图还等于一帧短片吗？分段解码呢？
# 2. 修改：把 `rope_axes` 的时间分量和行分量对调，哪个检查会红？训练好的网络还认得方向吗？
# 3. 动手：只换第一帧的潜变量，让猫的短片从火箭开始。哪些帧变了？

# %% [markdown] lang="en" twin="67719152"
# **Where we stand.** The engine draws clips: `TextToVideo` puts these parts together, and `diffusion-engine animate` is its command. What is missing is size: real models have tens of thousands of tokens and a billion weights or more. From chapter 15 on their weights go into our parts.
#
# ## Three questions
#
# 1. Predict: pad causal convolutions with copies of the first frame instead of zeros. Is an image still a one-frame video? And decoding in parts?
# 2. Modify: swap the time and row parts of `rope_axes`. Which check turns red, and does the trained network still know directions?
# 3. Build: exchange the first frame of latents alone, so that the cat's clip begins with a rocket. Which frames change?

# %% tags=["solution"]
# 1 · yes and yes: y_0 still sees frame 0 alone, and later parts take their past from memory, not from padding
copied = lambda v: F.conv3d(torch.cat([v[:, :, :1]] * 2 + [v], dim=2), causal.weight, causal.bias, padding=(0, 1, 1))  # noqa: E731
v = torch.randn(1, 4, 5, 6, 6, generator=torch.Generator().manual_seed(2))
assert torch.allclose(copied(v)[:, :, :1], copied(v[:, :, :1]), atol=1e-5)
assert torch.allclose(copied(v)[:, :, 2:], causal(v)[:, :, 2:], atol=1e-5)  # only the first two frames differ

# %% tags=["solution"]
# 2 · Wan's parity; the sizes still add up, so nothing else complains, but every angle has another meaning
swapped = axial_rope(grid_positions(3, 3, 4), (42, 44, 42))
assert swapped.cos.shape == cos[:, ::2].shape
assert not torch.allclose(swapped.cos, cos[:, ::2], atol=0.1)

# %% tags=["solution"]
# 3 · frame 0 changes most; the memory of causal layers carries the rocket on into the next frames, weaker and weaker
mixed = latents[:1].clone()
mixed[:, :, 0] = latents[4, :, 0]
change = (trained.decode(mixed) - trained.decode(latents[:1])).square().mean(dim=(0, 1, 3, 4))  # (17,)
assert change[0] == change.max() and change[-4:].mean() < 0.2 * change[0]

# %% [markdown] lang="zh"
# ## 小结
#
# - 时间压缩的 VAE 要求 $T = 4k + 1$：第一帧独占一帧潜变量，一张图就是一帧短片。
# - 因果卷积把补零放在前面；改动后面的帧，前面一个比特都不变。
# - 每层记住两帧输入，分段解码就等于整段解码。
# - 三维图块和三轴旋转与 Wan 一致；全注意力随 $N^2$ 涨价，分解注意力便宜，但信息要多走一层。
# - 噪声表、引导、流水线一个字没改。
#
# 阅读卡片：[`papers/09_wan`](../../papers/09_wan.zh.md)。笔记：[`notes/09_video_latents`](../../notes/09_video_latents.zh.md)。下一章：15。

# %% [markdown] lang="en" twin="023284e7"
# ## Recap
#
# - A VAE that shrinks time wants $T = 4k + 1$: the first frame has its own frame of latents, and a picture is a clip of one frame.
# - Causal convolutions pad in front; change a late frame and no early bit moves.
# - Every layer remembers two input frames, and decoding in parts equals decoding at once.
# - 3-D patches and three-axis rotation agree with Wan; full attention pays $N^2$, factorised attention is cheap but news travels one layer longer.
# - Schedule, guidance and pipeline have not changed by a word.
#
# Reading card: [`papers/09_wan`](../../papers/09_wan.en.md). Note: [`notes/09_video_latents`](../../notes/09_video_latents.en.md). Next chapter: 15.
