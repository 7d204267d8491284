# ---
# jupyter:
#   course:
#     minutes: 40
#     module: guidance
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown] lang="zh"
# # 08 · 引导（guidance）
#
# 读完这一章，你手里多了一个旋钮：不重新训练，就能让网络更听提示词的话；你也会看清它拿什么来换。
#
# | 你会做出 | 你需要 | 时间 | 模块 |
# | --- | --- | --- | --- |
# | 无分类器引导及其四个变体 | 第 01 章的速度与积分、第 07 章的提示词嵌入 | 40 分钟 | `diffusion_engine/guidance.py` |

# %% [markdown] lang="en" twin="681c377d"
# # 08 · Guidance
#
# After this chapter you hold a knob: without any training, the network listens harder to the prompt; and you see what it pays with.
#
# | You build | You need | Time | Module |
# | --- | --- | --- | --- |
# | classifier-free guidance and four variants | velocity and integration from chapter 01, prompt embeddings from chapter 07 | 40 minutes | `diffusion_engine/guidance.py` |

# %% [markdown] lang="zh"
# **先想一想**：训练时有一成提示词被换成空白，所以同一个网络既会「按提示词画」，也会「随便画」。只凭这两个答案，你怎样让画面更贴近提示词？先写下你的公式。

# %% [markdown] lang="en" twin="0c78712c"
# **Think first:** in training one prompt in ten was blanked, so the same network can "draw this" and can "draw anything". From these two answers alone, how would you push the picture closer to the prompt? Write your formula down.

# %% tags=["export"]
import math
from collections.abc import Callable

import torch
from torch import Tensor

from diffusion_engine.text_conditioning import PromptEmbeds, stack_prompts

# %% tags=["hide"]
import matplotlib.pyplot as plt

from course.figures import COLORS, show
from diffusion_engine.dit import DiT, DiTConfig
from diffusion_engine.rectified_flow import integrate

# %% [markdown] lang="zh"
# ## 一个知道答案的世界
#
# 六团高斯点云围成一圈，宽都是 $\tau$，中心是 $\mu_k$；相对的两团同属一类。沿第 01 章的直路走到 $\sigma$ 时，每团仍是高斯，所以速度有公式，不必训练：
#
# $$v(x, \sigma) = \sum_k r_k(x)\Big[\tfrac{\sigma - (1-\sigma)\tau^2}{a^2}\,g_k - \mu_k\Big], \qquad g_k = x - (1-\sigma)\mu_k, \quad a^2 = (1-\sigma)^2\tau^2 + \sigma^2$$
#
# 其中 $r_k$ 是 $x$ 出自第 $k$ 团的概率，$a$ 是各团走到 $\sigma$ 时的宽。

# %% [markdown] lang="en" twin="52fb063c"
# ## A world with a known answer
#
# Six Gaussian clouds, all of width $\tau$ and centred at $\mu_k$, stand in a ring; two that face each other make one class. On the straight road of chapter 01 each is still Gaussian at $\sigma$, so the velocity has a formula and needs no training:
#
# $$v(x, \sigma) = \sum_k r_k(x)\Big[\tfrac{\sigma - (1-\sigma)\tau^2}{a^2}\,g_k - \mu_k\Big], \qquad g_k = x - (1-\sigma)\mu_k, \quad a^2 = (1-\sigma)^2\tau^2 + \sigma^2$$
#
# Here $r_k$ is the probability that $x$ came from cloud $k$, and $a$ is the width of each at $\sigma$.

# %%
TAU = 0.7
ANGLE = torch.arange(6) * math.pi / 3
CENTRES = 2 * torch.stack([ANGLE.cos(), ANGLE.sin()], dim=-1)  # (6, 2)


def log_density(x: Tensor, sigma: Tensor, weights: Tensor) -> Tensor:
    """log of each cloud's share at x, up to one constant: (B, 6); sigma (B, 1), weights (B, 6)."""
    a2 = ((1 - sigma) * TAU) ** 2 + sigma**2
    return weights.log() - (x[:, None] - (1 - sigma[..., None]) * CENTRES).square().sum(-1) / (2 * a2)


def clouds_velocity(x: Tensor, sigma: Tensor, weights: Tensor) -> Tensor:
    a2 = ((1 - sigma) * TAU) ** 2 + sigma**2
    gap = x[:, None] - (1 - sigma[..., None]) * CENTRES  # (B, 6, 2)
    each = ((sigma - (1 - sigma) * TAU**2) / a2)[..., None] * gap - CENTRES
    return (log_density(x, sigma, weights).softmax(-1)[..., None] * each).sum(1)  # (B, 2)


# %% [markdown] lang="zh"
# 把它装扮成网络：`model(x, t, prompt)`。提示词的池化向量就是六团的权重：空提示词六团均分，「第 0 类」只留两团。顺手记下每次被问了多少个样本。

# %% [markdown] lang="en" twin="5f919329"
# Dress it up as a network: `model(x, t, prompt)`. The pooled vector of a prompt is the weight of each cloud: the empty prompt shares evenly, "class 0" keeps two. And we note how many samples each call is asked for.

# %%
calls = []


def model(x: Tensor, t: Tensor, prompt: PromptEmbeds) -> Tensor:
    calls.append(len(x))
    return clouds_velocity(x, t[:, None] / 1000, prompt.pooled)


def says(*weights: float) -> PromptEmbeds:
    return PromptEmbeds(
        torch.zeros(1, 1, 6), torch.ones(1, 1, dtype=torch.bool), torch.tensor([weights]) / sum(weights)
    )


UNCOND, COND = says(1, 1, 1, 1, 1, 1), says(1, 0, 0, 1, 0, 0)
generator = torch.Generator().manual_seed(0)
noise, levels = torch.randn(1500, 2, generator=generator), torch.linspace(1, 0, 41)

# %% tags=["hide"]
fig, axes = plt.subplots(1, 2, figsize=(6.4, 3.1), sharex=True, sharey=True)
for ax, prompt, color, name in zip(axes, (UNCOND, COND), (COLORS[5], COLORS[0]), ("the empty prompt", "class 0")):
    points = integrate(lambda x, s, p=prompt: clouds_velocity(x, torch.full((1, 1), s), p.pooled), noise, levels)
    ax.scatter(*points.T, s=2, color=color)
    ax.scatter(*CENTRES.T, marker="+", color="black")
    ax.set(title=f"Noise flows to {name}", xlim=(-5, 5), ylim=(-5, 5), aspect="equal")
show(
    fig,
    alt="Left: noise flows to six overlapping clouds in a ring. Right: with the prompt, to the two clouds of one class.",
)

# %% [markdown] lang="zh"
# ## 像画漫画像那样放大差别
#
# 画漫画像的人先想「平均的脸」，再把眼前这张脸与它的差别放大。速度也一样：$v_c - v_u$ 是提示词带来的差别，放大 $w$ 倍：
#
# $$v = v_u + w\,(v_c - v_u)$$
#
# | 记号 | 形状 | 含义 |
# | --- | --- | --- |
# | $v_u$ | $(B, \dots)$ | 空提示词（或负面提示词）给的速度 |
# | $v_c$ | $(B, \dots)$ | 提示词给的速度 |
# | $w$ | 标量 | 引导强度：0 不听，1 照听，大于 1 加倍听 |

# %% [markdown] lang="en" twin="5d0b7b49"
# ## Enlarge the difference, as a caricature does
#
# A caricaturist thinks of the average face and enlarges how this face differs from it. So with velocities: $v_c - v_u$ is what the prompt adds; enlarge it $w$ times.
#
# $$v = v_u + w\,(v_c - v_u)$$
#
# | Symbol | Shape | Meaning |
# | --- | --- | --- |
# | $v_u$ | $(B, \dots)$ | velocity of the empty (or negative) prompt |
# | $v_c$ | $(B, \dots)$ | velocity of the prompt |
# | $w$ | scalar | guidance scale: 0 ignores, 1 listens, above 1 listens harder |

# %%
v_uncond, v_cond = torch.randn(2, 3, 4, 8, 8, generator=generator)  # three latents (4, 8, 8) each
by_hand = v_uncond + 1.0 * (v_cond - v_uncond)
torch.equal(by_hand, v_cond)  # close, but not the same bits: rounding; torch.lerp is exact at both ends


# %% tags=["export"]
def guide(v_uncond: Tensor, v_cond: Tensor, scale: float) -> Tensor:
    """Classifier-free guidance: v = v_u + w·(v_c − v_u), exact at w = 0 and w = 1.

    Args:
        v_uncond: v_u, velocity of the empty or negative prompt, (B, …).
        v_cond: v_c, velocity of the prompt, shaped like ``v_uncond``.
        scale: w, any finite number; 1 is the prompt alone.

    Returns:
        (B, …) in the dtype of ``v_cond``; computed in fp32 at least.

    Raises:
        ValueError: shapes differ, or ``scale`` is NaN or infinite.

    Source: Ho & Salimans 2022; w here is their 1 + w, as in diffusers and in the models' own papers since.
    """
    if v_uncond.shape != v_cond.shape:
        raise ValueError(f"v_uncond {tuple(v_uncond.shape)} and v_cond {tuple(v_cond.shape)} differ; pass equal shapes")
    if not math.isfinite(scale):
        raise ValueError(f"guidance scale {scale} is not finite; try 1 (the prompt alone) to 7")
    exact = torch.promote_types(v_cond.dtype, torch.float32)
    return torch.lerp(v_uncond.to(exact), v_cond.to(exact), scale).to(v_cond.dtype)


# %% tags=["check"]
assert torch.equal(guide(v_uncond, v_cond, 0.0), v_uncond)  # exactly, not nearly
assert torch.equal(guide(v_uncond, v_cond, 1.0), v_cond)
assert torch.allclose(guide(v_uncond, v_cond, 4.0), v_uncond + 4 * (v_cond - v_uncond), atol=1e-5)

# %% [markdown] lang="zh"
# ## 两个不改形状的陷阱
#
# 第一个：最早的论文写 $v_c + w(v_c - v_u)$，那里的 $w = 1$ 是这里的 2。抄错公式，旋钮就偏一格。第二个：把两个速度拿反，画面会逃离提示词。

# %% [markdown] lang="en" twin="4e7a7033"
# ## Two traps that keep all shapes
#
# One: the first paper writes $v_c + w(v_c - v_u)$; its $w = 1$ is our 2. Mix the two formulas and the knob is off by one. Two: swap the velocities, and the picture flees from the prompt.

# %% tags=["check"]
first_paper = v_cond + 1.0 * (v_cond - v_uncond)
assert torch.allclose(first_paper, guide(v_uncond, v_cond, 2.0), atol=1e-5)  # 1 + w, not w

towards = ((guide(v_uncond, v_cond, 3.0) - v_cond) * (v_cond - v_uncond)).sum()
swapped = ((guide(v_cond, v_uncond, 3.0) - v_cond) * (v_cond - v_uncond)).sum()
assert towards > 0 > swapped  # beyond the prompt, against away from it

# %% [markdown] lang="zh"
# ## 一步问几次
#
# 引导要两个速度。可以分两次问（顺序），也可以把批加倍一次问完（合批），约定空提示词在前；两种问法必须画出同一张画。$w = 1$ 时根本不必问空提示词：省下一半时间，负面提示词也就不起作用。

# %% [markdown] lang="en" twin="3ce02ae5"
# ## How many questions a step
#
# Guidance needs two velocities. Ask twice (sequential), or once with the batch doubled (batched), by custom the empty prompt first; both must draw the same picture. At $w = 1$ nobody need ask the empty prompt: half the time is saved, and a negative prompt has no effect.


# %% tags=["export"]
Model = Callable[[Tensor, Tensor, PromptEmbeds], Tensor]  # (x (B, …), t (B,) in 0…1000, prompt) → velocity (B, …)
Velocity = Callable[[Tensor, float], Tensor]  # (x (B, …), σ) → velocity (B, …)


def repeat_prompt(prompt: PromptEmbeds, batch: int) -> PromptEmbeds:
    """One prompt for every sample of a batch; as many prompts as samples pass unchanged.

    Raises:
        ValueError: neither one prompt nor ``batch`` prompts.
    """
    have = len(prompt.pooled)
    if have not in (1, batch):
        raise ValueError(f"{have} prompts for {batch} samples; give 1 or {batch}")
    return prompt if have == batch else PromptEmbeds(*(t.repeat_interleave(batch, dim=0) for t in prompt))


def both_velocities(
    model: Model, x: Tensor, t: Tensor, uncond: PromptEmbeds, cond: PromptEmbeds, batched: bool = True
) -> tuple[Tensor, Tensor]:
    """(v_u, v_c): one forward of 2·B samples, uncond first; or, not batched, two forwards of B."""
    uncond, cond = repeat_prompt(uncond, len(x)), repeat_prompt(cond, len(x))
    if not batched:
        return model(x, t, uncond), model(x, t, cond)
    return model(torch.cat([x, x]), torch.cat([t, t]), stack_prompts([uncond, cond])).chunk(2)


def require_range(name: str, value: float, low: float = 0.0, high: float = 1.0) -> None:
    """Raise ValueError unless low ≤ value ≤ high."""
    if not low <= value <= high:
        raise ValueError(f"{name} {value} lies outside {low:g}…{high:g}; try {min(max(value, low), high):g}")


# %% tags=["export"]
def guided_velocity(
    model: Model,
    cond: PromptEmbeds,
    uncond: PromptEmbeds | None,
    scale: float,
    batched: bool = True,
    interval: tuple[float, float] | None = None,
    rescale: float = 0.0,
    zero_star: bool = False,
    zero_above: float | None = None,
) -> Velocity:
    """v(x, σ) of the guided network, for any sampler.

    Args:
        model: the network; it is fed t = 1000·σ in fp32, one a sample.
        cond: the prompts: one, or one a sample.
        uncond: the empty or negative prompts; may be None where scale is 1, which never reads them.
        scale: w of `guide`. 1 costs one forward of B samples a call, every other w costs 2·B.
        batched: one forward of 2·B, uncond first; else two forwards of B. Equal up to rounding.
        interval: guide only where low < σ ≤ high; elsewhere w = 1.
        rescale: see `rescale_velocity`.
        zero_star: scale v_uncond as `project_uncond` does.
        zero_above: the velocity is zero where σ > zero_above; sigmas[k] of a schedule silences its first k steps.

    Raises:
        ValueError: scale not finite, uncond missing, or a number outside 0…1; at the call: a wrong number of prompts.

    Source: Ho & Salimans 2022; interval: Kynkäänniemi et al. 2024; zero_star, zero_above: Fan et al. 2025 (CFG-Zero*).
    """
    if not math.isfinite(scale):
        raise ValueError(f"guidance scale {scale} is not finite; try 1 (the prompt alone) to 7")
    if uncond is None and scale != 1:
        raise ValueError(f"guidance scale {scale} needs uncond, the embedding of the empty prompt; or try scale 1")
    low, high = interval or (-math.inf, math.inf)
    if not low < high:
        raise ValueError(f"interval {interval} is empty; try {(high, low)}")
    require_range("rescale", rescale)
    for edge in interval or ():
        require_range("interval", edge)
    if zero_above is not None:
        require_range("zero_above", zero_above)

    def velocity(x: Tensor, sigma: float) -> Tensor:
        sigma = float(sigma)
        if zero_above is not None and sigma > zero_above:
            return torch.zeros_like(x)
        t = torch.full((len(x),), 1000 * sigma, dtype=torch.float32, device=x.device)
        w = scale if low < sigma <= high else 1.0
        if w == 1 or (w == 0 and not zero_star):
            return model(x, t, repeat_prompt(cond if w == 1 else uncond, len(x)))
        v_uncond, v_cond = both_velocities(model, x, t, uncond, cond, batched)
        v = guide(project_uncond(v_uncond, v_cond) if zero_star else v_uncond, v_cond, w)
        return rescale_velocity(v, v_cond, rescale) if rescale else v

    return velocity


# %%
def counted(scale: float, **options) -> list[int]:
    calls.clear()
    guided_velocity(model, COND, UNCOND, scale, **options)(noise[:5], 0.5)
    return list(calls)


counted(4.0), counted(4.0, batched=False), counted(1.0), counted(0.0)

# %% tags=["check"]
assert counted(4.0) == [10] and counted(4.0, batched=False) == [5, 5]
assert counted(1.0) == counted(0.0) == [5]  # scale 1 costs one forward of the batch itself
plain = model(noise, torch.full((1500,), 500.0), repeat_prompt(COND, 1500))
assert torch.equal(guided_velocity(model, COND, None, 1.0)(noise, 0.5), plain)  # and needs no empty prompt

# %%
torch.manual_seed(0)
config = DiTConfig(width=32, heads=4, joint_depth=1, parallel_depth=1, text_width=16)
dit = DiT(config).requires_grad_(False)
for weight in dit.parameters():
    weight.normal_(std=0.2)  # a fresh DiT answers zero to everything
# the prompt has 6 tokens, the empty one 1: when batched, its row is padded and the mask must hide that
prompt, empty = (
    PromptEmbeds(torch.randn(1, m, 16), torch.ones(1, m, dtype=torch.bool), torch.randn(1, 16)) for m in (6, 1)
)


def network(x: Tensor, t: Tensor, p: PromptEmbeds) -> Tensor:
    return dit(x, t, p.tokens, p.mask, p.pooled)


# %% tags=["check"]
latents = torch.randn(3, config.latent_channels, 16, 16)
together, apart = (guided_velocity(network, prompt, empty, 4.0, batched=b)(latents, 0.7) for b in (True, False))
assert torch.allclose(together, apart, atol=1e-5 * apart.abs().max())
assert not torch.allclose(
    together, guided_velocity(network, empty, prompt, 4.0)(latents, 0.7), atol=1e-2
)  # order matters

# %% [markdown] lang="zh"
# ## 旋钮转动时发生什么
#
# 同一批噪声，$w$ 从 0.5 拖到 6；灰点是 $w = 1$，供你对照。先猜再拖，看两件事：点落在该落的地方吗？还剩多少花样？

# %% [markdown] lang="en" twin="b932c22a"
# ## What happens as the knob turns
#
# The same noise, with $w$ from 0.5 to 6; the grey points are $w = 1$, to compare with. Guess, then move, and watch two things: do the points land where they should, and how much variety is left?

# %%
samples = {
    w: integrate(guided_velocity(model, COND, UNCOND, w), noise, levels) for w in (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
}
chance = {w: log_density(x, torch.zeros(1, 1), UNCOND.pooled).softmax(-1) for w, x in samples.items()}  # (1500, 6)
obeys = {w: p[:, [0, 3]].sum(-1).mean().item() for w, p in chance.items()}  # mean probability of class 0
spread = {w: samples[w][samples[w][:, 0] > 0].std(0).mean().item() for w in samples}  # width of the right-hand cloud

# %% tags=["hide"]
from course.sliders import slider


def draw_samples(w: float):
    fig, ax = plt.subplots(figsize=(5, 3.2))
    ax.scatter(*samples[1.0][:400].T, s=3, color="#cbd5e0")
    ax.scatter(*samples[w][:400].T, s=3, color=COLORS[0])
    ax.scatter(*CENTRES.T, marker="+", color="black")
    ax.set(title=f"w = {w:g}: {obeys[w]:.0%} obey, each cloud is {spread[w]:.2f} wide", xlim=(-5, 5), ylim=(-3, 3))
    return fig


slider(
    draw_samples,
    list(samples),
    label="guidance w",
    alt="Samples at w = {} over grey ones at w = 1: as w grows two clouds shrink to wedges and move past the data's centres.",
    start=1,
    colors=24,
)

# %% tags=["check"]
assert obeys[0.5] < obeys[1.0] < obeys[2.0] < obeys[4.0]  # it obeys more …
assert spread[1.0] > spread[2.0] > spread[4.0]  # … with less variety …
right = samples[1.0][samples[1.0][:, 0] > 0]
assert abs(spread[1.0] - TAU) < 0.07 and (right.mean(0) - CENTRES[0]).norm() < 0.1  # w = 1 draws the class itself
assert samples[4.0][:, 0].abs().mean() > samples[1.0][:, 0].abs().mean() + 0.3  # … and lands beyond it

# %% [markdown] lang="zh"
# ## 引导到底在爬哪座山
#
# 记 $p_\sigma(x)$ 为噪声水平 $\sigma$ 时点的密度。对 $\varepsilon$ 的最好猜测是 $-\sigma\,\nabla\log p_\sigma(x)$（Tweedie 公式），而 $v = (\varepsilon - x)/(1-\sigma)$，所以 $v = -\big(x + \sigma\,\nabla\log p_\sigma(x)\big)/(1-\sigma)$。我们逆着速度走，于是引导后爬的是这座山：
#
# $$\log p_\sigma(x) + w\,\big[\log p_\sigma(x \mid c) - \log p_\sigma(x)\big]$$
#
# 用自动求导走另一条路算一遍，验证它。初读可以跳过这一节。

# %% [markdown] lang="en" twin="0dfdc423"
# ## Which hill guidance climbs
#
# Let $p_\sigma(x)$ be the density of points at noise level $\sigma$. The best guess of $\varepsilon$ is $-\sigma\,\nabla\log p_\sigma(x)$ (Tweedie's formula), and $v = (\varepsilon - x)/(1-\sigma)$, so $v = -\big(x + \sigma\,\nabla\log p_\sigma(x)\big)/(1-\sigma)$. We walk against the velocity, and with guidance that climbs this hill:
#
# $$\log p_\sigma(x) + w\,\big[\log p_\sigma(x \mid c) - \log p_\sigma(x)\big]$$
#
# Compute it on another road, by automatic differentiation, and compare. A first reading may skip this section.

# %% tags=["check"]
x, sigma, w = noise[:50].clone().requires_grad_(), torch.full((1, 1), 0.6), 3.0
log_p, log_p_given_c = (log_density(x, sigma, p.pooled).logsumexp(-1) for p in (UNCOND, COND))
(slope,) = torch.autograd.grad((log_p + w * (log_p_given_c - log_p)).sum(), x)
known = -(x + sigma * slope) / (1 - sigma)
assert torch.allclose(guided_velocity(model, COND, UNCOND, w)(x, 0.6), known, atol=1e-4)

# %% [markdown] lang="zh"
# 两团等宽的高斯时，答案更干脆：引导后的流就是流向第三团，中心在 $\mu_u + w(\mu_c - \mu_u)$。$w = 2$ 走过了头，多出的正是两团之间的距离，这就是颜色过饱和的由来。

# %% [markdown] lang="en" twin="30fa1494"
# For two Gaussians of one width the answer is plainer still: the guided flow is the flow to a third one, centred at $\mu_u + w(\mu_c - \mu_u)$. At $w = 2$ it overshoots by exactly the distance between the two: here is where oversaturated colours come from.

# %% tags=["check"]
from_cloud, to_cloud = says(1, 0, 0, 0, 0, 0), says(0, 1, 0, 0, 0, 0)
landed = integrate(guided_velocity(model, to_cloud, from_cloud, 2.0), noise, levels)
shifted = CENTRES[0] + 2 * (CENTRES[1] - CENTRES[0])
own = integrate(
    lambda x, s: model(x, torch.full((len(x),), 1000 * s), repeat_prompt(from_cloud, len(x))), noise, levels
)
assert torch.allclose(landed, own + (shifted - CENTRES[0]), atol=1e-4)  # every point, not only the mean

# %% [markdown] lang="zh"
# ## 只在需要时引导
#
# 噪声最重时，引导过早压掉花样；噪声将尽时，大局已定，引导没有用处（Kynkäänniemi 等 2024 在真实模型上量过）。于是只在一段 $\sigma$ 里引导，别处 $w = 1$，只问一次。若引导的步占比 $r$，就省下 $(1-r)/2$ 的计算。

# %% [markdown] lang="en" twin="1dd2be7d"
# ## Guide only where it helps
#
# In heavy noise guidance kills variety too early; near the end all is settled and it is of no use (Kynkäänniemi et al. 2024 measured it on real models). So guide within one interval of $\sigma$ and leave $w = 1$ elsewhere, one question a step. With a share $r$ of guided steps, $(1-r)/2$ of the work is saved.

# %% tags=["check"]
calls.clear()
sigmas = torch.linspace(1, 0, 11)
integrate(guided_velocity(model, COND, UNCOND, 4.0, interval=(0.25, 0.75)), noise[:1], sigmas)
assert calls == [1, 1, 1, 2, 2, 2, 2, 2, 1, 1]  # σ = 0.7 … 0.3 are guided: r = 1/2, 15 forwards instead of 20
everywhere = guided_velocity(model, COND, UNCOND, 4.0, interval=(0, 1))(noise, 0.5)
assert torch.equal(everywhere, guided_velocity(model, COND, UNCOND, 4.0)(noise, 0.5))

# %% [markdown] lang="zh"
# ## 把音量调回来
#
# 外推会放大速度的幅度，画面因此过曝。重缩放（rescale）保留方向，把每个样本的标准差调回 $v_c$ 的大小，再按 $\phi$ 与原来的混合：
#
# $$v' = \phi\,\frac{\mathrm{std}(v_c)}{\mathrm{std}(v)}\,v + (1-\phi)\,v$$

# %% [markdown] lang="en" twin="3684d156"
# ## Turn the volume back
#
# Extrapolation makes velocities larger, and pictures overexposed. Rescaling keeps the direction, brings each sample's standard deviation back to that of $v_c$, and blends by $\phi$ with what was there:
#
# $$v' = \phi\,\frac{\mathrm{std}(v_c)}{\mathrm{std}(v)}\,v + (1-\phi)\,v$$


# %% tags=["export"]
def rescale_velocity(v: Tensor, v_cond: Tensor, amount: float) -> Tensor:
    """v' = φ·std(v_c)/std(v)·v + (1 − φ)·v, standard deviations over each sample.

    Args:
        v: guided velocity, (B, …).
        v_cond: velocity of the prompt alone, shaped like ``v``.
        amount: φ in 0…1; 0 changes nothing, 1 restores the standard deviation of ``v_cond``.

    Raises:
        ValueError: ``amount`` outside 0…1.

    Source: Lin et al. 2023, §3.4 (they use 0.7).
    """
    require_range("rescale", amount)
    sample_dims = tuple(range(1, v.ndim))
    std, target = (y.float().std(sample_dims, keepdim=True) for y in (v, v_cond))
    ratio = torch.where(std > 0, target / std, 1.0)  # (B, 1, …)
    return (v.float() * (1 + amount * (ratio - 1))).to(v.dtype)


# %% tags=["check"]
loud = guide(v_uncond, v_cond, 7.0)
calm = rescale_velocity(loud, v_cond, 1.0)
assert loud.std() > 3 * v_cond.std()
assert torch.allclose(calm.std((1, 2, 3)), v_cond.std((1, 2, 3)), rtol=1e-4)  # each sample's own volume is back
assert torch.cosine_similarity(calm.flatten(1), loud.flatten(1)).min() > 1 - 1e-5  # the direction is untouched
assert torch.equal(rescale_velocity(loud, v_cond, 0.0), loud)

# %% [markdown] lang="zh"
# ## CFG-Zero*：先校准，再引导
#
# 网络没训练好时，$v_u$ 的大小不可信。先乘一个系数，使它离 $v_c$ 最近（最小二乘），差别里就只剩方向；开头几步估得最差，干脆不动（$\sigma$ 照样减，$x$ 留在原处）：
#
# $$\alpha = \frac{\langle v_c, v_u\rangle}{\lVert v_u\rVert^2}, \qquad v = \alpha v_u + w\,(v_c - \alpha v_u)$$

# %% [markdown] lang="en" twin="1530a17e"
# ## CFG-Zero*: calibrate, then guide
#
# In an imperfect network the size of $v_u$ is not to be trusted. First scale it to come as near to $v_c$ as it can (least squares), so that only direction remains in the difference; and in the first steps, the worst estimated, do not move at all ($\sigma$ falls, $x$ stays):
#
# $$\alpha = \frac{\langle v_c, v_u\rangle}{\lVert v_u\rVert^2}, \qquad v = \alpha v_u + w\,(v_c - \alpha v_u)$$


# %% tags=["export"]
def project_uncond(v_uncond: Tensor, v_cond: Tensor) -> Tensor:
    """α·v_u with α = ⟨v_c, v_u⟩ / |v_u|² of each sample: the multiple of v_u nearest to v_c (CFG-Zero*).

    Args:
        v_uncond: v_u, (B, …).
        v_cond: v_c, shaped like ``v_uncond``.

    Source: Fan et al. 2025 (CFG-Zero*), §4.
    """
    u, c = v_uncond.float(), v_cond.float()
    sample_dims = tuple(range(1, u.ndim))
    dot = (c * u).sum(sample_dims, keepdim=True)  # (B, 1, …)
    alpha = dot / u.square().sum(sample_dims, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return (alpha * u).to(v_uncond.dtype)


# %% tags=["check"]
nearest = project_uncond(v_uncond, v_cond)
left_over = ((v_cond - nearest) * v_uncond).sum((1, 2, 3))
assert left_over.abs().max() < 1e-3  # what remains stands at a right angle to v_u
assert torch.allclose(project_uncond(10 * v_uncond, v_cond), nearest, atol=1e-5)  # the size of v_u no longer matters

path = integrate(
    guided_velocity(model, COND, UNCOND, 4.0, zero_above=float(sigmas[2])), noise, sigmas, return_path=True
)
assert torch.equal(path[0], path[2]) and not torch.equal(path[2], path[3])  # the first two steps stand still

# %% [markdown] lang="zh"
# ## 和真家伙对一对
#
# diffusers 的各条流水线写的是同一个公式，它的引导器（guider）还带最早论文的写法、重缩放和 CFG-Zero*。四样都应相符，误差小于 $10^{-5}$。

# %% [markdown] lang="en" twin="96f6dd05"
# ## Against the real thing
#
# The pipelines of diffusers write the same formula, and its guiders add the first paper's version, rescaling and CFG-Zero*. All four must agree within $10^{-5}$.

# %% tags=["check"]
from diffusers.guiders import ClassifierFreeGuidance, ClassifierFreeZeroStarGuidance
from diffusers.utils import logging

logging.set_verbosity_error()  # guiders announce that they are experimental
theirs = ClassifierFreeGuidance(guidance_scale=4.0).forward(v_cond, v_uncond).pred
assert torch.allclose(guide(v_uncond, v_cond, 4.0), theirs, atol=1e-5)
theirs = ClassifierFreeGuidance(guidance_scale=4.0, guidance_rescale=0.7).forward(v_cond, v_uncond).pred
assert torch.allclose(rescale_velocity(guide(v_uncond, v_cond, 4.0), v_cond, 0.7), theirs, atol=1e-5)
theirs = ClassifierFreeGuidance(guidance_scale=3.0, use_original_formulation=True).forward(v_cond, v_uncond).pred
assert torch.allclose(guide(v_uncond, v_cond, 1 + 3.0), theirs, atol=1e-5)  # their w, our 1 + w
zero_star = ClassifierFreeZeroStarGuidance(guidance_scale=4.0, zero_init_steps=1)
zero_star.set_state(step=1, num_inference_steps=10, timestep=torch.tensor(900))
theirs = zero_star.forward(v_cond, v_uncond).pred
assert torch.allclose(guide(project_uncond(v_uncond, v_cond), v_cond, 4.0), theirs, atol=1e-5)

# %% [markdown] lang="zh"
# **到了这里**，引导就是一个速度函数，任何采样器都能用。SD3 与 Sana 合批，Wan 顺序；FLUX 把 $w$ 当作输入蒸馏进网络，一步只问一次。还缺一样：速度在潜空间里，谁把它变成像素？下一章是 VAE。
#
# ## 三个问题
#
# 1. 预测：$w = 0.5$ 时，点会落在哪里？先想，再看 `obeys[0.5]`。
# 2. 修改：把空提示词换成负面提示词，$w$ 取 1 与 4，哪个会变？
# 3. 动手：山脚下的分布真的是 $p^{1-w}p_c^{\,w}$ 吗？用两团不等宽的一维高斯检验。

# %% [markdown] lang="en" twin="f41d4c0f"
# **Where we stand.** Guidance is one more velocity function, for any sampler. SD3 and Sana batch it, Wan asks twice; FLUX has $w$ distilled into the network as an input and asks once a step. One thing is missing: velocities live in latent space; who turns it into pixels? Next: the VAE.
#
# ## Three questions
#
# 1. Predict: where do points land at $w = 0.5$? Think first, then look at `obeys[0.5]`.
# 2. Modify: put a negative prompt in place of the empty one, with $w$ at 1 and at 4. Which one changes?
# 3. Build: is the distribution at the foot of the hill really $p^{1-w}p_c^{\,w}$? Test it with two one-dimensional Gaussians of unequal widths.

# %% tags=["solution"]
# 1 · half-way: some stray into the neighbours' clouds, yet fewer than with the empty prompt, which obeys one time in three
assert 1 / 3 < obeys[0.5] < obeys[1.0]

# %% tags=["solution"]
# 2 · only w = 4: at w = 1 nobody asks the negative prompt
NEGATIVE = says(0, 1, 0, 0, 1, 0)
for w, same in ((1.0, True), (4.0, False)):
    a, b = (guided_velocity(model, COND, u, w)(noise, 0.5) for u in (UNCOND, NEGATIVE))
    assert torch.equal(a, b) == same


# %% tags=["solution"]
# 3 · no: each σ climbs its own hill, and those hills are not the noised versions of the last one
def gaussian_velocity(x: Tensor, sigma: float, tau: float) -> Tensor:  # centred at 0, width tau
    return (sigma - (1 - sigma) * tau**2) / ((1 - sigma) ** 2 * tau**2 + sigma**2) * x


def both(x: Tensor, sigma: float) -> Tensor:
    return guide(gaussian_velocity(x, sigma, 1.0), gaussian_velocity(x, sigma, 0.5), 2.0)  # w = 2


start = torch.ones(1, 1, dtype=torch.float64)  # each velocity is linear in x: a start at 1 ends at the width
width = integrate(both, start, torch.linspace(1, 0, 201), method="heun").item()
tilted = ((1 - 2) / 1.0**2 + 2 / 0.5**2) ** -0.5  # precisions add, with weights 1 − w and w
assert abs(width - 0.5**2 * 1.0**-1) < 1e-3  # the widths multiply instead
print(f"the flow ends at width {width:.2f}; the tilted density has {tilted:.2f}, the class itself 0.50")

# %% [markdown] lang="zh"
# ## 小结
#
# - $v = v_u + w(v_c - v_u)$；用 `lerp`，两端精确，在 fp32 里算。
# - $w = 1$ 只问一次，负面提示词不起作用；合批时空提示词在前。
# - 引导换来听话，付出花样与位置；两团等宽高斯时，中心恰好外推到 $w$ 倍。
# - 区间省计算，重缩放调回幅度，CFG-Zero* 先校准 $v_u$。
# - 与 diffusers 数值一致（误差小于 $10^{-5}$）。
#
# 阅读卡片：无分类器引导（[`papers/04_cfg`](../../papers/04_cfg.zh.md)）。笔记：[`notes/06_cfg`](../../notes/06_cfg.zh.md)。下一章：09。

# %% [markdown] lang="en" twin="9ed94632"
# ## Recap
#
# - $v = v_u + w(v_c - v_u)$; with `lerp`, exact at both ends, summed in fp32.
# - $w = 1$ asks once, and a negative prompt does nothing; batched order: the empty prompt first.
# - Guidance buys obedience and pays with variety and place; between two Gaussians of one width, the centre is extrapolated exactly $w$ times.
# - The interval saves work, rescaling restores the size, CFG-Zero* calibrates $v_u$ first.
# - Equal to diffusers (within $10^{-5}$).
#
# Reading card: classifier-free guidance ([`papers/04_cfg`](../../papers/04_cfg.en.md)). Note: [`notes/06_cfg`](../../notes/06_cfg.en.md). Next: chapter 09.
