# ---
# jupyter:
#   course:
#     minutes: 25
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown] lang="zh"
# # 00 · 总览：一句话怎样变成一张图（overview）
#
# 这一章不造零件，先看成品：让写完的引擎画几张图，再把它拆开，陪一句话走完全程。走完你会知道，后面每一章在造哪一段路。
#
# | 你会看到 | 你需要 | 时间 | 模块 |
# | --- | --- | --- | --- |
# | 引擎画图、整张地图、全部约定、你这台机器的体检 | 读得懂 Python，见过 PyTorch 的张量 | 25 分钟 | 整个 `diffusion_engine/` |

# %% [markdown] lang="en" twin="4c3ba6ac"
# # 00 · Overview: how a sentence becomes a picture
#
# This chapter builds no part. It looks at the finished thing: the engine draws, then we take it apart and follow one sentence all the way. Afterwards you know which stretch of the road each later chapter builds.
#
# | You see | You need | Time | Module |
# | --- | --- | --- | --- |
# | the engine drawing, the whole map, all conventions, a check-up of your machine | to read Python, to have met PyTorch's tensors | 25 minutes | all of `diffusion_engine/` |

# %%
import torch

from course.figures import image_grid
from diffusion_engine import TextToImage

engine = TextToImage.from_pretrained(device="cpu")

# %%
prompts = ["red apple", "smiling cat", "火箭", "彩虹"]
drawn = engine(prompts, seed=0)
image_grid(
    drawn.images,
    ["red apple", "smiling cat", "rocket (in Chinese)", "rainbow (in Chinese)"],
    alt="Four generated pictures for the prompts red apple, smiling cat, rocket and rainbow, the last two asked for in Chinese.",
    title="Four prompts, four pictures, drawn just now on a CPU",
    size=1.5,
)

# %% [markdown] lang="zh"
# **先想一想**：一张图有 $64 \times 64 \times 3 = 12288$ 个数，你给的却只有几个字。引擎从哪里下笔？先定轮廓，还是先定颜色？它什么时候知道要画的是火箭？先写下你的猜测。

# %% [markdown] lang="en" twin="5c578fb7"
# **Think first:** a picture is $64 \times 64 \times 3 = 12288$ numbers, and you gave a few letters. Where does the engine begin? With the outline or with the colours? When does it know that this will be a rocket? Write your guess down.

# %% [markdown] lang="zh"
# ## 看它画
#
# 引擎从纯噪声出发，走 28 步。每走一步，它都能说出「照现在看，成品大概是这样」。我们用回调（callback）把这些预览（preview）存下来。

# %% [markdown] lang="en" twin="328a9179"
# ## Watch it draw
#
# The engine starts from pure noise and takes 28 steps. At every step it can tell what the finished picture looks like from here. A callback keeps these previews.

# %%
previews = []


def keep(info):
    previews.append((info.step, info.sigma, info.data.clone()))


rainbow = engine("彩虹", seed=0, callback=keep)
len(previews), previews[0][2].shape

# %% tags=["hide"]
chosen = [previews[k] for k in (0, 3, 7, 12, 18, 27)]
image_grid(
    engine.decode(torch.cat([data for _, _, data in chosen])),
    [f"after step {step}" for step, _, _ in chosen],
    alt="Six previews of one rainbow, from a blur after the first step to the finished picture after step 28.",
    title="First a blur of everything it could be, then outlines, then edges",
)

# %% [markdown] lang="zh"
# 第一张预览很糊：它是这句提示词所有可能成品的平均。「彩虹」的可能不多，所以弧形一开始就在。噪声退去，可能性变少，轮廓先定，边缘最后才清楚。最后一步的预览就是成品，一个数都不差。

# %% [markdown] lang="en" twin="fb0f59cc"
# The first preview is a blur: the average of all that this prompt might become. For a rainbow that is not much, so the arc is there at once. As the noise recedes fewer pictures remain possible; outlines settle first, edges last. The last preview is the finished picture, number for number.

# %% tags=["check"]
first, last = previews[0][2], previews[-1][2]
assert torch.allclose(last, rainbow.latents, atol=1e-5)  # nothing is left to remove
assert (first - rainbow.latents).norm() > (previews[-4][2] - rainbow.latents).norm()  # the guess improves

# %% [markdown] lang="zh"
# ## 一句话走的路
#
# 引擎内部只有一个方向，谁也不往回传。下面的数字是章号：
#
# ```
# "彩虹" ─ 07 ─→ prompt embeddings ──┐
#                                    ├─→ for each σ of 02:  06 velocity ×2 ─→ 08 guided velocity ─→ 02 step ─→ 09 decode ─→ picture
# seed 0 ─ 10 ─→ noise ──────────────┘
# ```
#
# 现在我们不用引擎的总开关，一段一段地自己走一遍。

# %% [markdown] lang="en" twin="c13ba123"
# ## The road of a sentence
#
# Inside the engine there is one direction; nothing is handed back. The numbers are chapters:
#
# ```
# "彩虹" ─ 07 ─→ prompt embeddings ──┐
#                                    ├─→ for each σ of 02:  06 velocity ×2 ─→ 08 guided velocity ─→ 02 step ─→ 09 decode ─→ picture
# seed 0 ─ 10 ─→ noise ──────────────┘
# ```
#
# Now we walk it ourselves, stretch by stretch, without the engine's main switch.

# %% [markdown] lang="zh"
# **文字变成向量（第 07 章）。** 文本编码器给每个词元一个向量，再给整句一个向量。空句子也编码一份：等一下要问网络「要是什么都没说，你会画什么」。

# %% [markdown] lang="en" twin="b45f3293"
# **Words become vectors (chapter 07).** The text encoder gives one vector a token and one for the whole sentence. The empty sentence is encoded too: soon we ask the network what it would draw had nothing been said.

# %%
cond, uncond = engine.encode(["彩虹"]), engine.encode([""])
cond.tokens.shape, cond.pooled.shape

# %% [markdown] lang="zh"
# **种子变成噪声（第 10 章）。** 画布不是像素，而是 $4 \times 16 \times 16$ 的潜变量（latent），小了十二倍；像素到最后才出现。每张图有自己的随机数发生器，所以单独画和成批画从同一片噪声出发。

# %% [markdown] lang="en" twin="7f6e719b"
# **A seed becomes noise (chapter 10).** The canvas is not pixels but latents of $4 \times 16 \times 16$, twelve times fewer numbers; pixels appear only at the end. Every picture has its own generator, so it starts from the same noise alone or in a batch.

# %%
from diffusion_engine.pipeline import initial_noise
from diffusion_engine.scheduler import make_schedule

x = initial_noise([0], engine.latent_shape(64, 64))
x.shape, 64 * 64 * 3 / x[0].numel()

# %% [markdown] lang="zh"
# **路上停哪几站（第 01、02 章）。** $\sigma = 1$ 是纯噪声，$\sigma = 0$ 是数据，28 步把这段路切成 28 段。

# %% [markdown] lang="en" twin="002571bd"
# **Where to stop on the way (chapters 01 and 02).** $\sigma = 1$ is pure noise, $\sigma = 0$ is data; 28 steps cut the road into 28 stretches.

# %%
schedule = make_schedule(28, shift=engine.shift)
[round(sigma, 3) for sigma in schedule.sigmas.tolist()[:3] + schedule.sigmas.tolist()[-3:]]

# %% [markdown] lang="zh"
# **往哪走（第 03 到 08 章）。** 网络看着带噪的 $x$、时间 $t = 1000\sigma$ 和提示词，答一个速度（velocity）：$\sigma$ 增大时 $x$ 往哪边变，也就是噪声在哪边。问两次，一次有提示词，一次没有，再沿着两者之差多走一点，这就是引导（guidance）：
#
# $$v = v_\varnothing + w\,(v_c - v_\varnothing)$$

# %% [markdown] lang="en" twin="ba09bbdf"
# **Which way to go (chapters 03 to 08).** The network looks at the noisy $x$, the time $t = 1000\sigma$ and the prompt, and answers with a velocity: which way $x$ changes as $\sigma$ grows, that is, where the noise lies. Ask twice, with and without the prompt, and go further along the difference. That is guidance:
#
# $$v = v_\varnothing + w\,(v_c - v_\varnothing)$$


# %%
def velocity(x, sigma, cond=cond):
    t = torch.full((len(x),), 1000 * sigma)
    with_prompt = engine.dit(x, t, cond.tokens, cond.mask, cond.pooled)
    without = engine.dit(x, t, uncond.tokens, uncond.mask, uncond.pooled)
    return torch.lerp(without, with_prompt, engine.guidance_scale)


# %% [markdown] lang="zh"
# **走。** 每一步都是一次乘加。$\sigma$ 在减小，所以是逆着速度走，离开噪声；一口气走到 $\sigma = 0$ 的 $x - \sigma v$，就是刚才的预览。28 次之后，潜变量里就有了彩虹，解码器（第 09 章）把它变回像素。

# %% [markdown] lang="en" twin="ff14355d"
# **Walk.** Each step is one multiplication and one addition. $\sigma$ falls, so we walk against the velocity, away from the noise; going all the way to $\sigma = 0$ in one stride, $x - \sigma v$, is the preview you saw. After 28 of them the latents hold a rainbow, and the decoder (chapter 09) turns it into pixels.

# %%
with torch.no_grad():
    for sigma, sigma_next in schedule:
        x = x + (sigma_next - sigma) * velocity(x, sigma)

image_grid(
    [engine.decode(x)[0], rainbow.images[0]],
    ["by hand", "by the engine"],
    alt="Two equal rainbows, the left one drawn by the loop in this cell, the right one by the engine.",
    size=1.5,
)

# %% tags=["check"]
assert torch.allclose(x, rainbow.latents, atol=1e-3)  # the same walk, step for step

# %% [markdown] lang="zh"
# 整台引擎就是这十几行。后面的章节把里面的每个名字造出来，再让这几行算得对、跑得快、停得下、接得上。

# %% [markdown] lang="en" twin="8d58b0a2"
# These dozen lines are the whole engine. The chapters build every name in them, and then make the lines correct, fast, able to stop and able to go on.

# %% [markdown] lang="zh"
# ## 地图
#
# 一章造一个模块。从哪章开始都能读，但只有按顺序走，你才只用得到自己写过的东西。
#
# | 章 | 它要回答的问题 | 模块 |
# | --- | --- | --- |
# | [01](01_rectified_flow.ipynb) | 噪声和数据之间最简单的路是哪条？ | `rectified_flow` |
# | [02](02_scheduler.ipynb) | 只走几步的话，停在哪里最划算？ | `scheduler` |
# | [03](03_timestep_embedding.ipynb) | 网络怎么知道现在走到哪了？ | `timestep_embedding` |
# | [04](04_attention.ipynb) | 几百个图块怎样彼此看见？ | `attention` |
# | [05](05_transformer_block.ipynb) | 时间和提示词怎样指挥每一层？ | `transformer_block` |
# | [06](06_dit.ipynb) | 一张图怎样变成一串词元，再变回来？ | `dit` |
# | [07](07_text_conditioning.ipynb) | 网络怎样读懂一句话？ | `text_conditioning` |
# | [08](08_guidance.ipynb) | 怎样让它更听话？ | `guidance` |
# | [09](09_vae.ipynb) | 为什么不直接画像素？ | `vae` |
# | [10](10_pipeline.ipynb) | 这些零件怎样连成一条线？ | `pipeline` |
# | [11](11_training.ipynb) | 权重从哪里来？ | `training` |
#
# 再往后：内存（12）、优化（13）、视频（14）、七个真实的模型家族（15–24：SD3、FLUX、Sana 画图，Wan、LTX、CogVideoX、HunyuanVideo 画视频），以及一台用来对照的自回归引擎（A1–A4）。

# %% [markdown] lang="en" twin="4949caea"
# ## The map
#
# One chapter, one module. You may start anywhere, but only in this order do you never use a thing that you have not written.
#
# | Chapter | The question it answers | Module |
# | --- | --- | --- |
# | [01](01_rectified_flow.ipynb) | What is the simplest road between noise and data? | `rectified_flow` |
# | [02](02_scheduler.ipynb) | With only a few steps, where should they stop? | `scheduler` |
# | [03](03_timestep_embedding.ipynb) | How does the network know how far it has come? | `timestep_embedding` |
# | [04](04_attention.ipynb) | How do hundreds of patches see each other? | `attention` |
# | [05](05_transformer_block.ipynb) | How do time and prompt steer every layer? | `transformer_block` |
# | [06](06_dit.ipynb) | How does a picture become a row of tokens, and one again? | `dit` |
# | [07](07_text_conditioning.ipynb) | How does the network read a sentence? | `text_conditioning` |
# | [08](08_guidance.ipynb) | How do we make it listen more closely? | `guidance` |
# | [09](09_vae.ipynb) | Why not draw pixels directly? | `vae` |
# | [10](10_pipeline.ipynb) | How do the parts become one line? | `pipeline` |
# | [11](11_training.ipynb) | Where do the weights come from? | `training` |
#
# Further on: memory (12), optimisations (13), video (14), seven real model families (15–24: SD3, FLUX and Sana draw pictures, Wan, LTX, CogVideoX and HunyuanVideo clips), and an autoregressive engine for contrast (A1–A4).

# %%
parts = {"text encoder": engine.text_encoder, "DiT": engine.dit, "VAE": engine.vae}
{name: f"{sum(p.numel() for p in part.parameters()) / 1e6:.1f} M" for name, part in parts.items()}

# %% [markdown] lang="zh"
# ## 全书的约定
#
# 各家代码在这几件事上写法不一，错误也多半出在这里。这门课只用一种写法：
#
# | 约定 | 写法 |
# | --- | --- |
# | 噪声水平 | $\sigma = s \in [0, 1]$：$1$ 是噪声，$0$ 是数据 |
# | 路上的一点 | $x_s = (1 - s)\,x_0 + s\,\varepsilon$ |
# | 速度 | $v = \varepsilon - x_0$，于是 $x_0 = x_s - s\,v$ |
# | Euler 一步 | $x \leftarrow x + (s_\text{next} - s)\,v$ |
# | 网络看到的时间 | $t = 1000\,s$，一路 fp32 |
# | 引导 | $v_\varnothing + w\,(v_c - v_\varnothing)$，$w = 1$ 恰好是「只听提示词」；合批时无条件的在前 |
# | 形状 | 图像 $(B, C, H, W)$，视频 $(B, C, T, H, W)$，词元 $(B, N, D)$ |
# | 种子 | 第 $i$ 张图用 $\text{seed} + i$，第一句提示词的图排在最前 |

# %% [markdown] lang="en" twin="273886bb"
# ## Conventions of the whole course
#
# On these points everybody's code differs, and most faults live here. This course writes them in one way only:
#
# | Convention | Written as |
# | --- | --- |
# | noise level | $\sigma = s \in [0, 1]$: $1$ is noise, $0$ is data |
# | a point on the road | $x_s = (1 - s)\,x_0 + s\,\varepsilon$ |
# | velocity | $v = \varepsilon - x_0$, hence $x_0 = x_s - s\,v$ |
# | one Euler step | $x \leftarrow x + (s_\text{next} - s)\,v$ |
# | the time that the network sees | $t = 1000\,s$, fp32 all the way |
# | guidance | $v_\varnothing + w\,(v_c - v_\varnothing)$; $w = 1$ is exactly "just the prompt"; in a batch the unconditional half comes first |
# | shapes | images $(B, C, H, W)$, videos $(B, C, T, H, W)$, tokens $(B, N, D)$ |
# | seeds | picture $i$ uses $\text{seed} + i$, the first prompt's pictures first |

# %% [markdown] lang="zh"
# 这门课里，说过的话都要有检查（check）。检查不通过，整章就停下；通过了，什么也不打印。下面查三条约定。

# %% [markdown] lang="en" twin="c204d71e"
# In this course every claim has a check. One that fails stops the chapter; one that passes prints nothing. Here are three of the conventions.

# %% tags=["check"]
from diffusion_engine.rectified_flow import interpolate, predict_data, velocity_target

data, noise = rainbow.latents, initial_noise([1], engine.latent_shape(64, 64))
halfway = interpolate(data, noise, 0.5)
assert torch.allclose(predict_data(halfway, velocity_target(data, noise), 0.5), data, atol=1e-6)  # x0 = x_s − s·v

# %% tags=["check"]
u, c = noise, data
assert torch.equal(torch.lerp(u, c, 1.0), c)  # w = 1 is the prompt alone, to the last bit
assert not torch.equal(u + 1.0 * (c - u), c)  # the formula typed in as it stands is not

# %% tags=["check"]
batch = initial_noise([5, 6, 7], engine.latent_shape(64, 64))
assert torch.equal(batch[2:], initial_noise([7], engine.latent_shape(64, 64)))  # picture 2 of it is "seed 7"

# %% [markdown] lang="zh"
# 引擎的错误信息也要教人：哪个值不对，规则是什么，最近的正确值是多少。我们故意错一次。

# %% [markdown] lang="en" twin="fa77f6a6"
# Errors teach as well: the value, the rule, the nearest valid value. One mistake on purpose.

# %% tags=["check"]
try:
    engine("red apple", num_inference_steps=0)
except ValueError as error:
    print(error)
else:
    raise AssertionError("zero steps were accepted")

# %% [markdown] lang="zh"
# ## 它不会什么
#
# 这个模型只见过 1,911 张 emoji，每张都背了下来。背下来不等于理解：没见过的组合，它多半给你一个最像的旧图，或者几张旧图的混合。

# %% [markdown] lang="en" twin="b6851550"
# ## What it cannot do
#
# This model has seen 1,911 emoji and learned each by heart. Knowing by heart is not understanding: for an unseen mixture it mostly gives the nearest picture it knows, or a blend of several.

# %%
unseen = engine(["blue apple", "three hearts", "戴帽子的猫", "绿色的火箭"], seed=0)
image_grid(
    unseen.images,
    ["blue apple", "three hearts", "cat with a hat (zh)", "green rocket (zh)"],
    alt="What the model draws for four prompts that are no caption of its data: blue apple, three hearts, cat with a hat, green rocket.",
    title="Four prompts that it never learned: blends and near misses",
    size=1.5,
)

# %% [markdown] lang="zh"
# 逐条标签的实测在[模型卡](../../diffusion_engine/assets/model/MODEL_CARD.md)里。第 11 章讲它怎样训练，也讲为什么这么小的模型只能背书。想自己考考它，打开[试验台](../playground.zh.ipynb)。

# %% [markdown] lang="en" twin="05050670"
# The measurements, label by label, are on the [model card](../../diffusion_engine/assets/model/MODEL_CARD.md). Chapter 11 tells how it was trained, and why so small a model can only learn by heart. To question it yourself, open the [playground](../playground.en.ipynb).

# %% [markdown] lang="zh"
# ## 你的机器
#
# 最后给机器做个体检。下面几格存的是别人机器上的数，你运行一遍就换成自己的；版本和速度没有对错，所以没有任何检查去比较它们。

# %% [markdown] lang="en" twin="10ded3ba"
# ## Your machine
#
# Last, a check-up of the machine. The outputs stored below come from somebody else's; run the cells and they become yours. Versions and speeds are neither right nor wrong, so no check compares them.

# %%
import os
import platform

memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30 if hasattr(os, "sysconf") else float("nan")
print("Python ", platform.python_version(), "· torch", torch.__version__)
print("cores  ", os.cpu_count(), "· threads of torch", torch.get_num_threads())
print("memory ", f"{memory:.0f} GiB")
print("GPU    ", torch.cuda.get_device_name() if torch.cuda.is_available() else "none, and none is needed")

# %% [markdown] lang="zh"
# 一个数最说明问题：大矩阵相乘时，这台机器一秒能做多少次乘加。它是后面所有「快不快」的尺子。两种精度各量一次：bf16 只占一半内存，可处理器若没有 bf16 指令，反而会慢几十倍。

# %% [markdown] lang="en" twin="dd3e6a14"
# One number says most: how many multiplications and additions a second the machine does in a large matrix product. It is the yardstick for every later "is it fast?". We take it twice: bf16 needs half the memory, yet on a processor without bf16 instructions it is many times slower.

# %%
import time


def gflops(dtype, size=512, repeats=5):
    a, b = (torch.randn(size, size, dtype=dtype) for _ in range(2))
    times = []
    for _ in range(repeats + 1):
        begun = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - begun)
    return 2 * size**3 / sorted(times[1:])[repeats // 2] / 1e9


rates = {str(dtype): gflops(dtype) for dtype in (torch.float32, torch.bfloat16)}
{name: f"{rate:.0f} GFLOP/s" for name, rate in rates.items()}

# %% [markdown] lang="zh"
# 有了尺子，就能先算后量。数一数网络一次前向有多少次运算，乘上 28 步、每步两问，除以速率，就是这张图**最快**要多久。

# %% [markdown] lang="en" twin="456940fb"
# With the yardstick we can predict before we measure. Count the operations of one forward pass, times 28 steps, two questions a step, over the rate: that is the **least** time a picture can take.

# %%
from torch.utils.flop_counter import FlopCounterMode

with torch.no_grad(), FlopCounterMode(display=False) as counter:
    engine.dit(noise, torch.tensor([500.0]), cond.tokens, cond.mask, cond.pooled)

gflop = 28 * 2 * counter.get_total_flops() / 1e9
least = gflop / rates["torch.float32"]
print(f"{gflop:.0f} GFLOP: at least {least:.2f} s; this picture's steps took {rainbow.seconds['denoise']:.2f} s")

# %% [markdown] lang="zh"
# 量出来总比算出来慢：小矩阵喂不饱处理器，归一化和激活函数也要时间。`make bench` 会把差在哪里一项一项列给你看，第 13 章再去把它们要回来。
#
# ## 三个问题
#
# 1. 预测：把引导强度 $w$ 设成 $0$，「red apple」和「彩虹」各画一张，会有什么不同？
# 2. 修改：只走一步，画出来的是什么？你在这一章里见过它。
# 3. 动手：改写 `velocity`，让它同时听两句提示词，画一张一半苹果、一半彩虹的图。

# %% [markdown] lang="en" twin="53aca1d0"
# Measured is always slower than computed: small matrices leave the processor hungry, and norms and activations take time too. `make bench` lists what the difference is made of; chapter 13 goes and gets it back.
#
# ## Three questions
#
# 1. Predict: with guidance scale $w$ at $0$, draw "red apple" and "彩虹". How do they differ?
# 2. Modify: take a single step. What comes out? You have met it in this chapter.
# 3. Build: rewrite `velocity` so that it listens to two prompts at once, and draw half an apple, half a rainbow.

# %% tags=["solution"]
# 1 · not at all: at w = 0 the prompt is multiplied by nothing, and both are what the network draws unasked
apple, bow = (engine(prompt, guidance_scale=0, seed=0, num_inference_steps=4) for prompt in ("red apple", "彩虹"))
assert torch.allclose(apple.latents, bow.latents, atol=1e-4)

# %% tags=["solution"]
# 2 · the first preview: one long step to σ = 0 is exactly the guess x − σ·v at σ = 1
one_step = engine("彩虹", seed=0, num_inference_steps=1)
assert torch.allclose(one_step.latents, previews[0][2], atol=1e-4)

# %% tags=["solution"]
# 3 · the mean of two velocities leads between two pictures
red_apple = engine.encode(["red apple"])
y = initial_noise([0], engine.latent_shape(64, 64))
with torch.no_grad():
    for sigma, sigma_next in schedule:
        y = y + (sigma_next - sigma) * (velocity(y, sigma, cond) + velocity(y, sigma, red_apple)) / 2
image_grid(engine.decode(y), ["apple + rainbow"], alt="A picture between an apple and a rainbow.", size=1.5)

# %% [markdown] lang="zh"
# ## 小结
#
# - 画图就是沿一条路走：从噪声出发，每一步问网络该往哪去。
# - 一句话只朝一个方向走：编码、噪声、速度、引导、步进、解码。
# - 全书只有一套约定：$\sigma$ 从 $1$ 到 $0$，$v = \varepsilon - x_0$，$t = 1000\sigma$。
# - 说过的话都有检查，错误信息会教人。
# - 这个模型会背，不会想；它小到你的 CPU 几秒就能画一张。
#
# 下一章：[01](01_rectified_flow.ipynb)。先造那条路：噪声和数据之间，最简单的走法是什么？

# %% [markdown] lang="en" twin="d0be872d"
# ## Recap
#
# - Drawing is walking a road: start from noise and ask the network at every step which way to go.
# - A sentence goes one way only: encode, noise, velocity, guidance, step, decode.
# - One set of conventions: $\sigma$ from $1$ to $0$, $v = \varepsilon - x_0$, $t = 1000\sigma$.
# - Every claim has a check, and errors teach.
# - This model knows by heart and cannot think; it is small enough for your CPU to draw a picture in seconds.
#
# Next: [01](01_rectified_flow.ipynb). We build the road first: what is the simplest way from noise to data?
