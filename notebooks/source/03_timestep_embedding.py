# ---
# jupyter:
#   course:
#     minutes: 30
#     module: timestep_embedding
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown] lang="zh"
# # 03 · 时间步嵌入（timestep embedding）
#
# 读完这一章，网络就能分清「刚开始去噪」和「快要画完」：你会把一个数 $t$ 变成一个向量，并证明它的几何是对的。
#
# | 你会做出 | 你需要 | 时间 | 模块 |
# | --- | --- | --- | --- |
# | 正弦嵌入、两层 MLP | 第 01、02 章的 $\sigma$ 与 $t = 1000\sigma$ | 30 分钟 | `diffusion_engine/timestep_embedding.py` |

# %% [markdown] lang="en" twin="dec16493"
# # 03 · Timestep embedding
#
# After this chapter the network can tell "just begun" from "almost done": you turn one number $t$ into a vector, and prove that its geometry is right.
#
# | You build | You need | Time | Module |
# | --- | --- | --- | --- |
# | the sinusoid, a two-layer MLP | $\sigma$ and $t = 1000\sigma$ from chapters 01 and 02 | 30 minutes | `diffusion_engine/timestep_embedding.py` |

# %% [markdown] lang="zh"
# **先想一想**：同一个网络要在 $t = 900$ 时从噪声里找轮廓，在 $t = 50$ 时修边缘。把 $t$ 当作一个数直接喂进去，会有什么问题？先写下你的答案，再往下读。

# %% [markdown] lang="en" twin="9e3eb349"
# **Think first:** one network must find outlines in noise at $t = 900$ and mend edges at $t = 50$. What goes wrong if you feed it $t$ as one bare number? Write your answer down before you read on.

# %% tags=["export"]
import math

import torch
from torch import Tensor, nn

# %% [markdown] lang="zh"
# ## 一个数不够用
#
# 线性层看到的只有 $w\,t$：$t$ 翻倍，响应就翻倍，它没法只在某一段时间「亮起来」。我们想要的是：相近的时间相像，相远的时间不像。可是单独一个数和谁都同向，余弦相似度（cosine similarity）永远是 $1$。

# %% [markdown] lang="en" twin="902a610d"
# ## One number is not enough
#
# A linear layer only sees $w\,t$: double the time, double the response; it cannot light up for one stretch of time alone. What we want: near times look alike, far times do not. A bare number points the same way as any other, so its cosine similarity is always $1$.

# %%
times = torch.tensor([50.0, 60.0, 900.0])
as_numbers = times[:, None]  # (3, 1)
torch.nn.functional.cosine_similarity(as_numbers[:1], as_numbers)  # 50 against 50, 60 and 900

# %% [markdown] lang="zh"
# ## 许多快慢不同的钟
#
# 看钟的人靠三根针分清一天里的每一秒：快针说细处，慢针说大处。照这个办法取 $D/2$ 根针，第 $i$ 根以频率 $\omega_i$ 转动；读出每根针尖的横坐标和纵坐标，就是时间的指纹：
#
# $$\omega_i = P^{-i/(D/2)}, \qquad e(t) = [\cos(\omega_0 t), \dots, \cos(\omega_{D/2-1} t),\; \sin(\omega_0 t), \dots, \sin(\omega_{D/2-1} t)]$$
#
# | 记号 | 形状 | 含义 |
# | --- | --- | --- |
# | $t$ | $(B,)$ | 时间，$0$ 到 $1000$，fp32 |
# | $D$ | 标量 | 嵌入宽度，偶数 |
# | $P$ | 标量 | 最慢一根针的尺度，惯用 $10^4$ |
# | $e(t)$ | $(B, D)$ | 先余弦，后正弦 |

# %% [markdown] lang="en" twin="01e559ba"
# ## Many clocks, each at its own pace
#
# A clock tells every second of the day apart with three hands: the fast one for detail, the slow ones for the large. Do the same with $D/2$ hands, the $i$-th turning at frequency $\omega_i$; the coordinates of all the tips are the fingerprint of the time:
#
# $$\omega_i = P^{-i/(D/2)}, \qquad e(t) = [\cos(\omega_0 t), \dots, \cos(\omega_{D/2-1} t),\; \sin(\omega_0 t), \dots, \sin(\omega_{D/2-1} t)]$$
#
# | Symbol | Shape | Meaning |
# | --- | --- | --- |
# | $t$ | $(B,)$ | time, $0$ to $1000$, fp32 |
# | $D$ | scalar | embedding width, even |
# | $P$ | scalar | the scale of the slowest hand, by custom $10^4$ |
# | $e(t)$ | $(B, D)$ | cosines first, then sines |

# %% [markdown] lang="zh"
# 先写最笨的版本：一次一个时间，一次一根针，和公式逐字对应。它不进引擎，留着当答案。

# %% [markdown] lang="en" twin="ea760f60"
# The plainest version first: one time, one hand after another, word for word the formula. It does not go into the engine; it stays as the answer key.


# %%
def embedding_by_loops(t: float, dim: int, max_period: float = 10_000.0) -> list[float]:
    half = dim // 2
    omegas = [max_period ** (-i / half) for i in range(half)]
    return [math.cos(w * t) for w in omegas] + [math.sin(w * t) for w in omegas]


[round(v, 3) for v in embedding_by_loops(1.0, 8)]  # four hands: cosines, then sines

# %% tags=["hide"]
from course.figures import plt, show

fig, axes = plt.subplots(1, 3, figsize=(6.4, 2.5))
for ax, time in zip(axes, times.tolist()):
    hands = embedding_by_loops(time, 8)
    ax.add_patch(plt.Circle((0, 0), 1, fill=False, color="#718096"))
    for i, (x, y) in enumerate(zip(hands[:4], hands[4:])):
        ax.plot([0, x], [0, y], color=f"C{i}", lw=3.4 - 0.7 * i, label=f"period {2 * math.pi * 10**i:,.0f}")
    ax.set(title=f"t = {time:.0f}", xlim=(-1.1, 1.1), ylim=(-1.1, 1.1), aspect="equal")
    ax.axis("off")
axes[2].legend(bbox_to_anchor=(1.02, 0.5), loc="center left", title="hands")
fig.suptitle("The slow hands tell 900 from 50; the fast hands tell 60 from 50", fontsize=11, x=0.01, ha="left")
show(
    fig,
    alt="Three dials with four hands: slow hands agree at 50 and 60 and differ at 900, fast hands differ everywhere",
)

# %% [markdown] lang="zh"
# 再写会进引擎的版本：整批一起算，角度用 fp32；宽度不对、形状不对、精度不够，当场报错。

# %% [markdown] lang="en" twin="9b7ec797"
# Now the version that goes into the engine: a whole batch at once, angles in fp32; a wrong width, a wrong shape, too few digits are refused on the spot.


# %% tags=["export"]
def timestep_embedding(t: Tensor, dim: int, max_period: float = 10_000.0) -> Tensor:
    """Sinusoidal embedding e(t) = [cos(ω t), sin(ω t)] with ω_i = max_period^(-i / (dim/2)).

    Args:
        t: times in 0…1000, shape (B,); float32, float64 or integers, computed in fp32.
        dim: embedding width D, even.
        max_period: P, the scale of the slowest hand.

    Returns:
        (B, D), fp32, cosines first (the order that DiT, SD3 and FLUX use).

    Raises:
        ValueError: ``dim`` is no positive even number, ``t`` is not one-dimensional, or it is a half-precision
            tensor, which has lost the time's last digits already.

    Source: Vaswani et al. 2017, §3.5; Peebles & Xie 2023 (DiT), ``models.py``.
    """
    if dim < 2 or dim % 2:
        low = max(2, dim // 2 * 2)
        raise ValueError(f"dim {dim} is no positive even number; try {low} or {low + 2}")
    if t.ndim != 1:
        raise ValueError(f"t has shape {tuple(t.shape)}; expected (B,), one time a sample")
    if t.dtype in (torch.float16, torch.bfloat16):
        raise ValueError(f"t is {t.dtype}, which cannot hold every time in 0…1000; keep it torch.float32")
    half = dim // 2
    omega = torch.exp(-math.log(max_period) * torch.arange(half, device=t.device) / half)  # (D/2,)
    angle = t.float()[:, None] * omega  # (B, D/2)
    return torch.cat([angle.cos(), angle.sin()], dim=-1)  # (B, D)


# %%
t = torch.tensor([0.0, 1.0, 37.5, 1000.0])
timestep_embedding(t, 64).shape

# %% tags=["check"]
slow = torch.tensor([embedding_by_loops(v, 64) for v in t.tolist()])
assert torch.allclose(timestep_embedding(t, 64), slow, atol=1e-4)  # the fast one is the plain one
assert torch.equal(timestep_embedding(t, 64)[2:3], timestep_embedding(t[2:3], 64))  # a batch is its samples

# %% tags=["check"]
for bad_t, bad_dim in [(t, 63), (t[:, None], 64), (t.bfloat16(), 64)]:
    try:
        timestep_embedding(bad_t, bad_dim)
    except ValueError as error:
        print(error)  # an error that teaches
    else:
        raise AssertionError("a bad argument was accepted")

# %% tags=["hide"]
grid = torch.arange(0, 1000, 4.0)
fig, ax = plt.subplots(figsize=(6.4, 2.6))
ax.imshow(timestep_embedding(grid, 128).T, aspect="auto", extent=(0, 1000, 128, 0), cmap="RdBu", vmin=-1, vmax=1)
ax.axhline(64, color="black", lw=0.8)
ax.set(title="Every column is one time's fingerprint: fast hands on top of each half", xlabel="t", ylabel="component")
ax.set_yticks([32, 96], ["cos", "sin"])
show(fig, alt="Heat map of the embedding over time: stripes from fast to nearly still, once for cosine, once for sine")

# %% [markdown] lang="zh"
# ## 为什么这个几何是对的
#
# 每根针都只转动、不伸缩，所以两个时间的内积只取决于时间差：
#
# $$\langle e(t), e(t')\rangle = \sum_i \cos(\omega_i (t - t'))$$
#
# 令 $t' = t$，每一项都是 $1$，长度恒为 $\sqrt{D/2}$：没有哪个时间更「响」。第 04 章会用同一件事给图块编位置。

# %% [markdown] lang="en" twin="2373c4c3"
# ## Why this geometry is right
#
# Every hand only turns, it never stretches, so the inner product of two times depends on their difference alone:
#
# $$\langle e(t), e(t')\rangle = \sum_i \cos(\omega_i (t - t'))$$
#
# Put $t' = t$: every term is $1$ and the length is always $\sqrt{D/2}$. No time is louder than another. Chapter 04 uses the same fact to place patches.

# %% tags=["check"]
a, b = timestep_embedding(torch.tensor([100.0, 130.0]), 256)
c, d = timestep_embedding(torch.tensor([700.0, 730.0]), 256)
assert torch.allclose(a @ b, c @ d, rtol=1e-4)  # the same gap, the same likeness
closed_form = sum(math.cos(10_000 ** (-i / 128) * 30) for i in range(128))
assert abs(a @ b - closed_form) < 1e-2
assert torch.allclose(timestep_embedding(t, 256).norm(dim=-1), torch.full((4,), 128**0.5))

# %% [markdown] lang="zh"
# **先猜，再拖**：下图右边是 $t$ 的指纹和每个时间的指纹有多像。把 $t$ 从 $0$ 拖到 $1000$，这座峰会变宽、变矮，还是只平移？左边的四根针又怎样转？

# %% [markdown] lang="en" twin="ebd532d9"
# **Guess, then move:** on the right is how much the fingerprint of $t$ is like that of every other time. Move $t$ from $0$ to $1000$: will the peak widen, sink, or only travel? And how do the four hands on the left turn?

# %% tags=["hide"]
from course.sliders import slider

every = timestep_embedding(torch.arange(0, 1001, 5), 256)


def draw_likeness(time: float):
    fig, (dial, ax) = plt.subplots(1, 2, figsize=(6.4, 2.6), width_ratios=(1, 2.2))
    hands = timestep_embedding(torch.tensor([time]), 8)[0]
    dial.add_patch(plt.Circle((0, 0), 1, fill=False, color="#718096"))
    for i, (x, y) in enumerate(zip(hands[:4], hands[4:])):
        dial.plot([0, x], [0, y], color=f"C{i}", lw=3.4 - 0.7 * i)
    dial.set(title="Four hands of it", xlim=(-1.1, 1.1), ylim=(-1.1, 1.1), aspect="equal")
    dial.axis("off")
    alike = torch.nn.functional.cosine_similarity(timestep_embedding(torch.tensor([time]), 256), every)
    ax.plot(torch.arange(0, 1001, 5), alike)
    ax.axvline(time, color="#718096", lw=0.8, ls=":")
    ax.set(title=f"How much each time is like t = {time:.0f}", xlabel="t′", ylabel="likeness", ylim=(0, 1.05))
    return fig


slider(
    draw_likeness,
    [0.0, 50.0, 100.0, 200.0, 300.0, 400.0, 500.0, 600.0, 800.0, 1000.0],
    label="t",
    alt="Four hands at time {}, and a curve of likeness with one sharp peak at {}, the same shape for every time.",
    start=4,
    live=[25.0 * i for i in range(41)],
)

# %% [markdown] lang="zh"
# ## 两个真实的错误
#
# 第一个，真实项目里有人报告过：把 $\sigma \in [0, 1]$ 直接喂给为 $0 \dots 1000$ 设计的嵌入。形状全对，也不报错，可是针几乎没动，所有时间长得一样。

# %% [markdown] lang="en" twin="cc3e1108"
# ## Two real faults
#
# The first was reported in real projects: $\sigma \in [0, 1]$ goes straight into an embedding made for $0 \dots 1000$. Every shape is right, nothing raises, yet the hands have hardly moved and all times look the same.

# %% tags=["check"]
sigma = torch.tensor([0.1, 0.9])
unscaled, scaled = timestep_embedding(sigma, 256), timestep_embedding(1000 * sigma, 256)
likeness = torch.nn.functional.cosine_similarity
assert likeness(unscaled[0], unscaled[1], dim=0) > 0.95  # indistinguishable
assert likeness(scaled[0], scaled[1], dim=0) < 0.6  # told apart

# %% tags=["hide"]
sigmas = torch.linspace(0, 1, 201)
middle = torch.tensor([0.5])
fig, ax = plt.subplots(figsize=(6.4, 2.6))
for scale, label in [(1000, "fed t = 1000 σ"), (1, "fed σ itself")]:
    ax.plot(
        sigmas, likeness(timestep_embedding(scale * middle, 256), timestep_embedding(scale * sigmas, 256)), label=label
    )
ax.set(title="Fed σ itself, every time looks like σ = 0.5", xlabel="σ", ylabel="likeness to σ = 0.5", ylim=(0, 1.05))
ax.legend()
show(
    fig, alt="Likeness to sigma 0.5: a sharp peak when fed a thousand times sigma, a flat line near one when fed sigma"
)

# %% [markdown] lang="zh"
# 第二个：把时间转成 bf16。在 $512$ 到 $1024$ 之间，bf16 只能表示每隔 $4$ 的整数。第 02 章的移位（shift）把许多步挤在高噪声一端，于是有几步从此分不开。所以时间一路保持 fp32，过了正弦才转换。

# %% [markdown] lang="en" twin="11ee1511"
# The second: casting time to bf16. Between $512$ and $1024$ bf16 only holds every fourth integer. The shift of chapter 02 crowds many steps into the noisy end, and some of them can no longer be told apart. Time stays fp32 until it has passed the sinusoid.

# %% tags=["check"]
uniform = torch.linspace(1, 0.01, 100)
steps = 1000 * 3 * uniform / (1 + 2 * uniform)  # one hundred steps, shift 3
assert torch.tensor(750.0 + 1).bfloat16() == 752  # one integer in four survives
assert len(steps.unique()) == 100
assert len(steps.bfloat16().unique()) < 100  # some steps have become the same step

# %% [markdown] lang="zh"
# ## 从指纹到条件
#
# 正弦是固定的，网络还要学会怎么用它：线性层、SiLU、线性层，把 $D$ 维指纹变成模型宽度的条件（condition）向量。FLUX 把引导强度也当作一种「时间」，用的是同一个模块。

# %% [markdown] lang="en" twin="9ef4a5d5"
# ## From fingerprint to condition
#
# The sinusoid is fixed; the network still has to learn its use: linear, SiLU, linear, from the $D$-wide fingerprint to a condition as wide as the model. FLUX treats its guidance scale as one more "time" and reuses the same module.


# %% tags=["export"]
class TimestepEmbedder(nn.Module):
    """Sinusoid, then Linear → SiLU → Linear: times (B,) to conditions (B, width).

    Args:
        width: model width.
        frequency_dim: width D of the sinusoid, even.

    Raises:
        ValueError: what `timestep_embedding` raises, at the first call.

    Source: Peebles & Xie 2023 (DiT), ``TimestepEmbedder``; the same two layers in SD3, FLUX and Wan.
    """

    def __init__(self, width: int, frequency_dim: int = 256):
        super().__init__()
        self.frequency_dim = frequency_dim
        self.mlp = nn.Sequential(nn.Linear(frequency_dim, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, t: Tensor) -> Tensor:
        features = timestep_embedding(t, self.frequency_dim)  # (B, D) fp32
        return self.mlp(features.to(self.mlp[0].weight.dtype))  # (B, width)


# %% tags=["check"]
torch.manual_seed(0)
embedder = TimestepEmbedder(64).bfloat16()  # weights in half precision, time in full
with torch.no_grad():
    near = embedder(torch.tensor([750.0, 751.0]))
assert near.dtype == torch.bfloat16
assert not torch.equal(near[0], near[1])  # 750 and 751 still differ; as bf16 numbers they could not

# %% [markdown] lang="zh"
# ## 和真家伙对一对
#
# diffusers 里的正弦叫 `get_timestep_embedding`，两层 MLP 叫 `TimestepEmbedding`。注意：函数默认值是「先正弦、除以 half − 1」，SD3、FLUX、Wan 用的却是下面这一组。

# %% [markdown] lang="en" twin="bd9c4a71"
# ## Against the real thing
#
# diffusers calls the sinusoid `get_timestep_embedding` and the two layers `TimestepEmbedding`. Mind the trap: the function's defaults are "sine first, half − 1", while SD3, FLUX and Wan use the setting below.

# %% tags=["check"]
from diffusers.models.embeddings import TimestepEmbedding, get_timestep_embedding

theirs_sinusoid = get_timestep_embedding(t, 256, flip_sin_to_cos=True, downscale_freq_shift=0)
assert torch.allclose(timestep_embedding(t, 256), theirs_sinusoid, atol=1e-6)
assert not torch.allclose(timestep_embedding(t, 256), get_timestep_embedding(t, 256), atol=0.1)  # the defaults differ

# %% tags=["check"]
ours, theirs = TimestepEmbedder(64), TimestepEmbedding(256, 64)
theirs.linear_1.load_state_dict(ours.mlp[0].state_dict())
theirs.linear_2.load_state_dict(ours.mlp[2].state_dict())
assert torch.allclose(ours(t), theirs(theirs_sinusoid), atol=1e-6)

# %% [markdown] lang="zh"
# **到了这里**，引擎有了时钟。它还不知道怎么让时钟指挥网络：第 05 章的 AdaLN 会用这个条件向量去调每一层。下一章先问另一个问题：几百个图块怎样彼此看见？
#
# ## 三个问题
#
# 1. 预测：把 `max_period` 改成 10，热图每一半的下端会变成什么样？
# 2. 修改：把余弦和正弦对调，哪些检查会变红，哪些不会？
# 3. 动手：写出高斯傅里叶特征 $[\cos(2\pi f t), \sin(2\pi f t)]$，其中 $f$ 随机抽取，并证明它的长度也恒定。

# %% [markdown] lang="en" twin="3313e5bf"
# **Where we stand.** The engine has a clock. It does not yet know how the clock steers the network: AdaLN in chapter 05 uses this condition to modulate every layer. The next chapter asks something else first: how do a few hundred patches see each other?
#
# ## Three questions
#
# 1. Predict: with `max_period` 10, what becomes of the lower end of each half of the heat map?
# 2. Modify: swap cosines and sines. Which checks turn red, and which do not?
# 3. Build: write Gaussian Fourier features $[\cos(2\pi f t), \sin(2\pi f t)]$ with random $f$, and show that their length is constant too.

# %% tags=["solution"]
# 1 · the lower ends fill with stripes: the slowest hand now turns about every 60 steps, so no hand tells early from late
slowest = timestep_embedding(torch.tensor([0.0, 31.4]), 64, max_period=10)[:, 31]
patient = timestep_embedding(torch.tensor([0.0, 31.4]), 64)[:, 31]
assert (slowest[0] - slowest[1]).abs() > 0.5 > 1e-4 > (patient[0] - patient[1]).abs()

# %% tags=["solution"]
# 2 · lengths and inner products do not notice the swap; the loops and both comparisons with diffusers do
swapped = timestep_embedding(t, 64).roll(32, dims=-1)
assert torch.allclose(swapped.norm(dim=-1), torch.full((4,), 32**0.5))
assert not torch.allclose(swapped, slow, atol=1e-4)

# %% tags=["solution"]
# 3 · cos² + sin² = 1 for every hand, whatever its frequency
f = torch.randn(32, generator=torch.Generator().manual_seed(0))
angle = 2 * math.pi * t[:, None] / 1000 * f
fourier = torch.cat([angle.cos(), angle.sin()], dim=-1)
assert torch.allclose(fourier.norm(dim=-1), torch.full((4,), 32**0.5))

# %% [markdown] lang="zh"
# ## 小结
#
# - 一个数太单薄，$D/2$ 根快慢不同的针给时间一枚指纹。
# - 内积只看时间差，长度恒定。
# - 嵌入要的是 $t = 1000\sigma$。
# - 时间一路 fp32，过了正弦才转换；半精度的 $t$ 当场被拒绝。
# - 两层 MLP 把指纹变成条件；与 diffusers 数值一致（误差小于 $10^{-6}$）。
#
# 阅读卡片：DiT（[`papers/03_dit`](../../papers/03_dit.zh.md)）。下一章：04，注意力。

# %% [markdown] lang="en" twin="5bdb8dcc"
# ## Recap
#
# - One number is too thin; $D/2$ hands at different paces give time a fingerprint.
# - Inner products see only time differences; lengths are constant.
# - The embedding wants $t = 1000\sigma$.
# - Time stays fp32 until it has passed the sinusoid; a half-precision $t$ is refused.
# - Two layers turn the fingerprint into a condition, equal to diffusers' (within $10^{-6}$).
#
# Reading card: DiT ([`papers/03_dit`](../../papers/03_dit.en.md)). Next: chapter 04, attention.
