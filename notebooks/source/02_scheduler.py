# ---
# jupyter:
#   course:
#     minutes: 45
#     module: scheduler
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown] lang="zh"
# # 02 · 调度器（scheduler）
#
# 读完这一章，你能决定网络在哪几个噪声水平上被调用、两次调用之间怎么走，并且和 SD3、FLUX、Wan 的数值对上六位小数。
#
# | 你会做出 | 你需要 | 时间 | 模块 |
# | --- | --- | --- | --- |
# | 不可变的噪声表、移位、三种求解器 | 第 01 章的 $x_\sigma$、$v$ 与 Euler | 45 分钟 | `diffusion_engine/scheduler.py` |

# %% [markdown] lang="en" twin="bd717664"
# # 02 · Scheduler
#
# After this chapter you decide at which noise levels the network is called and how to walk between two calls, and your numbers agree with SD3, FLUX and Wan to six decimals.
#
# | You build | You need | Time | Module |
# | --- | --- | --- | --- |
# | an immutable noise schedule, the shift, three solvers | $x_\sigma$, $v$ and Euler from chapter 01 | 45 minutes | `diffusion_engine/scheduler.py` |

# %% [markdown] lang="zh"
# **先想一想**：网络很贵，你只能调用四次。从 $\sigma = 1$ 到 $\sigma = 0$ 的路上，这四站放在哪里？均匀放是最好的吗？图片变大四倍，答案变不变？先写下你的猜测。

# %% [markdown] lang="en" twin="f06594a6"
# **Think first:** the network is expensive, and you may call it four times. On the way from $\sigma = 1$ to $\sigma = 0$, where do you put the four stations? Is even spacing best? Does the answer change when the picture grows four times larger? Write your guess down.

# %% tags=["export"]
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

# %% tags=["hide"]
import matplotlib.pyplot as plt

from course.figures import COLORS, show
from diffusion_engine.rectified_flow import interpolate


def refusal(function: Callable, *args, **kwargs) -> str:
    """The message with which a call is refused; nothing when it is not."""
    try:
        function(*args, **kwargs)
    except ValueError as error:
        return str(error)
    return ""


# %% [markdown] lang="zh"
# ## 噪声表就是一张表
#
# $N$ 步要 $N + 1$ 个站：$1 \ge \sigma_0 > \sigma_1 > \dots > \sigma_N = 0$。许多库把「走到第几步」也存在这张表里，于是两次生成会互相打扰。这里的表造好就不再变：它只有数，没有状态。乘 $1000$ 是沿袭：早先的扩散模型用一千步来训练。
#
# | 记号 | 形状 | 含义 |
# | --- | --- | --- |
# | $\sigma_i$ | $(N + 1,)$ | 噪声水平，fp32，末尾是 $0$ |
# | $t_i = 1000\,\sigma_i$ | $(N,)$ | 喂给网络的时间，fp32 |

# %% [markdown] lang="en" twin="c39d203e"
# ## A schedule is a table
#
# $N$ steps need $N + 1$ stations: $1 \ge \sigma_0 > \sigma_1 > \dots > \sigma_N = 0$. Many libraries also keep "which step are we at" in this object, so that two runs disturb each other. Ours never changes once made: it holds numbers, no state. The factor $1000$ is custom: earlier diffusion models were trained on a thousand steps.
#
# | Symbol | Shape | Meaning |
# | --- | --- | --- |
# | $\sigma_i$ | $(N + 1,)$ | noise levels, fp32, the last is $0$ |
# | $t_i = 1000\,\sigma_i$ | $(N,)$ | the time fed to the network, fp32 |

# %% tags=["export"]
TRAIN_STEPS = 1000  # the network is fed t = 1000·σ


@dataclass(frozen=True)
class Schedule:
    """N steps through N + 1 falling noise levels, the last of them 0. Immutable; iterating gives (σ, σ_next).

    Attributes:
        values: σ, N + 1 numbers in double precision.
        integer_timesteps: cut the times to whole numbers, as UniPC does.

    Raises:
        ValueError: fewer than two values, values outside 0…1, values that do not fall in fp32, a last value but 0.
    """

    values: tuple[float, ...]
    integer_timesteps: bool = False

    def __post_init__(self):
        object.__setattr__(self, "values", tuple(float(v) for v in self.values))
        if len(self.values) < 2 or self.values[-1] != 0 or not self.values[0] <= 1:
            raise ValueError(f"sigmas {list(self.values)} must begin at 1 or below and end at 0; try (1.0, 0.5, 0.0)")
        for s, s_next in self:
            if not s > s_next:
                raise ValueError(f"sigma {s:g} is followed by {s_next:g}, it must fall; try fewer steps or less shift")

    @property
    def sigmas(self) -> Tensor:
        """The noise levels, (N + 1,), fp32; a fresh tensor each time."""
        return torch.tensor(self.values, dtype=torch.float32)

    @property
    def timesteps(self) -> Tensor:
        """What the network is told, t = 1000·σ, (N,), fp32."""
        if self.integer_timesteps:
            return torch.tensor([math.floor(TRAIN_STEPS * v) for v in self.values[:-1]], dtype=torch.float32)
        return TRAIN_STEPS * self.sigmas[:-1]

    @property
    def num_steps(self) -> int:
        """N."""
        return len(self.values) - 1

    def __iter__(self) -> Iterator[tuple[float, float]]:
        sigmas = self.sigmas.tolist()
        return iter(zip(sigmas[:-1], sigmas[1:]))

    @classmethod
    def from_config(
        cls,
        config: str | Path | dict,
        num_inference_steps: int | None = None,
        num_tokens: int | None = None,
        grid: str = "even",
        sigmas: Sequence[float] | None = None,
    ) -> "Schedule":
        """The schedule that a diffusers ``scheduler_config.json`` describes.

        Args:
            config: the file, the folder that holds it, or its contents.
            num_inference_steps: N, 1…1000; may be left out when ``sigmas`` is given.
            num_tokens: image tokens; needed where the file asks for a dynamic shift, unused elsewhere.
            grid: the base grid, which the file does not tell (a pipeline's code does); see `make_schedule`. UniPC has
                its own.
            sigmas: the base grid itself, instead of ``grid``.

        Raises:
            ValueError: no such file, no JSON, an unknown class or setting, or a setting that this engine does not
                follow.
        """
        return _schedule_from_config(config, num_inference_steps, num_tokens, grid, sigmas)


# %% tags=["check"]
even = Schedule((1.0, 0.75, 0.5, 0.25, 0.0))
even.sigmas[0] = 7.0  # scribbles on a copy
assert list(even) == [(1.0, 0.75), (0.75, 0.5), (0.5, 0.25), (0.25, 0.0)]
assert even.timesteps.tolist() == [1000.0, 750.0, 500.0, 250.0]
for wrong in [(1.0, 0.5), (1.0, 0.5, 0.5, 0.0), (0.0, 0.0), (1.5, 0.0), (1.0, math.nan, 0.0)]:
    assert refusal(Schedule, wrong)

# %% [markdown] lang="zh"
# ## 图片越大，噪声越要多
#
# 一张纯色图有 $n$ 个像素，每个都蒙了噪声。把它们平均，颜色就露出来了，残余误差是 $\frac{\sigma}{1-\sigma}\big/\sqrt{n}$。像素变成四倍，误差就减半：同一个 $\sigma$，大图看起来更干净。要一样难，就得把 $\frac{\sigma}{1-\sigma}$ 乘上 $k$，四倍像素时 $k = 2$：
#
# $$\frac{\sigma'}{1-\sigma'} = k\,\frac{\sigma}{1-\sigma} \quad\Longleftrightarrow\quad \sigma' = \frac{k\,\sigma}{1 + (k-1)\,\sigma}$$

# %% [markdown] lang="en" twin="5c5c7817"
# ## Larger pictures need more noise
#
# Take a picture of one colour with $n$ noisy pixels. Average them and the colour shows, with an error of $\frac{\sigma}{1-\sigma}\big/\sqrt{n}$. Four times the pixels halve it: at the same $\sigma$ a larger picture looks cleaner. To make it as hard, multiply $\frac{\sigma}{1-\sigma}$ by $k$, and $k = 2$ for four times the pixels:
#
# $$\frac{\sigma'}{1-\sigma'} = k\,\frac{\sigma}{1-\sigma} \quad\Longleftrightarrow\quad \sigma' = \frac{k\,\sigma}{1 + (k-1)\,\sigma}$$


# %% tags=["export"]
def shift_sigmas(sigmas: float | Tensor, shift: float) -> float | Tensor:
    """Move σ towards noise, σ' = k·σ / (1 + (k − 1)·σ), so that the odds σ/(1 − σ) grow k-fold; 0 and 1 stay.

    Args:
        sigmas: a number or a tensor of any shape, in 0…1.
        shift: k > 0; above 1, more of the steps are spent at high noise.

    Raises:
        ValueError: ``shift`` is not a positive finite number.

    Source: Esser et al. 2024 (SD3), eq. 23.
    """
    if not (math.isfinite(shift) and shift > 0):
        raise ValueError(f"shift {shift} is not a positive number; try 1.0 (no shift) or 3.0")
    return shift * sigmas / (shift * sigmas + (1 - sigmas))  # written so, 0 and 1 stay exactly


# %% tags=["check"]
def colour_error(n: int, sigma: float) -> float:  # guess the colour of a flat picture from its noisy pixels
    noise = torch.randn(20_000, n, generator=torch.Generator().manual_seed(0))
    return (interpolate(torch.ones(20_000, n), noise, sigma).mean(1) / (1 - sigma)).std().item()


assert abs(colour_error(64, shift_sigmas(0.5, 2.0)) / colour_error(16, 0.5) - 1) < 0.03  # 4× the pixels, k = 2
s = torch.linspace(0.01, 1, 100)
assert torch.allclose(shift_sigmas(shift_sigmas(s, 3.0), 2.0), shift_sigmas(s, 6.0))  # shifts multiply
assert torch.allclose(shift_sigmas(s, math.exp(0.7)), math.exp(0.7) / (math.exp(0.7) + 1 / s - 1))  # diffusers' form

# %% [markdown] lang="zh"
# **先猜，再拖**：$k = 3$ 时，正中间的站 $\sigma = 0.5$ 会移到哪里？把 $k$ 拖大，看站往哪一头挤。
#
# FLUX 让 $k$ 随图片大小自己变：$k = e^\mu$，$\mu$ 是图像词元（token）数的线性函数，256 个时为 $0.5$，4096 个时为 $1.15$。词元多到十六倍，$k$ 只翻了约一倍，按上面的根号却该是四倍：这是人的选择，不是定律。diffusers 给动态移位另写了一个公式 $e^\mu / (e^\mu + 1/\sigma - 1)$，其实是同一个。

# %% [markdown] lang="en" twin="107fff8a"
# **Guess, then move:** with $k = 3$, where does the middle station $\sigma = 0.5$ go? Raise $k$, and watch to which end the stations crowd.
#
# FLUX lets $k$ follow the picture's size: $k = e^\mu$, where $\mu$ is linear in the number of image tokens, $0.5$ at 256 and $1.15$ at 4096. Sixteen times the tokens only about double $k$, where the root above asks for four times: a choice, not a law. For the dynamic shift diffusers writes another formula, $e^\mu / (e^\mu + 1/\sigma - 1)$; it is the same one.

# %% tags=["hide"]
from course.sliders import slider

s = torch.linspace(0, 1, 81)


def draw_shift(k: float):
    fig, ax = plt.subplots(figsize=(6, 3.2))
    ax.plot(s, s, color=COLORS[5], lw=0.8)
    ax.plot(s, shift_sigmas(s, k))
    for even, moved in zip(s[::10], shift_sigmas(s[::10], k)):
        ax.plot([even, even, 0], [0, moved, moved], color=COLORS[1], lw=0.6)
        ax.plot([even, 0], [moved, moved], "o", color=COLORS[1], ms=4, clip_on=False)
    ax.set(title=f"k = {k:g}: the middle station moves to {k / (1 + k):.2f}", xlabel="even σ", ylabel="shifted σ")
    ax.set(xlim=(0, 1), ylim=(0, 1.02))
    return fig


slider(
    draw_shift,
    [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0, 10.0],
    label="shift k",
    alt="The curve of shift {} from 0 to 1 over the diagonal; nine stations move up towards 1 along the vertical axis.",
    live=[1 + i / 4 for i in range(37)],
)


# %% tags=["export"]
def dynamic_mu(
    num_tokens: int, base_tokens: int = 256, max_tokens: int = 4096, base_mu: float = 0.5, max_mu: float = 1.15
) -> float:
    """μ on the line through (base_tokens, base_mu) and (max_tokens, max_mu); the shift is k = e^μ.

    Args:
        num_tokens: tokens that the network sees for the picture or clip, at least 1.
        base_tokens, base_mu, max_tokens, max_mu: the line; FLUX's by default. It goes on beyond both ends.

    Raises:
        ValueError: ``num_tokens`` below 1, or a line with one point.

    Source: black-forest-labs/flux, ``sampling.py`` (``get_lin_function``).
    """
    if not num_tokens >= 1 or base_tokens == max_tokens:
        raise ValueError(f"{num_tokens} tokens on a line {base_tokens} … {max_tokens}; try 4096 tokens on 256 … 4096")
    return base_mu + (max_mu - base_mu) / (max_tokens - base_tokens) * (num_tokens - base_tokens)


# %% [markdown] lang="zh"
# ## 移位之前的站，和一个陷阱
#
# 移位之前先要有底格。FLUX、LTX 从 $1$ 均匀走到 $1/N$；SD3 走到训练过的最小值 $1/1000$。可 SD3 的代码把这个末端存成了移位后的值，于是末端被移了两次。要和它一致，就得明说 `grid="double"`。Wan 的采样器 UniPC 另有一套底格，写作 `"unipc"`。
#
# LTX 还要求末站恰好是 $\tau$（和第 01 章的团宽无关）：把离 $1$ 的距离按比例缩放，$\sigma' = 1 - (1-\sigma)\,\frac{1-\tau}{1-\sigma_{N-1}}$。只有一步时分母是 $0$，diffusers 在这里得到 NaN。

# %% [markdown] lang="en" twin="a6e54a05"
# ## The stations before the shift, and a trap
#
# The shift needs a base grid. FLUX and LTX go evenly from $1$ to $1/N$; SD3 to the smallest level trained on, $1/1000$. But SD3's code stores that end already shifted, so its tail is shifted twice. To match, say so: `grid="double"`. Wan's sampler, UniPC, has a grid of its own, `"unipc"`.
#
# LTX also wants the last station to be $\tau$ (no cloud's width this time): scale the distances from $1$, $\sigma' = 1 - (1-\sigma)\,\frac{1-\tau}{1-\sigma_{N-1}}$. With one step the divisor is $0$, and diffusers gives NaN.

# %% tags=["export"]
GRIDS = ("even", "trained", "double", "unipc")


def _base_grid(steps: int, grid: str, shift: float) -> Tensor:
    """Noise levels before the shift, (N,), float64, from 1 down."""
    if grid not in GRIDS:
        raise ValueError(f'grid "{grid}" is unknown; try {", ".join(GRIDS)}')
    steps, smallest = _check_steps(steps), 1 / TRAIN_STEPS
    if grid == "unipc":
        return 1 - torch.arange(steps, dtype=torch.float64) * ((1 - smallest) / steps)
    last = {"even": 1 / steps, "trained": smallest, "double": shift_sigmas(smallest, shift)}[grid]
    return torch.linspace(1, last, steps, dtype=torch.float64)


def _stretch(sigmas: Tensor, terminal: float | None) -> Tensor:
    """Scale the distances from 1 so that the last level is ``terminal``; a lone 1 stays 1."""
    if terminal is not None and not 0 < terminal < 1:
        raise ValueError(f"terminal {terminal} must lie between 0 and 1; try 0.1, or None for no stretch")
    if terminal is None or sigmas[-1] == 1:
        return sigmas
    return 1 - (1 - sigmas) * (1 - terminal) / (1 - sigmas[-1])


# %% [markdown] lang="zh"
# ## 还有三种疏密
#
# 初读可以跳到“三种走法”。第一站和末站定了，中间可以另排，$u$ 从 $0$ 均匀走到 $1$：
#
# | 名字 | 中间各站 |
# | --- | --- |
# | Karras | $\sigma^{1/7}$ 均匀 |
# | exponential | $\log\sigma$ 均匀 |
# | beta | 分位数 $F^{-1}(1 - u)$，$F$ 是 $\mathrm{Beta}(0.6, 0.6)$ 的分布函数 |
#
# 分位数没有闭式，但 $F$ 有快速收敛的级数，二分就能反解，不必为它多装一个库。

# %% [markdown] lang="en" twin="ecbef370"
# ## Three more spacings
#
# A first reading may go on at “Three ways to walk”. With the first and last station fixed, those between may be placed anew; $u$ goes evenly from $0$ to $1$:
#
# | Name | Stations between |
# | --- | --- |
# | Karras | $\sigma^{1/7}$ even |
# | exponential | $\log\sigma$ even |
# | beta | quantiles $F^{-1}(1 - u)$, with $F$ the distribution function of $\mathrm{Beta}(0.6, 0.6)$ |
#
# The quantile has no closed form, but $F$ has a fast series, and halving inverts it. No need to install a library for that.


# %% tags=["export"]
SPACINGS = ("linear", "karras", "exponential", "beta")


def _beta_quantile(u: Tensor, a: float = 0.6) -> Tensor:
    """F⁻¹(u) of Beta(a, a) in float64: ∫₀ˣ (t(1 − t))ᵃ⁻¹ dt = xᵃ Σ_k (1 − a)_k / k! · xᵏ / (a + k), inverted by halving."""
    k = torch.arange(64, dtype=torch.float64)
    weights = torch.cat([k[:1] + 1, ((k[1:] - a) / k[1:]).cumprod(0)]) / (a + k)
    low, high = torch.zeros_like(u), torch.full_like(u, 0.5)  # x ≤ ½; the other half by symmetry
    whole = 2 * 0.5**a * (weights * 0.5**k).sum()
    for _ in range(60):
        x = (low + high) / 2
        below = x**a * (weights * x[:, None] ** k).sum(-1) < whole * torch.minimum(u, 1 - u)
        low, high = torch.where(below, x, low), torch.where(below, high, x)
    return torch.where(u <= 0.5, low, 1 - low)


def _respace(sigmas: Tensor, spacing: str) -> Tensor:
    """Other distances between the first and the last level."""
    first, last = sigmas[0], sigmas[-1]
    u = torch.linspace(0, 1, len(sigmas), dtype=torch.float64)
    if spacing == "karras":
        return torch.lerp(first ** (1 / 7), last ** (1 / 7), u) ** 7
    if spacing == "exponential":
        return torch.lerp(first.log(), last.log(), u).exp()
    if spacing == "beta":
        return torch.lerp(last, first, _beta_quantile(1 - u))
    if spacing == "linear":
        return sigmas
    raise ValueError(f'spacing "{spacing}" is unknown; try {", ".join(SPACINGS)}')


# %% tags=["check"]
ends = torch.linspace(0.9, 0.1, 9, dtype=torch.float64)
ratios = _respace(ends, "exponential")[1:] / _respace(ends, "exponential")[:-1]
assert torch.allclose(ratios, ratios[0].expand(8))  # every step divides σ by the same number
torch.manual_seed(0)
draws = torch.distributions.Beta(0.6, 0.6).sample((200_000,))
u = torch.tensor([0.05, 0.3, 0.5, 0.9], dtype=torch.float64)
assert torch.allclose((draws[:, None] < _beta_quantile(u)).double().mean(0), u, atol=5e-3)  # u of the draws lie below

# %% [markdown] lang="zh"
# ## 按顺序拼起来
#
# 底格 → 移位 → 拉伸 → 疏密 → 末尾添 $0$。顺序换了，数值就变，形状却不变，所以后面用公开的数值来核对。步数先过一道关：零步、负数、小数、上万步，都当场说清楚。
#
# 时间一路 fp32：bf16 在 $512$ 到 $1024$ 之间每隔 $4$ 才有一个数，$750$ 会变成 $752$。

# %% [markdown] lang="en" twin="fe07b10e"
# ## Putting it together, in order
#
# Base grid → shift → stretch → spacing → append $0$. Another order gives other numbers of the same shape, so published values will judge. The step count passes a gate first: zero, negative, fractional or ten thousand steps are refused on the spot.
#
# Times stay fp32: between $512$ and $1024$ bf16 holds every fourth number, and $750$ becomes $752$.


# %% tags=["export"]
def _check_steps(steps: int) -> int:
    """N as a whole number within 1…1000.

    Raises:
        ValueError: anything else, with the nearest valid count.
    """
    if hasattr(steps, "__index__") and not isinstance(steps, bool) and 1 <= int(steps) <= 1000:
        return int(steps)
    near = 28
    if isinstance(steps, (int, float)) and not math.isnan(min(steps, 1000)):
        near = round(min(max(steps, 1), 1000))
    raise ValueError(f"num_inference_steps {steps!r} is not a whole number within 1…1000; try {near}")


def _given_grid(sigmas: Sequence[float], steps: int | None) -> Tensor:
    """The caller's base grid, checked, (N,), float64."""
    base = torch.as_tensor(sigmas, dtype=torch.float64)
    if base.ndim != 1 or not ((base > 0) & (base <= 1)).all():
        raise ValueError(f"sigmas {base.tolist()} must be numbers in (0, 1]; the 0 at the end is added for you")
    if _check_steps(len(base) if steps is None else steps) != len(base):
        raise ValueError(f"{len(base)} sigmas for {steps} steps; try num_inference_steps={len(base)}")
    return base


# %% tags=["export"]
def make_schedule(
    num_inference_steps: int | None = None,
    shift: float = 1.0,
    mu: float | None = None,
    terminal: float | None = None,
    spacing: str = "linear",
    grid: str = "even",
    sigmas: Sequence[float] | None = None,
) -> Schedule:
    """Base grid → shift → terminal stretch → spacing → append 0.

    Args:
        num_inference_steps: N, 1…1000; may be left out when ``sigmas`` is given.
        shift: static shift k > 0, see `shift_sigmas`.
        mu: dynamic shift, k = e^μ, instead of ``shift``; see `dynamic_mu`.
        terminal: the last σ before 0, in (0, 1); None leaves it.
        spacing: ``"linear"`` keeps the grid; ``"karras"`` (ρ = 7), ``"exponential"`` and ``"beta"`` (0.6, 0.6) respace it.
        grid: ``"even"`` is 1 … 1/N (FLUX, LTX, HunyuanVideo); ``"trained"`` is 1 … 1/1000; ``"double"`` the same with
            an end already shifted (SD3's own code, diffusers without ``sigmas``); ``"unipc"`` the first N of N + 1
            points 1 … 1/1000, with whole-numbered times and a first σ of 1 − 1e-6 (Wan).
        sigmas: the base grid itself, N falling numbers in (0, 1].

    Returns:
        N + 1 levels; [1, 0] for one step, whatever the options (unless ``sigmas`` begins elsewhere).

    Raises:
        ValueError: a value outside its range; ``shift`` and ``mu`` at once; ``sigmas`` of another length than N.

    Source: diffusers, ``FlowMatchEulerDiscreteScheduler`` and ``UniPCMultistepScheduler``; Karras et al. 2022, eq. 5.
    """
    if mu is not None and (shift != 1.0 or not abs(mu) < 50):
        raise ValueError(
            f"mu {mu} with shift {shift}: try one of them alone; mu lies within ±50 and equals shift = exp(mu)"
        )
    k = shift if mu is None else math.exp(mu)
    base = _base_grid(num_inference_steps, grid, k) if sigmas is None else _given_grid(sigmas, num_inference_steps)
    levels = _respace(_stretch(shift_sigmas(base, k), terminal), spacing)
    if grid == "unipc" and len(levels) > 1:
        levels = levels.clamp_max(1 - 1e-6)  # UniPC's solver takes log(1 − σ)
    return Schedule((*levels.tolist(), 0.0), integer_timesteps=grid == "unipc")


# %%
PUBLISHED = {  # computed with the models' own schedulers
    "SD3": (make_schedule(4, 3.0, grid="double"), "1 .857692 .602151 .008929 0"),
    "SD3, shifted once": (make_schedule(4, 3.0, grid="trained"), "1 .857326 .600719 .002994 0"),
    "FLUX, 1024²": (make_schedule(4, mu=1.15), "1 .904531 .759511 .512844 0"),
    "FLUX-schnell": (make_schedule(4), "1 .75 .5 .25 0"),
    "LTX": (make_schedule(8, mu=2.05, terminal=0.1), "1 .965712 .921875 .863856 .783445 .664579 .471003 .1 0"),
    "HunyuanVideo": (make_schedule(8, 7.0), "1 .98 .954545 .921053 .875 .807692 .7 .5 0"),
    "Karras": (make_schedule(6, 3.0, spacing="karras", grid="double"), "1 .485508 .216886 .087232 .030609 .008929 0"),
    "exponential": (
        make_schedule(6, 3.0, spacing="exponential", grid="double"),
        "1 .389185 .151465 .058948 .022942 .008929 0",
    ),
    "beta": (make_schedule(6, 3.0, spacing="beta", grid="double"), "1 .878176 .640537 .368391 .130753 .008929 0"),
    "Wan (UniPC)": (
        make_schedule(8, 3.0, grid="unipc"),
        ".999999 .954595 .90012 .833555 .750375 .643469 .500999 .301678 0",
    ),
}


# %% tags=["check"]
def agrees(sigmas: Tensor, published: str) -> bool:
    return bool((sigmas - torch.tensor([float(v) for v in published.split()])).abs().max() <= 1e-6)


assert all(agrees(schedule.sigmas, published) for schedule, published in PUBLISHED.values())
sd3, flux = make_schedule(28, 3.0, grid="double").sigmas, make_schedule(28, mu=1.15).sigmas
assert agrees(sd3[:3], "1 .987381 .974108") and agrees(sd3[-4:], ".199827 .110906 .008929 0")
assert agrees(flux[-3:], ".195455 .104721 0")
assert PUBLISHED["Wan (UniPC)"][0].timesteps.tolist() == [999, 954, 900, 833, 750, 643, 500, 301]  # whole numbers

# %% tags=["check"]
for grid in GRIDS:  # one step goes from noise to data, whatever was asked
    assert all(make_schedule(1, 3.0, None, tau, sp, grid).values == (1, 0) for tau in (None, 0.1) for sp in SPACINGS)
for wrong in (0, -4, 4.5, 10_000):
    assert (message := refusal(make_schedule, wrong))
    print(message)

# %% tags=["check"]
t = make_schedule(100, mu=1.15).timesteps
assert t.dtype == torch.float32 and len(t.unique()) == 100
assert (
    torch.tensor(750.0).bfloat16() == 752 and len(t.bfloat16().unique()) == 98
)  # in bf16 two of FLUX's steps are lost

# %% tags=["hide"]
fig, ax = plt.subplots(figsize=(6.4, 3.4))
for row, (schedule, _) in enumerate(PUBLISHED.values()):
    ax.plot(schedule.sigmas, [row] * len(schedule.values), "o-", color=COLORS[row % 5], ms=4, lw=0.8)
ax.set(
    title="Shift crowds the noisy end, Karras the clean one",
    xlabel="σ: the walk goes from left to right",
)
ax.set(xlim=(1.03, -0.03), ylim=(9.5, -0.5))
ax.set_yticks(range(len(PUBLISHED)), PUBLISHED)
show(fig, alt="Ten rows of dots between sigma 1 and 0; HunyuanVideo's crowd at 1, Karras' and the exponential's at 0.")

# %% [markdown] lang="zh"
# ## 读别人的配置
#
# 模型文件夹里有一份 `scheduler_config.json`。读它的原则是：认得的照做，不认得的拒绝。悄悄忽略一项设置，画还是画得出来，只是不对。文件没有写底格，那在各家流水线（pipeline）的代码里，所以由你用 `grid` 说明。

# %% [markdown] lang="en" twin="d097511f"
# ## Reading other people's settings
#
# A model's folder holds a `scheduler_config.json`. The rule for reading it: follow what we know, refuse what we do not. Ignore a setting silently and a picture still comes out, only a wrong one. The file does not tell the base grid, each pipeline's code does; so you say it, with `grid`.

# %% tags=["export", "hide"]
_FOLLOWED = {  # class → the settings that move σ, with diffusers' defaults
    "FlowMatchEulerDiscreteScheduler": {
        **dict(shift=1.0, use_dynamic_shifting=False, base_shift=0.5, max_shift=1.15, time_shift_type="exponential"),
        **dict(base_image_seq_len=256, max_image_seq_len=4096, shift_terminal=None),
        **dict(use_karras_sigmas=False, use_exponential_sigmas=False, use_beta_sigmas=False),
    },
    "UniPCMultistepScheduler": dict(
        flow_shift=1.0, shift_terminal=None, use_flow_sigmas=False, prediction_type="epsilon"
    ),
}
_ONLY = {  # settings of which this engine follows one value
    "FlowMatchEulerDiscreteScheduler": dict(num_train_timesteps=1000, invert_sigmas=False, stochastic_sampling=False),
    "UniPCMultistepScheduler": {
        **dict(num_train_timesteps=1000, use_flow_sigmas=True, prediction_type="flow_prediction", thresholding=False),
        **dict(use_karras_sigmas=False, use_exponential_sigmas=False, use_beta_sigmas=False, sigma_min=None),
        **dict(use_dynamic_shifting=False, time_shift_type="exponential", final_sigmas_type="zero", sigma_max=None),
    },
}
_IDLE = frozenset(  # UniPC's old noise table and its own solver: they do not move a flow's σ
    "beta_start beta_end beta_schedule trained_betas rescale_betas_zero_snr timestep_spacing steps_offset solver_p predict_x0 "
    "solver_order solver_type lower_order_final disable_corrector dynamic_thresholding_ratio sample_max_value".split()
)


# %% tags=["export", "hide"]
def _read_settings(config: str | Path | dict) -> tuple[str, dict]:
    """Class and settings of a scheduler config, every one of them known and of the right kind."""
    if not isinstance(config, dict):
        path = Path(config) / "scheduler_config.json" if Path(config).is_dir() else Path(config)
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} is no readable scheduler_config.json: {error}") from error
    name = config.get("_class_name") if isinstance(config, dict) else None
    if str(name) not in _FOLLOWED:
        raise ValueError(f"scheduler class {name!r} is not supported; try {' or '.join(_FOLLOWED)}")
    followed, only, idle = _FOLLOWED[name], _ONLY[name], _IDLE if name == "UniPCMultistepScheduler" else set()
    settings = followed | {key: value for key, value in config.items() if not key.startswith("_")}
    for key, value in settings.items():
        if key not in followed | only and key not in idle:
            raise ValueError(f"{name} setting {key} is unknown; known are {', '.join(followed | only)}")
        if key in only and value != only[key]:
            raise ValueError(f"{name} with {key} = {value!r} is not supported; only {only[key]!r} is")
        kinds = {bool: (bool,), str: (str,)}.get(type(followed.get(key)), (int, float))
        if key in followed and value != followed[key] and type(value) not in kinds:
            raise ValueError(f"{name} with {key} = {value!r} is not supported; try {followed[key]!r}")
    return name, settings


# %% tags=["export", "hide"]
def _schedule_from_config(config, steps: int | None, num_tokens: int | None, grid: str, sigmas) -> Schedule:
    """See `Schedule.from_config`."""
    name, got = _read_settings(config)
    terminal = got["shift_terminal"] or None
    if name == "UniPCMultistepScheduler":
        return make_schedule(steps, got["flow_shift"], terminal=terminal, grid="unipc", sigmas=sigmas)
    spacing = [key for key in SPACINGS if got.get(f"use_{key}_sigmas")] or ["linear"]
    if len(spacing) > 1:
        raise ValueError(f"the config asks for {' and '.join(spacing)} spacing; set only one of them true")
    shift, kind = got["shift"], got["time_shift_type"]
    if got["use_dynamic_shifting"]:
        if num_tokens is None:
            raise ValueError("the config shifts by picture size; pass num_tokens, 4096 for a 1024×1024 FLUX picture")
        if kind not in ("exponential", "linear"):
            raise ValueError(f'time_shift_type {kind!r} is unknown; try "exponential" or "linear"')
        line = (got[key] for key in ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift"))
        mu = dynamic_mu(num_tokens, *line)
        shift = math.exp(mu) if kind == "exponential" else mu  # "linear" takes μ itself for k
    return make_schedule(steps, shift, terminal=terminal, spacing=spacing[0], grid=grid, sigmas=sigmas)


# %% tags=["check"]
FLUX = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0, "use_dynamic_shifting": True}
assert Schedule.from_config(FLUX, 4, num_tokens=4096) == make_schedule(4, mu=1.15)
assert Schedule.from_config(FLUX, 4, num_tokens=256) == make_schedule(4, mu=0.5)
for extra in ({}, {"invert_sigmas": True}, {"use_karas_sigmas": True}, {"_class_name": "DDIMScheduler"}):
    assert (message := refusal(Schedule.from_config, FLUX | extra, 4))  # the first lacks num_tokens
    print(message[:96])

# %% [markdown] lang="zh"
# ## 三种走法
#
# 求解器（solver）是一个函数，走一步，把要记住的东西作为 `history` 交还，自己什么也不存。Euler 和 Heun 你已经认识。Heun 准，可每步要看两眼。多步法（multistep）只看一眼，另一眼用上一步的记忆代替。令 $h = \sigma_\text{next} - \sigma$，由前后两个速度估计半路上的速度：
#
# $$x \leftarrow x + h\left(v + \frac{h}{2}\cdot\frac{v - v_\text{prev}}{h_\text{prev}}\right)$$

# %% [markdown] lang="en" twin="0aadb28d"
# ## Three ways to walk
#
# A solver is a function that takes one step and hands back, as `history`, what it wants to remember; it stores nothing. You know Euler and Heun. Heun is accurate but looks twice a step; multistep looks once and uses the memory of the step before. With $h = \sigma_\text{next} - \sigma$, two velocities estimate the one half way:
#
# $$x \leftarrow x + h\left(v + \frac{h}{2}\cdot\frac{v - v_\text{prev}}{h_\text{prev}}\right)$$


# %% tags=["export"]
Velocity = Callable[[Tensor, float], Tensor]  # v(x, σ), shaped like x


class Step(NamedTuple):
    """One step's result: the new latents, the velocity where it began (x0 = x − σ·v), what the next step looks back on."""

    latents: Tensor
    velocity: Tensor
    history: tuple = ()


def _wide(x: Tensor) -> Tensor:
    """x in fp32, or in its own dtype where that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _takes(out: Tensor | None, x: Tensor, velocity: Tensor) -> bool:
    """Whether ``out`` can hold every intermediate sum: it is given, and none is wider than x."""
    return out is not None and x.dtype == torch.promote_types(velocity.dtype, torch.float32)


def _advance(x: Tensor, velocity: Tensor, width: float, out: Tensor | None = None) -> Tensor:
    """x + h·v in fp32 at least, cast back to the dtype of x; the same bits into ``out``, which may be the velocity."""
    if _takes(out, x, velocity):
        return out.copy_(velocity).mul_(width).add_(x)
    new = (_wide(x) + width * _wide(velocity)).to(x.dtype)
    return new if out is None else out.copy_(new)


def euler_step(
    velocity: Velocity, x: Tensor, sigma: float, sigma_next: float, history: tuple = (), out: Tensor | None = None
) -> Step:
    """x ← x + h·v(x, σ) with h = σ_next − σ. One call, error O(1/N).

    Args:
        velocity: v(x, σ).
        x: latents of any rank, any float dtype; the update is fp32 and cast back.
        sigma, sigma_next: where the step begins and ends, 1 ≥ σ > σ_next ≥ 0.
        history: what the step before handed back; () at the start. Euler and Heun ignore it.
        out: where the new latents go, shaped like x and not x itself: the same bits, and fp32 allocates nothing.
    """
    v = velocity(x, sigma)
    return Step(_advance(x, v, sigma_next - sigma, out), v)


def heun_step(
    velocity: Velocity, x: Tensor, sigma: float, sigma_next: float, history: tuple = (), out: Tensor | None = None
) -> Step:
    """x ← x + h·(v(x, σ) + v(x + h·v, σ_next))/2. Two calls, error O(1/N²). Args: as `euler_step`."""
    v, width = velocity(x, sigma), sigma_next - sigma
    ahead = velocity(_advance(x, v, width, out), sigma_next)
    mean = out.copy_(ahead).add_(v).div_(2) if _takes(out, x, v) else (_wide(v) + _wide(ahead)) / 2
    return Step(_advance(x, mean, width, out), v)


def multistep_step(
    velocity: Velocity, x: Tensor, sigma: float, sigma_next: float, history: tuple = (), out: Tensor | None = None
) -> Step:
    """x ← x + h·(v + h/2·(v − v_prev)/h_prev): Adams–Bashforth 2 for uneven steps. One call, error O(1/N²).

    Args: as `euler_step`; ``history`` is () or (v_prev, h_prev), and the first step is Euler's.
    """
    v, width = velocity(x, sigma), sigma_next - sigma
    half_way = _wide(v)
    if history:
        v_prev, ratio = history[0], width / (2 * history[1])
        if _takes(out, x, v):
            half_way = out.copy_(v_prev).sub_(v).mul_(-ratio).add_(v)
        else:
            half_way = half_way + ratio * (half_way - _wide(v_prev))
    return Step(_advance(x, half_way, width, out), v, (v, width))


SOLVERS = {"euler": euler_step, "heun": heun_step, "multistep": multistep_step}
SOLVER_CALLS = {"euler": 1, "heun": 2, "multistep": 1}  # calls of the velocity a step

# %%
centre, tau = 2.0, 1.5  # the Gaussian cloud of chapter 01: its noise ε ends at centre + tau·ε


def cloud_velocity(x: Tensor, s: float) -> Tensor:
    slope = (s - (1 - s) * tau**2) / ((1 - s) ** 2 * tau**2 + s**2)
    return -centre + slope * (x - (1 - s) * centre)


def sample(step: Callable, noise: Tensor, schedule: Schedule, velocity: Velocity = cloud_velocity) -> Tensor:
    x, history = noise, ()
    for sigma, sigma_next in schedule:
        x, _, history = step(velocity, x, sigma, sigma_next, history)
    return x


noise = torch.randn(2, 4, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)  # (B, C, T, H, W)
counts = [16, 32, 64, 128, 256]
errors = {
    name: [(sample(step, noise, make_schedule(n, 3.0)) - centre - tau * noise).abs().mean().item() for n in counts]
    for name, step in SOLVERS.items()
}

# %% tags=["check"]
slopes = {name: math.log2(e[-1] / e[-3]) / 2 for name, e in errors.items()}  # per doubling of N
assert abs(slopes["euler"] + 1) < 0.1
assert abs(slopes["heun"] + 2) < 0.1 and abs(slopes["multistep"] + 2) < 0.1
x, history = torch.full((1,), 1.5), (torch.full((1,), 3.0), 0.8 - 1.0)  # v = 3σ from 1 to 0.8: x = 1.5·σ²
second = multistep_step(lambda x, s: torch.full_like(x, 3 * s), x * 0.8**2, 0.8, 0.1, history)
assert torch.allclose(second.latents, x * 0.1**2, atol=1e-6)  # exact where v is linear in σ, however uneven the widths

# %% tags=["hide"]
fig, (ax, right) = plt.subplots(1, 2, figsize=(7.4, 2.9), width_ratios=(1.2, 1))
for name, error in errors.items():
    ax.loglog([SOLVER_CALLS[name] * n for n in counts], error, "o-", label=f"{name}, slope {slopes[name]:.2f}")
ax.set(title="Error against calls of the network", xlabel="calls", ylabel="mean error")
ax.minorticks_off()
ax.legend(fontsize=8)
kept, shifts = tau, [0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0]
for tau in (0.1, 0.5, kept):  # clouds of other widths
    ends = [sample(euler_step, noise, make_schedule(4, k)) for k in shifts]
    off = [(end - centre - tau * noise).abs().mean().item() for end in ends]
    right.plot(shifts, [error / min(off) for error in off], "o-", ms=3, label=f"width {tau}")
tau = kept
right.set(title="Four Euler steps: every cloud\nwants another shift", xlabel="shift k", ylabel="error / the least error")
right.set_xscale("log")
right.set_xticks([0.5, 1, 2, 4], ["0.5", "1", "2", "4"])
right.minorticks_off()
right.legend(fontsize=8)
show(
    fig,
    alt="Left, on log axes: errors fall with the calls, Euler with slope −1, Heun and multistep with −2. Right: the error of four steps over the shift, least below one half for the narrow cloud and near 1.5 for the wide one.",
)

# %% [markdown] lang="zh"
# ## 图片、视频、半精度
#
# 求解器不看形状：视频的每一帧，和单独走的图片逐位相同。latents 是 bf16 时，加法仍在 fp32 里做，最后才转回去：一步只舍入一次。

# %% [markdown] lang="en" twin="476f2596"
# ## Images, videos, half precision
#
# Solvers do not look at shapes: each frame of a video equals, bit for bit, the picture walked alone. With bf16 latents the sum is still done in fp32 and cast at the end: one rounding a step.

# %% tags=["check"]
for step in SOLVERS.values():
    video = sample(step, noise, make_schedule(6, 3.0))
    assert torch.equal(video[:, :, 1], sample(step, noise[:, :, 1], make_schedule(6, 3.0)))  # (B, C, H, W)
x, small = torch.randn(2, 1000, generator=torch.Generator().manual_seed(1)).bfloat16()
once = (x.float() + (0.7 - 1.0) * small.float()).bfloat16()
assert torch.equal(euler_step(lambda x, s: small, x, 1.0, 0.7).latents, once)

# %% [markdown] lang="zh"
# ## 和真家伙对一对
#
# 同样的设置、同样的速度，走完整条路，应当和 diffusers 处处相等，不管有没有移位、拉伸、重排。

# %% [markdown] lang="en" twin="3aa33d83"
# ## Against the real thing
#
# The same settings, the same velocities, the whole way: we must agree with diffusers, shifted, stretched, respaced or not.

# %% tags=["check"]
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

for settings in ({}, {"shift": 3.0}, {"shift": 3.0, "use_karras_sigmas": True}, {"shift": 3.0, "shift_terminal": 0.1}):
    theirs = FlowMatchEulerDiscreteScheduler(**settings)
    theirs.set_timesteps(9)
    ours = Schedule.from_config({"_class_name": "FlowMatchEulerDiscreteScheduler", **theirs.config}, 9, grid="double")
    assert torch.allclose(ours.sigmas, theirs.sigmas, atol=1e-6)
    assert torch.allclose(ours.timesteps, theirs.timesteps, atol=1e-3)
    x = noise.float()
    for t, sigma in zip(theirs.timesteps, theirs.sigmas.tolist()):
        x = theirs.step(cloud_velocity(x, sigma), t, x).prev_sample
    assert torch.allclose(sample(euler_step, noise.float(), ours), x, atol=1e-5)
wan = UniPCMultistepScheduler(use_flow_sigmas=True, flow_shift=3.0, prediction_type="flow_prediction")
wan.set_timesteps(50)
ours = Schedule.from_config({"_class_name": "UniPCMultistepScheduler", **wan.config}, 50)
assert torch.allclose(ours.sigmas, wan.sigmas, atol=1e-6) and ours.timesteps.tolist() == wan.timesteps.tolist()

# %% [markdown] lang="zh"
# **到了这里**，引擎知道在哪里停、怎样走。开头那四站怎么放？右图：连云的宽窄都会改答案，所以发布的模型自带一份设置。它对网络只有一个要求：给出 $v(x, \sigma)$。可是网络怎么知道现在是 $t = 900$ 还是 $t = 50$？下一章把这个数变成一个向量。
#
# ## 三个问题
#
# 1. 预测：HunyuanVideo 的八步（$k = 7$）里，最后一步走完全程的几分之几？
# 2. 修改：多步法忘了步长比，总用 $\tfrac{3}{2}v - \tfrac{1}{2}v_\text{prev}$，均匀的站会怎样？一长一短交替的站呢？
# 3. 动手：图生图从强度 `strength` 对应的噪声开始。写一个函数，找出第一个不高于它的站；强度太小时要有清楚的错误。

# %% [markdown] lang="en" twin="a0e2639c"
# **Where we stand.** The engine knows where to stop and how to walk. And the four stations of the beginning? On the right even a cloud's width changes the answer, so a released model brings its own settings. It asks one thing of the network: $v(x, \sigma)$. But how does the network know whether it is $t = 900$ or $t = 50$? The next chapter turns that number into a vector.
#
# ## Three questions
#
# 1. Predict: of HunyuanVideo's eight steps ($k = 7$), what share of the whole way is the last?
# 2. Modify: let multistep forget the widths and always use $\tfrac{3}{2}v - \tfrac{1}{2}v_\text{prev}$. What happens with even stations, and with long and short steps in turn?
# 3. Build: image-to-image starts at the noise level `strength`. Write a function that finds the first station not above it, with a clear error when the strength is too small.

# %% tags=["solution"]
# 1 · half of it: seven steps for σ from 1 to 0.5, one for the rest
assert make_schedule(8, 7.0).values[-2] == 0.5


# %% tags=["solution"]
# 2 · even stations: the same thing; long, short, long, short: the error falls with slope −1 only
def forgetful_step(velocity: Velocity, x: Tensor, sigma: float, sigma_next: float, history: tuple = ()) -> Step:
    v = velocity(x, sigma)
    mixed = 1.5 * v - 0.5 * history[0] if history else v
    return Step(x + (sigma_next - sigma) * mixed, v, (v,))


def slope(step: Callable) -> float:
    widths = [torch.tensor([2.0, 1.0]).repeat(n) for n in (32, 64)]
    ends = [sample(step, noise, make_schedule(sigmas=1 - (w.cumsum(0) - w) / w.sum())) for w in widths]
    first, second = ((end - centre - tau * noise).abs().mean().item() for end in ends)
    return math.log2(second / first)


assert torch.allclose(sample(forgetful_step, noise, even), sample(multistep_step, noise, even))
assert abs(slope(forgetful_step) + 1) < 0.2 and abs(slope(multistep_step) + 2) < 0.2


# %% tags=["solution"]
# 3 · the caller then mixes in noise to exactly that σ and walks on from there
def first_step(schedule: Schedule, strength: float) -> int:
    for i, sigma in enumerate(schedule.sigmas[:-1].tolist()):
        if sigma <= strength:
            return i
    raise ValueError(f"strength {strength} is below the last station {sigma:.3g}; try {sigma:.3g} or more steps")


assert first_step(make_schedule(28, 3.0), 1.0) == 0 and first_step(make_schedule(4), 0.6) == 2

# %% [markdown] lang="zh"
# ## 小结
#
# - 噪声表是不可变的数：$N + 1$ 个 $\sigma$，末尾是 $0$；一步就是 $[1, 0]$。
# - 移位把 $\frac{\sigma}{1-\sigma}$ 乘上 $k$；动态移位是 $k = e^\mu$。
# - 顺序：底格、移位、拉伸、疏密、添 $0$；SD3 的末端被移了两次，要明说。
# - 认不得的设置要拒绝；时间保持 fp32。
# - 多步法每步只看一眼，斜率和 Heun 一样是 $-2$。
#
# 阅读卡片：[`papers/05_sd3`](../../papers/05_sd3.zh.md)、[`papers/06_flux`](../../papers/06_flux.zh.md)。下一章：03。

# %% [markdown] lang="en" twin="65bed33c"
# ## Recap
#
# - A schedule is immutable numbers: $N + 1$ levels, the last $0$; one step is $[1, 0]$.
# - The shift multiplies $\frac{\sigma}{1-\sigma}$ by $k$; the dynamic one is $k = e^\mu$.
# - The order: grid, shift, stretch, spacing, append $0$; SD3's tail is shifted twice, so say it.
# - Settings we do not know are refused; time stays fp32.
# - Multistep looks once a step and has Heun's slope of $-2$.
#
# Reading cards: [`papers/05_sd3`](../../papers/05_sd3.en.md), [`papers/06_flux`](../../papers/06_flux.en.md). Next: chapter 03.
