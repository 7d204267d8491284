# ---
# jupyter:
#   course:
#     minutes: 50
#     module: vae
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown] lang="zh"
# # 09 · 变分自编码器（variational autoencoder, VAE）
#
# 读完这一章，一张图会变成一小块潜变量（latent），又变回来；再大的图也能一片一片地解码，拼好后看不出接缝。
#
# | 你会做出 | 你需要 | 时间 | 模块 |
# | --- | --- | --- | --- |
# | 卷积 VAE、缩放与平移、均匀分片、接缝混合 | 第 01 章的噪声约定、第 06 章的图块 | 50 分钟 | `diffusion_engine/vae.py` |

# %% [markdown] lang="en" twin="8d68933b"
# # 09 · Variational autoencoder
#
# After this chapter a picture turns into a small block of latents and back again; and a picture of any size is decoded tile by tile, joined without a visible seam.
#
# | You build | You need | Time | Module |
# | --- | --- | --- | --- |
# | a convolutional VAE, scale and shift, even tiles, blended seams | the noise convention of chapter 01, the patches of chapter 06 | 50 minutes | `diffusion_engine/vae.py` |

# %% [markdown] lang="zh"
# **先想一想**：一张 $64\times64$ 的彩色图有 $12\,288$ 个数。去噪要把它们全部算上几十遍。你能扔掉哪些数，而人眼看不出来？扔掉以后，又怎样找回来？先写下你的办法。

# %% [markdown] lang="en" twin="afe74df2"
# **Think first:** a $64\times64$ colour picture has $12\,288$ numbers, and denoising goes through all of them dozens of times. Which could you throw away without the eye noticing? And how would you get them back? Write your plan down.

# %% tags=["export"]
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# %% tags=["hide"]
import matplotlib.pyplot as plt
from course.figures import image_grid, show
from recipes.emoji_data import load_emoji

pictures = torch.from_numpy(load_emoji().images).permute(0, 3, 1, 2).float() / 127.5 - 1  # (1911, 3, 64, 64) in −1…1
examples = pictures[[8, 563, 700, 1000, 1234, 1500]]
mosaic = examples[:4].unflatten(0, (2, 2)).permute(2, 0, 3, 1, 4).reshape(1, 3, 128, 128)  # four emoji, one picture


unit = lambda images: list((images + 1) / 2)  # noqa: E731


# %% [markdown] lang="zh"
# ## 平均是最笨的压缩
#
# 最笨的办法：每 $4\times4$ 个像素只留平均色，$12\,288$ 个数剩 $768$ 个，再插值放大。颜色还在，线条没了。能不能同样小，却记住线条？

# %% [markdown] lang="en" twin="dc8eb1da"
# ## Averaging is the plainest compression
#
# The plainest plan: keep the mean colour of every $4\times4$ pixels. Of $12\,288$ numbers $768$ are left; interpolate to get back. Colours survive, lines do not. Could something as small remember the lines?

# %%
pooled = F.avg_pool2d(examples, 4)  # (6, 3, 16, 16)
blurred = F.interpolate(pooled, scale_factor=4, mode="bilinear")
image_grid(unit(examples) + unit(blurred), columns=6, title="Mean colours keep the paint and lose the drawing",
           alt="Six emoji above, the same six below after averaging and interpolation: blurred, without lines.")  # fmt: skip

# %% [markdown] lang="zh"
# VAE 让网络自己学：编码器（encoder）写下摘要，解码器（decoder）照着摘要重画。
#
# | 记号 | 形状 | 含义 |
# | --- | --- | --- |
# | $x$ | $(B, 3, H, W)$ | 图，数值在 $-1 \dots 1$ |
# | $\mu, \log\sigma^2$ | $(B, 4, H/4, W/4)$ | 编码器的回答：一个高斯（$\sigma$ 是它的宽，不是噪声水平） |
# | $m, s$ | $(4,)$ | 每个通道的平移与缩放 |
# | $z = (\mu - m)/s$ | $(B, 4, H/4, W/4)$ | 潜变量，扩散模型只见到它 |
#
# ## 归一化只看自己这一格
#
# 常见的 VAE 用 GroupNorm，它对整张图求平均：右下角一变亮，左上角也跟着变。切成小片后平均值就不同了，接缝由此而来。我们只在一格的通道之间求均方：
#
# $$y_c = w_c \, \frac{x_c}{\sqrt{\tfrac1C \sum_{c'} x_{c'}^2 + \epsilon}}$$

# %% [markdown] lang="en" twin="f5d12933"
# A VAE lets the network learn it: the encoder writes a summary, the decoder draws from the summary.
#
# | Symbol | Shape | Meaning |
# | --- | --- | --- |
# | $x$ | $(B, 3, H, W)$ | a picture, values in $-1 \dots 1$ |
# | $\mu, \log\sigma^2$ | $(B, 4, H/4, W/4)$ | the encoder's answer: a Gaussian ($\sigma$ is its width, no noise level) |
# | $m, s$ | $(4,)$ | shift and scale of each channel |
# | $z = (\mu - m)/s$ | $(B, 4, H/4, W/4)$ | the latent, all that the diffusion model ever sees |
#
# ## A norm that looks at one position only
#
# The usual VAE takes GroupNorm, a mean over the whole picture: brighten the lower right corner and the upper left one changes too. A tile has another mean than the whole, and seams begin there. We take the mean square over the channels of one position:
#
# $$y_c = w_c \, \frac{x_c}{\sqrt{\tfrac1C \sum_{c'} x_{c'}^2 + \epsilon}}$$


# %% tags=["export"]
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


# %% tags=["check"]
generator = torch.Generator().manual_seed(0)
features = torch.randn(1, 32, 8, 8, generator=generator)
brighter = features.clone()
brighter[..., -1, -1] += 20  # one far corner
norm, group_norm = ChannelNorm(32), nn.GroupNorm(8, 32)
assert torch.equal(norm(features)[..., 0, 0], norm(brighter)[..., 0, 0])  # the near corner does not notice
assert not torch.allclose(group_norm(features)[..., 0, 0], group_norm(brighter)[..., 0, 0], atol=0.1)
assert torch.allclose(norm(features).square().mean(dim=1), torch.ones(1, 8, 8), atol=1e-4)  # not over H or W

from diffusers.models.autoencoders.autoencoder_kl_wan import WanRMS_norm

theirs = WanRMS_norm(32, images=False)  # made for clips: (B, C, T, H, W)
nn.init.normal_(theirs.gamma, generator=generator)
norm.weight.data = theirs.gamma.data.flatten()
assert torch.allclose(norm(features), theirs(features.unsqueeze(2)).squeeze(2), atol=1e-5)  # Wan2.1's own

# %% [markdown] lang="zh"
# ## 残差块、编码器、解码器
#
# 残差块（residual block）里，$3\times3$ 卷积看邻居，$1\times1$ 卷积混通道；后者从零开始，起初什么也不做。编码器用 `PixelUnshuffle` 把 $4\times4$ 个像素叠成 $48$ 个通道，一个数也不丢，再压成 $4 + 4$ 个；解码器反过来，两次放大两倍。卷积不认得绝对位置：图右移 $4$ 个像素，潜变量就右移一格。

# %% [markdown] lang="en" twin="7cff2be8"
# ## Residual block, encoder, decoder
#
# In the residual block a $3\times3$ convolution looks at the neighbours and a $1\times1$ one mixes channels; the latter starts at zero, so at first nothing happens. The encoder stacks $4\times4$ pixels into $48$ channels with `PixelUnshuffle`, losing nothing, then squeezes them into $4 + 4$; the decoder doubles twice. Convolutions know no absolute place: move the picture $4$ pixels to the right and the latents move by one.


# %% tags=["export"]
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


# %% tags=["export"]
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


# %% tags=["check"]
torch.manual_seed(0)
block = ResBlock(32)
assert torch.equal(block(features), features)  # the identity at init
nn.init.normal_(block.conv2.weight)
changed = (block(brighter) != block(features)).any(dim=1)[0]  # (8, 8)
assert changed.sum() == 4 and changed[-2:, -2:].all()  # one position tells its neighbours, nobody else

small = VAEConfig(width=32, encoder_depth=1, decoder_depth=2)
encoder, decoder = Encoder(small), Decoder(small)
moved = encoder(examples.roll(4, dims=-1))
assert torch.allclose(moved[..., 5:-4], encoder(examples)[..., 4:-5], atol=1e-5)  # away from the border
back = decoder(moved[:, :4]), decoder(moved[:, :4].roll(1, dims=-2))
assert torch.allclose(back[1][..., 28:-24, :], back[0][..., 24:-28, :], atol=1e-5)  # one latent down: four pixels

try:
    VAEConfig(factor=8)
except ValueError as error:
    print(error)
else:
    raise AssertionError("a factor that the decoder cannot undo was accepted")

# %% [markdown] lang="zh"
# ## 为什么回答一个高斯
#
# 若编码器只给一个点，它会把图塞进稀奇古怪的角落，点与点之间全是空地。让它给一个范围 $\mathcal N(\mu, \sigma^2)$，训练时从中抽样；再用 KL 散度轻轻把它拉向标准正态：
#
# $$z = \mu + \sigma\,\epsilon, \qquad \mathrm{KL} = \tfrac12\left(\mu^2 + \sigma^2 - 1 - \log\sigma^2\right)$$

# %% [markdown] lang="en" twin="754f2ab6"
# ## Why the answer is a Gaussian
#
# An encoder that answers with a point would hide pictures in odd corners, with no man's land between them. Let it answer with a range $\mathcal N(\mu, \sigma^2)$, draw from it in training, and pull it gently to the standard normal with the KL divergence:
#
# $$z = \mu + \sigma\,\epsilon, \qquad \mathrm{KL} = \tfrac12\left(\mu^2 + \sigma^2 - 1 - \log\sigma^2\right)$$


# %% tags=["export"]
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


# %% tags=["check"]
from torch.distributions import Normal, kl_divergence

mean, logvar = torch.randn(2, 2, 4, 8, 8, generator=generator)
answer, noise = Gaussian(mean, logvar), torch.randn(mean.shape, generator=generator)
theirs = kl_divergence(Normal(mean, (logvar / 2).exp()), Normal(0.0, 1.0))
assert torch.allclose(answer.kl(), theirs.mean(), rtol=1e-5)
many = answer.sample(torch.randn(4000, *mean.shape, generator=generator))
assert torch.allclose(many.mean(dim=0), mean, atol=0.3) and torch.allclose(many.var(dim=0).log(), logvar, atol=0.2)

from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

theirs = DiagonalGaussianDistribution(torch.cat([mean, logvar], dim=1))
assert torch.allclose(answer.kl(), theirs.kl().mean() / mean[0].numel(), rtol=1e-5)  # they sum, we average
assert torch.allclose(answer.sample(noise), theirs.mean + theirs.std * noise)

# %% [markdown] lang="zh"
# ## 合起来，加上平移与缩放
#
# 扩散模型从单位方差的噪声出发，它的数据也该是单位方差；否则同一个 $\sigma$ 下信噪比就不同，第 02 章的噪声表便对不上号。所以 `encode` 交出 $z = (\mu - m)/s$，`decode` 先还原再画。$m$ 和 $s$ 训练完才量（`calibrate`），存在权重旁边。SD3 与 FLUX 写作 $(\mu - m)\cdot f$，$f = 1/s$。

# %% [markdown] lang="en" twin="96d7242b"
# ## Together, with shift and scale
#
# The diffusion model starts from noise of unit variance, so its data should have unit variance too; otherwise the same $\sigma$ means another signal-to-noise ratio, and the noise schedules of chapter 02 no longer fit. `encode` therefore hands out $z = (\mu - m)/s$, and `decode` undoes that before it draws. $m$ and $s$ are measured after training (`calibrate`) and stored with the weights. SD3 and FLUX write $(\mu - m)\cdot f$ with $f = 1/s$.


# %% tags=["export"]
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


# %% [markdown] lang="zh"
# ## 训练一个小的
#
# 损失有四项：绝对误差管颜色，平方误差罚大错，梯度误差照看线条，一点点 KL 照看潜空间。KL 的系数只有 $10^{-3}$，这里要的是好摘要，不是好抽样。像不像用 `psnr` 量，单位分贝，越大越好：
#
# $$L = |\hat x - x| + 2\,(\hat x - x)^2 + \tfrac14\,|\nabla \hat x - \nabla x| + 10^{-3}\,\mathrm{KL}$$

# %% [markdown] lang="en" twin="004a8714"
# ## Train a small one
#
# The loss has four terms: absolute error for colour, squared error against big mistakes, gradient error for lines, a little KL for the latent space. Its weight is only $10^{-3}$: we want a good summary here, not a good sampler. `psnr` tells how alike two pictures are, in decibels, the more the better:
#
# $$L = |\hat x - x| + 2\,(\hat x - x)^2 + \tfrac14\,|\nabla \hat x - \nabla x| + 10^{-3}\,\mathrm{KL}$$


# %% tags=["export"]
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


# %%
torch.manual_seed(0)
vae, steps, peak = VAE(small), 400, 8e-3
optimizer = torch.optim.AdamW(vae.parameters(), lr=peak)
for step in range(steps):
    rows = torch.randint(len(pictures), (8,), generator=generator)
    top, left = torch.randint(64 - 24 + 1, (2,), generator=generator).tolist()
    crops = pictures[rows, :, top : top + 24, left : left + 24]
    loss = vae_loss(vae, crops, torch.randn(8, 4, 6, 6, generator=generator))
    optimizer.zero_grad()
    loss.backward()
    optimizer.param_groups[0]["lr"] = peak * min(1, (step + 1) / 20, (steps - step) / 200)
    optimizer.step()
vae.requires_grad_(False)

before, redrawn = vae.decode(vae.encode(examples)), calibrate(vae, pictures[::8]).decode(vae.encode(examples))
image_grid(unit(examples) + unit(redrawn), columns=6, title="A few seconds of training bring most lines back",
           alt="Six emoji above, below them the same six redrawn by the small VAE: outlines and faces are there.")  # fmt: skip

# %% tags=["check"]
assert (psnr(redrawn, examples) - psnr(blurred, examples)).mean() > 2  # dB; well above the mean colours
assert torch.allclose(redrawn, before, atol=1e-4)  # encode and decode cancel: calibration moves no pixel
latents = vae.encode(pictures[::8])
assert torch.allclose(latents.mean(dim=(0, 2, 3)), torch.zeros(4), atol=1e-4)
assert torch.allclose(latents.std(dim=(0, 2, 3)), torch.ones(4), atol=1e-4)  # unit variance, channel by channel
as_sd3 = (vae.posterior(examples).mean - vae.shift.reshape(-1, 1, 1)) * (1 / vae.scale).reshape(-1, 1, 1)
assert torch.allclose(vae.encode(examples), as_sd3, atol=1e-5)  # their shift_factor and scaling_factor

# %% [markdown] lang="zh"
# ## 大图放不下
#
# 解码器的峰值内存（peak memory）与面积成正比：最挤的时候，半分辨率的残差块里有三份 $(w/2)\cdot(H/2)\cdot(W/2)$ 的 fp32 特征（$w$ 是解码器的宽），约 $1.5\,w H W$ 字节。数一数活着的张量，看公式准不准。放不下就分片解码（tiled decoding）。先试最省事的：切成互不重叠的小片，各自解码，再并排放好。

# %% [markdown] lang="en" twin="9b4d3983"
# ## A large picture does not fit
#
# The decoder's peak memory grows with the area: at the tightest moment a block at half resolution holds three copies of $(w/2)\cdot(H/2)\cdot(W/2)$ fp32 features ($w$ is the decoder's width), about $1.5\,w H W$ bytes. Count the tensors alive and see whether that is right. What does not fit calls for tiled decoding. The easy way first: cut into pieces that do not overlap, decode each, put them side by side.

# %% tags=["hide"]
import weakref
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors made inside this block: alive now, and at the peak."""

    now, peak, seen = 0, 0, frozenset()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        storage = out.untyped_storage()
        if storage._cdata not in self.seen:  # a view brings no new bytes
            self.seen, self.now = self.seen | {storage._cdata}, self.now + storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.free, storage._cdata, storage.nbytes())
        return out

    def free(self, key, size):
        self.seen, self.now = self.seen - {key}, self.now - size


# %% tags=["check"]
peaks = {}
for side in (16, 32, 64):
    with LiveBytes() as meter:
        vae.decode(torch.zeros(1, 4, side, side))
    peaks[side] = meter.peak / (1.5 * small.width * (4 * side) ** 2)  # measured / formula
assert all(1.0 <= ratio < 1.1 for ratio in peaks.values())


# %%
def side_by_side(vae: VAE, latents: Tensor, tile: int) -> Tensor:
    rows = [torch.cat([vae.decode(part) for part in row.split(tile, -1)], -1) for row in latents.split(tile, -2)]
    return torch.cat(rows, -2)


latents = vae.encode(mosaic)  # (1, 4, 32, 32)
full, cut = vae.decode(latents), side_by_side(vae, latents, 11)
image_grid([*unit(full), *unit(cut), (cut - full).abs()[0] * 4], ["whole", "pieces of 11", "4 × difference"], size=2.0,
           title="Each cut leaves a line", alt="A picture decoded whole, in pieces, and the difference: lines.")  # fmt: skip

# %% [markdown] lang="zh"
# ## 一个潜变量看多远
#
# 小片的边上，卷积看到的是补上的零，不是真邻居。错误能传多远？把各层的半径加起来：在边长为 $c$ 的格子上，$k\times k$ 卷积伸出 $c\,(k-1)/2$。再用染色来验证：滴一滴 NaN，它会染遍所有受影响的像素，一个不多，一个不少。

# %% [markdown] lang="en" twin="fbe4ee99"
# ## How far one latent reaches
#
# At the rim of a tile the convolutions see padded zeros, not the true neighbours. How far does that error travel? Add up the radii: on cells of side $c$ a $k\times k$ convolution reaches $c\,(k-1)/2$ further. Then check it with dye: a drop of NaN colours every pixel that depends on it, not one more, not one less.


# %% tags=["export"]
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


# %% tags=["check"]
dyed = torch.zeros(1, 4, 33, 33, dtype=torch.float64)
dyed[..., 16, 16] = torch.nan
columns = VAE(small).double().decode(dyed).isnan().any(dim=1)[0].any(dim=0).nonzero().flatten()  # coloured pixels
radius = receptive_radius(vae.decoder)
assert radius == 1 + 2 + 2 * 0.5 + 0.5
assert columns.min() == 4 * 16 - 4 * radius and columns.max() == 4 * 16 + 3 + 4 * radius
assert receptive_radius(Decoder(VAEConfig())) == 6.5 and receptive_radius(Encoder(VAEConfig())) == 4

# %% [markdown] lang="zh"
# ## 均匀分片
#
# 常见做法从左往右按固定步长切，最后常剩一条窄边，也要算一次。均匀的做法：先定片数，再让每片一样大，均匀排开。边长 $L$，一片最大 $t$，重叠至少 $o$：
#
# $$n = \left\lceil \frac{L - o}{t - o} \right\rceil, \qquad \text{size} = \left\lceil \frac{L + (n - 1)\,o}{n} \right\rceil$$

# %% [markdown] lang="en" twin="d06c990a"
# ## Even tiles
#
# The common way cuts from left to right at a fixed stride, and often leaves a sliver that costs one more call. The even way: fix the number of tiles, give all one size, space them evenly. $L$ is the side, $t$ the largest tile, $o$ the least overlap:
#
# $$n = \left\lceil \frac{L - o}{t - o} \right\rceil, \qquad \text{size} = \left\lceil \frac{L + (n - 1)\,o}{n} \right\rceil$$


# %% tags=["export"]
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


# %% tags=["check"]
fixed = [(start, min(start + 32, 100)) for start in range(0, 100, 24)]  # diffusers' grid: tile 32, a quarter shared
even = even_tiles(100, 32, 8)
assert [b - a for a, b in fixed] == [32, 32, 32, 28, 4]  # five calls, the last a sliver
assert [b - a for a, b in even] == [31] * 4  # four calls, all alike
assert even[0][0] == 0 and even[-1][1] == 100 and all(b - c >= 8 for (_, b), (c, _) in zip(even, even[1:]))

# %% [markdown] lang="zh"
# ## 扔掉脏边，再混合
#
# 教科书式的混合在整个重叠区上线性过渡，可是脏边也分到了权重。脏边宽 $r$，应当先扔掉；剩下的 $o - 2r$ 才用来过渡，过渡带宽 $\rho$，至少一个潜变量。$d$ 是到切边的距离，$w$ 是权重：
#
# $$w(d) = \operatorname{clamp}\!\left(\frac{d - (o - \rho)/2}{\rho},\, 0,\, 1\right), \qquad \rho = \max(1,\; o - 2r)$$

# %% [markdown] lang="en" twin="cb394e15"
# ## Throw the dirty rim away, then blend
#
# The textbook blend fades over the whole overlap, so the dirty rim gets weight too. The rim, $r$ wide, should go first; only the remaining $o - 2r$ serve the fade, of width $\rho$, at least one latent. $d$ is the distance to the cut edge, $w$ the weight:
#
# $$w(d) = \operatorname{clamp}\!\left(\frac{d - (o - \rho)/2}{\rho},\, 0,\, 1\right), \qquad \rho = \max(1,\; o - 2r)$$


# %% tags=["export"]
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


# %% [markdown] lang="zh"
# ## 重叠不够时，接缝有多明显
#
# 精确要 $o \ge 2r + 1$，有时太贵。那就量：接缝比（seam ratio）是拼缝处相邻像素的差，除以整图解码时同一处的差。$1$ 表示没有缝。

# %% [markdown] lang="en" twin="8700d107"
# ## How visible is a seam when the overlap is too small?
#
# Exactness takes $o \ge 2r + 1$, sometimes too dear. Then measure: the seam ratio is the step between neighbouring pixels across a join, divided by the step at the same place in the whole decode. $1$ means no seam.


# %%
def seam_ratio(picture: Tensor, whole: Tensor, tile: int, overlap: int) -> float:
    tiles = even_tiles(whole.shape[-1] // 4, tile, overlap)
    joins = [2 * (stop + start) for (_, stop), (start, _) in zip(tiles, tiles[1:])]  # middle of the overlap, in pixels
    across = [sum((p[..., j] - p[..., j - 1]).abs().mean() for j in joins) for p in (picture, whole)]
    return (across[0] / across[1]).item()


wide = vae.encode(torch.cat([mosaic, mosaic.flip(-1)], dim=-1))  # (1, 4, 32, 64): no square
overlaps = [0, 1, 2, 4, 6, 8, 10]
tried = [tiled_decode(vae, wide, 16, overlap) for overlap in overlaps]
ratios = [seam_ratio(picture, vae.decode(wide), 16, overlap) for picture, overlap in zip(tried, overlaps)]
rmse = [(picture - vae.decode(wide)).square().mean().sqrt().item() for picture in tried]

fig, (left, right) = plt.subplots(1, 2, figsize=(6.4, 2.6))
left.plot(overlaps, ratios, "o-")
left.axhline(1, color="0.7", lw=1)
left.set(title="Two latents hide the seam", xlabel="overlap, latents", ylabel="seam ratio")
right.semilogy(overlaps, [max(value, 1e-8) for value in rmse], "o-")
right.axvline(2 * radius + 1, color="0.7", lw=1)
right.set(title="2r + 1 makes it exact", xlabel="overlap, latents", ylabel="RMS error")
show(fig, alt="Against the overlap: the seam ratio falls towards one, the RMS error falls to rounding at 2r + 1.")

# %% tags=["check"]
enough = int(2 * radius + 1)  # 10 latents
assert torch.allclose(tiled_decode(vae, wide, 16, enough), vae.decode(wide), atol=1e-5)
assert torch.allclose(tiled_encode(vae, mosaic, 12, 7), vae.encode(mosaic), atol=1e-5)
assert not torch.allclose(tiled_decode(vae, wide, 16, 4), vae.decode(wide), atol=1e-5)  # 4 does not cover the rim
assert ratios[0] > 1.1  # pieces side by side: a visible line
assert all(ratio < 1.1 for ratio in ratios[3:])
assert rmse[0] > 10 * rmse[3] > 100 * rmse[-1]  # falls all the way, to rounding

# %% [markdown] lang="zh"
# ## 和真家伙对一对，再看随引擎发布的 VAE
#
# diffusers 的 `blend_h` 逐数对上；再让它的 `tiled_decode` 驱动我们的解码器，同样大小的片、同样的重叠，看谁离整图更近。最后读入引擎自己的 VAE：宽 $128$，在 $1\,911$ 张表情上用上面的损失训练，以 fp16 存放。

# %% [markdown] lang="en" twin="6674800f"
# ## Against the real thing, and the VAE that ships
#
# The `blend_h` of diffusers agrees number by number; then its `tiled_decode` drives our decoder, with tiles and overlap of the same size. Which comes closer to the whole picture? At last read the engine's own VAE: $128$ wide, trained on $1\,911$ emoji with the loss above, stored in fp16.

# %% tags=["check"]
from types import SimpleNamespace
from diffusers import AutoencoderKL

a, b = vae.decode(wide[..., :16]), vae.decode(wide[..., 8:24])  # two neighbours that share 8 latents, 32 pixels
faded = torch.lerp(a[..., -32:], b[..., :32], torch.arange(32) / 32)
assert torch.allclose(faded, AutoencoderKL.blend_h(None, a, b.clone(), 32)[..., :32], atol=1e-6)

grid = SimpleNamespace(tile_latent_min_size=16, tile_sample_min_size=64, tile_overlap_factor=0.5, decoder=vae.decode)
grid.config = SimpleNamespace(use_post_quant_conv=False)
grid.blend_v, grid.blend_h = (lambda *args, f=f: f(None, *args) for f in (AutoencoderKL.blend_v, AutoencoderKL.blend_h))
theirs = AutoencoderKL.tiled_decode(grid, wide, return_dict=False)[0]
errors = [(picture - vae.decode(wide)).square().mean().sqrt() for picture in (tiled_decode(vae, wide, 16, 8), theirs)]
assert errors[0] < errors[1] / 10  # the same overlap, a tenth of the error: the rim was thrown away

# %% tags=["check"]
from importlib.resources import files
from safetensors.torch import load_file

shipped = VAE().requires_grad_(False)
shipped.load_state_dict(load_file(files("diffusion_engine") / "assets" / "model" / "vae.safetensors"))
redrawn = shipped.decode(shipped.encode(examples))
image_grid(unit(examples) + unit(redrawn), columns=6, title="The shipped VAE: a twelfth of the numbers, the same picture",
           alt="Six emoji above, the same six redrawn by the shipped VAE below: hardly a difference.")  # fmt: skip

assert (psnr(redrawn, examples) > psnr(blurred, examples) + 3).all()
spread = shipped.encode(pictures[::16]).std(dim=(0, 2, 3))
assert torch.allclose(spread, torch.ones(4), atol=0.15)  # its scale is measured
whole = shipped.decode(shipped.encode(mosaic))
assert torch.allclose(tiled_decode(shipped, shipped.encode(mosaic), 24, 14), whole, atol=1e-4)  # 14 = 2 · 6.5 + 1

# %% [markdown] lang="zh"
# **到了这里**，引擎的两端都有了：文字进得来，图画得出。中间的零件散在九章里。下一章把它们串成一条流水线（pipeline）：若一批四张图里有一张你喜欢，怎样单独再画出它来？
#
# ## 三个问题
#
# 1. 预测：解码器再加两个半分辨率的残差块，精确分片需要的重叠变成多少？
# 2. 修改：把 `tile_weight` 里的脏边去掉（$\rho = o$），哪个检查变红？接缝比能看出来吗？
# 3. 动手：用 `LiveBytes` 比较整图与分片解码的峰值内存，说明它何时不省。

# %% [markdown] lang="en" twin="5a28d641"
# **Where we stand.** Both ends of the engine exist: text comes in, pictures come out. The parts between lie scattered over nine chapters. The next one strings them into a pipeline: if you like one of a batch of four pictures, how do you draw that one again, alone?
#
# ## Three questions
#
# 1. Predict: with two more blocks at half resolution, which overlap does exact tiling need?
# 2. Modify: give `tile_weight` no rim ($\rho = o$). Which check turns red? Does the seam ratio show it?
# 3. Build: compare the peak memory of whole and tiled decoding with `LiveBytes`, and say when tiling saves nothing.

# %% tags=["solution"]
# 1 · each block adds half a latent: r = 6.5 + 2 · 0.5, so 2r + 1 = 16
deeper = nn.Sequential(*Decoder(VAEConfig()), ResBlock(1), ResBlock(1))
assert receptive_radius(Decoder(VAEConfig())) + 2 * 0.5 == 7.5 and 2 * 7.5 + 1 == 16
assert receptive_radius(deeper) == 6.5 + 2 * 0.25  # behind the last shuffle a cell is a quarter: cheaper still

# %% tags=["solution"]
# 2 · the exactness check turns red; the seam ratio hardly notices, because a long fade hides what it smears
smeared = tiled(vae.decode, wide, 16, enough, radius=0.0, factor=4)  # radius 0: the whole overlap fades
assert not torch.allclose(smeared, vae.decode(wide), atol=1e-3)
assert seam_ratio(smeared, vae.decode(wide), 16, enough) < 1.1

# %% tags=["solution"]
# 3 · the tile's features shrink with its area; the joined picture and its weights stay; one big tile saves nothing
big, peaks = torch.zeros(1, 4, 64, 64), []
for decode in (vae.decode, lambda z: tiled_decode(vae, z, 24, 10), lambda z: tiled_decode(vae, z, 64, 10)):
    with LiveBytes() as meter:
        decode(big)
    peaks.append(meter.peak)
assert peaks[1] < 0.6 * peaks[0] < peaks[2]

# %% [markdown] lang="zh"
# ## 小结
#
# - VAE 把 $12\,288$ 个数写成 $1\,024$ 个，还画得回来。
# - 归一化只看一格，分片才有可能精确。
# - $z = (\mu - m)/s$ 让每个通道方差为 $1$，噪声表才对得上。
# - 均匀分片没有窄边；先扔脏边，再混合。
# - $o \ge 2r + 1$ 时分片与整图相差不到 $10^{-5}$；与 diffusers 的公式数值一致。
#
# 阅读卡片：SD3（[`papers/05_sd3`](../../papers/05_sd3.zh.md)）。下一章：10。

# %% [markdown] lang="en" twin="f2d0662e"
# ## Recap
#
# - A VAE writes $12\,288$ numbers as $1\,024$ and can draw them again.
# - A norm that sees one position is what makes exact tiling possible.
# - $z = (\mu - m)/s$ gives every channel variance $1$, as the noise schedules expect.
# - Even tiles leave no slivers; throw the dirty rim away, then blend.
# - With $o \ge 2r + 1$ tiles and whole differ by less than $10^{-5}$; the formulas agree with diffusers' in numbers.
#
# Reading card: SD3 ([`papers/05_sd3`](../../papers/05_sd3.en.md)). Next: chapter 10.
