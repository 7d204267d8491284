# ---
# jupyter:
#   course:
#     minutes: 50
#     module: training
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown] lang="zh"
# # 11 · 训练（training）
#
# 读完这一章，随机权重会变成会画画的权重；训练途中拔掉电源，接着跑，得到的每一个比特都和没拔过一样。
#
# | 你会做出 | 你需要 | 时间 | 模块 |
# | --- | --- | --- | --- |
# | 损失、噪声抽样、条件丢弃、EMA、可续跑的检查点 | 第 01、06、07 章的速度场、DiT、提示词嵌入 | 50 分钟 | `diffusion_engine/training.py` |

# %% [markdown] lang="en" twin="ae369574"
# # 11 · Training
#
# After this chapter random weights become weights that draw; and when the power goes in the middle of a run, it goes on later and ends in the very same bits.
#
# | You build | You need | Time | Module |
# | --- | --- | --- | --- |
# | the loss, noise levels, condition dropout, EMA, checkpoints that resume | velocity, DiT and prompt embeddings of chapters 01, 06, 07 | 50 minutes | `diffusion_engine/training.py` |

# %% [markdown] lang="zh"
# **先想一想**：$1\,911$ 张图，两个 CPU 核，几个小时。哪些噪声强度该多练，哪些少练？训练到一半停电了，磁盘上必须留下哪些东西，才能当作什么都没发生？写下你的清单。

# %% [markdown] lang="en" twin="9a1e4233"
# **Think first:** $1\,911$ pictures, two CPU cores, a few hours. Which noise levels deserve more practice, which less? And when the power goes half-way: what must be on the disk so that it never happened? Write your list.

# %% tags=["export"]
import io
import json
import math
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from tqdm import tqdm

from diffusion_engine.rectified_flow import interpolate, velocity_target
from diffusion_engine.scheduler import shift_sigmas
from diffusion_engine.text_conditioning import PromptEmbeds

# %% tags=["hide"]
import matplotlib.pyplot as plt
from course.figures import image_grid, show
from diffusion_engine.dit import DiT, DiTConfig
from diffusion_engine.rectified_flow import integrate
from recipes.emoji_data import load_emoji

generator = Generator().manual_seed(0)
per_sample = lambda t: (t / 1000).reshape(-1, 1, 1, 1)  # noqa: E731, σ as (B, 1, 1, 1)

# %% [markdown] lang="zh"
# ## 哪个噪声强度最难
#
# 先看一个能算到底的世界：数据本身是标准正态，$x_\sigma$ 已知，速度还剩多少方差猜不到？
#
# $$\min_v \mathbb E\,(v - (\epsilon - x_0))^2 = \frac{1}{(1-\sigma)^2 + \sigma^2}, \qquad v^\star = \frac{2\sigma-1}{(1-\sigma)^2+\sigma^2}\,x_\sigma$$
#
# 两头是 $1$，正中是 $2$：要拿主意的都在中间。所以 SD3 不均匀抽 $\sigma$，而抽 logit-normal：
#
# $$\sigma = \operatorname{sigmoid}(m + s\,n), \quad n \sim \mathcal N(0, 1)$$

# %% [markdown] lang="en" twin="0a1ac637"
# ## Which noise level is hardest?
#
# First a world that can be worked out to the end: the data is standard normal itself. Knowing $x_\sigma$, how much variance of the velocity is beyond guessing?
#
# $$\min_v \mathbb E\,(v - (\epsilon - x_0))^2 = \frac{1}{(1-\sigma)^2 + \sigma^2}, \qquad v^\star = \frac{2\sigma-1}{(1-\sigma)^2+\sigma^2}\,x_\sigma$$
#
# $1$ at both ends, $2$ in the middle: that is where the decisions are made. So SD3 draws $\sigma$ not uniformly but logit-normal:
#
# $$\sigma = \operatorname{sigmoid}(m + s\,n), \quad n \sim \mathcal N(0, 1)$$


# %% tags=["export"]
def sample_sigmas(batch: int, generator: Generator, mean: float = 0.0, std: float = 1.0, shift: float = 1.0) -> Tensor:
    """Noise levels of one batch: σ = shift∘sigmoid(mean + std · n) with n ~ N(0, 1), the logit-normal of SD3.

    Args:
        batch: how many, B.
        generator: a CPU generator.
        mean: centre on the logit axis; above 0 leans towards noise.
        std: spread on the logit axis.
        shift: k of σ ← k σ / (1 + (k − 1) σ); the same as adding ln k to ``mean``.

    Returns:
        (B,), fp32, inside 0…1.

    Raises:
        ValueError: ``batch`` < 1 or ``std`` ≤ 0.

    Source: Esser et al. 2024 (SD3), §3.1.
    """
    if batch < 1:
        raise ValueError(f"batch {batch} is not a positive number of noise levels; try 1")
    if not std > 0:
        raise ValueError(f"std {std} is not positive; try 1.0")
    logits = mean + std * torch.randn(batch, generator=generator)  # (B,)
    return shift_sigmas(torch.sigmoid(logits), shift)


# %%
def density(sigma: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """Of the logit-normal: the normal's density on the logit axis, times d logit / dσ = 1 / (σ (1 − σ))."""
    return (-((sigma.logit() - mean) ** 2) / (2 * std**2)).exp() / (std * math.sqrt(2 * math.pi) * sigma * (1 - sigma))


edges = torch.linspace(0, 1, 41)
middles = (edges[1:] + edges[:-1]) / 2
draws = {mean: sample_sigmas(200_000, generator, mean) for mean in (0.0, 0.7)}
counts = {mean: torch.histogram(drawn, edges, density=True).hist for mean, drawn in draws.items()}

# %% tags=["hide"]
fig, ax = plt.subplots(figsize=(6.4, 2.6))
for mean, hist in counts.items():
    ax.plot(middles, hist, "o", ms=3, label=f"drawn, mean {mean}")
    ax.plot(middles, density(middles, mean), "k-", lw=0.8)
ax.set(title="Practice where decisions are made; a positive mean leans towards noise", xlabel="σ", ylabel="density")
ax.legend()
show(fig, alt="Two histograms of noise levels on their formulas: one symmetric hill, one leaning towards noise.")

# %% tags=["check"]
for mean, hist in counts.items():
    assert torch.allclose(hist, density(middles, mean), atol=0.06)  # the drawn levels follow the formula
a, b = Generator().manual_seed(1), Generator().manual_seed(1)
assert torch.allclose(sample_sigmas(999, a, shift=3.0), sample_sigmas(999, b, mean=math.log(3)), atol=1e-6)

# %% [markdown] lang="zh"
# 最后一行是个有用的等式：把 $\sigma$ 移位 $k$ 倍，就是在 logit 轴上加 $\ln k$。第 02 章的移位和这里的均值，说的是同一件事。
#
# ## 损失：补全一道填空题
#
# 取一张图 $x_0$，掺入噪声 $\epsilon$，问网络往哪个方向走：
#
# $$L = \mathbb E\,\big\| v_\theta\big((1-\sigma)\,x_0 + \sigma\,\epsilon,\; 1000\,\sigma,\; c\big) - (\epsilon - x_0) \big\|^2$$

# %% [markdown] lang="en" twin="ee68ba2b"
# The last line is a useful identity: shifting $\sigma$ by $k$ adds $\ln k$ on the logit axis. The shift of chapter 02 and the mean here say the same thing.
#
# ## The loss: fill in the blank
#
# Take a picture $x_0$, mix in noise $\epsilon$, and ask the network which way to go:
#
# $$L = \mathbb E\,\big\| v_\theta\big((1-\sigma)\,x_0 + \sigma\,\epsilon,\; 1000\,\sigma,\; c\big) - (\epsilon - x_0) \big\|^2$$


# %% tags=["export"]
def flow_matching_loss(
    model: Callable[[Tensor, Tensor, PromptEmbeds], Tensor],
    data: Tensor,
    prompts: PromptEmbeds,
    generator: Generator,
    mean: float = 0.0,
    std: float = 1.0,
    shift: float = 1.0,
) -> Tensor:
    """mean ‖ model(x_σ, 1000 σ, prompts) − (ε − x0) ‖² over one batch, σ from `sample_sigmas`, ε ~ N(0, 1).

    Args:
        model: velocity network, (x (B, …), t (B,) in 0…1000, prompts) → (B, …).
        data: clean latents x0, (B, C, H, W) or (B, C, T, H, W), about unit variance.
        prompts: what the model reads, B rows.
        generator: a CPU generator; gives ε first, then σ.
        mean, std, shift: see `sample_sigmas`.

    Returns:
        A scalar, fp32.

    Raises:
        ValueError: what the model gives is not shaped like the data.

    Source: Lipman et al. 2023 (flow matching); Liu et al. 2023 (rectified flow).
    """
    noise = torch.randn(data.shape, generator=generator).to(data)
    sigma = sample_sigmas(len(data), generator, mean, std, shift).to(data.device)
    velocity = model(interpolate(data, noise, sigma), 1000 * sigma, prompts)
    if velocity.shape != data.shape:
        raise ValueError(f"the model gives {tuple(velocity.shape)}; expected the data's shape, {tuple(data.shape)}")
    return F.mse_loss(velocity.float(), velocity_target(data, noise).float())


# %% [markdown] lang="zh"
# 怎样检查一个损失？找一个已知答案的模型。若全部数据只是一个点 $c$，那么 $v = (x - c)/\sigma$ 一字不差，损失必须是 $0$。符号反了、时间忘了乘 $1000$、噪声和数据颠倒，都会露馅。

# %% [markdown] lang="en" twin="469a133e"
# How do you check a loss? With a model whose answer is known. If all the data is one point $c$, then $v = (x - c)/\sigma$ to the letter, and the loss must be $0$. A flipped sign, a time not multiplied by $1000$, noise and data swapped: each would show.

# %% tags=["check"]
constant, nothing = torch.full((256, 4, 4, 4), 1.5), None
exact = flow_matching_loss(lambda x, t, _: (x - 1.5) / per_sample(t), constant, nothing, generator)
assert exact < 1e-6
normal = torch.randn(4096, 4, 4, 4, generator=generator)
silent = flow_matching_loss(lambda x, t, _: torch.zeros_like(x), normal, nothing, generator)
assert abs(silent - 2) < 0.02  # E[ε²] + E[x0²]: what a DiT scores before its first step


# %% tags=["check"]
def best_guess(x: Tensor, t: Tensor, _) -> Tensor:
    s = per_sample(t)
    return (2 * s - 1) / ((1 - s) ** 2 + s**2) * x


for level in (0.1, 0.5, 0.8):  # a tiny std pins σ
    floor = 1 / ((1 - level) ** 2 + level**2)
    loss = flow_matching_loss(best_guess, normal, nothing, generator, mean=math.log(level / (1 - level)), std=1e-6)
    assert abs(loss - floor) < 0.02 * floor  # no model gets below

# %% [markdown] lang="zh"
# ## 偶尔把提示词拿走
#
# 引导（第 08 章）要同一个网络既会「按题作画」，也会「随便画」。训练时以一成的机会，把整条提示词换成空提示词：词元、掩码、汇总向量一起换。漏换一样，答案就从门缝里漏进去。

# %% [markdown] lang="en" twin="5aea7ea9"
# ## Now and then, take the prompt away
#
# Guidance (chapter 08) needs one network that draws to order and also draws anything. In training, one time in ten, the whole prompt is replaced by the empty one: tokens, mask and pooled vector together. Forget one of the three and the answer leaks in through the gap.


# %% tags=["export"]
def drop_condition(
    prompts: PromptEmbeds, empty: PromptEmbeds, probability: float, generator: Generator
) -> PromptEmbeds:
    """Replace whole prompts by the empty one, each row with ``probability``: what makes guidance possible later.

    Args:
        prompts: B rows: tokens (B, M, D), mask (B, M), pooled (B, D).
        empty: the embedded empty prompt, one row.
        probability: 0…1; 0.1 by custom.
        generator: a CPU generator.

    Returns:
        Embeddings of B rows, as long as the longer of both.

    Raises:
        ValueError: ``probability`` outside 0…1, or ``empty`` has not one row.

    Source: Ho & Salimans 2022, §3.2.
    """
    if not 0 <= probability <= 1:
        raise ValueError(f"probability {probability} is outside 0…1; try 0.1")
    if len(empty.pooled) != 1:
        raise ValueError(f"empty has {len(empty.pooled)} rows; expected 1, the embedded empty prompt")
    length = max(prompts.mask.shape[1], empty.mask.shape[1])
    prompts, empty = _pad(prompts, length), _pad(empty, length)
    drop = (torch.rand(len(prompts.pooled), generator=generator) < probability).to(prompts.pooled.device)  # (B,)
    pairs = zip(empty, prompts)
    return PromptEmbeds(*(torch.where(drop.reshape(-1, *[1] * (p.ndim - 1)), e, p) for e, p in pairs))


def _pad(prompts: PromptEmbeds, length: int) -> PromptEmbeds:
    """Masked places behind each prompt, up to ``length``."""
    extra = length - prompts.mask.shape[1]
    return PromptEmbeds(F.pad(prompts.tokens, (0, 0, 0, extra)), F.pad(prompts.mask, (0, extra)), prompts.pooled)


# %% tags=["check"]
many = PromptEmbeds(torch.ones(2000, 5, 3), torch.ones(2000, 5, dtype=torch.bool), torch.ones(2000, 3))
empty = PromptEmbeds(torch.full((1, 1, 3), -1.0), torch.ones(1, 1, dtype=torch.bool), torch.full((1, 3), -1.0))
dropped = drop_condition(many, empty, 0.1, generator)
gone = dropped.pooled[:, 0] == -1
assert 0.07 < gone.float().mean() < 0.13
assert torch.equal(gone, dropped.tokens[:, 0, 0] == -1) and torch.equal(gone, dropped.mask.sum(dim=1) == 1)  # together
assert (dropped.tokens[gone, 1:] == 0).all()

# %% [markdown] lang="zh"
# ## 权重在抖，取平均
#
# 每步只看一小批，权重总在抖。指数滑动平均（EMA）$s \leftarrow d\,s + (1-d)\,\theta$ 记住最近约 $1/(1-d)$ 步。毛病在开头：$d = 0.999$ 时走了 $700$ 步，还有一半是随机初值。解法是让 $d_n = \min\left(d, \frac{n}{n + 10}\right)$ 慢慢长大，初值的份额恰是一个二项式系数的倒数：
#
# $$\prod_{k=1}^{n} \frac{k}{k + 10} = \frac{n!\,10!}{(n + 10)!} = 1 \Big/ \binom{n+10}{10}$$

# %% [markdown] lang="en" twin="ba852249"
# ## Weights jitter; take their mean
#
# Each step sees a small batch, so the weights keep jittering. An exponential moving average (EMA), $s \leftarrow d\,s + (1-d)\,\theta$, remembers about the last $1/(1-d)$ steps. The trouble is the beginning: with $d = 0.999$, after $700$ steps half is still the random start. The cure: let $d_n = \min\left(d, \frac{n}{n + 10}\right)$ grow. What is left of the start is one over a binomial coefficient:
#
# $$\prod_{k=1}^{n} \frac{k}{k + 10} = \frac{n!\,10!}{(n + 10)!} = 1 \Big/ \binom{n+10}{10}$$


# %% tags=["export"]
class EMA:
    """Exponential moving average of a model's weights: s ← d s + (1 − d) θ, with d_n = min(decay, n / (n + warmup)).

    Args:
        model: what to follow; the average starts at its weights.
        decay: the final d, which remembers about 1 / (1 − d) steps.
        warmup: 10 lets the average forget the random start quickly; 0 keeps d constant.

    Raises:
        ValueError: ``decay`` outside 0…1, 1 excluded.

    Source: Polyak & Juditsky 1992; the growing d follows TensorFlow's ``ExponentialMovingAverage``.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999, warmup: float = 10.0):
        if not 0 <= decay < 1:
            raise ValueError(f"decay {decay} is outside 0…1, or is 1 and would never move; try 0.999")
        self.decay, self.warmup, self.updates = decay, warmup, 0
        self.shadow = {name: value.detach().clone() for name, value in model.state_dict().items()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Follow the model by one step; call it after the optimizer's step."""
        self.updates += 1
        decay = min(self.decay, self.updates / (self.updates + self.warmup))
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                self.shadow[name].lerp_(value, 1 - decay)
            else:
                self.shadow[name].copy_(value)

    def copy_to(self, model: nn.Module) -> nn.Module:
        """Load the average into ``model`` and return it."""
        model.load_state_dict(self.shadow)
        return model


# %% tags=["check"]
layer = nn.Linear(1, 1, bias=False).requires_grad_(False)
averages = EMA(nn.Linear(1, 1, bias=False), 0.99, warmup=0), EMA(layer, 0.99)
for average in averages:
    average.shadow["weight"].zero_()  # the start; from now on the model stands still at 1
    nn.init.ones_(layer.weight), [average.update(layer) for _ in range(20)]
assert math.isclose(averages[0].shadow["weight"].item(), 1 - 0.99**20, rel_tol=1e-4)  # 82 % of the start is left
assert math.isclose(averages[1].shadow["weight"].item(), 1 - 1 / math.comb(30, 10), rel_tol=1e-6)  # nothing is

# %% [markdown] lang="zh"
# ## 学习率：先升，再平，后降
#
# 开头梯度最乱，慢慢升；结尾要收敛，降到零。中间可以一直平着：想多练就延长平台，不必重来。$f$ 是直线，或半个余弦：
#
# $$\eta(i) = \eta_{\max} \min\left(1,\; \frac{i + 1}{\text{warmup}},\; f\!\left(\frac{N - i}{\text{decay}}\right)\right)$$

# %% [markdown] lang="en" twin="43835611"
# ## The learning rate: up, flat, down
#
# Gradients are wildest at first, so rise slowly; the end must settle, so fall to zero. Between them it may stay flat: to train longer, lengthen the plateau instead of starting over. $f$ is a line or half a cosine:
#
# $$\eta(i) = \eta_{\max} \min\left(1,\; \frac{i + 1}{\text{warmup}},\; f\!\left(\frac{N - i}{\text{decay}}\right)\right)$$


# %% tags=["export"]
def learning_rate(step: int, steps: int, warmup: int = 0, decay: int | None = None, cosine: bool = False) -> float:
    """Share of the peak rate at ``step``: min(1, (step + 1) / warmup, f((steps − step) / decay)).

    Args:
        step: counted from 0.
        steps: N, the whole run.
        warmup: steps of the rise.
        decay: steps of the descent; None takes all that follow the rise.
        cosine: f(u) = (1 − cos πu) / 2 instead of u.

    Raises:
        ValueError: ``step`` outside 0…steps − 1, or rise and descent longer than the run.
    """
    decay = steps - warmup if decay is None else decay
    if not 0 <= step < steps:
        raise ValueError(f"step {step} is outside 0…{steps - 1}")
    if warmup < 0 or decay < 0 or warmup + decay > steps:
        raise ValueError(
            f"warmup {warmup} and decay {decay} do not fit into {steps} steps; try a sum of at most {steps}"
        )
    rise = (step + 1) / max(warmup, 1)
    fall = min(1.0, (steps - step) / max(decay, 1))
    return min(1.0, rise, (1 - math.cos(math.pi * fall)) / 2 if cosine else fall)


# %% tags=["hide"]
curves = {
    f"{kind}": [learning_rate(i, 100, 10, 40, kind == "cosine") for i in range(100)] for kind in ("linear", "cosine")
}
fig, ax = plt.subplots(figsize=(6.4, 2.0))
for kind, curve in curves.items():
    ax.plot(curve, label=kind)
ax.set(title="Up, flat, down", xlabel="step", ylabel="share of the peak rate")
ax.legend()
show(fig, alt="Two curves that rise together, stay at one, and fall to zero, one straight and one as a cosine.")

# %% tags=["check"]
assert all(curve[0] == 0.1 and set(curve[9:60]) == {1.0} for curve in curves.values())  # no step is wasted at rate 0
assert abs(sum(curves["linear"]) - sum(curves["cosine"])) < 0.1  # the same area: the same way in all
assert 0 < curves["cosine"][-1] < curves["linear"][-1] < 0.03

# %% [markdown] lang="zh"
# ## 一步，和它的随机数
#
# 一步里有三样随机：取哪几张图、什么噪声、什么 $\sigma$。若来自一个一路用下去的发生器，就得存下它的状态。更简单：第 $i$ 步的发生器由 (种子, $i$) 决定，步数就是状态。顺序固定：损失、梯度、裁剪、优化器、EMA。损失若不是有限的数，权重一动不动。

# %% [markdown] lang="en" twin="04c27ff9"
# ## One step, and its randomness
#
# Three things in a step are random: which pictures, which noise, which $\sigma$. From one generator used all along, its state would have to be saved. Simpler: (seed, $i$) decide the generator of step $i$, and the step number is the state. The order is fixed: loss, gradients, clipping, optimizer, EMA. If the loss is not finite, no weight moves.


# %% tags=["export"]
def step_generator(seed: int, step: int) -> Generator:
    """All randomness of one training step, a function of (seed, step) alone: nothing else need be saved to resume.

    PyTorch's CPU generator reads only 32 bits of its seed, so both numbers are mixed into 32.
    """
    return Generator().manual_seed((seed * 2_654_435_761 + step) % 2**32)


@dataclass
class TrainState:
    """Everything that changes in training; what a checkpoint holds.

    Each group of the optimizer keeps its peak rate in ``initial_lr``. ``loss`` is smoothed over about twenty steps,
    ``seconds`` counts training alone, ``curve`` has one entry a logged step.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    ema: EMA
    seed: int = 0
    step: int = 0
    loss: float = 0.0
    seconds: float = 0.0
    curve: list[dict[str, float]] = field(default_factory=list)


def train_step(state: TrainState, loss: Callable[[Generator], Tensor], factor: float = 1.0, clip: float = 1.0) -> float:
    """One step: loss(generator) → gradients → clip each group's norm → optimizer at ``factor`` × peak rate → EMA.

    Returns:
        The loss of this batch.

    Raises:
        FloatingPointError: the loss or its gradient is NaN or infinite; the weights are left as they were.
    """
    value = loss(step_generator(state.seed, state.step))
    if not torch.isfinite(value):
        raise FloatingPointError(f"the loss is {value.item()} at step {state.step}; try a lower learning rate")
    state.optimizer.zero_grad()
    value.backward()
    for group in state.optimizer.param_groups:
        norm = nn.utils.clip_grad_norm_(group["params"], clip)
        if not torch.isfinite(norm):
            raise FloatingPointError(f"the gradient's norm is {norm} at step {state.step}; try a lower learning rate")
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor
    state.optimizer.step()
    state.ema.update(state.model)
    state.loss = value.item() if state.step == 0 else 0.95 * state.loss + 0.05 * value.item()
    state.step += 1
    return value.item()


# %% [markdown] lang="zh"
# ## 过拟合一小批
#
# 新训练代码的第一道关：八张图，十六像素见方，每张配一条随机的「提示词」，网络应当背下来；背不下来，就别开长跑。损失会降，但真正的考试是画出来：从纯噪声出发，用平均后的权重走二十步，每条提示词都该画回自己的那张图。

# %% [markdown] lang="en" twin="32f12a67"
# ## Overfit one batch
#
# The first gate for new training code: eight pictures, sixteen pixels square, a random "prompt" for each; the network should learn them by heart, or the long run should not start. The loss will fall, but drawing is the real exam: from pure noise, twenty steps with the averaged weights, and each prompt should bring back its own picture.

# %%
pictures = torch.from_numpy(load_emoji().images[[8, 120, 563, 700, 820, 1000, 1234, 1500]])
small = F.avg_pool2d(pictures.permute(0, 3, 1, 2).float() / 127.5 - 1, 4)  # (8, 3, 16, 16)
batch = (small - small.mean()) / small.std()  # unit variance, as latents have it
show_as = lambda x: list(x * small.std() / 2 + (small.mean() + 1) / 2)  # noqa: E731
words = torch.randn(9, 2, 32, generator=generator)  # eight prompts of two tokens, and the empty one
prompts = PromptEmbeds(words[:8], torch.ones(8, 2, dtype=torch.bool), words[:8, 0])
empty = PromptEmbeds(words[8:], torch.ones(1, 2, dtype=torch.bool), words[8:, 0])


def new_state(seed: int = 0) -> TrainState:
    torch.manual_seed(0)
    config = DiTConfig(latent_channels=3, patch=4, width=64, heads=4, joint_depth=1, parallel_depth=1, text_width=32)
    model = DiT(config)
    return TrainState(model, torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0), EMA(model, 0.98), seed)


# %%
def loss_of(state: TrainState, drop: float = 0.1):
    def loss(generator: Generator) -> Tensor:
        shown = drop_condition(prompts, empty, drop, generator)
        return flow_matching_loss(lambda x, t, p: state.model(x, t, *p), batch, shown, generator)

    return loss


state = new_state()
losses = [train_step(state, loss_of(state), learning_rate(i, 320, 20, 200)) for i in range(320)]


# %%
def draw(model: DiT, prompts: PromptEmbeds, steps: int = 20) -> Tensor:
    noise = torch.randn(batch.shape, generator=Generator().manual_seed(7))
    velocity = lambda x, sigma: model(x, torch.full((len(x),), 1000.0 * sigma), *prompts)  # noqa: E731
    return integrate(velocity, noise, [1 - i / steps for i in range(steps + 1)])


drawn = draw(model := state.ema.copy_to(new_state().model).requires_grad_(False), prompts)
image_grid(show_as(batch) + show_as(drawn), columns=8, size=0.8, title="A few seconds of training: noise turns into the right picture",
           alt="Eight tiny emoji above; below them eight drawings from noise that resemble them one by one.")  # fmt: skip

# %% tags=["check"]
first, last = sum(losses[:1]), sum(losses[-50:]) / 50
assert abs(first - 2) < 0.15  # v = 0 at init: ε² + x0²
assert last < 0.5 * first  # what drop leaves open it cannot know: the empty prompt may be any of the eight
distance = torch.cdist(drawn.flatten(1), batch.flatten(1))  # (8, 8)
assert torch.equal(distance.argmin(dim=1), torch.arange(8))  # each prompt its own picture

# %% [markdown] lang="zh"
# ## 停电之后
#
# 只存权重够不够？先试：练十步，存下权重，放进新的优化器，再练十步。和一口气练二十步比。AdamW 的动量丢了，结果就不同。

# %% [markdown] lang="en" twin="ebdd2069"
# ## After the power cut
#
# Are the weights enough? Try: ten steps, keep the weights, put them under a new optimizer, ten more. Compare with twenty in one go. AdamW's moments are lost, and the result is another.


# %%
def run(state: TrainState, steps: int) -> TrainState:
    while state.step < steps:
        train_step(state, loss_of(state), learning_rate(state.step, 20, 5))
    return state


whole, half = run(new_state(), 20), run(new_state(), 10)
naive = new_state()
naive.model.load_state_dict(half.model.state_dict())
naive.step = 10
difference = [(a - b).abs().max() for a, b in zip(run(naive, 20).model.parameters(), whole.model.parameters())]
print("only the weights were saved: the same run?", max(difference).item() == 0)

# %% [markdown] lang="zh"
# 完整的清单：权重、优化器的动量、EMA 及其计数、步数、种子。写文件也要防停电：先写到旁边，再改名；改名是原子的，磁盘上绝不会有半个文件。最后是循环本身：进度条带着剩余时间，曲线记下步数、损失、训练秒数；收到停止的请求，先存好再走。

# %% [markdown] lang="en" twin="ad28e02d"
# The full list: weights, the optimizer's moments, the EMA with its count, the step, the seed. Writing must survive a power cut too: write beside the file, then rename; a rename is atomic, so there is never half a file. At last the loop itself: a bar with the time left, a curve of step, loss and seconds trained; asked to stop, it saves before it goes.

# %% tags=["export"]
PLAIN = ("seed", "step", "loss", "seconds", "curve")  # what a checkpoint holds besides tensors


def save_checkpoint(path: Path | str, state: TrainState) -> None:
    """Write the whole state to ``path`` and the curve beside it (.jsonl); no reader ever sees half a file."""
    plain = {name: getattr(state, name) for name in PLAIN}
    ema = {"shadow": state.ema.shadow, "updates": state.ema.updates}
    file = io.BytesIO()
    torch.save(plain | {"model": state.model.state_dict(), "optimizer": state.optimizer.state_dict(), "ema": ema}, file)
    _replace(Path(path), file.getvalue())
    _replace(Path(path).with_suffix(".jsonl"), "".join(json.dumps(entry) + "\n" for entry in state.curve).encode())


def _replace(path: Path, data: bytes) -> None:
    """Write beside ``path``, then rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def load_checkpoint(path: Path | str, state: TrainState) -> TrainState:
    """Put a checkpoint into ``state``, whose model and optimizer are built as they were; return it.

    Raises:
        ValueError: the file is no whole checkpoint, or was made with another seed, model or optimizer; ``state`` is as before.
    """
    try:
        payload = torch.load(io.BytesIO(Path(path).read_bytes()), weights_only=True)
        found = payload["seed"], {name: value.shape for name, value in payload["model"].items()}
        ema, plain = payload["ema"]["shadow"], {name: payload[name] for name in PLAIN}
        updates = payload["ema"]["updates"]
    except (RuntimeError, EOFError, pickle.UnpicklingError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is no whole checkpoint ({type(error).__name__}); delete it to begin again") from error
    if found != (state.seed, {name: value.shape for name, value in state.model.state_dict().items()}):
        raise ValueError(f"{path} belongs to another run: seed {found[0]}, not {state.seed}, or another model")
    try:
        state.optimizer.load_state_dict(payload["optimizer"])  # looks before it changes anything
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} belongs to another run: its optimizer differs ({error})") from error
    state.model.load_state_dict(payload["model"])
    state.ema.shadow, state.ema.updates = ema, updates
    for name, value in plain.items():
        setattr(state, name, value)
    return state


# %% tags=["export"]
def train(
    state: TrainState,
    loss: Callable[[Generator], Tensor],
    steps: int,
    factor: Callable[[int], float] = lambda step: 1.0,
    *,
    clip: float = 1.0,
    checkpoint: Path | str | None = None,
    every: int = 200,
    log_every: int = 50,
    measure: Callable[[TrainState], dict[str, float]] | None = None,
    stop: Callable[[], bool] = lambda: False,
    progress: bool = True,
) -> TrainState:
    """Train from ``state.step`` to ``steps``, with a bar and its ETA, a curve, and checkpoints.

    Args:
        state: where to begin; changed in place.
        loss: one batch's loss; draws everything random from the generator that it is handed.
        factor: step → share of the peak learning rate.
        clip: largest gradient norm of a parameter group.
        checkpoint: file written every ``every`` steps and at the end, the curve beside it as JSON lines (.jsonl).
        log_every: steps between two entries of the curve: step, loss, seconds trained.
        measure: called before each checkpoint; its numbers join the curve.
        stop: asked after each step; True ends the run with a checkpoint.
        progress: show the bar on stderr; into a file it writes only twice a minute.

    Returns:
        ``state``.

    Raises:
        ValueError: ``every`` or ``log_every`` below 1.
    """
    for name, value in (("every", every), ("log_every", log_every)):
        if value < 1:
            raise ValueError(f"{name} {value} is below 1; try 1")
    shown = {"disable": not progress, "mininterval": 0.5 if sys.stderr.isatty() else 30.0, "smoothing": 0.02}
    with tqdm(total=steps, initial=min(state.step, steps), unit="step", **shown) as bar:
        last = state.step >= steps
        while not last:
            begun = time.perf_counter()
            train_step(state, loss, factor(state.step), clip)
            state.seconds += time.perf_counter() - begun
            bar.set_postfix(loss=f"{state.loss:.4f}", refresh=False)
            bar.update()
            last = state.step >= steps or stop()
            saving = last or state.step % every == 0
            if saving or state.step % log_every == 0:
                entry = {"step": state.step, "loss": round(state.loss, 6), "seconds": round(state.seconds, 1)}
                state.curve.append(entry | (measure(state) if saving and measure else {}))
            if saving and checkpoint is not None:
                save_checkpoint(checkpoint, state)
    return state


# %% tags=["check"]
with tempfile.TemporaryDirectory() as folder:
    path, rate = Path(folder, "dit.pt"), lambda step: learning_rate(step, 20, 5)  # noqa: E731
    broken = new_state()
    train(broken, loss_of(broken), 20, rate, checkpoint=path, every=4, stop=lambda: broken.step == 10, progress=False)
    assert broken.step == 10
    resumed = load_checkpoint(path, new_state())
    train(resumed, loss_of(resumed), 20, rate, checkpoint=path, progress=False)
    logged = [json.loads(line)["step"] for line in path.with_suffix(".jsonl").read_text().splitlines()]
assert all(torch.equal(a, b) for a, b in zip(resumed.model.parameters(), whole.model.parameters()))  # bit for bit
assert all(torch.equal(resumed.ema.shadow[name], value) for name, value in whole.ema.shadow.items())
assert resumed.loss == whole.loss and logged == [4, 8, 10, 20]

# %% tags=["check"]
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "dit.pt")
    save_checkpoint(path, half)
    path.write_bytes(path.read_bytes()[:5000])  # somebody copied half of it
    try:
        load_checkpoint(path, new_state())
    except ValueError as error:
        print(str(error).replace(folder, "…"))
        assert "no whole checkpoint" in str(error)
    else:
        raise AssertionError("half a checkpoint was accepted")

# %% [markdown] lang="zh"
# ## 和真家伙对一对
#
# diffusers 的训练脚本用 `compute_density_for_timestep_sampling` 抽时间，用 `EMAModel` 求平均。同一个发生器、同样的权重，数值该一样。它的 EMA 第一次只抄权重，所以我们从第一步之后开始。

# %% [markdown] lang="en" twin="d5bc8cdc"
# ## Against the real thing
#
# The training scripts of diffusers draw times with `compute_density_for_timestep_sampling` and average with `EMAModel`. Same generator, same weights: the numbers must agree. Its EMA merely copies on the first call, so ours starts after the first step.

# %% tags=["check"]
from diffusers.training_utils import EMAModel, compute_density_for_timestep_sampling

a, b = Generator().manual_seed(3), Generator().manual_seed(3)
theirs = compute_density_for_timestep_sampling("logit_normal", 1000, logit_mean=0.7, logit_std=1.2, generator=a)
assert torch.allclose(sample_sigmas(1000, b, 0.7, 1.2), theirs, atol=1e-6)

layer, theirs = nn.Linear(8, 8), None
for n in range(1, 41):
    nn.init.normal_(layer.weight, generator=generator)
    theirs = theirs or EMAModel(layer.parameters(), decay=0.9)
    theirs.step(layer.parameters())
    if n == 1:
        ours = EMA(layer, decay=0.9, warmup=9)
        ours.updates = 1
    else:
        ours.update(layer)
assert torch.allclose(ours.shadow["weight"], theirs.shadow_params[0], atol=1e-6)

# %% [markdown] lang="zh"
# ## 引擎里的权重是怎样来的
#
# `python -m recipes.train all` 用这个模块依次跑三段，两个核上几个小时；中断后同一条命令接着跑。
#
# | 段 | 学什么 | 损失 |
# | --- | --- | --- |
# | `vae` | 图与潜变量的互译（第 09 章） | 绝对、平方、梯度误差与一点 KL |
# | `text` | 隔一个线性层，从说明文字猜半尺寸的图；之后冻结 | 均方误差 |
# | `dit` | 速度场，提示词嵌入预先算好 | 本章的损失，一成空提示词，EMA |
#
# **到了这里**，引擎能画，也知道画技从哪来。它还不知道自己占多少内存：每一步都在申请新的潜变量。第 12 章问：能不能一开始就把要用的内存全备好？
#
# ## 三个问题
#
# 1. 预测：若 `drop` 设为 $1$，八条提示词会画出什么？
# 2. 修改：把目标写成 $x_0 - \epsilon$，哪个检查变红？损失还会下降吗？
# 3. 动手：EMA 的 $d = 0.98$、不预热，二十步后初值还剩几成？预热之后呢？用算式回答。

# %% [markdown] lang="en" twin="25d90a33"
# ## Where the engine's weights come from
#
# `python -m recipes.train all` runs three stages with this module, a few hours on two cores; after an interruption the same command goes on.
#
# | Stage | What it learns | Loss |
# | --- | --- | --- |
# | `vae` | pictures to latents and back (chapter 09) | absolute, squared and gradient error, a little KL |
# | `text` | to guess the picture at half size from its caption, through one linear layer; then frozen | mean squared error |
# | `dit` | the velocity field, over prompt embeddings computed ahead | this chapter's loss, one empty prompt in ten, EMA |
#
# **Where we stand.** The engine draws, and you know where its skill comes from. It does not yet know how much memory it takes: every step allocates new latents. Chapter 12 asks: could all the memory be set aside at the start?
#
# ## Three questions
#
# 1. Predict: with `drop` at $1$, what do the eight prompts draw?
# 2. Modify: write the target as $x_0 - \epsilon$. Which check turns red? Does the loss still fall?
# 3. Build: an EMA with $d = 0.98$ and no warm-up: how much of the start is left after twenty steps? And with it? Answer by formula.

# %% tags=["solution"]
# 1 · it never saw a prompt, so the prompts make no difference: the drawings hardly depend on them
blind = new_state()
for i in range(60):
    train_step(blind, loss_of(blind, drop=1.0), learning_rate(i, 60, 10))
swapped = PromptEmbeds(*(part.flip(0) for part in prompts))
moved = [(draw(m, prompts, 4) - draw(m, swapped, 4)).abs().mean() for m in (blind.model, model)]
assert moved[0] < 0.2 * moved[1]

# %% tags=["solution"]
# 2 · the loss falls just as well, for a sign is as easy to learn as its opposite; only the exact model tells
flipped = lambda x, t, _: -(x - 1.5) / per_sample(t)  # noqa: E731
assert flow_matching_loss(flipped, torch.full((64, 4, 4, 4), 1.5), None, generator) > 1

# %% tags=["solution"]
# 3
assert round(0.98**20, 2) == 0.67 and 1 / math.comb(30, 10) < 1e-7

# %% [markdown] lang="zh"
# ## 小结
#
# - 难题在中间的 $\sigma$；logit-normal 多练那里，移位 $k$ 就是加 $\ln k$。
# - 损失用已知答案的模型来查，不只看它会不会降。
# - 条件丢弃要整条换掉，引导才有得比。
# - EMA 的 $d$ 从小长到大，随机初值很快忘光。
# - 随机数由 (种子, 步数) 决定，检查点写全并原子改名：续跑与不停，逐比特相同。
#
# 阅读卡片：SD3（[`papers/05_sd3`](../../papers/05_sd3.zh.md)）。下一章：12。

# %% [markdown] lang="en" twin="aae47f6d"
# ## Recap
#
# - The hard questions are at middle $\sigma$; the logit-normal practises there, and a shift $k$ is adding $\ln k$.
# - Check a loss with a model whose answer is known; that it falls says little.
# - Condition dropout replaces the whole prompt, or guidance has nothing to compare.
# - The $d$ of an EMA grows, and the random start is soon forgotten.
# - (seed, step) decides all randomness, checkpoints are complete and renamed atomically: resumed and uninterrupted agree bit by bit.
#
# Reading card: SD3 ([`papers/05_sd3`](../../papers/05_sd3.en.md)). Next: chapter 12.
