# ---
# jupyter:
#   course:
#     minutes: 45
#     module: rectified_flow
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown] lang="zh"
# # 01 · 整流流（rectified flow）
#
# 读完这一章，一团随机的点会自己走成一颗心：你会学出一个速度场（velocity field），沿着它走，并且知道每一步走错了多少。
#
# | 你会做出 | 你需要 | 时间 | 模块 |
# | --- | --- | --- | --- |
# | 直路、速度、Euler 与 Heun 行走、弯曲度 | 张量的加减乘；导数是什么 | 45 分钟 | `diffusion_engine/rectified_flow.py` |

# %% [markdown] lang="en" twin="400f02e7"
# # 01 · Rectified flow
#
# After this chapter a cloud of random points walks into the shape of a heart: you learn a velocity field, walk along it, and know how wrong every step is.
#
# | You build | You need | Time | Module |
# | --- | --- | --- | --- |
# | straight roads, velocities, Euler and Heun walks, a measure of bending | adding and multiplying tensors; what a derivative is | 45 minutes | `diffusion_engine/rectified_flow.py` |

# %% [markdown] lang="zh"
# **先想一想**：要让五百个随机的点走成一颗心。你只能写一个函数：告诉它「点在哪里、现在几点」，它回答「往哪边走」。没有人画过路线，训练用的正确答案从哪里来？先写下你的办法。

# %% [markdown] lang="en" twin="37b842bd"
# **Think first:** five hundred random points shall become a heart. You may write one function: told where a point is and what time it is, it answers which way to go. Nobody has drawn any routes. Where do the right answers for training come from? Write your idea down.

# %% tags=["export"]
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

# %% [markdown] lang="zh"
# ## 最小的世界：一团噪声，一颗心
#
# 图片有几万个数，看不见；平面上的点只有两个数，看得见，而且真相算得出来。这颗心由 24 个小高斯团排成。数据 $x_0$ 从心上抽，噪声 $\varepsilon$ 从标准正态抽，两边随意配对。

# %% [markdown] lang="en" twin="a6846430"
# ## The smallest world: noise and a heart
#
# A picture has tens of thousands of numbers, too many to see. A point in the plane has two; we can see it, and the truth can be computed. This heart is 24 small Gaussian clouds in a row. Data $x_0$ come from the heart, noise $\varepsilon$ from the standard normal, paired at random.

# %%
import math

angle = torch.arange(24) / 24 * 2 * math.pi
bumps = 13 * angle.cos() - 5 * (2 * angle).cos() - 2 * (3 * angle).cos() - (4 * angle).cos()
heart, spread = torch.stack([16 * angle.sin() ** 3, bumps + 2.5], dim=-1) / 7, 0.15  # centres (24, 2)


def draw_pairs(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    cloud = torch.randint(len(heart), (n,), generator=generator)
    data = heart[cloud] + spread * torch.randn(n, 2, generator=generator)
    return data, torch.randn(n, 2, generator=generator)


data, noise = draw_pairs(2000, torch.Generator().manual_seed(0))

# %% [markdown] lang="zh"
# ## 每一对之间修一条直路
#
# 最省事的路线是直线。$\sigma$ 是路标：$\sigma = 0$ 在数据，$\sigma = 1$ 在噪声。
#
# $$x_\sigma = (1 - \sigma)\,x_0 + \sigma\,\varepsilon$$
#
# | 记号 | 形状 | 含义 |
# | --- | --- | --- |
# | $x_0$，$\varepsilon$ | $(B, \dots)$ | 数据；噪声 |
# | $\sigma$ | $(B,)$ | 噪声的比例，$0$ 到 $1$ |
# | $x_\sigma$ | $(B, \dots)$ | 路上的点 |
#
# 照公式写一行，它能跑。可是一批恰好有两个点、每点恰好有两个坐标时，$\sigma$ 会乘到坐标上：形状没错，也不报错，每个点却都成了半数据、半噪声。所以 $(B,)$ 要先变成 $(B, 1, \dots, 1)$；点、图片、视频从此共用一行公式。

# %% [markdown] lang="en" twin="08f1d483"
# ## A straight road for every pair
#
# The cheapest route is a straight line. $\sigma$ is the milestone: data at $\sigma = 0$, noise at $\sigma = 1$.
#
# $$x_\sigma = (1 - \sigma)\,x_0 + \sigma\,\varepsilon$$
#
# | Symbol | Shape | Meaning |
# | --- | --- | --- |
# | $x_0$, $\varepsilon$ | $(B, \dots)$ | data; noise |
# | $\sigma$ | $(B,)$ | share of noise, $0$ to $1$ |
# | $x_\sigma$ | $(B, \dots)$ | a point on the road |
#
# Typed in as it stands, the formula runs. But give it two points with two coordinates each, and $\sigma$ goes to the coordinates: right shape, no complaint, every point half data, half noise. So $(B,)$ must first become $(B, 1, \dots, 1)$; then one line serves points, images and videos.

# %%
two_sigmas = torch.tensor([0.0, 1.0])  # the first point should stay data (0), the second become noise (1)
(1 - two_sigmas) * torch.zeros(2, 2) + two_sigmas * torch.ones(2, 2)  # rows should be (0, 0) and (1, 1)


# %% tags=["export"]
def append_dims(sigma: float | Tensor, like: Tensor) -> Tensor:
    """One σ a sample, shaped to multiply ``like``: (B,) → (B, 1, …, 1), whatever the rank of ``like``.

    Args:
        sigma: one number for the whole batch, or a tensor (B,); in 0…1.
        like: points (B, D), images (B, C, H, W) or videos (B, C, T, H, W).

    Returns:
        (B, 1, …, 1), or a scalar tensor for one number; at least fp32, on the device of ``like``.

    Raises:
        ValueError: σ lies outside 0…1 or is NaN, or its length is not the batch size.

    Source: lucidrains, rectified-flow-pytorch (``append_dims``).
    """
    sigma = torch.as_tensor(sigma, device=like.device, dtype=torch.promote_types(like.dtype, torch.float32))
    outside = sigma[~((sigma >= 0) & (sigma <= 1))]
    if outside.numel():
        worst = outside[0].item()
        near = worst / 1000 if 1 < worst <= 1000 else float(worst > 0)
        raise ValueError(f"sigma {worst:g} lies outside 0…1; try {near:g} (t = 1000·sigma is for the network alone)")
    if sigma.ndim == 0:
        return sigma
    if sigma.shape != like.shape[:1]:
        raise ValueError(f"sigma has shape {tuple(sigma.shape)}; expected one a sample, {tuple(like.shape[:1])}")
    return sigma.reshape(-1, *[1] * (like.ndim - 1))


def _same_shape(**tensors: Tensor) -> None:
    """Refuse two tensors that would only broadcast."""
    (first, a), (second, b) = tensors.items()
    if a.shape != b.shape:
        raise ValueError(
            f"{first} {tuple(a.shape)} and {second} {tuple(b.shape)} differ; both must be {tuple(a.shape)}"
        )


# %% tags=["export"]
def interpolate(data: Tensor, noise: Tensor, sigma: float | Tensor) -> Tensor:
    """The point at σ on the straight road from data to noise: x_σ = (1 − σ)·x0 + σ·ε.

    Args:
        data: x0, (B, …).
        noise: ε, shaped like ``data``.
        sigma: one number or (B,), in 0…1; 0 is data, 1 is noise.

    Returns:
        x_σ, shape and dtype of ``data``; computed in fp32 at least.

    Raises:
        ValueError: shapes differ, whole-number data, or σ refused by `append_dims`.

    Source: Liu et al. 2022 (Rectified Flow), §2.1; σ here runs from data to noise.
    """
    _same_shape(data=data, noise=noise)
    if not data.is_floating_point():
        raise ValueError(f"data of {data.dtype} would be rounded to whole numbers; scale it to −1…1 in float32")
    s = append_dims(sigma, data)
    return ((1 - s) * data + s * noise).to(data.dtype)


# %% tags=["check"]
for shape in [(2, 2), (2, 3, 2, 2), (2, 3, 2, 2, 2)]:  # points, images, videos; sizes equal to B on purpose
    road = interpolate(torch.zeros(shape), torch.ones(shape), two_sigmas)
    assert (road[0] == 0).all() and (road[1] == 1).all()  # each sample got its own σ, in every element

# %% [markdown] lang="zh"
# **先猜，再拖**：图从纯噪声开始，灰线是六对点的路。把 $\sigma$ 从 $1$ 拖到 $0$：拖到多少时，你第一次认得出那颗心？红点会不会走得有快有慢？

# %% [markdown] lang="en" twin="10a382a5"
# **Guess, then move:** the picture starts as pure noise; grey lines are the roads of six pairs. Move $\sigma$ from $1$ to $0$. Where will you first make out the heart? Do some of the red points travel faster than others?

# %% tags=["hide"]
from course.figures import COLORS, plt, show
from course.sliders import slider


def draw_road(s: float):
    fig, ax = plt.subplots(figsize=(4, 3.6))
    x, six = interpolate(data, noise, s), slice(24, 30)
    ax.plot(*torch.stack([data[six], noise[six]]).permute(2, 0, 1), color=COLORS[5], lw=0.8)
    ax.scatter(*x[:360].T, s=3, color=COLORS[0])
    ax.scatter(*x[six].T, s=18, color=COLORS[3], zorder=3)
    ax.spines[:].set_visible(False)
    title = f"σ = {s:g}: every pair walks its own straight road"
    ax.set(title=title, xticks=[], yticks=[], aspect="equal", xlim=(-3.2, 3.2), ylim=(-2.8, 2.8))
    return fig


slider(
    draw_road,
    torch.linspace(1, 0, 9).tolist(),
    label="σ",
    alt="At sigma {} the cloud of points stands between a round cloud at 1 and a heart at 0; six roads cross each other.",
    live=torch.linspace(1, 0, 41).tolist(),
    text="{:.3g}",
    colors=24,
)

# %% [markdown] lang="zh"
# ## 速度：路的导数
#
# 对 $\sigma$ 求导，直路上的速度是个常数：$v = \dfrac{\mathrm{d}x_\sigma}{\mathrm{d}\sigma} = \varepsilon - x_0$，指向噪声。知道当前位置和速度，路的两端都能反推：
#
# $$x_0 = x_\sigma - \sigma\,v, \qquad \varepsilon = x_\sigma + (1 - \sigma)\,v$$
#
# 这就是训练答案的来历：路是我们自己修的，所以每条路的速度都知道。

# %% [markdown] lang="en" twin="b9da5790"
# ## Velocity: the slope of the road
#
# Differentiate by $\sigma$, and the velocity on a straight road is constant: $v = \dfrac{\mathrm{d}x_\sigma}{\mathrm{d}\sigma} = \varepsilon - x_0$, pointing to the noise. A position and a velocity give back both ends:
#
# $$x_0 = x_\sigma - \sigma\,v, \qquad \varepsilon = x_\sigma + (1 - \sigma)\,v$$
#
# So that is where the right answers come from: we laid the roads, so we know the velocity on each.


# %% tags=["export"]
def velocity_target(data: Tensor, noise: Tensor) -> Tensor:
    """What the network learns: v = dx_σ/dσ = ε − x0, constant along the road.

    Args:
        data: x0, (B, …).
        noise: ε, shaped like ``data``.

    Raises:
        ValueError: shapes differ.

    Source: Liu et al. 2022, eq. 1; Lipman et al. 2022 (Flow Matching), optimal-transport path; signs as in SD3.
    """
    _same_shape(data=data, noise=noise)
    return noise - data


def predict_data(x: Tensor, velocity: Tensor, sigma: float | Tensor) -> Tensor:
    """The data end of the road through x_σ: x0 = x_σ − σ·v.

    Args:
        x: x_σ, (B, …).
        velocity: v, shaped like ``x``.
        sigma: one number or (B,), in 0…1.

    Returns:
        x0, shape and dtype of ``x``; computed in fp32 at least.

    Raises:
        ValueError: shapes differ, or σ is refused by `append_dims`.
    """
    _same_shape(x=x, velocity=velocity)
    return (x - append_dims(sigma, x) * velocity).to(x.dtype)


def predict_noise(x: Tensor, velocity: Tensor, sigma: float | Tensor) -> Tensor:
    """The noise end of the road through x_σ: ε = x_σ + (1 − σ)·v.

    Args:
        x: x_σ, (B, …).
        velocity: v, shaped like ``x``.
        sigma: one number or (B,), in 0…1.

    Returns:
        ε, shape and dtype of ``x``; computed in fp32 at least.

    Raises:
        ValueError: shapes differ, or σ is refused by `append_dims`.
    """
    _same_shape(x=x, velocity=velocity)
    return (x + (1 - append_dims(sigma, x)) * velocity).to(x.dtype)


# %% tags=["check"]
sigma = torch.rand(len(data), generator=torch.Generator().manual_seed(1))
x, v = interpolate(data, noise, sigma), velocity_target(data, noise)
assert torch.allclose(predict_data(x, v, sigma), data, atol=1e-5)  # both ends come back, each sample with its own σ
assert torch.allclose(predict_noise(x, v, sigma), noise, atol=1e-5)
ahead = interpolate(data, noise, 0.6) - interpolate(data, noise, 0.5)
assert torch.allclose(ahead / 0.1, v, atol=1e-4)  # v is the slope in σ: it points to the noise, not to the data
try:
    interpolate(data, noise, 750.0)  # a time in 0…1000 where a σ belongs
except ValueError as error:
    print(error)
else:
    raise AssertionError("t was taken for σ")

# %% [markdown] lang="zh"
# ## 路会交叉，速度场只能有一个
#
# 网络只看见 $(x, \sigma)$，不知道自己在哪条路上。平方误差下，最好的回答是经过此处所有路的平均：$v(x, \sigma) = \mathbb{E}[\varepsilon - x_0 \mid x_\sigma = x]$。数据只有一团 $\mathcal{N}(\mu, \tau^2 I)$（中心 $\mu$，宽 $\tau$）时，它有闭式解：
#
# $$v(x, \sigma) = -\mu + \frac{\sigma - (1-\sigma)\tau^2}{(1-\sigma)^2\tau^2 + \sigma^2}\,\bigl(x - (1-\sigma)\mu\bigr)$$
#
# 有许多团时，按「此处的点来自哪一团」的概率加权。不必相信公式：一团高斯时，条件均值对 $x$ 是线性的，拿二十万条路做一次最小二乘就能核对。

# %% [markdown] lang="en" twin="49d7e7e7"
# ## Roads cross, but the field is one
#
# The network sees only $(x, \sigma)$, not the road it is on. Under squared error its best answer is the mean over all roads through here: $v(x, \sigma) = \mathbb{E}[\varepsilon - x_0 \mid x_\sigma = x]$. When the data are one cloud $\mathcal{N}(\mu, \tau^2 I)$, centre $\mu$, width $\tau$, it has a closed form:
#
# $$v(x, \sigma) = -\mu + \frac{\sigma - (1-\sigma)\tau^2}{(1-\sigma)^2\tau^2 + \sigma^2}\,\bigl(x - (1-\sigma)\mu\bigr)$$
#
# With many clouds, weigh them by the probability that a point here came from each. No need to trust it: for one cloud the mean is linear in $x$, so least squares over 200,000 roads can check it.


# %%
def exact_velocity(x: Tensor, s: float, centres: Tensor, tau: float) -> Tensor:
    variance = (1 - s) ** 2 * tau**2 + s**2
    away = x[:, None] - (1 - s) * centres  # (B, K, 2)
    share = (-away.square().sum(-1) / (2 * variance)).softmax(-1)  # which cloud, (B, K)
    each = -centres + (s - (1 - s) * tau**2) / variance * away
    return (share[..., None] * each).sum(1)


# %% tags=["check"]
mu, tau, s = torch.tensor([2.0, 1.0]), 0.5, 0.7
rng = torch.Generator().manual_seed(2)
ends, starts = mu + tau * torch.randn(200_000, 2, generator=rng), torch.randn(200_000, 2, generator=rng)
x = interpolate(ends, starts, s)
design = torch.cat([x, torch.ones(len(x), 1)], dim=-1)  # v ≈ x·A + b
fitted = design @ torch.linalg.lstsq(design, velocity_target(ends, starts)).solution
assert (fitted - exact_velocity(x, s, mu[None], tau)).abs().mean() < 0.01

# %% [markdown] lang="zh"
# ## 沿着场走回家
#
# 从噪声出发，$\sigma$ 由 $1$ 减到 $0$。Euler 的办法：看一眼速度，直走一段。
#
# $$x \leftarrow x + (\sigma_\text{next} - \sigma)\,v(x, \sigma)$$
#
# 括号是负数，于是我们逆着 $v$ 走，离开噪声。Heun 走到头再看一眼，用两次速度的平均重走这一段。先手工走一步：

# %% [markdown] lang="en" twin="c31beb2f"
# ## Walking home along the field
#
# Start at the noise and let $\sigma$ fall from $1$ to $0$. Euler's way: look at the velocity once, walk straight for a while.
#
# $$x \leftarrow x + (\sigma_\text{next} - \sigma)\,v(x, \sigma)$$
#
# The bracket is negative, so we walk against $v$, away from the noise. Heun looks again at the far end and walks the stretch anew with the mean of both velocities. One step by hand first:

# %%
here, sigma_now, sigma_next = noise[:2], 1.0, 0.5
by_hand = here + (sigma_next - sigma_now) * exact_velocity(here, sigma_now, heart, spread)
by_hand.shape


# %% tags=["export"]
def integrate(
    velocity: Callable[[Tensor, float], Tensor],
    noise: Tensor,
    sigmas: Iterable[float] | Tensor,
    method: str = "euler",
    return_path: bool = False,
) -> Tensor:
    """Walk dx/dσ = v(x, σ) from the first σ to the last.

    Euler: x ← x + (σ_next − σ)·v(x, σ). Heun: the same with the mean of the velocities at both ends.

    Args:
        velocity: v(x, σ) → shaped like x; σ is a float.
        noise: where the walk begins, (B, …).
        sigmas: N + 1 falling numbers in 0…1.
        method: ``"euler"`` (one call a step, error O(1/N)) or ``"heun"`` (two calls, error O(1/N²)).
        return_path: give every state instead of the last.

    Returns:
        The last state, shaped like ``noise``; or the path (N + 1, B, …), which begins with ``noise``.

    Raises:
        ValueError: unknown method; fewer than two σ; σ that do not fall or leave 0…1; a velocity not shaped like x.

    Source: Liu et al. 2022, §2.1 (Euler); Karras et al. 2022, algorithm 1 (Heun).
    """
    if method not in ("euler", "heun"):
        raise ValueError(f'method "{method}" is unknown; try "euler" or "heun"')
    levels = [float(s) for s in sigmas]
    if len(levels) < 2 or not all(1 >= a > b >= 0 for a, b in zip(levels, levels[1:])):
        raise ValueError(f"sigmas {levels} must be two or more numbers that fall within 1…0; try [1.0, 0.5, 0.0]")
    x, path = noise, [noise]
    for s, s_next in zip(levels, levels[1:]):
        v = velocity(x, s)
        if method == "heun":
            v = (v + velocity(x + (s_next - s) * v, s_next)) / 2
        _same_shape(x=x, velocity=v)
        x = x + (s_next - s) * v
        path.append(x)
    return torch.stack(path) if return_path else x


# %% tags=["check"]
home = torch.tensor([[0.3, -0.8]])  # data of a single point: no roads cross, so one step must arrive, exactly
for sigmas in ([1.0, 0.0], [1.0, 0.9, 0.2, 0.0]):  # one step, or three uneven ones
    arrived = integrate(lambda x, s: exact_velocity(x, s, home, 1e-4), noise, sigmas)
    assert torch.allclose(arrived, home.expand_as(arrived), atol=1e-5)
    for method in ("euler", "heun"):  # every pair on its own road
        assert torch.allclose(integrate(lambda x, s: noise - data, noise, sigmas, method), data, atol=1e-5)
assert torch.equal(integrate(lambda x, s: exact_velocity(x, s, heart, spread), here, [1.0, 0.5]), by_hand)

# %% [markdown] lang="zh"
# ## 一步走错多少？
#
# 路一弯，直走就有误差。数据是一团高斯时，终点算得出来：整团噪声只是平移、缩小，每个点在团里的位置不变，所以 $x_0 = \mu + \tau\,\varepsilon$（这里的 $x_0$ 是走到的终点，不是随机配来的数据）。于是可以量：步数加倍，误差减到几分之几？在双对数图上，$N^{-p}$ 是斜率 $-p$ 的直线。

# %% [markdown] lang="en" twin="fda15cb6"
# ## How wrong is a step?
#
# Where the way bends, walking straight errs. For one Gaussian cloud the true end is known: the noise as a whole is only moved and shrunk, each point keeps its place in it, so $x_0 = \mu + \tau\,\varepsilon$ (here $x_0$ is where the walk ends, not the partner drawn at random). So we can measure: double the steps, and what becomes of the error? On a log-log plot $N^{-p}$ is a line of slope $-p$.

# %%
counts, start = [8, 16, 32, 64, 128], noise.double()
truth = mu + tau * start


def walk_error(method: str, n: int) -> float:
    end = integrate(lambda x, s: exact_velocity(x, s, mu[None], tau), start, torch.linspace(1, 0, n + 1), method)
    return (end - truth).norm(dim=-1).mean().item()


errors = {method: [walk_error(method, n) for n in counts] for method in ("euler", "heun")}

# %% tags=["check"]
logs = {method: torch.tensor(e).log2() for method, e in errors.items()}
slopes = {method: ((log[-1] - log[-3]) / 2).item() for method, log in logs.items()}  # per doubling of N
assert abs(slopes["euler"] + 1) < 0.1  # twice the steps, half the error
assert abs(slopes["heun"] + 2) < 0.1  # twice the steps, a quarter

# %% tags=["hide"]
fig, ax = plt.subplots(figsize=(6, 2.8))
for method, calls in (("euler", 1), ("heun", 2)):
    ax.loglog([calls * n for n in counts], errors[method], "o-", label=f"{method}, slope {slopes[method]:.2f}")
ax.set(title="Heun pays two calls a step and still wins", xlabel="calls of the velocity", ylabel="mean error")
ax.legend()
show(
    fig, alt="Error against calls on log axes: Euler falls with slope −1, Heun with slope −2 and lies lower throughout."
)

# %% [markdown] lang="zh"
# ## 把场学出来
#
# 真实的数据没有闭式解，只能学。每次随机取一对点、一个 $\sigma$，让网络去猜那条路的速度：
#
# $$\mathcal{L} = \mathbb{E}\,\bigl\|\,v_\theta(x_\sigma, \sigma) - (\varepsilon - x_0)\,\bigr\|^2$$
#
# 损失不会降到零：路在交叉，猜不中是正常的。最小处正是平均速度。这颗心的真实速度场会算，学完就逐点比。先猜一猜：$\sigma = 1$ 时，箭头会指向哪里？下面的滑块给出答案。

# %% [markdown] lang="en" twin="483f80bb"
# ## Learning the field
#
# Real data have no closed form; the field must be learned. Draw a pair and a $\sigma$ at random, and let the network guess the velocity of that road:
#
# $$\mathcal{L} = \mathbb{E}\,\bigl\|\,v_\theta(x_\sigma, \sigma) - (\varepsilon - x_0)\,\bigr\|^2$$
#
# The loss does not reach zero: roads cross, and no guess fits them all. Its minimum is the mean velocity. For the heart we know that field, so afterwards we compare point by point. Guess first: where do the arrows point at $\sigma = 1$? The slider below tells.


# %%
from torch import nn


class ToyVelocity(nn.Module):
    """(x, σ) → v for points in the plane."""

    def __init__(self, width: int = 96):
        super().__init__()
        hidden = [layer for _ in range(2) for layer in (nn.Linear(width, width), nn.SiLU())]
        self.net = nn.Sequential(nn.Linear(3, width), nn.SiLU(), *hidden, nn.Linear(width, 2))

    def forward(self, x: Tensor, sigma: float | Tensor) -> Tensor:
        sigma = torch.as_tensor(sigma).expand(len(x))
        return self.net(torch.cat([x, sigma[:, None]], dim=-1))


# %%
def train(model: nn.Module, pairs: Callable, steps: int, lr: float = 6e-3, batch: int = 256) -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    optimizer = torch.optim.Adam(model.parameters(), lr, fused=True)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, steps)
    for _ in range(steps):
        data, noise = pairs(batch, generator)
        sigma = torch.rand(batch, generator=generator)
        guess = model(interpolate(data, noise, sigma), sigma)
        loss = (guess - velocity_target(data, noise)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        decay.step()
    return model.requires_grad_(False)


torch.manual_seed(0)
model = train(ToyVelocity(), draw_pairs, steps=2000)


# %% tags=["check"]
def heart_distance(x: Tensor) -> float:
    return torch.cdist(x, heart).amin(1).mean().item()


fresh_data, fresh = draw_pairs(2000, torch.Generator().manual_seed(4))
for s in (0.9, 0.5, 0.2):
    x = interpolate(fresh_data, fresh, s)
    truth_here = exact_velocity(x, s, heart, spread)
    assert (model(x, s) - truth_here).square().mean() < 0.1 * truth_here.square().mean()
path = integrate(model, fresh, torch.linspace(1, 0, 33), return_path=True)
assert heart_distance(path[-1]) < 0.3 < 0.5 < heart_distance(fresh)  # real data lie at about 0.17

# %% tags=["hide"]
x, y = torch.meshgrid(torch.linspace(-3, 3, 13), torch.linspace(-2.5, 2.5, 11), indexing="xy")
grid = torch.stack([x.flatten(), y.flatten()], dim=-1)


def draw_field(s: float):
    fig, ax = plt.subplots(figsize=(4, 3.6))
    k = round(32 * (1 - s))  # the station of the walk at this σ
    ax.quiver(*grid.T, *-model(grid, s).T, color="#a0aec0", width=0.005, scale=60)
    ax.plot(path[: k + 1, :20, 0], path[: k + 1, :20, 1], color=COLORS[0], lw=0.7)
    ax.scatter(*path[k, :300].T, s=3, color=COLORS[3], zorder=3)
    ax.spines[:].set_visible(False)
    title = f"σ = {s:g}: where −v points, the noise walks"
    ax.set(title=title, xticks=[], yticks=[], aspect="equal", xlim=(-3.2, 3.2), ylim=(-2.8, 2.8))
    return fig


slider(
    draw_field,
    torch.linspace(1, 0, 9).tolist(),
    label="σ",
    alt="Arrows and points at sigma {}: the arrows turn from the centre to a heart's outline, and the points follow.",
    live=torch.linspace(1, 0, 33).tolist(),
    text="{:.3g}",
    colors=24,
)

# %% [markdown] lang="zh"
# ## 路有多弯？
#
# 训练用的是直路，走出来的却是弯路：哪里有交叉，平均速度就在哪里拐弯。弯曲度 $S$ 量的是每一步偏离「匀速直走」多少：
#
# $$S = \frac{1}{N}\sum_{i} \bigl\|\,(x_N - x_0) - N\,(x_{i+1} - x_i)\,\bigr\|^2$$
#
# 这里 $x_0, \dots, x_N$ 是一条轨迹上的各站。$S = 0$ 时，一步 Euler 就是准的。

# %% [markdown] lang="en" twin="12ead798"
# ## How much do the ways bend?
#
# We trained on straight roads, yet the walks are curved: where roads cross, the mean velocity turns. $S$ measures how far each step is from walking straight at an even pace:
#
# $$S = \frac{1}{N}\sum_{i} \bigl\|\,(x_N - x_0) - N\,(x_{i+1} - x_i)\,\bigr\|^2$$
#
# Here $x_0, \dots, x_N$ are the stations of one trajectory. With $S = 0$ a single Euler step is exact.


# %% tags=["export"]
def straightness(path: Tensor) -> Tensor:
    """How far a walk is from one straight, even stride: S = mean_i ‖(x_N − x_0) − N·(x_{i+1} − x_i)‖².

    Args:
        path: states at evenly spaced σ, (N + 1, B, …), as `integrate` returns them.

    Returns:
        (B,), squared length; 0 for a straight path walked evenly (there one Euler step is exact), larger as it bends.

    Raises:
        ValueError: fewer than two states, or no batch dimension.

    Source: Liu et al. 2022, §2.2, S(Z).
    """
    if path.ndim < 2 or len(path) < 2:
        raise ValueError(f"path has shape {tuple(path.shape)}; expected (N + 1, B, …) with N of at least 1")
    path = path.reshape(*path.shape[:2], -1)  # (N + 1, B, D)
    strides = (len(path) - 1) * path.diff(dim=0)  # (N, B, D)
    return (path[-1] - path[0] - strides).square().sum(-1).mean(0)  # (B,)


# %% tags=["check"]
turn = torch.linspace(0, math.pi, 2001, dtype=torch.float64)
half_circle = torch.stack([turn.cos(), turn.sin()], dim=-1)[:, None]  # speed π, chord 2
assert torch.allclose(straightness(half_circle), torch.tensor(math.pi**2 - 4, dtype=torch.float64), rtol=1e-5)
evenly = torch.linspace(0, 1, 11)[:, None, None] * data
assert straightness(evenly).max() < 1e-8 < straightness(evenly.square()).min()  # straight but uneven is not enough

# %% [markdown] lang="zh"
# ## 重新配对，把路拉直
#
# 路交叉，是因为配对太随意。现在每个噪声点都已经有了自己走到的终点，就拿这些新的配对再训练一次（reflow）：轨迹互不相交（同一处、同一个 $\sigma$ 只有一个速度），新的直路也就很少交叉。

# %% [markdown] lang="en" twin="554451ae"
# ## Pair again, and the ways straighten
#
# Roads crossed because we paired at random. By now every noise point has an end that it walked to. Train once more on these new pairs (reflow): trajectories never cross (a place at one $\sigma$ has one velocity), so the new roads seldom do.

# %%
import copy

seeds = torch.randn(8192, 2, generator=torch.Generator().manual_seed(5))
landed = integrate(model, seeds, torch.linspace(1, 0, 33), "heun")


def draw_landed(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    chosen = torch.randint(len(seeds), (n,), generator=generator)
    return landed[chosen], seeds[chosen]


straight_model = train(copy.deepcopy(model).requires_grad_(True), draw_landed, steps=800)

# %% tags=["check"]
straight_path = integrate(straight_model, fresh, torch.linspace(1, 0, 33), return_path=True)
assert straightness(straight_path).mean() < straightness(path).mean() / 5
one_step = {name: integrate(net, fresh, [1.0, 0.0]) for name, net in (("before", model), ("after", straight_model))}
assert heart_distance(one_step["after"]) < 0.5 * heart_distance(one_step["before"])

# %% tags=["hide"]
fig, axes = plt.subplots(1, 3, figsize=(8, 3), sharex=True, sharey=True)
axes[0].plot(straight_path[:, :80, 0], straight_path[:, :80, 1], color=COLORS[5], lw=0.5)
axes[0].scatter(*straight_path[-1, :900].T, s=2, color=COLORS[3])
axes[0].set(title="After reflow: nearly straight")
for ax, (name, points) in zip(axes[1:], one_step.items()):
    ax.scatter(*points[:900].T, s=2, color=COLORS[3])
    ax.set(title=f"One step, {name} reflow")
for ax in axes:
    ax.set(xticks=[], yticks=[], aspect="equal", xlim=(-3.2, 3.2), ylim=(-3.2, 3.2))
show(
    fig,
    alt="After reflow the paths are nearly straight; one step before reflow lands in a blob, after reflow on the heart.",
)

# %% [markdown] lang="zh"
# ## 和真家伙对一对
#
# diffusers 的 `FlowMatchEulerDiscreteScheduler` 是 SD3 与 FLUX 的采样器。它的 `scale_noise` 就是 `interpolate`，`step` 就是一步 Euler。

# %% [markdown] lang="en" twin="d780ea3a"
# ## Against the real thing
#
# diffusers' `FlowMatchEulerDiscreteScheduler` samples SD3 and FLUX. Its `scale_noise` is our `interpolate`, its `step` one Euler step.

# %% tags=["check"]
from diffusers import FlowMatchEulerDiscreteScheduler

theirs = FlowMatchEulerDiscreteScheduler()
theirs.set_timesteps(sigmas=[1.0, 0.75, 0.5, 0.25])
t = theirs.timesteps[1:2]
assert torch.allclose(theirs.scale_noise(data, t, noise), interpolate(data, noise, 0.75), atol=1e-6)
x = noise
for t, s in zip(theirs.timesteps, [1.0, 0.75, 0.5, 0.25]):
    x = theirs.step(model(x, s), t, x).prev_sample
assert torch.allclose(x, integrate(model, noise, [1.0, 0.75, 0.5, 0.25, 0.0]), atol=1e-5)

# %% [markdown] lang="zh"
# **到了这里**，引擎会走路了：把两个数换成六万个数，这些函数一行都不用改。可是每一站放在哪里，我们一直是均匀地放。步数只有四步时，站放在哪里会差很多：下一章就安排这些站。
#
# ## 三个问题
#
# 1. 预测：训练时把目标写反成 $x_0 - \varepsilon$，行走照旧，点会走到哪里？
# 2. 修改：把直路换成圆弧 $x_\sigma = \cos(\tfrac{\pi}{2}\sigma)\,x_0 + \sin(\tfrac{\pi}{2}\sigma)\,\varepsilon$，数据只有一个点时，一步还能走到吗？
# 3. 动手：把 Heun 倒着走，让 $\sigma$ 从 $0$ 升到 $1$，由数据找回它的噪声（inversion），用 $\varepsilon = (x_0 - \mu)/\tau$ 核对。

# %% [markdown] lang="en" twin="18f6f9e0"
# **Where we stand.** The engine can walk: replace two numbers by sixty thousand, and not a line of these functions changes. But we have always spaced the stations evenly. With only four steps it matters a lot where they are: the next chapter places them.
#
# ## Three questions
#
# 1. Predict: train on the flipped target $x_0 - \varepsilon$ and walk as before. Where do the points go?
# 2. Modify: replace the straight road by the arc $x_\sigma = \cos(\tfrac{\pi}{2}\sigma)\,x_0 + \sin(\tfrac{\pi}{2}\sigma)\,\varepsilon$. With a single data point, does one step still arrive?
# 3. Build: walk Heun backwards, with $\sigma$ rising from $0$ to $1$, to find the noise behind given data (inversion). Check it by $\varepsilon = (x_0 - \mu)/\tau$.

# %% tags=["solution"]
# 1 · away from the heart, the wrong way along every road
lost = integrate(lambda x, s: -exact_velocity(x, s, heart, spread), fresh, torch.linspace(1, 0, 21))
assert heart_distance(lost) > 2 * heart_distance(fresh)

# %% tags=["solution"]
# 2 · no: at σ = 1 the arc's velocity is −(π/2)·x0, which points past the goal and ignores where the walk began
arc_velocity = -math.pi / 2 * home + 0 * noise
assert (noise - arc_velocity - home).norm(dim=-1).mean() > 1
assert torch.allclose(noise - (noise - home), home.expand_as(noise), atol=1e-6)  # the straight road: one step


# %% tags=["solution"]
# 3 · the same formula with the stations turned round: an ODE can be walked both ways
def invert(velocity: Callable, x: Tensor, n: int) -> Tensor:
    stations = torch.linspace(0, 1, n + 1).tolist()
    for s, s_next in zip(stations, stations[1:]):
        v = velocity(x, s)
        x = x + (s_next - s) * (v + velocity(x + (s_next - s) * v, s_next)) / 2
    return x


found = invert(lambda x, s: exact_velocity(x, s, mu[None], tau), truth, 64)
assert torch.allclose(found, (truth - mu) / tau, atol=1e-2)

# %% [markdown] lang="zh"
# ## 小结
#
# - 直路 $x_\sigma = (1-\sigma)x_0 + \sigma\varepsilon$，速度 $v = \varepsilon - x_0$，从 $v$ 可以反推两端。
# - $\sigma$ 要先变成 $(B, 1, \dots, 1)$，否则形状对、数值错。
# - 网络学到的是所有交叉道路的平均速度。
# - Euler 的误差斜率是 $-1$，Heun 是 $-2$；直路一步就准。
# - 重新配对训练，轨迹变直，步数就能变少。
#
# 阅读卡片：[`papers/01_rectified_flow`](../../papers/01_rectified_flow.zh.md)、[`papers/02_flow_matching`](../../papers/02_flow_matching.zh.md)。下一章：02。

# %% [markdown] lang="en" twin="fd5f7ee3"
# ## Recap
#
# - The straight road $x_\sigma = (1-\sigma)x_0 + \sigma\varepsilon$ has velocity $v = \varepsilon - x_0$, and $v$ gives back both ends.
# - $\sigma$ must become $(B, 1, \dots, 1)$ first, or shapes are right and numbers wrong.
# - The network learns the mean velocity of all roads that cross.
# - Euler's error has slope $-1$, Heun's $-2$; on a straight road one step is exact.
# - Trained on new pairs, trajectories straighten, and fewer steps are enough.
#
# Reading cards: [`papers/01_rectified_flow`](../../papers/01_rectified_flow.en.md), [`papers/02_flow_matching`](../../papers/02_flow_matching.en.md). Next: chapter 02.
