# ---
# jupyter:
#   course:
#     minutes: 50
#     module: reference/solvers
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown] lang="zh"
# # 23 · 各家的走法：DPM-Solver++、UniPC、DDIM（solvers）
#
# 读完这一章，Sana、Wan、CogVideoX 按各自文件夹里写的走法走，终点和 diffusers 相等；三种走法其实都是同一个动作：把 $x$ 和数据混合。
#
# | 你会做出 | 你需要 | 时间 | 模块 |
# | --- | --- | --- | --- |
# | 两种新的求解器、DDIM 和它的直路、读懂各家的走法 | 第 01 章的 $\hat x_0$，第 02 章的噪声表与求解器，第 21 章的 $v$ | 50 分钟 | `diffusion_engine/reference/solvers.py` |

# %% [markdown] lang="en" twin="1ba49bbe"
# # 23 · The families' own solvers: DPM-Solver++, UniPC, DDIM
#
# After this chapter Sana, Wan and CogVideoX are walked as their own folders say, and end where diffusers ends; all three turn out to be one move, blending $x$ with data.
#
# | You build | You need | Time | Module |
# | --- | --- | --- | --- |
# | two new solvers, DDIM and its straight road, a reader of each family's way | $\hat x_0$ of chapter 01, schedule and solvers of chapter 02, $v$ of chapter 21 | 50 minutes | `diffusion_engine/reference/solvers.py` |

# %% [markdown] lang="zh"
# **先想一想**：Sana 的文件夹要 DPM-Solver++，Wan 的要 UniPC，CogVideoX 的要 DDIM。三个名字，三篇论文。循环要写三遍吗？还是它们和欧拉法只差一个地方？猜猜差在哪里。

# %% [markdown] lang="en" twin="49018568"
# **Think first:** Sana's folder asks for DPM-Solver++, Wan's for UniPC, CogVideoX's for DDIM. Three names, three papers. Must the loop be written three times, or do they differ from Euler in one place? Guess which.

# %% tags=["export"]
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from diffusion_engine.rectified_flow import predict_data
from diffusion_engine.reference.checkpoint import read_json, require
from diffusion_engine.scheduler import TRAIN_STEPS, Schedule, Step, euler_step, make_schedule, shift_sigmas

# %% tags=["hide"]
import matplotlib.pyplot as plt

from course.figures import COLORS, show
from diffusion_engine.scheduler import heun_step, multistep_step

rng = torch.Generator().manual_seed(0)
noise, centre, tau = torch.randn(2, 4, 3, 4, 6, generator=rng), 2.0, 1.5  # chapter 01's cloud: ε ends at centre + τ·ε


def cloud(x: Tensor, s: float) -> Tensor:
    """The exact velocity of the cloud."""
    slope = (s - (1 - s) * tau**2) / ((1 - s) ** 2 * tau**2 + s**2)
    return -centre + slope * (x - (1 - s) * centre)


def walk(step: Callable, x: Tensor, schedule: Schedule) -> Tensor:
    """Down the schedule, step by step."""
    history = ()
    for sigma, sigma_next in schedule:
        x, _, history = step(cloud, x, sigma, sigma_next, history)
    return x


# %% [markdown] lang="zh"
# ## 一步就是一次混合
#
# 在 $\sigma$ 处问一次网络，就得到它猜的数据 $\hat x_0 = x - \sigma v$。把欧拉法 $x' = x + (\sigma' - \sigma)\,v$ 里的 $v$ 换成 $\hat x_0$：
#
# $$x' = \tfrac{\sigma'}{\sigma}\,x + \big(1 - \tfrac{\sigma'}{\sigma}\big)\,D, \qquad D = \hat x_0$$
#
# 噪声按比例缩小，空出来的位置填上 $D$。下面每种走法都只改 $D$。
#
# | 记号 | 形状 | 含义 |
# | --- | --- | --- |
# | $\hat x_0$ | $(B, \dots)$ | 此刻猜的数据 |
# | $D$ | $(B, \dots)$ | 这一整步里要填的数据 |
# | $\lambda$ | 数 | $\ln\frac{1 - \sigma}{\sigma}$，从 $-\infty$（噪声）到 $+\infty$（数据） |

# %% [markdown] lang="en" twin="f54d6c2d"
# ## A step is a blend
#
# One question at $\sigma$ gives the network's guess of the data, $\hat x_0 = x - \sigma v$. Write Euler, $x' = x + (\sigma' - \sigma)\,v$, with $\hat x_0$ in place of $v$:
#
# $$x' = \tfrac{\sigma'}{\sigma}\,x + \big(1 - \tfrac{\sigma'}{\sigma}\big)\,D, \qquad D = \hat x_0$$
#
# The noise shrinks in proportion, and $D$ fills the room. Every way of walking below changes $D$ alone.
#
# | Symbol | Shape | Meaning |
# | --- | --- | --- |
# | $\hat x_0$ | $(B, \dots)$ | the data as guessed here |
# | $D$ | $(B, \dots)$ | the data to fill in during the whole step |
# | $\lambda$ | a number | $\ln\frac{1 - \sigma}{\sigma}$, from $-\infty$ (noise) to $+\infty$ (data) |


# %% tags=["export"]
class Look(NamedTuple):
    """One question to the network: the noise level, and the data x̂0 = x − σ·v that it guessed there, fp32 at least."""

    sigma: float
    data: Tensor


def look(velocity: Callable, x: Tensor, sigma: float) -> tuple[Tensor, Look]:
    """The velocity at x, and its `Look`."""
    v = velocity(x, sigma)
    return v, Look(sigma, predict_data(x.to(torch.promote_types(x.dtype, torch.float32)), v, sigma))


def blend(x: Tensor, data: Tensor, ratio: float) -> Tensor:
    """ratio · x + (1 − ratio) · D with ratio = σ' / σ, in the dtype of D."""
    return torch.lerp(data, x.to(data.dtype), ratio)


# %% tags=["check"]
v, seen = look(cloud, noise, 0.8)
assert torch.allclose(blend(noise, seen.data, 0.5 / 0.8), euler_step(cloud, noise, 0.8, 0.5).latents, atol=1e-6)
assert torch.equal(blend(noise, seen.data, 0.0), seen.data)  # the last step lands on the guess

# %% [markdown] lang="zh"
# ## 精确的一步
#
# 这个混合不是粗略的近似，精确解就长这样。$x/\sigma$ 对 $1/\sigma$ 的导数正是 $\hat x_0$，所以精确的 $D$ 是一路上 $\hat x_0$ 的平均，按 $1/\sigma = 1 + e^\lambda$ 均匀取：
#
# $$\frac{x'}{\sigma'} - \frac{x}{\sigma} = \int \hat x_0\; d\tfrac{1}{\sigma} \quad\Longrightarrow\quad D = \text{mean of } \hat x_0$$
#
# 欧拉法用起点代替平均。剩下的问题只有一个：怎样不多问网络，把平均估得更准。

# %% [markdown] lang="en" twin="ccb0ba26"
# ## The exact step
#
# The blend is no rough approximation: the exact solution has this very shape. The derivative of $x/\sigma$ by $1/\sigma$ is $\hat x_0$ itself, so the exact $D$ is the mean of $\hat x_0$ along the way, evenly weighted in $1/\sigma = 1 + e^\lambda$:
#
# $$\frac{x'}{\sigma'} - \frac{x}{\sigma} = \int \hat x_0\; d\tfrac{1}{\sigma} \quad\Longrightarrow\quad D = \text{mean of } \hat x_0$$
#
# Euler takes the beginning for the mean. One question is left: how to guess the mean better without asking the network more.

# %% tags=["check"]
fine, x, guesses = 1 / torch.linspace(1 / 0.8, 1 / 0.2, 1001, dtype=torch.float64), noise.double(), []
for s, s_next in zip(fine[:-1].tolist(), fine[1:].tolist()):  # even in 1/σ
    x, v, _ = heun_step(cloud, x, s, s_next)
    guesses.append(look(cloud, x, s_next)[1].data)
mean = torch.stack(guesses).mean(0)
assert torch.allclose(blend(noise.double(), mean, 0.2 / 0.8), x, atol=5e-3)  # from 0.8 to 0.2 in one step

# %% tags=["export"]
def log_odds(sigma: float) -> float:
    """λ = ln((1 − σ) / σ): −∞ at noise, +∞ at data."""
    return math.copysign(math.inf, 0.5 - sigma) if sigma in (0, 1) else math.log((1 - sigma) / sigma)


# %% tags=["hide"]
x, path = torch.tensor([0.9], dtype=torch.float64), []
for s, s_next in make_schedule(200, 3.0):
    path.append((log_odds(s), look(cloud, x, s)[1].data.item()))
    x = heun_step(cloud, x, s, s_next).latents
path = [(odds, data) for odds, data in path if -2.6 < odds < 3.2]
at = [min(path, key=lambda p: abs(p[0] - odds)) for odds in (-2.0, -1.0, 0.0)]  # before, now, next
(l0, d0), (l1, d1), (l2, d2) = at
half, along = l1 + (l2 - l1) / 2, (d1 - d0) / (l1 - l0)
fig, ax = plt.subplots(figsize=(6.4, 3.0))
ax.axvspan(l1, l2, color="#eef1f5")
ax.plot(*zip(*path), color=COLORS[5], label="the guess on the exact way")
ax.plot([l1, l2], [d1, d1], color=COLORS[0], label="Euler: as at the beginning")
ax.plot([l0, half], [d0, d1 + along * (half - l1)], color=COLORS[1], label="DPM-Solver++: a line, half way")
p = [(d1 - d0) / (l1 - l0), (d2 - d1) / (l2 - l1)]
bend = (p[1] - p[0]) / (l2 - l0)
grid = torch.linspace(l0, l2, 60)
ax.plot(grid, d1 + (grid - l1) * (p[0] + bend * (grid - l0)), "--", color=COLORS[2], label="UniPC, on arrival: a parabola")
ax.plot([l0, l1, l2], [d0, d1, d2], "o", color="black", ms=4)
ax.set(title="Which guess should fill the step?", xlabel="λ: from noise to data", ylabel="guess of the data")
ax.legend(fontsize=8)
show(fig, alt="A curve of guesses over lambda with three looks; on the step between the last two a flat line, a line extended to the middle, and a parabola through all three.")

# %% [markdown] lang="zh"
# ## DPM-Solver++：记住上一眼
#
# 沿 $\lambda$ 走，把上一眼和这一眼连成直线，取这一步的中点。$h$ 是这一步的 $\lambda$ 之差，$h_\text{prev}$ 是上一步的：
#
# $$D = \hat x_0 + \frac{h}{2\,h_\text{prev}}\,\big(\hat x_0 - \hat x_0^\text{prev}\big)$$
#
# 第一步没有上一眼，最后一步的 $h$ 是无穷大，这两步用欧拉。第 02 章的多步法也记住上一眼，只是沿 $\sigma$ 连线，记的是 $v$。Sana 的站也自成一套：$N + 1$ 个点从 $0.999$ 均匀走到 $0$，取前 $N$ 个移位。

# %% [markdown] lang="en" twin="a5b2ddcb"
# ## DPM-Solver++: remember the last look
#
# Go along $\lambda$, draw a line through the last look and this one, and take it half way through the step. $h$ is this step's width in $\lambda$, $h_\text{prev}$ the one before:
#
# $$D = \hat x_0 + \frac{h}{2\,h_\text{prev}}\,\big(\hat x_0 - \hat x_0^\text{prev}\big)$$
#
# The first step has no last look and the last has an infinite $h$: both are Euler's. Chapter 02's multistep remembers too, only its line runs along $\sigma$ and it keeps $v$. Sana has its own stations: of $N + 1$ even points from $0.999$ to $0$ the first $N$, shifted.


# %% tags=["export"]
def ahead(looks: Sequence[Look], sigma_next: float) -> Tensor:
    """D for the step to σ_next: x̂0 half way in λ, on the line through the two newest looks, newest first.

    Where there is one look only, or the way is infinite: the newest itself.
    """
    now, *before = looks
    if not before or sigma_next == 0:
        return now.data
    way, last = (log_odds(b) - log_odds(a) for a, b in ((now.sigma, sigma_next), (before[0].sigma, now.sigma)))
    return now.data + way / (2 * last) * (now.data - before[0].data)


def dpm_step(
    velocity: Callable, x: Tensor, sigma: float, sigma_next: float, history: tuple = (), out: Tensor | None = None
) -> Step:
    """DPM-Solver++ (2M, midpoint) on the straight road; one call. Arguments: as `euler_step`; ``history`` is the last look.

    Source: Lu et al. 2022 (DPM-Solver++), algorithm 2; diffusers' ``DPMSolverMultistepScheduler``.
    """
    v, now = look(velocity, x, sigma)
    new = blend(x, ahead((now, *history), sigma_next), sigma_next / sigma).to(x.dtype)
    return Step(new if out is None else out.copy_(new), v, (now,))


def dpm_schedule(num_inference_steps: int, shift: float = 1.0) -> Schedule:
    """The first N of N + 1 even points 0.999 … 0, shifted; whole-numbered times. Source: diffusers, "flow sigmas" of DPM.

    Raises:
        ValueError: N or the shift outside its range.
    """
    steps, smallest = make_schedule(num_inference_steps).num_steps, 1 / TRAIN_STEPS  # refuses other counts
    shares = 1 - torch.arange(1, steps + 1, dtype=torch.float64) * ((1 - smallest) / steps)
    shares[-1] = smallest  # as numpy's linspace ends
    return Schedule((*shift_sigmas(1 - shares.flip(0), shift).tolist(), 0.0), integer_timesteps=True)


# %%
def theirs(kind: type, steps: int, shift: float, x: Tensor) -> tuple:
    """diffusers' scheduler after its own walk through the cloud, and where it ended."""
    sampler = kind(use_flow_sigmas=True, flow_shift=shift, prediction_type="flow_prediction")
    sampler.set_timesteps(steps)
    for t, sigma in zip(sampler.timesteps, sampler.sigmas.tolist()):
        x = sampler.step(cloud(x, sigma), t, x).prev_sample
    return sampler, x


# %% tags=["check"]
from diffusers import DPMSolverMultistepScheduler, UniPCMultistepScheduler

for steps, shift in ((1, 3.0), (2, 1.0), (5, 3.0), (20, 3.0)):
    sampler, end = theirs(DPMSolverMultistepScheduler, steps, shift, noise)
    road = dpm_schedule(steps, shift)
    assert torch.allclose(road.sigmas, sampler.sigmas, atol=1e-6)
    assert road.timesteps.tolist() == sampler.timesteps.tolist()
    assert torch.allclose(walk(dpm_step, noise, road), end, atol=1e-5)  # Sana's sampler, to the last step

# %% [markdown] lang="zh"
# ## UniPC：到了再改
#
# 走到 $\sigma'$，反正要再问网络一次。问到的 $\hat x_0'$ 就在上一步的终点：拿它回头把上一步**重走**一遍，不多花一次调用。
#
# 过三眼画一条抛物线，$u$ 是这一步走过的份额，再上一眼在 $u = -r$，$r = h_\text{prev} / h$。精确平均的权重是 $e^{hu}$（前面的 $1/\sigma$），它的两个矩算得出来：
#
# $$\mathbb{E}[u] = \frac{1}{1 - e^{-h}} - \frac1h, \qquad \mathbb{E}[u^2] = \frac{1}{1 - e^{-h}} - \frac2h\,\mathbb{E}[u]$$

# %% [markdown] lang="en" twin="5b85aed2"
# ## UniPC: mend on arrival
#
# Arrived at $\sigma'$, the network is asked anyway. Its answer $\hat x_0'$ stands at the end of the last step: use it to walk that step **again**, at no further call.
#
# Through three looks goes one parabola; $u$ is the share of the step that is done, and the look before stands at $u = -r$ with $r = h_\text{prev} / h$. The exact mean has the weights $e^{hu}$ (the $1/\sigma$ from above), with two moments in closed form:
#
# $$\mathbb{E}[u] = \frac{1}{1 - e^{-h}} - \frac1h, \qquad \mathbb{E}[u^2] = \frac{1}{1 - e^{-h}} - \frac2h\,\mathbb{E}[u]$$


# %% tags=["export"]
def moments(h: float) -> tuple[float, float]:
    """E[u] and E[u²] of u in 0 … 1 with weights e^(h·u): where on a step of width h in λ the mean of x̂0 lies."""
    whole = -1 / math.expm1(-h)
    first = whole - 1 / h
    return first, whole - 2 * first / h


def behind(looks: Sequence[Look]) -> Tensor:
    """D of the step just walked, from the looks at its end, at its beginning and, where there is one, before.

    The mean of the parabola through the three, see `moments`; of two alone half way between them.
    """
    new, old, *older = looks
    if not older:
        return (old.data + new.data) / 2
    h, h_last = (log_odds(b.sigma) - log_odds(a.sigma) for a, b in ((old, new), (older[0], old)))
    r, (first, second) = h_last / h, moments(h)
    share = (first - second) / (1 + r)
    return old.data + (first - share) * (new.data - old.data) + share / r * (old.data - older[0].data)


def unipc_step(
    velocity: Callable, x: Tensor, sigma: float, sigma_next: float, history: tuple = (), out: Tensor | None = None
) -> Step:
    """UniPC (order 2, B₂): mend the last step with the look at its end, then step as `dpm_step` does; one call.

    Arguments: as `euler_step`; ``history`` is where the last step began, and the looks there and before.

    Source: Zhao et al. 2023 (UniPC); diffusers' ``UniPCMultistepScheduler``.
    """
    v, now = look(velocity, x, sigma)
    start, *known = history or (x,)
    looks = (now, *known)
    better = blend(start, behind(looks), sigma / known[0].sigma) if known else x
    new = blend(better, ahead(looks[:2], sigma_next), sigma_next / sigma).to(x.dtype)
    return Step(new if out is None else out.copy_(new), v, (better, *looks[:2]))


# %% tags=["check"]
u, h = torch.linspace(0, 1, 100_001, dtype=torch.float64), 1.7
weights = torch.exp(h * u) / torch.exp(h * u).sum()
assert all(abs((weights * u**k).sum() - moment) < 1e-5 for k, moment in zip((1, 2), moments(h)))
assert [log_odds(s) for s in (1, 0.5, 0)] == [-math.inf, 0, math.inf] and log_odds(0.2) > 1  # data lies ahead
lam = {s: log_odds(s) for s in (0.7, 0.5, 0.3)}
line = [Look(s, torch.tensor([3 * lam[s] + 1])) for s in (0.3, 0.5, 0.7)]  # x̂0 = 3λ + 1: any line is met exactly
h = lam[0.3] - lam[0.5]
assert torch.allclose(behind(line), torch.tensor([3 * (lam[0.5] + moments(h)[0] * h) + 1]))
assert torch.allclose(ahead(line, 0.1), torch.tensor([3 * (lam[0.3] + log_odds(0.1)) / 2 + 1]))  # half way

# %% tags=["check"]
for steps, shift in ((1, 3.0), (2, 1.0), (3, 5.0), (8, 3.0), (50, 3.0)):
    _, end = theirs(UniPCMultistepScheduler, steps, shift, noise)
    drawn = walk(unipc_step, noise, make_schedule(steps, shift, grid="unipc"))
    assert torch.allclose(drawn, end, atol=2e-5)  # Wan's sampler, to the last step

# %% [markdown] lang="zh"
# ## 值不值
#
# 先在云里比：每种走法每步都只问一次网络。再到随引擎发布的模型上比：以 24 步 Heun 为准，量 PSNR，越高越近。先猜：论文里的新走法，会不会处处胜过第 02 章的多步法？

# %% [markdown] lang="en" twin="83d60cad"
# ## What it is worth
#
# First in the cloud, where every way asks the network once a step. Then on the shipped model: take 24 steps of Heun for the truth and measure PSNR: higher is closer. Guess first: do the papers' new ways beat chapter 02's multistep everywhere?

# %%
WAYS = {"euler": euler_step, "multistep": multistep_step, "dpm": dpm_step, "unipc": unipc_step}
counts = [8, 16, 32, 64, 128]
ends = {name: [walk(way, noise.double(), make_schedule(n, 3.0)) for n in counts] for name, way in WAYS.items()}
errors = {name: [(e - centre - tau * noise).abs().mean().item() for e in row] for name, row in ends.items()}

# %% tags=["check"]
slopes = {name: math.log2(e[-1] / e[-3]) / 2 for name, e in errors.items()}
print({name: round(slope, 1) for name, slope in slopes.items()})
assert abs(slopes["euler"] + 1) < 0.1 and all(slopes[name] < -1.5 for name in ("multistep", "dpm", "unipc"))
assert all(errors["unipc"][k] < errors["dpm"][k] for k in range(len(counts)))  # mending never hurts here

# %%
from diffusion_engine.guidance import guided_velocity
from diffusion_engine.model_folder import load_model
from diffusion_engine.pipeline import denoise, initial_noise
from diffusion_engine.text_conditioning import encode_prompt, stack_prompts
from diffusion_engine.vae import psnr

model = load_model()
prompts = [encode_prompt(model.text_encoder, model.tokenizer, text) for text in ("red apple", "blue car", "")]
drawn = guided_velocity(lambda x, t, p: model.dit(x, t, *p), stack_prompts(prompts[:2]), prompts[2], 3.0)
first = initial_noise([0, 1], (4, 16, 16))


@torch.no_grad()
def pictures(way: Callable, steps: int, shift: float) -> Tensor:
    return model.vae.decode(denoise(drawn, first, make_schedule(steps, shift), way).latents)


truth, calls = pictures(heun_step, 24, 1.0).clamp(-1, 1), (4, 8, 16)
off = {
    (name, shift): [psnr(pictures(way, n, shift), truth).mean().item() for n in calls]
    for shift in (1.0, 3.0)
    for name, way in WAYS.items()
}

# %% tags=["check"]
for name in ("multistep", "dpm", "unipc"):
    assert off[name, 1.0][-1] > off["euler", 1.0][-1]  # memory pays once there are steps enough …
assert off["multistep", 3.0][0] < off["euler", 3.0][0] - 3  # … and four uneven steps punish a line along σ
assert off["dpm", 3.0][0] > off["multistep", 3.0][0] + 3

# %% tags=["hide"]
fig, axes = plt.subplots(1, 3, figsize=(9.2, 2.9), width_ratios=(1.1, 1, 1))
for name, color in zip(WAYS, COLORS):
    axes[0].loglog(counts, errors[name], "o-", ms=3, color=color, label=name)
    for ax, shift in zip(axes[1:], (1.0, 3.0)):
        ax.plot(calls, off[name, shift], "o-", ms=3, color=color)
axes[0].set(title="The cloud", xlabel="calls", ylabel="mean error")
axes[0].minorticks_off()
axes[0].set_xticks(counts, counts)
axes[0].legend(fontsize=8)
for ax, shift in zip(axes[1:], (1, 3)):
    ax.set(title=f"Shipped model, shift {shift}", xlabel="guided calls", ylim=(11, 52), xticks=calls)
axes[1].set_ylabel("PSNR, dB")
show(
    fig,
    alt="Left: errors in the cloud fall with calls, fastest for multistep and unipc. Middle: PSNR on the shipped model at shift 1, multistep on top. Right: at shift 3 multistep is worst at four calls and best at sixteen.",
)

# %% [markdown] lang="zh"
# 不是处处都胜。发布的模型路很直、站又均匀，第 02 章的多步法最好；移位把末几步拉长，只有四步时它沿 $\sigma$ 冲过了头，DPM-Solver++ 沿 $\lambda$ 就稳，却仍不及欧拉。
#
# ## 读懂文件夹里的走法
#
# 所以真实模型就用它文件夹里写的走法，在 `scheduler_config.json` 里：认得的照做，不认得的拒绝。UniPC 和 DPM 告诉网络的时间是整数，而循环给的是 $1000\,\sigma$，网络外面便包一层，换成最近一站的时间。

# %% [markdown] lang="en" twin="0929cb1b"
# Not everywhere. The shipped model's road is nearly straight and its stations even: chapter 02's multistep is best. With four shifted steps its line along $\sigma$ overshoots where DPM-Solver++, along $\lambda$, stays calm, yet behind Euler.
#
# ## Reading the way in a folder
#
# So a real model is walked as its folder says, in `scheduler_config.json`: what we know is followed, the rest refused. UniPC and DPM tell the network whole numbers; a wrapper turns the loop's $1000\,\sigma$ into the nearest station's time.

# %% tags=["export", "hide"]
FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}  # must be said; the rest only not contradicted
FIXED = {  # class → its step, and the settings of which one value is built
    "FlowMatchEulerDiscreteScheduler": (euler_step, {}),
    "UniPCMultistepScheduler": (
        unipc_step,
        {"solver_order": 2, "solver_type": "bh2", "predict_x0": True, "lower_order_final": True}
        | {"disable_corrector": [], "solver_p": None},
    ),
    "DPMSolverMultistepScheduler": (
        dpm_step,
        {"solver_order": 2, "solver_type": "midpoint", "algorithm_type": "dpmsolver++", "final_sigmas_type": "zero"}
        | {"num_train_timesteps": TRAIN_STEPS, "thresholding": False, "use_dynamic_shifting": False}
        | {f"use_{name}": False for name in ("karras_sigmas", "exponential_sigmas", "beta_sigmas", "lu_lambdas")}
        | FLOW,
    ),
}
IDLE = frozenset(  # of DPM: its old noise table, and what moves nothing where flow levels end at zero
    "flow_shift beta_start beta_end beta_schedule trained_betas dynamic_thresholding_ratio sample_max_value steps_offset "
    "lower_order_final euler_at_final lambda_min_clipped variance_type timestep_spacing rescale_betas_zero_snr "
    "time_shift_type".split()
)


# %% tags=["export"]
class Road(NamedTuple):
    """Where a family stops and how it walks: a schedule and a solver step, both for `generate`."""

    schedule: Schedule
    solver: Callable


def read_road(folder: Path, steps: int, num_tokens: int | None = None, grid: str = "even") -> Road:
    """The road of a folder with ``scheduler_config.json``: flow-match Euler, UniPC or DPM-Solver++.

    Args:
        steps: N. num_tokens, grid: see `Schedule.from_config`; unused by UniPC and DPM.

    Raises:
        ValueError: another class, or a setting that is not built; names it and what is.
    """
    config = read_json(folder / "scheduler_config.json")
    name = config.get("_class_name")
    if name not in FIXED:
        raise ValueError(f"scheduler class {name!r} is not supported; try {' or '.join(FIXED)}")
    solver, fixed = FIXED[name]
    for key, value in fixed.items():
        if (said := config.get(key, None if key in FLOW else value)) != value:
            raise ValueError(f"{name} with {key} = {said!r} is not supported; only {value!r} is")
    if name != "DPMSolverMultistepScheduler":
        return Road(Schedule.from_config(config, steps, num_tokens, grid), solver)
    if unknown := [key for key in config if key[0] != "_" and key not in fixed and key not in IDLE]:
        raise ValueError(f"{name} setting {unknown[0]} is unknown; known are {', '.join([*fixed, *sorted(IDLE)])}")
    return Road(dpm_schedule(steps, config.get("flow_shift", 1.0)), solver)


def told_times(network: Callable, schedule: Schedule) -> Callable:
    """network(x, t, …) asked with t = 1000 · σ (B,), and told the schedule's own time of the nearest level instead."""
    stations, times = TRAIN_STEPS * schedule.sigmas[:-1], schedule.timesteps

    def asked(x: Tensor, t: Tensor, *condition, **more) -> Tensor:
        nearest = (stations.to(t) - t.unsqueeze(1)).abs().argmin(dim=1)
        return network(x, times.to(t)[nearest], *condition, **more)

    return asked


# %% tags=["check"]
import tempfile

room = tempfile.TemporaryDirectory()
for kind, way in ((DPMSolverMultistepScheduler, dpm_step), (UniPCMultistepScheduler, unipc_step)):
    sampler, _ = theirs(kind, 11, 3.0, noise)
    sampler.save_pretrained(room.name)
    schedule, solver = read_road(Path(room.name), 11)
    assert solver is way and torch.allclose(schedule.sigmas, sampler.sigmas, atol=1e-6)
    heard = told_times(lambda x, t: t, schedule)
    said = torch.cat([heard(noise, torch.tensor([1000 * s])) for s, _ in schedule])
    assert said.tolist() == sampler.timesteps.tolist()  # whole numbers, as the network was trained to hear
for wrong in ({"algorithm_type": "sde-dpmsolver++"}, {"solver_order": 3}, {"use_karras_sigmas": True}):
    DPMSolverMultistepScheduler(**FLOW, **wrong).save_pretrained(room.name)
    try:
        read_road(Path(room.name), 11)
    except ValueError as error:
        print(error)
    else:
        raise AssertionError(f"{wrong} was followed")

# %% [markdown] lang="zh"
# ## 噪声在圆弧上
#
# 训练时 $x = \cos\varphi\,x_0 + \sin\varphi\,\varepsilon$，$\cos^2\varphi = \bar\alpha_t$。$\bar\alpha_t$ 是 $1 - \beta$ 累乘到第 $t$ 个，$\sqrt\beta$ 均匀增大。再改两次：$1 - \bar\alpha$ 按第 02 章移位；$\sqrt{\bar\alpha}$ 整条拉伸，首项不变，末项为 $0$，起点才是纯噪声。
#
# | 记号 | 含义 |
# | --- | --- |
# | $t$ | 训练步，0 到 999，越大越吵 |
# | $\varphi$ | 弧上的角度，从 $\pi/2$（噪声）走到 $0$（数据） |
# | $v$ | $\cos\varphi\,\varepsilon - \sin\varphi\,x_0$，弧的切线 |

# %% [markdown] lang="en" twin="1c042fdc"
# ## Noise on an arc
#
# In training $x = \cos\varphi\,x_0 + \sin\varphi\,\varepsilon$ with $\cos^2\varphi = \bar\alpha_t$. $\bar\alpha_t$ multiplies the factors $1 - \beta$ up to $t$, with $\sqrt\beta$ evenly rising. Two changes: $1 - \bar\alpha$ is shifted as in chapter 02; $\sqrt{\bar\alpha}$ is stretched, first value kept, last made $0$, so that the start is pure noise.
#
# | Symbol | Meaning |
# | --- | --- |
# | $t$ | step of training, 0 to 999, noisier as it grows |
# | $\varphi$ | angle on the arc, from $\pi/2$ (noise) down to $0$ (data) |
# | $v$ | $\cos\varphi\,\varepsilon - \sin\varphi\,x_0$, the tangent of the arc |


# %% tags=["export"]
@dataclass(frozen=True)
class DDIM:
    """``scheduler_config.json`` of diffusers' ``CogVideoXDDIMScheduler``: its names, its defaults.

    Built for v-prediction and trailing time steps; the entries about clipping are idle there, too.

    Raises:
        ValueError: another prediction, spacing, β or number of training steps.
    """

    num_train_timesteps: int = TRAIN_STEPS
    beta_start: float = 0.00085
    beta_end: float = 0.012
    beta_schedule: str = "scaled_linear"
    clip_sample: bool = True
    set_alpha_to_one: bool = True
    prediction_type: str = "epsilon"
    clip_sample_range: float = 1.0
    sample_max_value: float = 1.0
    timestep_spacing: str = "leading"
    rescale_betas_zero_snr: bool = False
    snr_shift_scale: float = 3.0

    def __post_init__(self):
        require(self, num_train_timesteps=TRAIN_STEPS, beta_schedule="scaled_linear")
        require(self, prediction_type="v_prediction", timestep_spacing="trailing")

    @property
    def alphas_cumprod(self) -> Tensor:
        """ᾱ of t = 0 … 999, float64: Π (1 − β); 1 − ᾱ shifted as σ is; √ᾱ stretched to end at 0 (zero terminal SNR)."""
        betas = torch.linspace(self.beta_start**0.5, self.beta_end**0.5, TRAIN_STEPS, dtype=torch.float64) ** 2
        alphas = 1 - shift_sigmas(1 - (1 - betas).cumprod(0), self.snr_shift_scale)
        first, last = alphas[0].sqrt(), alphas[-1].sqrt()
        return ((alphas.sqrt() - last) * first / (first - last)) ** 2 if self.rescale_betas_zero_snr else alphas

    @property
    def angles(self) -> Tensor:
        """φ of t = 0 … 999, float64: cos φ = √ᾱ."""
        return self.alphas_cumprod.sqrt().acos()

    @cached_property  # asked at every step
    def sigmas(self) -> Tensor:
        """s = sin φ / (cos φ + sin φ) of t = 0 … 999, float64: where on the straight road the step t lies."""
        angles = self.angles
        return angles.sin() / (angles.cos() + angles.sin())


def ddim_timesteps(num_inference_steps: int) -> list[int]:
    """N steps of training from 999 down, 1000 / N apart ("trailing").

    diffusers' rounding, ties included; where its grid gains a step t = −1 by rounding (N = 61, …), it is left out.

    Raises:
        ValueError: N is no whole number within 1…1000.
    """
    steps = make_schedule(num_inference_steps).num_steps  # refuses other counts
    gap = TRAIN_STEPS - (TRAIN_STEPS - TRAIN_STEPS / steps)  # as numpy's arange rounds it: decides ties
    return [round(TRAIN_STEPS - k * gap) - 1 for k in range(steps)]


# %%
ENTRIES, SHIFTS = dict(prediction_type="v_prediction", rescale_betas_zero_snr=True), {"2B": 3.0, "5B": 1.0}
ddims = {name: DDIM(timestep_spacing="trailing", snr_shift_scale=shift, **ENTRIES) for name, shift in SHIFTS.items()}


def exact(x: Tensor, t: Tensor) -> Tensor:
    """The best v-prediction for data N(0, ½²): the smallest world in which the network is known."""
    angle = ddims["2B"].angles[t.long()].reshape(-1, *[1] * (x.ndim - 1)).to(x)
    data = angle.cos() / (angle.cos() ** 2 + 4 * angle.sin() ** 2) * x  # E[x0 | x]
    return (angle.cos() * x - data) / angle.sin()  # from x0 = cos φ · x − sin φ · v


# %% tags=["check"]
from diffusers import CogVideoXDDIMScheduler

samplers = {name: CogVideoXDDIMScheduler(**vars(ddim)) for name, ddim in ddims.items()}  # the same entries
for name, ddim in ddims.items():
    assert (ddim.alphas_cumprod - samplers[name].alphas_cumprod).abs().max() < 1e-12
    assert ddim.angles[-1] == torch.pi / 2  # pure noise at the start
share = [DDIM(**vars(ddim) | {"rescale_betas_zero_snr": False}).alphas_cumprod for ddim in ddims.values()]
assert torch.allclose(3 * share[0] / (1 - share[0]), share[1] / (1 - share[1]))  # shift k: the SNR over k

# %% [markdown] lang="zh"
# ## 一步就是转一个角
#
# 知道 $x$ 和 $v$，就知道 $x_0 = \cos\varphi\,x - \sin\varphi\,v$ 和 $\varepsilon = \sin\varphi\,x + \cos\varphi\,v$。DDIM 用它们在下一个角度 $\varphi'$ 重新混合。展开、合并，只剩一次转动：
#
# $$x' = \cos\varphi'\,x_0 + \sin\varphi'\,\varepsilon = \cos(\varphi - \varphi')\,x - \sin(\varphi - \varphi')\,v$$

# %% [markdown] lang="en" twin="3f651644"
# ## A step is a turn
#
# From $x$ and $v$ follow $x_0 = \cos\varphi\,x - \sin\varphi\,v$ and $\varepsilon = \sin\varphi\,x + \cos\varphi\,v$. DDIM mixes them anew at the next angle $\varphi'$. Expand and collect, and one turn remains:
#
# $$x' = \cos\varphi'\,x_0 + \sin\varphi'\,\varepsilon = \cos(\varphi - \varphi')\,x - \sin(\varphi - \varphi')\,v$$


# %%
def ddim_turns(ddim: DDIM, num_inference_steps: int) -> list[tuple[int, float]]:
    """(t, φ − φ_next) of every step, as diffusers takes them: to t − ⌊1000 / N⌋, at the end to data."""
    angles, stride = ddim.angles.tolist(), TRAIN_STEPS // num_inference_steps
    steps = ddim_timesteps(num_inference_steps)
    return [(t, angles[t] - (angles[t - stride] if t >= stride else 0.0)) for t in steps]


def ddim_step(x: Tensor, v: Tensor, turn: float) -> Tensor:
    """One deterministic step by the angle δ = φ − φ_next."""
    return math.cos(turn) * x - math.sin(turn) * v


# %% tags=["check"]
for steps in (1, 7, 48, 50):
    samplers["2B"].set_timesteps(steps)
    x = y = noise
    for (_, turn), t_theirs in zip(ddim_turns(ddims["2B"], steps), samplers["2B"].timesteps, strict=True):
        x = ddim_step(x, exact(x, t_theirs[None]), turn)
        y = samplers["2B"].step(exact(y, t_theirs[None]), t_theirs, y).prev_sample
    assert (x - y).abs().max() < 1e-5  # turns alone: diffusers' whole loop, also where N does not divide 1000

# %% [markdown] lang="zh"
# ## 把弧线拉直
#
# 把 $x$ 除以 $k = \cos\varphi + \sin\varphi$，两个系数之和就是 $1$：弧线投影到弦上，正是我们的直路。
#
# $$y = \frac{x}{k} = (1 - s)\,x_0 + s\,\varepsilon, \qquad s = \frac{\sin\varphi}{\cos\varphi + \sin\varphi}$$
#
# 直路上的速度仍是 $u = \varepsilon - x_0 = (\sin\varphi - \cos\varphi)\,x + k\,v$。$x_0$ 和 $\varepsilon$ 在一步之内不动，所以 DDIM 的一步在 $y$ 里就是**欧拉法**的一步，一点不差。

# %% [markdown] lang="en" twin="f5bd65cb"
# ## The arc made straight
#
# Divide $x$ by $k = \cos\varphi + \sin\varphi$ and the two coefficients sum to $1$: the arc falls onto its chord, which is our straight road.
#
# $$y = \frac{x}{k} = (1 - s)\,x_0 + s\,\varepsilon, \qquad s = \frac{\sin\varphi}{\cos\varphi + \sin\varphi}$$
#
# Its velocity still is $u = \varepsilon - x_0 = (\sin\varphi - \cos\varphi)\,x + k\,v$. Within a step $x_0$ and $\varepsilon$ stand still, so a DDIM step in $x$ is an **Euler** step in $y$, exactly.


# %% tags=["export"]
def straight_schedule(ddim: DDIM, num_inference_steps: int) -> Schedule:
    """The steps of `ddim_timesteps` on the straight road, for `straighten`.

    Where N divides 1000 each ends where diffusers ends it; elsewhere diffusers' steps end a little off the next one's beginning
    and off data, and these do not.

    Raises:
        ValueError: noise that does not run from pure noise to data.
    """
    require(ddim, rescale_betas_zero_snr=True, set_alpha_to_one=True)
    return Schedule((*ddim.sigmas[ddim_timesteps(num_inference_steps)].tolist(), 0.0))


def nearest_steps(ddim: DDIM, s: Tensor) -> Tensor:
    """The step of training that lies nearest to each s (B,) on the straight road: what the network is told, 0.0 … 999.0."""
    return (ddim.sigmas.float().to(s.device) - s.unsqueeze(1)).abs().argmin(dim=1).float()


def straighten(network: Callable[..., Tensor], ddim: DDIM) -> Callable[..., Tensor]:
    """A v-predicting network as a velocity on the straight road: u = k² (2s − 1) · y + k · v(k · y, t_train).

    k = 1 / √(s² + (1 − s)²) = cos φ + sin φ. Walk it down `straight_schedule`; guidance may come before or after.

    Args:
        network: network(x, t, …) → v, t = 0 … 999. ddim: says which is taken at which s, see `nearest_steps`.

    Returns:
        velocity(latents y (B, …), t = 1000 · s (B,), …) → (B, …) in the dtype of y; what follows t is handed on.

    Source: Gao et al. 2024, "Diffusion meets flow matching".
    """

    def velocity(latents: Tensor, t: Tensor, *condition, **more) -> Tensor:
        s = t.float() / TRAIN_STEPS
        step = nearest_steps(ddim, s)
        s = s.reshape(-1, *[1] * (latents.ndim - 1))
        k, y = (s**2 + (1 - s) ** 2) ** -0.5, latents.float()
        v = network((k * y).to(latents.dtype), step, *condition, **more)
        return (k**2 * (2 * s - 1) * y + k * v.float()).to(latents.dtype)

    return velocity


# %% tags=["hide"]
fig, (ax, right) = plt.subplots(1, 2, figsize=(7.0, 3.0), width_ratios=(1, 1.1))
phi, marks = torch.linspace(0, torch.pi / 2, 90), ddims["2B"].angles[ddim_timesteps(10)]
ax.plot(phi.cos(), phi.sin(), color=COLORS[1], label="arc: CogVideoX")
ax.plot([0, 1], [1, 0], color=COLORS[0], label="chord: our road")
for a in marks:
    k = a.cos() + a.sin()
    ax.plot([a.cos(), a.cos() / k], [a.sin(), a.sin() / k], color=COLORS[5], linewidth=0.8)
    ax.plot(a.cos(), a.sin(), "o", color=COLORS[1], markersize=4)
    ax.plot(a.cos() / k, a.sin() / k, "o", color=COLORS[0], markersize=4)
ax.set(
    xlabel="share of data",
    ylabel="share of noise",
    aspect="equal",
    xlim=(-0.05, 1.25),
    ylim=(-0.05, 1.15),
    xticks=(0, 0.5, 1),
)
ax.plot(1, 0, "o", color="black", markersize=4)
ax.annotate("data", (1, 0), (1.04, 0.04), ha="left")
ax.annotate("noise", (0, 1), (-0.02, 1.06), ha="left")
ax.legend(loc="lower left", fontsize=8)
ax.set_title("Divided by k, the arc is straight")
for (name, ddim), color in zip(ddims.items(), COLORS):
    right.plot(straight_schedule(ddim, 50).sigmas, color=color, label=f"{name}: shift {SHIFTS[name]:g}")
right.plot([0, 50], [1, 0], ":", color=COLORS[5], label="even steps")
right.set(xlabel="step of 50", ylabel="s", title="2B stays near noise for longer")
right.legend()
show(
    fig,
    alt="Left: ten points on a quarter circle from noise to data, each joined to a point of the chord. Right: the levels of 50 steps for 2B and 5B, 2B staying higher.",
)

# %% tags=["check"]
flow = straighten(exact, ddims["2B"])


def on_the_chord(y: Tensor, s: float) -> Tensor:
    """As chapter 10 calls a velocity."""
    return flow(y, torch.full((len(y),), 1000 * s))


assert nearest_steps(ddims["2B"], ddims["2B"].sigmas.float()).tolist() == [*range(1000)]  # each finds itself
for steps in (1, 5, 50):
    x = noise
    for t_train, turn in ddim_turns(ddims["2B"], steps):
        x = ddim_step(x, exact(x, torch.tensor([t_train])), turn)
    y = denoise(on_the_chord, noise, straight_schedule(ddims["2B"], steps)).latents
    assert (x - y).abs().max() < 1e-5  # Euler on the chord is DDIM on the arc

# %% [markdown] lang="zh"
# 那 CogVideoX 算不算整流流？采样器算：弧与弦只差一个已知的倍数。网络不算：它听训练步 $t$，吐 $v$。
#
# ## 在 diffusers 里，这些在哪儿
#
# | 我们 | diffusers |
# | --- | --- |
# | `dpm_step`、`dpm_schedule` | `scheduling_dpmsolver_multistep.py`，`multistep_dpm_solver_second_order_update`、`set_timesteps` |
# | `ahead` 与 `behind` | `scheduling_unipc_multistep.py`，`multistep_uni_p_bh_update` 与 `multistep_uni_c_bh_update` |
# | `moments` | 同上，`h_phi_k` 与 `b` |
# | `DDIM`、`ddim_timesteps`、`ddim_turns` 与 `ddim_step` | `scheduling_ddim_cogvideox.py`，`set_timesteps` 与 `step` |
# | `straighten` | 没有 |
#
# **还缺什么**：三阶的走法、带随机噪声的走法（CogVideoX 的 DPM 就是）会被拒绝。步数不整除 1000 时，直路和 diffusers 的 DDIM 不再相等，因为它的每一步停得略偏。
#
# ## 三个问题
#
# 1. 预测：走 7 步时，diffusers 的 DDIM 最后一步停在数据上吗？
# 2. 修改：UniPC 只改上一步，不往前看（填 $\hat x_0$ 本身），还剩下多少好处？
# 3. 动手：在直路上换第 02 章的 Heun。同样的网络调用次数，误差小多少？

# %% [markdown] lang="en" twin="e43bff37"
# Is CogVideoX a rectified flow, then? Its sampler is: arc and chord differ by a known factor. Its network is not: it hears a training step and speaks $v$.
#
# ## Where this lives in diffusers
#
# | Ours | diffusers |
# | --- | --- |
# | `dpm_step`, `dpm_schedule` | `scheduling_dpmsolver_multistep.py`, `multistep_dpm_solver_second_order_update`, `set_timesteps` |
# | `ahead` and `behind` | `scheduling_unipc_multistep.py`, `multistep_uni_p_bh_update` and `multistep_uni_c_bh_update` |
# | `moments` | the same, `h_phi_k` and `b` |
# | `DDIM`, `ddim_timesteps`, `ddim_turns` and `ddim_step` | `scheduling_ddim_cogvideox.py`, `set_timesteps` and `step` |
# | `straighten` | nowhere |
#
# **What is missing:** ways of third order, and those with fresh noise (CogVideoX's DPM is one), are refused. Where steps do not divide 1000, the straight road and diffusers' DDIM no longer agree: each of its steps stops a little off.
#
# ## Three questions
#
# 1. Predict: with 7 steps, does the last step of diffusers' DDIM end on data?
# 2. Modify: let UniPC mend the last step and not look ahead (fill in $\hat x_0$ itself). How much of its gain remains?
# 3. Build: on the straight road take chapter 02's Heun. With as many calls of the network, how much smaller is the error?

# %% tags=["solution"]
# 1 · no: 142 − ⌊1000 / 7⌋ = 0, so it ends on training step 0, with a little noise left; our road ends on data
angles = ddims["2B"].angles
for steps in (7, 50):
    t_last, turn = ddim_turns(ddims["2B"], steps)[-1]
    print(f"{steps} steps: the last goes from t = {t_last} to the angle {angles[t_last] - turn:.3f}")
assert sum(turn for _, turn in ddim_turns(ddims["2B"], 7)) < sum(turn for _, turn in ddim_turns(ddims["2B"], 50))


# %% tags=["solution"]
# 2 · most of it: still second order, with four times the error
def only_mends(velocity: Callable, x: Tensor, sigma: float, sigma_next: float, history: tuple = ()) -> Step:
    v, now = look(velocity, x, sigma)
    start, *known = history or (x,)
    better = blend(start, behind((now, *known)), sigma / known[0].sigma) if known else x
    return Step(blend(better, now.data, sigma_next / sigma), v, (better, now, *known[:1]))


ends = [walk(only_mends, noise.double(), make_schedule(n, 3.0)) for n in (32, 128)]
rest = [(end - centre - tau * noise).abs().mean().item() for end in ends]
print(f"slope {math.log2(rest[1] / rest[0]) / 2:.1f}; {rest[1] / errors['unipc'][-1]:.0f} times UniPC's error")
assert math.log2(rest[1] / rest[0]) / 2 < -1.7

# %% tags=["solution"]
# 3 · in the world where the network is known, the truth is half the noise
left = {}
for solver, steps in (("euler", 20), ("heun", 10)):
    end = denoise(on_the_chord, noise, straight_schedule(ddims["2B"], steps), solver).latents
    left[solver] = (end - noise / 2).abs().mean().item()
    print(f"{solver}, {steps} steps: {left[solver]:.3f}")
assert left["heun"] < left["euler"] / 2

# %% [markdown] lang="zh"
# ## 小结
#
# - 在直路上，一步是 $x$ 和数据的混合；走法不同，主要是填进去的 $D$ 不同。
# - DPM-Solver++ 沿 $\lambda$ 把上一眼往前延半步；UniPC 到站之后再用新的一眼把上一步改好。
# - 哪种走法好，要看站和网络：均匀的站上，第 02 章的多步法更准；四步、移位之后，它最差。
# - v-prediction 是弧的切线，DDIM 的一步就是转一个角；除以 $\cos\varphi + \sin\varphi$，弧线变成直路，DDIM 变成欧拉法。
# - 三种走法走到终点都和 diffusers 相等（DDIM：步数整除 1000 时）；没写过的设置一律拒绝。
#
# 阅读卡片：Sana（[`papers/07_sana`](../../papers/07_sana.zh.md)）、CogVideoX（[`papers/08_cogvideox`](../../papers/08_cogvideox.zh.md)）。下一章：24。

# %% [markdown] lang="en" twin="87299f50"
# ## Recap
#
# - On the straight road a step blends $x$ with data; ways of walking differ mainly in the $D$ that they fill in.
# - DPM-Solver++ extends the last look half a step ahead along $\lambda$; UniPC mends the step before with the look at its end.
# - Which way is best depends on stations and network: on even ones chapter 02's multistep is closer, with four shifted steps it is the worst.
# - v-prediction is the arc's tangent and a step of DDIM a turn; divided by $\cos\varphi + \sin\varphi$ the arc is the straight road, and DDIM is Euler.
# - All three end where diffusers ends (DDIM: where the steps divide 1000); settings that are not built are refused.
#
# Reading cards: Sana ([`papers/07_sana`](../../papers/07_sana.en.md)), CogVideoX ([`papers/08_cogvideox`](../../papers/08_cogvideox.en.md)). Next: chapter 24.
