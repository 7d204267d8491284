# ---
# jupyter:
#   course:
#     minutes: 45
#     module: pipeline
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown] lang="zh"
# # 10 · 流水线：从一句话到一张图（pipeline）
#
# 读完这一章，前九章的零件会连成一条线：一句话进去，一张图出来；画的途中你能偷看、喊停，再从停下的地方接着画。
#
# | 你会做出 | 你需要 | 时间 | 模块 |
# | --- | --- | --- | --- |
# | `initial_noise`、`denoise`、`generate` | 第 01、02 章的 $\sigma$、速度与求解器；最后一节用到第 06–09 章 | 45 分钟 | `diffusion_engine/pipeline.py` |

# %% [markdown] lang="en" twin="e8ef602a"
# # 10 · The pipeline: from a sentence to a picture
#
# After this chapter the parts of nine chapters stand in one line: a sentence goes in, a picture comes out, and on the way you can look over its shoulder, stop it, and go on where it stopped.
#
# | You build | You need | Time | Module |
# | --- | --- | --- | --- |
# | `initial_noise`, `denoise`, `generate` | $\sigma$, velocity and solvers from chapters 01 and 02; the last section uses 06–09 | 45 minutes | `diffusion_engine/pipeline.py` |

# %% [markdown] lang="zh"
# **先想一想**：种子 7 的那张图，单独画一次，再和另外三张一起成批画一次。两次应当是同一张图吗？有哪些看上去没错的写法，会让它变成另一张？先写下你的答案。

# %% [markdown] lang="en" twin="9d25a063"
# **Think first:** draw the picture of seed 7 alone, then once more in a batch with three others. Should it be the same picture? Which innocent-looking ways of writing the code turn it into another? Write your answer down.

# %% tags=["export"]
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from diffusion_engine.rectified_flow import predict_data
from diffusion_engine.scheduler import SOLVERS, Schedule

# %% [markdown] lang="zh"
# ## 一个答案已知的小世界
#
# 先不碰神经网络。设想世界上只有四张 8×8 的小图 $c_1 \dots c_4$。看着带噪的 $x$，最好的猜测就是按可能性加权的平均；有了它，速度也有闭式解，逆着速度走就走向它：
#
# $$p_k \propto \pi_k \exp\!\Big(-\frac{\lVert x - (1-\sigma)\,c_k \rVert^2}{2\sigma^2}\Big), \qquad \hat x_0 = \sum_k p_k\, c_k, \qquad v = \frac{x - \hat x_0}{\sigma}$$
#
# | 记号 | 形状 | 含义 |
# | --- | --- | --- |
# | $x$ | $(B, C, H, W)$ | 潜变量，$\sigma = 1$ 时是纯噪声 |
# | $\pi$ | $(B, 4)$ | 提示词说的是哪张图；不提要求就各占四分之一 |
# | $\hat x_0$ | 同 $x$ | 此刻对成品的猜测 |

# %% [markdown] lang="en" twin="2aee8d49"
# ## A small world with a known answer
#
# No network yet. Suppose the world holds four pictures of 8×8, $c_1 \dots c_4$. Seeing a noisy $x$, the best guess is their average, weighted by how likely each is. From it the velocity follows in closed form; to walk against it is to walk towards the guess:
#
# $$p_k \propto \pi_k \exp\!\Big(-\frac{\lVert x - (1-\sigma)\,c_k \rVert^2}{2\sigma^2}\Big), \qquad \hat x_0 = \sum_k p_k\, c_k, \qquad v = \frac{x - \hat x_0}{\sigma}$$
#
# | Symbol | Shape | Meaning |
# | --- | --- | --- |
# | $x$ | $(B, C, H, W)$ | latents, pure noise at $\sigma = 1$ |
# | $\pi$ | $(B, 4)$ | which picture the prompt asks for; a quarter each if it does not say |
# | $\hat x_0$ | as $x$ | the guess, so far, of the finished picture |

# %%
from course.figures import image_grid
from diffusion_engine.scheduler import make_schedule

ART = {
    "heart": "........ .##..##. ######## ######## .######. ..####.. ...##... ........",
    "cross": "...##... ...##... ...##... ######## ######## ...##... ...##... ...##...",
    "ring": "..####.. .######. ##....## ##....## ##....## ##....## .######. ..####..",
    "arrow": "...#.... ...##... ######.. #######. #######. ######.. ...##... ...#....",
}
rows = [[[1.0 if dot == "#" else -1.0 for dot in row] for row in art.split()] for art in ART.values()]
world = torch.tensor(rows)[:, None]  # (4, 1, 8, 8), −1 … 1


def encode(prompts: Sequence[str]) -> Tensor:
    known = [[float(name == prompt) for name in ART] for prompt in prompts]
    prior = torch.tensor(known)  # (B, 4)
    return torch.where(prior.sum(dim=1, keepdim=True) > 0, prior, 0.25)


# %%
def toy_velocity(prior: Tensor):
    def velocity(x: Tensor, sigma: float) -> Tensor:
        s = max(sigma, 1e-4)
        distance = (x[:, None] - (1 - s) * world).square().sum(dim=(2, 3, 4))  # (B, 4)
        p = (prior.log() - distance / (2 * s * s)).softmax(dim=1)
        return (x - torch.einsum("bk,kchw->bchw", p, world)) / s

    return velocity


def draw_plainly(prompts: list[str], seed: int, sigmas: list[float]) -> Tensor:  # the whole pipeline at its plainest
    velocity = toy_velocity(encode(prompts))
    x = torch.randn(len(prompts), 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    for sigma, sigma_next in zip(sigmas, sigmas[1:]):
        x = x + (sigma_next - sigma) * velocity(x, sigma)
    return x


schedule = make_schedule(12)
plain = draw_plainly(["heart", "arrow", "anything", "anything"], seed=7, sigmas=schedule.sigmas.tolist())

# %% tags=["hide"]
image_grid(
    [(1 - x) / 2 for x in plain],
    ["heart", "arrow", "anything", "anything"],
    alt="Four small black and white pictures drawn from noise: a heart, an arrow, and two that the noise chose.",
    title="Not asked, the noise decides",
)

# %% tags=["check"]
distances = torch.cdist(plain.flatten(1), world.flatten(1))  # (4, 4)
assert distances.min(dim=1).values.max() < 1e-3  # every drawing is one of the four pictures, not a mixture
assert distances.argmin(dim=1)[:2].tolist() == [0, 3]  # and the prompt was heard

# %% [markdown] lang="zh"
# ## 噪声：每张图一颗种子
#
# 上面那四行有一个毛病：整批噪声出自同一个生成器，第三张图的噪声取决于它前面有几张图。单独重画它，办不到。

# %% [markdown] lang="en" twin="36fea63d"
# ## Noise: one seed a picture
#
# Those four lines have a flaw: one generator makes the noise of the whole batch, so the third picture's noise depends on how many stand before it. You cannot draw it again alone.

# %%
alone = draw_plainly(["anything"], seed=9, sigmas=schedule.sigmas.tolist())
torch.equal(alone[0], plain[2])  # seed 7, third in the batch: which seed would bring it back alone?

# %% [markdown] lang="zh"
# 所以每张图各有一个生成器：第 $i$ 张的噪声是 $x^{(i)} = \mathrm{randn}(\text{seed}_i)$，批里有谁、排第几，都不相干。
#
# 还有一个少有人知的坑：torch 的 CPU 生成器只看种子的低 32 位，种子 7 和 $7 + 2^{32}$ 给出同一份噪声。更大的种子因此交给 NumPy，它读得完整个整数。

# %% [markdown] lang="en" twin="25dcfd92"
# So every picture has a generator of its own: the noise of picture $i$ is $x^{(i)} = \mathrm{randn}(\text{seed}_i)$, whoever else is in the batch.
#
# And a trap that few know: torch's CPU generator looks at the lower 32 bits of a seed only; 7 and $7 + 2^{32}$ give the same noise. Larger seeds therefore go to NumPy, which reads the whole integer.


# %% tags=["export"]
def initial_noise(seeds: Sequence[int], shape: Sequence[int]) -> Tensor:
    """x⁽ⁱ⁾ ~ N(0, 1) from seed i alone: bit-identical however pictures are batched.

    Args:
        seeds: 64-bit integers 0 … 2**64 − 1, one a sample. Below 2**32 they feed torch's CPU generator, which reads
            no more than 32 bits; above, NumPy's.
        shape: of one sample, such as (C, H, W) or (C, T, H, W).

    Returns:
        (B, *shape), fp32, on the CPU.

    Raises:
        ValueError: a seed that is no 64-bit integer.
    """
    noise = torch.empty(len(seeds), *shape)
    for row, seed in zip(noise, seeds):
        if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or not 0 <= seed < 2**64:
            raise ValueError(f"seed {seed!r} is not a 64-bit integer (0 to 2**64 - 1); try 0")
        if seed < 2**32:
            row.copy_(torch.randn(*shape, generator=torch.Generator().manual_seed(int(seed))))
        else:
            row.copy_(torch.from_numpy(np.random.default_rng(int(seed)).standard_normal(tuple(shape), np.float32)))
    return noise


# %% tags=["check"]
before = torch.get_rng_state()
batch = initial_noise([4, 7, 7 + 2**32, 5], (1, 8, 8))
assert torch.equal(initial_noise([7], (1, 8, 8))[0], batch[1])  # alone or in a batch: the same bits
assert not torch.equal(batch[1], batch[2])  # the upper 32 bits count
assert abs(initial_noise([2**40], (1, 64, 64)).std() - 1) < 0.05  # and that noise is as loud
assert torch.equal(torch.get_rng_state(), before)  # nobody else's random numbers moved
for seed in (2**64, -1, 1.5):
    try:
        initial_noise([seed], (1, 8, 8))
    except ValueError as error:
        print(error)
    else:
        raise AssertionError(f"seed {seed} was accepted")

# %% [markdown] lang="zh"
# ## 去噪循环，能被旁观
#
# 一步走完，我们手里有速度 $v$，于是白得一份预览：$\hat x_0 = x - \sigma v$。把它交给一个回调函数，你就能看着图显形；回调返回 `False`，循环就停下。
#
# 停下时要留住什么，才能原样接着画？潜变量、走了几步，还有求解器记得的东西（`history`）。循环还要拦住 NaN：它会悄悄染遍整张图，所以每一步都查，报错时说出是哪一步。

# %% [markdown] lang="en" twin="7dafee94"
# ## A loop that can be watched
#
# After a step we hold the velocity $v$, and so a free preview: $\hat x_0 = x - \sigma v$. Hand it to a callback and you watch the picture appear; if the callback returns `False`, the loop stops.
#
# What must be kept to go on as if nothing happened? Latents, steps taken, and the solver's memory (`history`). And the loop stops a NaN, which would silently spread: it looks at every step and names the guilty one.


# %% tags=["export"]
class StepInfo(NamedTuple):
    """What a callback sees after each step. Clone what you keep: a later pipeline may reuse the buffers."""

    step: int  # steps taken so far, 1 … N
    sigma: float  # noise level of ``latents``
    latents: Tensor
    data: Tensor  # x̂0, the preview that this step's velocity gives


class State(NamedTuple):
    """Where the loop stands: all that is needed to go on, bit for bit."""

    latents: Tensor
    step: int
    history: tuple
    cancelled: bool


class NotFiniteError(ArithmeticError):
    """A stage gave NaN or infinity; the message names the stage."""


def require_finite(value: Any, stage: str) -> Any:
    """``value`` itself, if all floating tensors in it (tuples and lists are looked into) are finite.

    A finite sum proves every number finite without a mask as large as the tensor.

    Raises:
        NotFiniteError: names ``stage``.
    """
    if isinstance(value, Tensor):
        if value.is_floating_point() and not math.isfinite(value.sum()) and not bool(value.isfinite().all()):
            raise NotFiniteError(f"{stage} gave NaN or infinity; try float32, a smaller guidance, or intact weights")
    elif isinstance(value, (tuple, list)):
        for part in value:
            require_finite(part, stage)
    return value


# %% tags=["export"]
Velocity = Callable[[Tensor, float], Tensor]
Callback = Callable[[StepInfo], Any]


def _says_no(answer: Any) -> bool:
    """False, as Python, NumPy or torch write it, and nothing else."""
    if isinstance(answer, Tensor):
        return answer.dtype == torch.bool and not answer.any()
    return isinstance(answer, (bool, np.bool_)) and not answer


@torch.no_grad()
def denoise(
    velocity: Velocity,
    noise: Tensor,
    schedule: Schedule,
    solver: str | Callable = "euler",
    callback: Callback | None = None,
    start: int = 0,
    history: tuple = (),
    buffer: Any = None,
) -> State:
    """Walk the ODE dx/dσ = v(x, σ) down the schedule: for each (σ, σ_next) one solver step.

    Args:
        velocity: v(x (B, …), σ) → (B, …); guidance is already inside.
        noise: latents at the first σ, or, to go on, a cancelled `State`'s latents.
        callback: called after each step with a `StepInfo`; returning False (NumPy's or torch's, too) cancels.
        start, history: a cancelled `State`'s step and history; the rest then equals an uninterrupted run, bit for bit.
        buffer: a pair of latents to walk in (load(x) fills ``front``; each step writes ``back``, then swap()), so that
            no step allocates any. The same bits; a callback's latents live until the step after next.

    Raises:
        ValueError: unknown solver, ``start`` outside 0 … N, a velocity not shaped like the latents.
        NotFiniteError: names the step.
    """
    if not callable(solver) and solver not in SOLVERS:
        raise ValueError(f"solver {solver!r} is unknown; try one of {', '.join(SOLVERS)}")
    walk = solver if callable(solver) else SOLVERS[solver]
    if not 0 <= start <= schedule.num_steps:
        raise ValueError(f"start {start} is outside 0 … {schedule.num_steps}, the steps of this schedule; try 0")
    x, count = noise if buffer is None else buffer.load(noise), schedule.num_steps
    for k, (sigma, sigma_next) in list(enumerate(schedule, 1))[start:]:
        step = walk(velocity, x, sigma, sigma_next, history, None if buffer is None else buffer.back)
        if step.velocity.shape != x.shape:
            raise ValueError(f"velocity has shape {tuple(step.velocity.shape)}; expected {tuple(x.shape)}")
        require_finite(step.latents, f"denoise, step {k} of {count},")
        data = predict_data(x, step.velocity, sigma) if callback is not None else None  # x̂0 = x − σ·v
        x, history = step.latents, step.history
        if buffer is not None:
            buffer.swap()
        answer = None if callback is None else callback(StepInfo(k, sigma_next, x, data))
        if _says_no(answer):
            return State(x if buffer is None else x.clone(), k, history, cancelled=True)
    return State(x if buffer is None else x.clone(), count, history, cancelled=False)


# %% [markdown] lang="zh"
# 提示词指定一张图时，路是直的：从哪里出发都正对着它走，预览从第一步起就是成品，一步就能走到。
#
# 什么也不指定时，路是弯的：预览从四图的平均开始，然后由噪声做主，而且早在潜变量看得清之前就定了。

# %% [markdown] lang="en" twin="91dde23c"
# When the prompt names one picture the road is straight: from everywhere we head right for it, the preview is the finished picture from step one, and one step is enough.
#
# When it names none the road bends: the preview starts as the average of all four, then the noise decides, long before you could tell from the latents.

# %%
seen: list[StepInfo] = []
noise = initial_noise([0, 1], (1, 8, 8))
ring = toy_velocity(encode(["ring", "ring"]))
state = denoise(ring, noise, schedule, callback=seen.append)

# %% tags=["check"]
assert all(torch.allclose(info.data, world[[2, 2]], atol=1e-5) for info in seen)  # the preview is right at every step
assert torch.allclose(denoise(ring, noise, make_schedule(1)).latents, world[[2, 2]], atol=1e-5)  # one step is enough
for info in seen:  # latents and σ belong together: they lie on the road from this noise to the ring
    assert torch.allclose(info.latents, (1 - info.sigma) * world[[2, 2]] + info.sigma * noise, atol=1e-5)
assert [info.step for info in seen] == list(range(1, 13))

# %% tags=["hide"]
shown: list[StepInfo] = []
denoise(toy_velocity(encode(["anything"])), initial_noise([3], (1, 8, 8)), schedule, callback=shown.append)
picked = shown[::2] + shown[-1:]
image_grid(
    [(1 - info.latents[0]) / 2 for info in picked] + [(1 - info.data[0]) / 2 for info in picked],
    [f"latents {info.sigma:.2f}" for info in picked] + [f"preview {info.step}" for info in picked],
    alt="Top: latents losing noise step by step. Bottom: previews that go from a blurred average to one sharp picture.",
    columns=len(picked),
    title="The preview decides while the latents are still noise",
)

# %% [markdown] lang="zh"
# ## 喊停，再接着画
#
# 多步求解器（multistep）会用上一步的速度修正这一步。漏掉 `history`，续画照样出图，形状也对，只是悄悄变成了另一张。

# %% [markdown] lang="en" twin="cfb5ae67"
# ## Stop, and go on
#
# The multistep solver corrects a step with the velocity of the step before. Forget `history` and the resumed run still gives a picture of the right shape; it is just silently another one.

# %%
free = toy_velocity(encode(["anything"] * 2))
whole = denoise(free, noise, schedule, "multistep")
paused = denoise(free, noise, schedule, "multistep", callback=lambda info: info.step < 5)
resumed = denoise(free, paused.latents, schedule, "multistep", start=paused.step, history=paused.history)
amnesic = denoise(free, paused.latents, schedule, "multistep", start=paused.step)
paused.step, paused.cancelled, resumed.step, resumed.cancelled

# %% tags=["check"]
assert paused.step == 5 and paused.cancelled and not resumed.cancelled
assert torch.equal(resumed.latents, whole.latents)  # bit for bit
assert not torch.equal(amnesic.latents, whole.latents)  # the history matters
assert not torch.equal(denoise(free, noise, schedule).latents, whole.latents)  # and is handed on: Euler differs
try:
    denoise(lambda x, sigma: ring(x, sigma) * (float("nan") if sigma < 0.5 else 1.0), noise, schedule)
except NotFiniteError as error:
    print(error)  # it names the step
    assert "step 8 of 12" in str(error)
else:
    raise AssertionError("a NaN went through")

# %% [markdown] lang="zh"
# ## 从张量到图片
#
# 解码器给出 $-1 \dots 1$ 的数，图片要 $0 \dots 255$ 的字节。偷懒的写法有两个坑：截断小数会让整张图暗半级；稍稍越界的 $1.01$ 会绕回成黑点。

# %% [markdown] lang="en" twin="0456bafc"
# ## From tensors to pictures
#
# The decoder gives numbers in $-1 \dots 1$, a picture wants bytes in $0 \dots 255$. The lazy form has two traps: cutting decimals darkens everything by half a level, and a $1.01$ just out of range wraps around to black.


# %% tags=["export"]
def to_pictures(images: Tensor) -> list[Image.Image]:
    """byte = round(127.5 · x + 127.5), clamped: images (B, 3, H, W) or (B, 1, H, W) in −1 … 1 → B PIL pictures.

    Raises:
        ValueError: another number of channels, or whole numbers.
    """
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        raise ValueError(f"images have shape {tuple(images.shape)}; expected (B, 3, H, W) or (B, 1, H, W)")
    if not images.is_floating_point():
        raise ValueError(f"images are {images.dtype}; expected floats in −1…1: bytes / 127.5 − 1")
    levels = (images.float().clamp(-1, 1) * 127.5 + 127.5).round().to(torch.uint8)
    arrays = levels.permute(0, 2, 3, 1).cpu().numpy()  # (B, H, W, C)
    return [Image.fromarray(np.ascontiguousarray(a[..., 0] if a.shape[-1] == 1 else a)) for a in arrays]


# %% tags=["check"]
ramp = torch.tensor([-1.2, -1.0, -0.996, 0.999, 1.0, 1.01]).reshape(1, 1, 1, 6)
assert np.asarray(to_pictures(ramp)[0]).tolist() == [[0, 0, 1, 255, 255, 255]]
assert (ramp * 127.5 + 127.5).to(torch.uint8).flatten().tolist()[-3:] != [255, 255, 255]  # the lazy form
wide = to_pictures(torch.tensor([1.0, -1.0, -1.0]).reshape(1, 3, 1, 1).expand(1, 3, 2, 5))[0]
assert wide.size == (5, 2) and wide.getpixel((4, 1)) == (255, 0, 0)  # width first, red is red

# %% [markdown] lang="zh"
# ## 整条线
#
# `generate` 只认普通函数：怎么编码、怎么得到速度、怎么解码，都由外面递进来。换一个网络、一个计时器、一个分片解码器，这段代码一个字也不用改。先写计时器和结果。

# %% [markdown] lang="en" twin="1df87a13"
# ## The whole line
#
# `generate` knows plain functions only: how to encode, how to get a velocity, how to decode are all handed in. Another network, another meter, a tiled decoder: not a word changes here. The stopwatch and the result come first.


# %% tags=["export"]
class Stopwatch:
    """A meter: ``with watch("decode"): …`` adds to ``watch.seconds["decode"]``.

    Args:
        synchronize: called before each reading of the clock, so that work queued on a GPU is counted where it belongs.
    """

    def __init__(self, synchronize: Callable[[], Any] = lambda: None):
        self.seconds: dict[str, float] = {}
        self.synchronize = synchronize

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        self.synchronize()
        begun = time.perf_counter()
        yield
        self.synchronize()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - begun


@dataclass(frozen=True)
class Result:
    """Pictures, and all that is needed to trust, repeat or continue them. A cancelled run has no pictures yet."""

    images: list[Image.Image]
    latents: Tensor  # (B, C, H, W), the last ones
    seeds: tuple[int, ...]
    sigmas: Tensor  # (N + 1,)
    seconds: dict[str, float]  # by stage
    step: int  # steps taken
    history: tuple = ()  # what the solver remembers
    cancelled: bool = False
    request: Any = None  # what was asked for; the engine fills it in
    peak_bytes: dict[str, int] = field(default_factory=dict)  # by stage, when the meter counts bytes
    memory: Any = None  # what an engine's own switches remember of a cancelled run
    origin: str = ""  # the engine that drew it: model and dtype


# %% tags=["export"]
def generate(
    prompts: Sequence[str],
    seeds: Sequence[int],
    schedule: Schedule,
    *,
    encode: Callable[[Sequence[str]], Any],
    velocity: Callable[[Any], Velocity],
    decode: Callable[[Tensor], Tensor],
    shape: Sequence[int],
    device: torch.device | str = "cpu",
    latents: Tensor | None = None,
    solver: str | Callable = "euler",
    callback: Callback | None = None,
    resume: Result | State | None = None,
    meter: Callable | None = None,
    buffer: Any = None,
) -> Result:
    """prompts → encode → noise → denoise → decode → `Result`, one direction, picture i from prompt i and seed i.

    Args:
        encode: prompts → condition. velocity: condition → v(x, σ), guidance inside. decode: latents → images in −1 … 1.
        shape: of one latent. device: where latents live; noise is drawn on the CPU and moved there.
        latents: the first noise (B, *shape), instead of the seeds'.
        resume: a cancelled result of the same request; the run goes on from its step.
        meter: times a stage, see `Stopwatch`; or counts its bytes. buffer: see `denoise`.

    Raises:
        ValueError: counts or shapes that do not fit. NotFiniteError: names the stage.
    """
    if not prompts or len(prompts) != len(seeds):
        raise ValueError(f"{len(prompts)} prompts for {len(seeds)} seeds; give one each, and at least one")
    meter = meter or Stopwatch()
    with meter("encode"):
        condition = require_finite(encode(prompts), "encode")
    with meter("noise"):
        x = initial_noise(seeds, shape) if latents is None else latents
        start, history = (resume.step, resume.history) if resume is not None else (0, ())
        x = require_finite(x if resume is None else resume.latents, "noise").to(device)
        if tuple(x.shape) != (len(seeds), *shape):
            raise ValueError(f"latents have shape {tuple(x.shape)}; expected {(len(seeds), *shape)}")
    with meter("denoise"):
        state = denoise(velocity(condition), x, schedule, solver, callback, start, history, buffer)
    images = []
    if not state.cancelled:
        with meter("decode"), torch.no_grad():
            images = to_pictures(require_finite(decode(state.latents), "decode"))
    stages, peaks = dict(getattr(meter, "seconds", {})), dict(getattr(meter, "peak_bytes", {}))
    return Result(images, state.latents, tuple(seeds), schedule.sigmas, stages, *state[1:], peak_bytes=peaks)


# %%
toy = dict(schedule=schedule, encode=encode, velocity=toy_velocity, decode=lambda x: x, shape=(1, 8, 8))
four = generate(["heart", "anything", "arrow", "anything"], [0, 1, 2, 3], **toy)
one = generate(["anything"], [3], **toy)
list(four.seconds), four.images[0].size

# %% tags=["check"]
assert torch.allclose(one.latents[0], four.latents[3], atol=1e-4)  # batch[i] == single(seed i)
assert torch.equal(generate(["anything"], [3], **toy).latents, one.latents)  # the same call twice: the same bits
stopped = generate(["anything"], [3], **toy, callback=lambda info: info.step < 4)
assert stopped.images == [] and stopped.step == 4 and stopped.cancelled
until_8 = dict(callback=lambda info: info.step < 8, **toy)
uninterrupted = generate(["anything"], [3], **until_8)
assert torch.equal(generate(["anything"], [3], resume=stopped, **until_8).latents, uninterrupted.latents)

# %% [markdown] lang="zh"
# ## 换上真零件，还没有训练
#
# 现在递进去的是前几章的真零件：文本编码器、DiT、引导、VAE，权重全是随机的；`load_model` 只管读文件。你猜会画出什么？线索在第 06 章：最后一层初始为零，所以 $v = 0$。

# %% [markdown] lang="en" twin="bef2769a"
# ## Real parts, untrained
#
# Now hand in the real parts of the earlier chapters: text encoder, DiT, guidance, VAE, all with random weights; `load_model` only reads files. What will they draw? The hint is in chapter 06: the last layer starts at zero, so $v = 0$.

# %%
from diffusion_engine.model_folder import Model, load_model
from diffusion_engine.guidance import guided_velocity
from diffusion_engine.text_conditioning import encode_prompt, stack_prompts


def parts(model: Model, guidance: float) -> dict:
    def encode(prompts):
        both = [[encode_prompt(model.text_encoder, model.tokenizer, text) for text in (p, "")] for p in prompts]
        return tuple(stack_prompts(list(side)) for side in zip(*both))  # with the prompt, without it

    def network(x, t, prompt):
        return model.dit(x, t, prompt.tokens, prompt.mask, prompt.pooled)

    def velocity(condition):
        return guided_velocity(network, *condition, scale=guidance)

    return dict(encode=encode, velocity=velocity, decode=model.vae.decode, shape=(4, 16, 16))


trained = load_model()
torch.manual_seed(0)
kinds = {name: type(getattr(trained, name)) for name in ("dit", "vae", "text_encoder")}
fresh = trained._replace(**{name: kind(getattr(trained, name).config) for name, kind in kinds.items()})
guidance, shift = (trained.config["recommended"][name] for name in ("guidance_scale", "shift"))
prompts, seeds, walk = ["red apple", "smiling cat", "火箭", "彩虹"], [0, 1, 2, 3], make_schedule(28, shift=shift)
untrained = generate(prompts, seeds, make_schedule(4), **parts(fresh, guidance))

# %% tags=["check"]
from diffusers import FlowMatchEulerDiscreteScheduler

assert torch.equal(untrained.latents, initial_noise(seeds, (4, 16, 16)))  # v = 0: the noise comes back untouched
theirs, x = FlowMatchEulerDiscreteScheduler(), noise
theirs.set_timesteps(sigmas=schedule.sigmas[:-1].tolist())
for t in theirs.timesteps:  # diffusers' loop, the same velocity
    x = theirs.step(free(x, float(t) / 1000), t, x).prev_sample
assert torch.allclose(denoise(free, noise, schedule).latents, x, atol=1e-5)

# %% [markdown] lang="zh"
# ## 换上训练好的权重
#
# 同样的代码，同样的噪声，只换权重。网络把噪声推到哪里，是训练教会它的，流水线一个字也没有改。滑块里是四张图的预览 $\hat x_0$。先猜再拖：第几步就认得出猫？颜色、轮廓、细节，哪样先定？

# %% [markdown] lang="en" twin="28d68dd8"
# ## With trained weights
#
# The same code, the same noise, other weights. Where the network pushes the noise is what training taught it; the pipeline has not changed by a word. The slider shows the previews $\hat x_0$ of all four. Guess, then move: at which step do you know the cat? Which settles first, colour, outline or detail?

# %%
previews: dict[int, list[Image.Image]] = {}


def keep(info: StepInfo) -> None:
    if info.step in (1, 2, 4, 8, 16, 28):
        previews[info.step] = to_pictures(trained.vae.decode(info.data))


drawn = generate(prompts, seeds, walk, **parts(trained, guidance), callback=keep)

# %% tags=["hide"]
from course.sliders import slider, tiles

image_grid(
    untrained.images + drawn.images,
    ["red apple", "smiling cat", "rocket", "rainbow"] * 2,
    alt="Top: noise from untrained parts. Bottom: an apple, a cat, a rocket, a rainbow.",
    columns=4,
    title="Random weights, trained weights",
    size=0.9,
)
slider(
    lambda step: tiles(previews[step]),
    list(previews),
    label="preview after step",
    alt="Previews of an apple, a cat, a rocket and a rainbow after step {} of 28, on the way from blurs to sharp pictures.",
    colors=None,
)

# %% tags=["check"]
few, real = make_schedule(6, shift=shift), parts(trained, guidance)
pair, single = generate(prompts[:2], [0, 1], few, **real), generate(prompts[1:2], [1], few, **real)
assert torch.allclose(pair.latents[1], single.latents[0], atol=1e-4)  # alone or in a batch
halted = generate(prompts[1:2], [1], few, **real, solver="multistep", callback=lambda info: info.step < 3)
through = generate(prompts[1:2], [1], few, **real, solver="multistep")
assert torch.equal(generate(prompts[1:2], [1], few, **real, solver="multistep", resume=halted).latents, through.latents)
assert max(drawn.seconds, key=drawn.seconds.get) == "denoise"  # where the time goes

# %% [markdown] lang="zh"
# ## 两个旋钮
#
# 先猜再拖。第一个滑块是引导强度 $w$，都走 12 步：$w = 0$ 时还听提示词吗？太大又会怎样？第二个是步数：最少几步，三张图都认得出来？再多走，换来的是什么？想写自己的提示词，请到[试验台](../playground.zh.ipynb)。

# %% [markdown] lang="en" twin="16a7885d"
# ## Two knobs
#
# Guess, then move. The first slider is the guidance $w$, always 12 steps: does $w = 0$ hear the prompt at all, and what does too much do? The second is the number of steps: how few make all three recognisable, and what do more of them buy? For prompts of your own there is the [playground](../playground.en.ipynb).


# %%
def draw(w: float = guidance, steps: int = 12) -> Image.Image:
    return tiles(generate(prompts[1:], seeds[1:], make_schedule(steps, shift=shift), **parts(trained, w)).images)


scales, counts = [0.0, 0.5, 1.0, 2.0, 3.0, 5.0, 9.0], [1, 2, 4, 8, 14, 28]
alts = "What the prompts cat, rocket and rainbow give with guidance {}.", "The same three prompts in {} steps."
slider(lambda w: draw(w=w), scales, label="guidance w", alt=alts[0], colors=None)
slider(lambda n: draw(steps=n), counts, label="steps", alt=alts[1], colors=None)

# %% [markdown] lang="zh"
# **到了这里**，引擎能从头画到尾。`TextToImage` 只是把这些零件装在一起，再加上命令行和文件。还没回答的是：那些权重从哪里来？第 11 章训练它们；第 12、13 章再把省内存、省时间的零件递进同一个 `generate`。
#
# ## 三个问题
#
# 1. 预测：回调在第 4 步返回 `False`，成品会是空的。此时你手里最好的图是什么？
# 2. 修改：续画时把 `start` 写成 `step + 1`，形状不变，哪里变了？
# 3. 动手：写一个回调，预览连续两步几乎不动就提前停下。

# %% [markdown] lang="en" twin="66fea36b"
# **Where we stand.** The engine draws from end to end. `TextToImage` only puts these parts together and adds a command line and files. Where do the weights come from? Chapter 11 trains them; chapters 12 and 13 hand savers of memory and time to this same `generate`.
#
# ## Three questions
#
# 1. Predict: a callback returns `False` at step 4, so there is no finished picture. What is the best picture you hold?
# 2. Modify: resume with `start` at `step + 1`. The shape stays; what changes?
# 3. Build: write a callback that stops early once the preview has hardly moved for a step.

# %% tags=["solution"]
# 1 · the last preview: much closer to a picture of this world than the latents are
last: list[StepInfo] = []
denoise(free, noise, schedule, callback=lambda info: last.append(info) or info.step < 4)
to_world = [torch.cdist(x.flatten(1), world.flatten(1)).min() for x in (last[-1].data, last[-1].latents)]
assert to_world[0] < to_world[1]

# %% tags=["solution"]
# 2 · one step of the road is missing: from there on the network is told a σ at which the latents are not
late = denoise(free, paused.latents, schedule, "multistep", start=paused.step + 1, history=paused.history)
assert late.step == schedule.num_steps and not torch.equal(late.latents, whole.latents)


# %% tags=["solution"]
# 3
def until_still(tolerance: float) -> Callback:
    before: list[Tensor] = []

    def callback(info: StepInfo) -> bool:
        moved = (info.data - before.pop()).abs().max() if before else float("inf")
        before.append(info.data.clone())
        return bool(moved > tolerance)

    return callback


early = denoise(ring, noise, schedule, callback=until_still(1e-3))
assert early.cancelled and early.step == 2  # on a straight road the preview never moves

# %% [markdown] lang="zh"
# ## 小结
#
# - 每张图一颗种子、一个生成器：批里第 $i$ 张就是单独画的那张。
# - 预览 $\hat x_0 = x - \sigma v$ 不花钱，回调可以看，也可以喊停。
# - 续画要潜变量、步数和求解器的记忆，缺一不可。
# - NaN 在哪一站出现，就在哪一站报错。
# - 流水线只认普通函数：换零件不改它。
#
# 笔记：数据怎样流过引擎（[`notes/03_data_flow`](../../notes/03_data_flow.zh.md)）。下一章：11。

# %% [markdown] lang="en" twin="6e07c70d"
# ## Recap
#
# - One seed and one generator a picture: number $i$ of a batch is the one drawn alone.
# - The preview $\hat x_0 = x - \sigma v$ is free; a callback may watch, and may stop the run.
# - To go on takes latents, step and the solver's memory, all three.
# - A NaN is reported by the stage that made it.
# - The pipeline knows plain functions only: other parts, same code.
#
# Note: how data flows through the engine ([`notes/03_data_flow`](../../notes/03_data_flow.en.md)). Next: chapter 11.
