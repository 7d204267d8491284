# ---
# jupyter:
#   course:
#     minutes: 50
#     module: optimizations
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown] lang="zh"
# # 13 · 优化（optimizations）
#
# 读完这一章，你能把一次加速说清楚：先证明画没有变，或者变了多少；再量时间；最后说出它在哪里没有用。
#
# | 你会做出 | 你需要 | 时间 | 模块 |
# | --- | --- | --- | --- |
# | 成对计时、外提、步缓存、屋顶线；六个对照实验 | 第 02、06–10、12 章 | 50 分钟 | `diffusion_engine/optimizations.py` |

# %% [markdown] lang="en" twin="0a94e42e"
# # 13 · Optimizations
#
# After this chapter you can account for a speed-up: prove first that the picture has not changed, or by how much; then measure the time; then say where it is of no use.
#
# | You build | You need | Time | Module |
# | --- | --- | --- | --- |
# | paired timing, hoisting, a step cache, the roofline; six controlled experiments | chapters 02, 06–10, 12 | 50 minutes | `diffusion_engine/optimizations.py` |

# %% [markdown] lang="zh"
# **先想一想**：画一张图走 28 步，每步问网络两次。缓存提示词、预先分配潜变量、合批引导、少走几步：四件事各能快几倍？先写下四个数字，读完再对。

# %% [markdown] lang="en" twin="c1a9243c"
# **Think first:** a picture takes 28 steps, and each asks the network twice. Cache the prompt, allocate latents ahead, batch the guidance, take fewer steps: how many times faster is each? Write four numbers down and compare at the end.

# %% tags=["export"]
import math
import os
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from operator import call
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from diffusion_engine.attention import CrossAttention
from diffusion_engine.dit import Conditions, DiT, DiTConfig, flop_count, parameter_count, patch_grid, sincos_2d
from diffusion_engine.text_conditioning import PromptEmbeds
from diffusion_engine.transformer_block import JointBlock, Mod

# %% tags=["hide"]
from functools import partial

from course.figures import COLORS, plt, show
from diffusion_engine.attention import attention
from diffusion_engine.model_folder import load_model
from diffusion_engine.guidance import guided_velocity
from diffusion_engine.memory_manager import LatentBuffer, LiveBytes
from diffusion_engine.pipeline import denoise, initial_noise
from diffusion_engine.scheduler import euler_step, make_schedule
from diffusion_engine.text_conditioning import PromptCache, encode_prompt, stack_prompts
from diffusion_engine.transformer_block import modulate
from diffusion_engine.vae import psnr, tiled_decode

model = load_model()
dit, cache = model.dit, PromptCache()


def says(text: str) -> PromptEmbeds:
    return cache.get(text, lambda: encode_prompt(model.text_encoder, model.tokenizer, text))


apple, nothing, noise = says("red apple"), says(""), initial_noise([0], (4, 16, 16))


def plain(x: Tensor, t: Tensor, prompt: PromptEmbeds) -> Tensor:
    return dit(x, t, *prompt)


def walk(network: Callable, steps: int = 28, buffer: LatentBuffer | None = None, **options: Any) -> Tensor:
    velocity = guided_velocity(network, apple, nothing, 3.0, **options)
    return denoise(velocity, noise, make_schedule(steps), buffer=buffer).latents


def peak_of(run: Callable[[], Any]) -> int:
    with torch.no_grad(), LiveBytes() as live:
        run()
    return live.peak


@torch.no_grad()
def decibels(latents: Tensor, reference: Tensor) -> float:
    return psnr(model.vae.decode(latents), model.vae.decode(reference).clamp(-1, 1)).item()


drawn, levels = walk(plain), make_schedule(28).sigmas

# %% [markdown] lang="zh"
# ## 先学会量
#
# 电脑同时在做别的事，计时就会抖。先跑 A 再跑 B，忙的那一阵只落在一边。所以轮流跑：A B A B；预热（warm-up）不计；报中位数和范围；要比，就逐轮相除，不拿两个中位数相除。

# %% [markdown] lang="en" twin="a04ccd30"
# ## Learn to measure first
#
# The computer does other things too, so timings shake. Run all of A, then all of B, and a busy moment hits one side alone. So take turns, A B A B; warm-up does not count; report median and range; to compare, divide round by round, not median by median.


# %% tags=["export"]
class Timing(NamedTuple):
    """Seconds of repeated runs: median, smallest, largest, and all of them in the order of measuring."""

    median: float
    low: float
    high: float
    every: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> "Timing":
        """The summary of some numbers."""
        return cls(statistics.median(values), min(values), max(values), tuple(values))

    def __str__(self) -> str:
        unit, factor = ("s", 1) if self.median >= 1 else ("ms", 1e3)
        return f"{self.median * factor:.3g} {unit} ({self.low * factor:.3g} … {self.high * factor:.3g})"


def measure(
    *runs: Callable[[], Any], repeats: int = 7, warmup: int = 2, synchronize: Callable[[], Any] = lambda: None
) -> list[Timing]:
    """Time several runs in turn, A B C A B C …, so that a busy moment of the machine hits all of them alike.

    Args:
        repeats: rounds that count, 1 or more. warmup: rounds before them that do not.
        synchronize: called before each reading of the clock, so that work queued on a GPU is counted where it belongs.

    Raises:
        ValueError: no round that counts.
    """
    if repeats < 1 or warmup < 0:
        raise ValueError(f"{repeats} repeats after {warmup} rounds of warm-up measure nothing; try 5 and 1")
    seconds = [[] for _ in runs]
    for turn in range(-warmup, repeats):
        for run, kept in zip(runs, seconds):
            synchronize()
            begun = time.perf_counter()
            run()
            synchronize()
            if turn >= 0:
                kept.append(time.perf_counter() - begun)
    return [Timing.of(kept) for kept in seconds]


def ratio(ours: Timing, other: Timing) -> Timing:
    """ours / other, round by round: the spread of the quotient, not the quotient of two medians."""
    return Timing.of([a / b for a, b in zip(ours.every, other.every, strict=True)])


# %% tags=["check"]
order = []
short, long = measure(lambda: order.append("A"), lambda: (order.append("B"), time.sleep(0.002)), repeats=3, warmup=1)
assert order == list("ABABABAB") and len(short.every) == len(long.every) == 3  # in turn, and warm-up is not kept
assert 0.002 <= long.low <= long.median <= long.high
busy = ratio(Timing.of([1.0, 10.0, 2.0]), Timing.of([2.0, 20.0, 4.0]))  # a machine that was busy in round two
assert (busy.low, busy.median, busy.high) == (0.5, 0.5, 0.5)  # no spread at all: the rounds were paired

# %% [markdown] lang="zh"
# ## 两道天花板
#
# 只占时间 $p$ 的一段快了 $k$ 倍，整体最多快 $1/(1-p+p/k)$ 倍：这是阿姆达尔定律（Amdahl's law）。机器也有天花板：每搬一个字节做 $I$ 次运算（算术强度，arithmetic intensity），速率不超过 $\min(P, I \cdot W)$，其中 $P$ 是峰值，$W$ 是内存带宽（bandwidth）。画出来像屋顶，叫屋顶线（roofline）。

# %% [markdown] lang="en" twin="db2992ff"
# ## Two ceilings
#
# When a part that takes the share $p$ of the time gets $k$ times faster, the whole gains at most $1/(1-p+p/k)$: Amdahl's law. The machine has a ceiling too: with $I$ operations for each byte moved (arithmetic intensity) it never exceeds $\min(P, I \cdot W)$, where $P$ is its peak and $W$ the memory bandwidth. Drawn, it looks like a roof: the roofline.


# %% tags=["export"]
def amdahl(share: float, factor: float) -> float:
    """How much faster the whole gets, 1 / (1 − p + p/k), when a share p of its time gets k times faster.

    Args:
        share: p, in 0…1. factor: k > 0; infinity removes the part.

    Raises:
        ValueError: a share outside 0…1, or a factor that is not positive.

    Source: Amdahl 1967.
    """
    if not 0 <= share <= 1 or not factor > 0:
        raise ValueError(f"share {share} with factor {factor}: a share lies in 0…1, a factor is positive; try 0.5, 2.0")
    rest = 1 - share + share / factor
    return 1 / rest if rest else math.inf


def roofline(intensity: float, peak: float, bandwidth: float) -> float:
    """FLOP/s that a machine can reach at best: min(P, I · W); the two meet at the ridge, I = P / W.

    Args:
        intensity: I, operations for each byte moved. peak: P, FLOP/s of large matrix products.
        bandwidth: W, bytes a second.

    Source: Williams et al. 2009.
    """
    return min(peak, intensity * bandwidth)


def weight_intensity(
    config: DiTConfig, grid: tuple[int, int], text_tokens: int, batch: int = 1, itemsize: int = 4
) -> float:
    """Operations that one forward of a `DiT` does for each byte of its weights, which it must read once.

    Args:
        config, grid, text_tokens, batch: as in `flop_count`. itemsize: bytes a weight.
    """
    return flop_count(config, grid, text_tokens, batch) / (parameter_count(config) * itemsize)


# %% tags=["check"]
assert amdahl(0.03, math.inf) < 1.031 and amdahl(1.0, 2.0) == 2.0 and amdahl(0.0, 9.0) == 1.0
assert amdahl(0.5, 2.0) == 1 / (0.5 + 0.25)
assert roofline(1, peak=100, bandwidth=10) == 10 and roofline(50, peak=100, bandwidth=10) == 100
flux = DiTConfig(16, 2, 3072, 24, 19, 38, 4096)  # FLUX.1's sizes; 64 × 64 tokens are a picture of 1024 × 1024
dense, token = weight_intensity(flux, (64, 64), 512, itemsize=2), 2 / 2  # a decoder reads a weight for 2 operations
assert 0.4 < dense / (64 * 64 + 512) < 0.7 and dense > 295 > token  # an H100's ridge lies between the two
assert weight_intensity(flux, (64, 64), 512, batch=2, itemsize=2) == 2 * dense  # a batch shares the weights

# %% tags=["hide"]
square, line = torch.randn(1024, 1024), torch.randn(8_000_000)
product, copied = measure(lambda: square @ square, line.clone)
peak, bandwidth = 2 * 1024**3 / product.median / 1e9, 2 * line.nbytes / copied.median / 1e9
fig, ax = plt.subplots(figsize=(6.4, 2.9))
intensity = [2.0**k for k in range(-3, 11)]
ax.plot(intensity, [roofline(i, peak, bandwidth) for i in intensity], color="black", lw=1, label="roof of this machine")
for side in (1, 2, 4, 16):
    patches = torch.randn(1, 4, 4 * side, 4 * side)
    with torch.no_grad():
        (seconds,) = measure(lambda p=patches: plain(p, torch.tensor([500.0]), apple))
    words = apple.tokens.shape[1]
    rate = flop_count(dit.config, (side, side), words) / seconds.median / 1e9
    ax.plot(weight_intensity(dit.config, (side, side), words), rate, "o", color=COLORS[0], ms=5)
    place = weight_intensity(dit.config, (side, side), words), rate
    ax.annotate(f"{side * side} patches", place, (5, -9), textcoords="offset points", fontsize=7)
ax.axvline(0.5, color=COLORS[1], lw=1, ls="--", label="decoding one token")
ax.set(
    title="Decoding would starve, the DiT computes", xscale="log", yscale="log", xlabel="operations a byte of weights"
)
ax.set_ylabel("GFLOP/s")
ax.legend()
show(
    fig,
    alt="A roofline: the DiT moves towards the flat roof as patches grow; decoding one token stands far on the slope",
)

# %% [markdown] lang="zh"
# 屋顶线和圆点都是刚在你的机器上量的。自回归解码每步只算一个词元（token），卡在搬权重的斜坡上；DiT 一次算几百个词元，撞的是算力的平顶。所以键值缓存救前者，救不了后者。
#
# ## 实验一、二：存起来，和先占好
#
# 提示词缓存（prompt cache）：每条提示词单独编码，命中就该逐位相同。双缓冲（ping-pong buffers）：更新一步不再分配内存，地址不变。

# %% [markdown] lang="en" twin="77917179"
# Roof and dots were measured on your machine just now. An autoregressive decoder computes one token a step and sits on the slope, hauling weights; the DiT computes hundreds of tokens and meets the flat roof. That is why a key-value cache saves the one and not the other.
#
# ## Experiments one and two: keep it, and reserve it
#
# A prompt cache: each prompt is encoded alone, so a hit must be the same bits. Ping-pong buffers: a step's update allocates nothing, and addresses stay.

# %% tags=["check"]
encode = partial(encode_prompt, model.text_encoder, model.tokenizer, "red apple")
assert cache.misses == 2 and all(torch.equal(a, b) for a, b in zip(says("red apple"), encode()))  # a hit: the same bits
print("encode {}; from the cache {}".format(*measure(encode, lambda: says("red apple"))))
pair = LatentBuffer((1, 4, 16, 16))
with LiveBytes() as live:
    euler_step(lambda x, s: noise, pair.front, 1.0, 0.9, (), pair.back)
assert live.allocations == 0 and torch.equal(walk(plain, 4, pair), walk(plain, 4))  # the update alone; the same bits

# %% [markdown] lang="zh"
# 第一个快上百倍，却只占一张图的零头：阿姆达尔定律说整体几乎不变。第二个**不是加速**：固定地址是给显卡的图捕获（graph capture）准备的。
#
# ## 实验三：少走几步
#
# 误差随步数怎样降？在有公式的高斯世界里，欧拉法斜率 $-1$，Heun 和多步法 $-2$；但 Heun 一步问两次。

# %% [markdown] lang="en" twin="074b68e9"
# The first is a hundred times faster, yet a sliver of a picture: Amdahl says the whole hardly moves. The second is **no speed-up**: fixed addresses are what graph capture on a GPU needs.
#
# ## Experiment three: take fewer steps
#
# How does the error fall with the number of steps? In a Gaussian world with a formula the slope is $-1$ for Euler, $-2$ for Heun and multistep; but a Heun step asks twice.


# %% tags=["check"]
def gaussian(x: Tensor, s: float, tau: float = 0.5) -> Tensor:  # data of width τ: the exact velocity, 1 flows to τ
    return (s - (1 - s) * tau**2) / ((1 - s) ** 2 * tau**2 + s**2) * x


def slope(solver: str) -> float:
    one = torch.ones(1, dtype=torch.float64)
    ends = [denoise(gaussian, one, make_schedule(n), solver).latents.item() for n in (64, 128)]
    return math.log2(abs(ends[1] - 0.5) / abs(ends[0] - 0.5))


assert abs(slope("euler") + 1) < 0.1 and abs(slope("heun") + 2) < 0.15 > abs(slope("multistep") + 2)

# %% tags=["hide"]
fig, ax = plt.subplots(figsize=(6.4, 2.8))
velocity = guided_velocity(plain, apple, nothing, 3.0)
exact = denoise(velocity, noise, make_schedule(48), "multistep").latents
for solver, marker in zip(("euler", "heun", "multistep"), "os^"):
    calls = (4, 8, 14)
    ends = [denoise(velocity, noise, make_schedule(n // (1 + (solver == "heun"))), solver).latents for n in calls]
    ax.plot(calls, [decibels(end, exact) for end in ends], marker=marker, ms=4, label=solver)
ax.set(title="On the shipped model the road is nearly straight", xlabel="guided model calls")
ax.set_ylabel("PSNR to 48 steps, dB")
ax.legend()
show(fig, alt="PSNR of the picture against guided model calls, one line a solver; all three rise")

# %% [markdown] lang="zh"
# ## 实验四、五：合批引导，注意力的内存
#
# 两次提问可以合成一批，画不变，内存却多一份。时间呢？算力占满时差不多；这个小模型还能省下些零碎开销（见下面打印的比值）。注意力：朴素写法摊开 $N \times N$ 的分数，内存斜率是 2；分段和融合（SDPA）的斜率是 1。一张 $(N, N)$ 的掩码会把 $N^2$ 请回来。

# %% [markdown] lang="en" twin="88583017"
# ## Experiments four and five: batched guidance, attention memory
#
# Two questions can go as one batch; the picture stays, memory doubles. And time? About the same where the device is busy already; this small model saves some overhead (the ratio printed below). Attention: the plain form lays $N \times N$ scores out, slope 2 in memory; chunked and fused (SDPA) have slope 1. An $(N, N)$ mask brings $N^2$ back.

# %% tags=["check"]
together, apart = (guided_velocity(plain, apple, nothing, 3.0, batched=b) for b in (True, False))
assert torch.allclose(together(noise, 0.6), apart(noise, 0.6), atol=1e-5)
assert 1.6 < peak_of(lambda: together(noise, 0.6)) / peak_of(lambda: apart(noise, 0.6)) < 2.6  # memory doubles
change = ratio(*measure(lambda: together(noise, 0.6), lambda: apart(noise, 0.6))).median
print(f"batched takes {change:.2f} × the time of sequential")


# %% tags=["check"]
ways = {"naive": lambda q, k, v: (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v, "fused": attention}
ways["chunked"] = partial(attention, chunk=64)
heads = {n: torch.randn(3, 1, 4, n, 16).unbind() for n in (1024, 2048)}
bytes_of = {name: [peak_of(lambda w=way, qkv=qkv: w(*qkv)) for qkv in heads.values()] for name, way in ways.items()}
slopes = {name: math.log2(b / a) for name, (a, b) in bytes_of.items()}
assert slopes["naive"] > 1.9 and slopes["chunked"] < 1.1 and slopes["fused"] < 1.1
assert all(torch.allclose(way(*heads[1024]), ways["naive"](*heads[1024]), atol=1e-5) for way in ways.values())

# %% [markdown] lang="zh"
# ## 实验六：分片解码
#
# 把一墙苹果（$96 \times 96$ 个潜变量）切成九片解码：均匀切、重叠处渐变。内存降到三成以下，多算约四分之一；画的差别要小到看不见，接缝也不能比别处更突出。小图不必分片：重叠占比太大，只会更慢。

# %% [markdown] lang="en" twin="659798ca"
# ## Experiment six: tiled decoding
#
# Decode a wall of apples, $96 \times 96$ latents, as nine tiles: even cuts, blended overlaps. Memory falls below a third, the work grows by about a quarter; the difference must be invisible, and no seam may stand out. Small pictures need no tiles: the overlap is then most of the work.

# %% tags=["check"]
wall = drawn.repeat(1, 1, 6, 6)
with torch.no_grad():
    whole, tiles = model.vae.decode(wall), tiled_decode(model.vae, wall, tile=36, overlap=6)
assert peak_of(lambda: tiled_decode(model.vae, wall, 36, 6)) < 0.35 * peak_of(lambda: model.vae.decode(wall))
assert psnr(tiles, whole.clamp(-1, 1)) > 35
jumps = [(image[..., 4 * 33] - image[..., 4 * 33 - 1]).abs().mean() for image in (tiles, whole)]  # mid-overlap
assert jumps[0] < 1.1 * jumps[1] + 1e-4  # no seam

# %% [markdown] lang="zh"
# 下表是公开的最好成绩。和我们的差距大多有原因：我们的模型小、路直、只有一台 CPU。
#
# | 实验 | 公开的成绩 |
# | --- | --- |
# | 提示词缓存 | 15.5 秒里省 0.43 秒，逐位相同 |
# | 双缓冲 | 没有人报告过加速 |
# | 求解器 | Sana 用 DPM++ 走 14–20 步，欧拉要 28–50 步 |
# | 合批引导 | 1.86–2.1 倍，但要两块显卡 |
# | 注意力 | 内存从 $N^2$ 降到 $N$ |
# | 分片解码 | 内存省到 1/3.5–1/5，多花 20–30 % 时间 |

# %% [markdown] lang="en" twin="b2682fa0"
# The table has the best published figures. Most gaps to ours have a reason: our model is small, its road is straight, and there is one CPU.
#
# | experiment | published |
# | --- | --- |
# | prompt cache | 0.43 s of 15.5 s, bit-identical |
# | ping-pong buffers | nobody reports a gain |
# | solver | Sana: DPM++ in 14–20 steps against Euler in 28–50 |
# | batched guidance | 1.86–2.1×, but on two GPUs |
# | attention | memory $N$ instead of $N^2$ |
# | tiled decoding | 3.5–5× less memory for 20–30 % more time |

# %% [markdown] lang="zh"
# ## 外提：和潜变量无关的，只算一次
#
# 循环里不变的东西要提到循环外（外提，hoisting）。走第一步之前，全部时刻都已知道：一个块在所有步的旋钮 $W\,\mathrm{SiLU}(c_k)$ 拼成**一次**矩阵乘法，$(S \cdot B, D) \times (D, kD)$；文本的入口投影和位置表也只做一次。这批权重不再每步重读；FLUX 有四分之一的权重是为这一个向量准备的。

# %% [markdown] lang="en" twin="cec53e3b"
# ## Hoisting: compute once what no latent changes
#
# What stays the same in a loop belongs outside of it (hoisting). All times are known before the first step: the knobs $W\,\mathrm{SiLU}(c_k)$ of a block at all steps become **one** product, $(S \cdot B, D) \times (D, kD)$; the text's way in and the position table are made once too. These weights are no longer read again at each step; in FLUX a quarter of all weights serves this one vector.


# %% tags=["export"]
def by_step(knobs: Any, steps: int) -> list:
    """Knobs made for S · B samples at once, step after step, as S times those of B; nested in any way, None stays None."""
    if knobs is None or isinstance(knobs, Tensor):
        return [None] * steps if knobs is None else list(knobs.unflatten(0, (steps, -1)).unbind(0))
    rows = zip(*(by_step(part, steps) for part in knobs))
    return [type(knobs)(*row) if isinstance(knobs, Mod) else type(knobs)(row) for row in rows]


def hoist(dit: DiT, grid: tuple[int, int], sigmas: Tensor, prompt: PromptEmbeds) -> list[Conditions]:
    """What `DiT.velocity` reads besides the latents, for every noise level of a schedule at once; equal to 1e-5.

    One product a layer, (S · B, D) × (D, its knobs), steers a block at every step; text tokens and positions are made once;
    a mask that hides nothing is dropped. The knobs take S · B · (all knobs) numbers.

    Args:
        grid: of image tokens. sigmas: (S,). prompt: the B prompts of one forward.

    Returns:
        S × `Conditions`.
    """
    cond = (dit.time_in(1000 * sigmas.float())[:, None] + dit.pooled_in(prompt.pooled)).flatten(0, 1)  # (S · B, D)
    joint = [(block.image_modulation(cond), block.text_modulation(cond)) for block in dit.joint_blocks]
    knobs = [*joint, *(block.modulation(cond) for block in dit.parallel_blocks), dit.final.knobs(cond)]
    text, mask = dit.text_in(prompt.tokens), None if bool(prompt.mask.all()) else prompt.mask
    positions = sincos_2d(grid, dit.config.width).to(text)
    return [Conditions(text, mask, positions, row) for row in by_step(knobs, len(sigmas))]


# %% tags=["check"]
both, x = stack_prompts([nothing, apple]), noise.repeat(2, 1, 1, 1)
with torch.no_grad():
    ahead = hoist(dit, (4, 4), levels, both)
    for k in (0, 13, 28):  # σ = 0 belongs to it, for Heun's second look
        t = torch.full((2,), 1000 * levels[k].item())
        assert torch.allclose(dit.velocity(x, ahead[k]), plain(x, t, both), atol=1e-5)
    assert ahead[0].text_mask is not None and hoist(dit, (4, 4), levels, apple)[0].text_mask is None
    stacked = dit.final.knobs(dit.conditions((4, 4), t, *both).cond[0].repeat(3, 1))  # three steps of two samples
    assert all(torch.equal(a, b[2:4]) for a, b in zip(by_step(stacked, 3)[1], stacked))
    assert by_step([Mod(stacked[0], stacked[1])], 3)[2][0].gate is None
    own = dit.joint_blocks[0].text_modulation(dit.conditions((4, 4), t, *both).cond[0])
    assert torch.allclose(own[0].shift, ahead[28].cond[0][1][0].shift, atol=1e-5)  # the text side's own

# %% [markdown] lang="zh"
# ## 文本的键和值：一处能提，一处不能
#
# 交叉注意力（Sana、Wan、PixArt）里，文本从头到尾不变，键和值算一次就够，逐位相同。联合注意力（SD3、FLUX 和我们的）里不行：文本流每一步都被 $t$ 调制，还读过图像；存下来就是近似，不再精确。

# %% [markdown] lang="en" twin="ceea1b1e"
# ## Text keys and values: hoisted in one place, not in the other
#
# In cross-attention (Sana, Wan, PixArt) the text stays the same throughout: keys and values are made once, same bits. In joint attention (SD3, FLUX, ours) they cannot be: the text stream is modulated by $t$ at every step and has read the image; kept, they would be an approximation.


# %% tags=["export"]
def hoist_text(cross: CrossAttention, text: Tensor) -> Callable[..., Tensor]:
    """The same cross-attention with keys and values of text (B, M, Dt) made once: called as (x, text_mask, chunk)."""
    keys, values = cross.keys_values(text)
    return lambda x, text_mask=None, chunk=None: cross.attend(x, keys, values, text_mask, chunk)


# %% tags=["check"]
torch.manual_seed(0)
cross, words = CrossAttention(32, 4).requires_grad_(False), torch.randn(2, 5, 32)
kept, real = hoist_text(cross, words), torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
for image in torch.randn(3, 2, 16, 32):  # three steps
    assert torch.equal(kept(image, real), cross(image, words, real))  # the same bits
    assert not torch.equal(kept(image, real), kept(image))


def text_keys(k: int) -> Tensor:  # what the first joint block makes of the same words at step k
    return dit.joint_blocks[0].attn.text.split(modulate(ahead[k].text, ahead[k].cond[0][1][0]))[1]


assert (text_keys(0) - text_keys(14)).abs().max() > 0.1  # they follow t: not to be hoisted

# %% [markdown] lang="zh"
# ## 步缓存：相邻两步很像，就少算几块
#
# 步缓存（step cache）里最有名的是首块缓存（first-block cache）：第一块总是算；它推动词元的方式和上次相差不到阈值，其余各块的总贡献就不再算，用上次的，或者沿最近两次的连线外推。阈值 0 必须逐位相同。记忆属于**一次**运行，每条提示词各有一份。

# %% [markdown] lang="en" twin="de137610"
# ## A step cache: where two steps are alike, compute fewer blocks
#
# The best-known step cache is the first-block cache: the first block always runs; while it moves the tokens within a threshold of how it last did, the joint contribution of all other blocks is not computed but taken from last time, or from the line through the last two. Threshold 0 must be the same bits. The memory belongs to **one** run, a part for each prompt.


# %% tags=["export", "hide"]
class PromptTable:
    """prompt → value, found by the prompt's numbers: guidance stacks its prompts anew at each step."""

    def __init__(self):
        self.rows: list[tuple[PromptEmbeds, Any]] = []

    def get(self, prompt: PromptEmbeds, make: Callable[[], Any]) -> Any:
        """The value that make() gave when this prompt was first met."""
        for known, value in self.rows:
            if all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(known, prompt)):
                return value
        self.rows.append((prompt, make()))
        return self.rows[-1][1]


class Memory:
    """What a step cache keeps of one prompt: the first block's last change, and up to two (t, change by the rest)."""

    def __init__(self):
        self.first: Tensor | None = None
        self.rest: list[tuple[float, Tensor]] = []

    def is_near(self, change: Tensor, threshold: float) -> bool:
        """Whether mean |change − first| < threshold · mean |first| in every sample."""
        if self.first is None:
            return False
        apart, size = (y.flatten(1).float().abs().mean(1) for y in (change - self.first, self.first))
        return bool((apart < threshold * size).all())

    def keep(self, t: float, first: Tensor, rest: Tensor) -> None:
        """A full forward at time t: the first block moved the tokens by ``first``, the others by ``rest``."""
        self.first, self.rest = first, [*self.rest[-1:], (t, rest)]

    def guess(self, t: float, forecast: bool) -> Tensor:
        """The change by the rest at time t: the last one, or, with ``forecast``, on the line through the last two."""
        t1, last = self.rest[-1]
        if not forecast or len(self.rest) < 2:
            return last
        t0, before = self.rest[0]
        return torch.lerp(before, last, (t - t0) / (t1 - t0)) if t1 != t0 else last


# %% tags=["export"]
class StepCache:
    """First-block cache of *one* run: while the first block does what it did, the other blocks are guessed.

    Below ``threshold``, a relative change that every sample of the batch must keep, a forward costs one block. At 0 every
    forward is full: same bits.

    Args:
        threshold: 0 or more; published settings lie near 0.1.
        forecast: go on along the line through the last two full forwards, instead of repeating the last.

    Attributes:
        full, reused: forwards of each kind so far.

    Raises:
        ValueError: a threshold that is negative or not finite.

    Source: ParaAttention's first-block cache; Liu et al. 2025 (TaylorSeer) for the forecast.
    """

    def __init__(self, threshold: float, forecast: bool = True):
        if not 0 <= threshold < math.inf:
            raise ValueError(f"step cache threshold {threshold} is not a number from 0 up; try 0.1, or 0 for none")
        self.threshold, self.forecast = threshold, forecast
        self.full, self.reused, self.memories = 0, 0, PromptTable()

    def runner(self, prompt: PromptEmbeds, t: float, blocks: int, run_block: Callable = call) -> Callable:
        """A ``run_block`` for one forward of ``blocks`` blocks at time t; what has to run goes through ``run_block``."""
        memory, place, near, first, after = self.memories.get(prompt, Memory), 0, False, None, None

        def run(block: nn.Module, x: Tensor, *rest: Any) -> Any:
            nonlocal place, near, first, after
            place += 1
            untouched = (x, rest[0]) if isinstance(block, JointBlock) else x
            out = untouched if near else run_block(block, x, *rest)
            tokens = out[0] if isinstance(out, tuple) else out
            if place == 1:
                first, after = tokens - x, tokens
                near = memory.is_near(first, self.threshold)
                self.full, self.reused = self.full + (not near), self.reused + near
            if place < blocks:
                return out
            if near:
                moved = after + memory.guess(t, self.forecast)
                return (moved, rest[0]) if isinstance(out, tuple) else moved
            memory.keep(t, first, tokens[:, : after.shape[1]] - after)
            return out

        return run


# %% tags=["export", "hide"]
class Accelerated:
    """model(x, t, prompt) for `guided_velocity`: a `DiT` with the switches of one run; make a new one for each run.

    Args:
        sigmas: of the schedule, to `hoist`; None works everything out at each step.
        cache: a `StepCache` of this run. chunk: see `attention`.
        run_block: how a block is run, see `DiT.forward`; `compiled_blocks` for example.

    Raises:
        ValueError: at the call: a time that is not in ``sigmas``.
    """

    def __init__(
        self,
        dit: DiT,
        sigmas: Tensor | None = None,
        cache: StepCache | None = None,
        chunk: int | None = None,
        run_block: Callable = call,
    ):
        self.dit, self.sigmas, self.cache, self.chunk, self.run_block = dit, sigmas, cache, chunk, run_block
        self.hoisted = PromptTable()

    def __call__(self, x: Tensor, t: Tensor, prompt: PromptEmbeds) -> Tensor:
        x, run_block = x.to(prompt.tokens.dtype), self.run_block
        if self.cache is not None:
            blocks = len(self.dit.joint_blocks) + len(self.dit.parallel_blocks)
            run_block = self.cache.runner(prompt, float(t[0]), blocks, run_block)
        if self.sigmas is None:
            return self.dit(x, t, *prompt, self.chunk, run_block).float()
        steps = self.hoisted.get(prompt, lambda: self._ahead(x, prompt))
        if float(t[0]) not in steps:
            raise ValueError(f"t = {float(t[0]):g} is not a time of this schedule; try one of {list(steps)[:3]} …")
        return self.dit.velocity(x, steps[float(t[0])], self.chunk, run_block).float()

    def _ahead(self, x: Tensor, prompt: PromptEmbeds) -> dict[float, Conditions]:
        grid = patch_grid(*x.shape[-2:], self.dit.config.patch)
        return dict(zip((1000 * self.sigmas).tolist(), hoist(self.dit, grid, self.sigmas.to(x.device), prompt)))


# %% tags=["check"]
def cached(threshold: float, **options: Any) -> tuple[Tensor, StepCache]:
    memory = StepCache(threshold, **options)
    return walk(Accelerated(dit, levels, memory)), memory


hoisted = walk(Accelerated(dit, levels))
assert torch.allclose(hoisted, drawn, atol=1e-4)  # 28 steps of 1e-5 each
same, none = cached(0.0)
assert torch.equal(same, hoisted) and (none.full, none.reused) == (28, 0)  # threshold 0: the same bits
near, some = cached(0.2)
assert some.full + some.reused == 28 and some.reused > 8 and not torch.equal(near, hoisted)


repeat, _ = cached(0.2, forecast=False)
assert decibels(near, hoisted) > max(34, decibels(repeat, hoisted))  # the line beats the last value
assert torch.equal(cached(0.2)[0], near)  # a new run starts from nothing
mixed, split = (walk(Accelerated(dit, cache=StepCache(9.0)), 4, batched=b) for b in (True, False))
assert torch.allclose(mixed, split, atol=1e-4)  # two prompts, two memories: they are not mixed up
stale, at_800 = StepCache(9.0), torch.tensor([800.0])
answers = [Accelerated(dit, cache=stale)(x, at_800, apple) for x in (noise, -noise)]
assert not torch.allclose(answers[1], plain(-noise, at_800, apple), atol=0.1)  # a memory that outlives its run leaks

# %% tags=["hide"]
fig, ax = plt.subplots(figsize=(6.4, 2.8))
steps = (7, 10, 14, 20)
ax.plot(
    [100 * n / 28 for n in steps],
    [decibels(walk(Accelerated(dit, make_schedule(n).sigmas), n), hoisted) for n in steps],
    color="black",
    lw=1,
    label="just fewer Euler steps",
)
for forecast, label in ((True, "cache, forecast"), (False, "cache, repeat")):
    runs = [cached(threshold, forecast=forecast) for threshold in (0.1, 0.2, 0.3)]
    work = [100 * (7 * memory.full + memory.reused) / (7 * 28) for _, memory in runs]
    ax.plot(work, [decibels(end, hoisted) for end, _ in runs], "o", ms=5, label=label)
ax.axhline(34, color="#718096", lw=0.8, ls=":")
ax.set(title="Reusing blocks against walking fewer steps", xlabel="blocks computed, % of 28 full steps")
ax.set_ylabel("PSNR to 28 steps, dB")
ax.legend()
show(
    fig,
    alt="PSNR against the share of blocks computed: a line for fewer steps, dots for the step cache with both rules",
)

# %% [markdown] lang="zh"
# 老实读：两倍、34 dB 不难，难的是赢过「少走几步」。重复上一次总是输；外推只在加速不大时赢，再往上也输：首块占七块之一，路又直，28 步本来就多。FLUX 有 57 块，跳一步几乎免费。外推其实是多步法改了名。
#
# ## 引导的变体
#
# 只在一段 $\sigma$ 上引导：占比 $r$ 的步问两次，省 $(1-r)/2$ 的调用。CFG-Zero\* 和重缩放只改画质。

# %% [markdown] lang="en" twin="3f966f3b"
# Honestly: 2× at 34 dB is easy, beating fewer steps is not. Repeating always loses; the forecast wins while the speed-up is small, then loses too: the first block is a seventh of the work, and the road is straight. With FLUX's 57 blocks a skip is nearly free. The forecast is the multistep solver renamed.
#
# ## Variants of guidance
#
# Guiding a share $r$ of the steps saves $(1-r)/2$ of the calls; CFG-Zero\* and rescale only change the picture.

# %% [markdown] lang="zh"
# ## 整台引擎的账
#
# 前面的实验很小。`make bench` 在整张图上量每个开关，也量引导的变体，存进 `notes/bench.json`；下图读的就是它。竖线左边才省时间：合批和外提最值，步缓存要付画质。右边：各种变体在 48 条说明里找对的一样多，不引导也只少一条。

# %% [markdown] lang="en" twin="5cf5ffa7"
# ## The whole engine's bill
#
# The experiments above are small. `make bench` measures every switch on whole pictures, and the variants of guidance; the figure reads what it left in `notes/bench.json`. Left of the line time is saved: batching and hoisting pay most, the step cache costs quality. On the right: all variants find as many of 48 captions, no guidance one fewer.

# %% tags=["hide"]
import inspect
import json
from pathlib import Path

root = Path(inspect.getfile(show)).parents[1]
report = json.loads((root / "notes" / "bench.json").read_text(encoding="utf-8"))["optimizations"]
fig, (left, right) = plt.subplots(1, 2, figsize=(6.4, 2.9))
for row, found in enumerate(report["switches"].values()):
    median, low, high = found["time_ratio"]
    left.plot([low, high], [row, row], color="#718096", lw=1)
    left.plot(median, row, "o", color=COLORS[0], ms=5)
left.axvline(1, color="black", lw=0.8)
left.set(yticks=range(len(report["switches"])), yticklabels=report["switches"], title="Time, on / off")
for row, found in enumerate(report["guidance"]):
    right.barh(row, found["calls"], color=COLORS[1], height=0.6)
    right.text(
        found["calls"] - 1, row, f"{found['right']:.0%} right", ha="right", va="center", fontsize=7, color="white"
    )
right.set(yticks=range(7), yticklabels=[found["name"] for found in report["guidance"]], title="Samples of the network")
for ax in (left, right):
    ax.invert_yaxis()
    ax.tick_params(axis="y", labelsize=8)
show(
    fig,
    alt="Left: time with each switch over time without, most near one, batching, hoisting and the step cache at 0.7 to 0.8. "
    "Right: network samples of seven ways of guidance, from 28 to 56, and the share of right pictures, nearly the same.",
)

# %% [markdown] lang="zh"
# ## 编译与半精度
#
# `torch.compile` 把一块里的逐元素运算并起来，第一次调用要编译很久：这段预热另报。同一类的块共用一份代码，所以只编译块。bf16 看机器：有张量核心的显卡上才快；这台处理器没有这种指令，逐个数模拟，比 fp32 慢得多。那就用 bf16 存，用 fp32 乘：每次只把一层放宽，内存仍然省一半（`upcast`）。

# %% [markdown] lang="en" twin="3419ca37"
# ## Compilation and half precision
#
# `torch.compile` fuses the elementwise work of a block; the first call compiles for long, and this warm-up is reported apart. Blocks of one kind share one piece of code, so compile only these. bf16 depends on the machine: GPUs with tensor cores gain; this processor emulates it, number by number, and is far slower. So store in bf16 and multiply in fp32 (`upcast`): one layer at a time is widened, half the memory stays saved.


# %% tags=["export", "hide"]
def compiled_blocks(compiler: Callable = torch.compile) -> Callable:
    """A ``run_block`` that runs each kind of block compiled; equal up to rounding, the first calls are slow.

    Args:
        compiler: forward → its compiled form.

    Raises:
        ValueError: torch.compile finds no C++ compiler on this machine.
    """
    names = (os.environ.get("CXX") or "g++", "clang++", "cl")
    if compiler is torch.compile and not any(shutil.which(name) for name in names):
        raise ValueError(
            f"compiling needs a C++ compiler, none of {', '.join(names)} is here; install g++ or leave it off"
        )
    kinds: dict[type, Callable] = {}

    def run(block: nn.Module, *arguments: Any) -> Any:
        kind = type(block)
        if kind not in kinds:
            kinds[kind] = compiler(kind.forward)
        return kinds[kind](block, *arguments)

    return run


HALVES = (torch.bfloat16, torch.float16)
PRODUCTS = (F.linear, F.conv2d, F.conv3d, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.baddbmm)


def multiplies(dtype: torch.dtype) -> bool:
    """Whether this processor has instructions for products of such numbers; True for fp32."""
    checks = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    return dtype not in checks or bool(getattr(torch.ops.mkldnn, checks[dtype])())


class Upcast(TorchFunctionMode):
    """``with Upcast():`` layers and products of bf16 or fp16 on the CPU are computed in fp32 and rounded once.

    Weights stay as small as they are; one layer at a time, and what it reads and gives, is widened while it runs.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in PRODUCTS or args[0].dtype not in HALVES or args[0].device.type != "cpu":
            return func(*args, **kwargs)
        widen = lambda x: x.float() if isinstance(x, Tensor) else x  # noqa: E731
        return func(*map(widen, args), **{key: widen(x) for key, x in kwargs.items()}).to(args[0].dtype)


# %% tags=["check"]
kinds = []
run_block = compiled_blocks(lambda forward: kinds.append(forward) or forward)  # a compiler that changes nothing
assert torch.equal(walk(Accelerated(dit, levels, run_block=run_block), 4), walk(Accelerated(dit, levels), 4))
assert len(kinds) == 2 and len(dit.joint_blocks) + len(dit.parallel_blocks) == 7  # one compilation a kind, not a block
with torch.no_grad(), Upcast():  # a layer kept in bf16, multiplied in fp32 and rounded once
    layer, tokens = nn.Linear(64, 64).bfloat16(), torch.randn(2, 9, 64).bfloat16()
    assert torch.equal(layer(tokens), layer.float()(tokens.float()).bfloat16()) and multiplies(torch.float32)

# %% [markdown] lang="zh"
# **到了这里**，引擎的每个开关都有名字：`engine("red apple", hoist=True, step_cache=0.1, vae_tile=16)`，命令行同名；会改变比特的都写进图片的记录。还缺：序列并行、量化、注意力稀疏。第 14 章问：潜变量多一根时间轴，哪些还成立？
#
# ## 三个问题
#
# 1. 预测：提示词缓存让编码快无穷倍，整张图最多快多少？
# 2. 修改：`hoist` 里把 $1000\sigma$ 写成 $\sigma$，形状不变，哪里会变红？
# 3. 动手：写一个「隔步问」的速度：每隔一步才问网络，其余沿连线外推。它的误差斜率是多少？像谁？

# %% [markdown] lang="en" twin="0ef41e96"
# **Where we stand.** Every switch of the engine has a name: `engine("red apple", hoist=True, step_cache=0.1, vae_tile=16)`, the same on the command line; whatever may change bits goes into the picture's record. Missing: sequence parallelism, quantisation, sparse attention. Chapter 14 asks what still holds when latents gain an axis of time.
#
# ## Three questions
#
# 1. Predict: the prompt cache makes encoding infinitely fast. How much faster can a whole picture get?
# 2. Modify: write $\sigma$ for $1000\sigma$ in `hoist`. Shapes stay; what turns red?
# 3. Build: a velocity that asks the network at every other step only and goes along the line in between. What is its error slope, and whom does it resemble?

# %% tags=["solution"]
# 1 · a few percent at most
encoding, four_steps = measure(encode, lambda: walk(plain, 4))
assert amdahl(encoding.median / (7 * four_steps.median), math.inf) < 1.3

# %% tags=["solution"]
# 2 · the network is told that the picture is almost finished, at every step
with torch.no_grad():
    late = hoist(dit, (4, 4), levels / 1000, both)
assert (dit.velocity(x, late[0]) - dit.velocity(x, ahead[0])).abs().max() > 0.1


# %% tags=["solution"]
# 3 · slope −2, with half the questions: the multistep solver again
def every_other(velocity: Callable) -> Callable:
    seen: list[tuple[float, Tensor]] = []

    def guess(x: Tensor, s: float) -> Tensor:
        if len(seen) < 2 or round(s * 128) % 2 == 0:
            seen[:] = [*seen[-1:], (s, velocity(x, s))]
            return seen[-1][1]
        (s0, v0), (s1, v1) = seen
        return torch.lerp(v0, v1, (s - s0) / (s1 - s0))

    return guess


one = torch.ones(1, dtype=torch.float64)
full, half = (denoise(v, one, make_schedule(128)).latents.item() for v in (gaussian, every_other(gaussian)))
fewer_steps = denoise(gaussian, one, make_schedule(64)).latents.item()
assert abs(half - full) < 0.1 * abs(fewer_steps - full)  # much closer to 128 steps than 64 steps are

# %% [markdown] lang="zh"
# ## 小结
#
# - 先证明相等或给出误差，再轮流计时、逐轮相除。
# - 阿姆达尔定律和屋顶线先说出上限：DiT 撞算力，自回归解码撞带宽。
# - 与潜变量无关的可以外提：旋钮一次算完；联合注意力的文本键不行。
# - 步缓存要和「少走几步」比；记忆属于一次运行。
# - 没用的时候要直说：双缓冲不加速；合批引导只在算力没占满时加速，内存总要翻倍。
#
# 笔记：[`notes/07_prompt_cache`](../../notes/07_prompt_cache.zh.md)、[`notes/08_latent_buffer`](../../notes/08_latent_buffer.zh.md)。下一章：14。

# %% [markdown] lang="en" twin="5ce62de2"
# ## Recap
#
# - First prove equality or give the error, then time in turn and divide round by round.
# - Amdahl's law and the roofline tell the limit ahead: a DiT meets compute, autoregressive decoding meets bandwidth.
# - What no latent changes can be hoisted: all knobs in one go; text keys of joint attention cannot.
# - A step cache must be compared with fewer steps; its memory belongs to one run.
# - Say plainly what does not help: ping-pong buffers bring no speed; batched guidance only where the device is not busy, and memory always doubles.
#
# Notes: [`notes/07_prompt_cache`](../../notes/07_prompt_cache.en.md), [`notes/08_latent_buffer`](../../notes/08_latent_buffer.en.md). Next: chapter 14.
