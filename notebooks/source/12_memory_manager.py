# ---
# jupyter:
#   course:
#     minutes: 45
#     module: memory_manager
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown] lang="zh"
# # 12 · 内存管理（memory manager）
#
# 读完这一章，你能在动手之前算出一张图要多少内存，并让引擎画进你给的预算里，画出来的还是那张图。
#
# | 你会做出 | 你需要 | 时间 | 模块 |
# | --- | --- | --- | --- |
# | 字节计、双缓冲、内存公式、预算计划、激活检查点 | 第 02、06、09、10 章的求解器、DiT、VAE、流水线 | 45 分钟 | `diffusion_engine/memory_manager.py` |

# %% [markdown] lang="en" twin="012f9dba"
# # 12 · The memory manager
#
# After this chapter you can tell how much memory a picture needs before you draw it, and make the engine draw the very same picture within the budget you set.
#
# | You build | You need | Time | Module |
# | --- | --- | --- | --- |
# | a byte counter, ping-pong buffers, memory formulas, a plan for a budget, activation checkpointing | solvers, DiT, VAE and pipeline of chapters 02, 06, 09, 10 | 45 minutes | `diffusion_engine/memory_manager.py` |

# %% [markdown] lang="zh"
# **先想一想**：随引擎发布的模型在内存里占 56 MB。一批画两张 $128\times128$ 的图，还要多少？去噪和解码，哪一站吃得多？系统监视器报出好几百 MB，能信吗？先写下你的猜测。

# %% [markdown] lang="en" twin="74862bb5"
# **Think first:** the shipped model takes 56 MB of memory. How much more for a batch of two pictures of $128\times128$? Which stage eats more, denoising or decoding? The system monitor reports several hundred MB: can you trust that? Write your guesses down.

# %% tags=["export"]
import math
import re
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from diffusion_engine.attention import score_bytes
from diffusion_engine.dit import DiTConfig, patch_grid
from diffusion_engine.vae import VAE, Decoder, VAEConfig, even_tiles, receptive_radius, tiled_decode

# %% [markdown] lang="zh"
# ## 数字节，不数进程
#
# 进程的内存里有 Python、几个大库、还没还给系统的旧页面；它只升不降，说不清是谁的。换个问法：此刻活着的张量一共多少字节？每执行一个算子就看一眼它的输出。先写最笨的版本：把输出的大小都加起来。

# %% [markdown] lang="en" twin="3f7673d9"
# ## Count bytes, not the process
#
# A process holds Python, a few large libraries, and old pages not yet given back; it hardly ever shrinks, and does not say whose memory it is. Ask instead: how many bytes of tensors are alive right now? Look at the output of every operation. The plainest version first: add up the sizes of all outputs.


# %%
class NaiveBytes(TorchDispatchMode):
    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.total += out.nbytes
        return out


def small_world(weight: Tensor) -> Tensor:
    x = torch.ones(1000)  # 4000 bytes
    head = x[:10]  # a view
    x.add_(1)  # in place
    y = x * weight.flip(0)  # two new tensors of 4000; the flipped one dies at once
    del x, head
    return y


weight = torch.ones(1000)
with NaiveBytes() as naive:
    small_world(weight)
naive.total  # how many bytes were alive at once?

# %% [markdown] lang="zh"
# 最多同时活着三份：12 000。笨办法数多了：视图和就地写入不带来新内存，死掉的也没减去。张量只是一扇窗，内存在它背后的存储（storage）里：
#
# $$\text{live} = \sum_{\text{storage}} \text{bytes}, \qquad \text{peak} = \max_{\text{time}}\; \text{live}$$
#
# | 记号 | 含义 |
# | --- | --- |
# | 存储 | 一段内存；多个张量可以共用，最后一个放手时才释放 |
# | 新存储 | 不在任何输入背后的存储 |
# | $B, N, M, D$ | 批、图块数、词元数、宽度；$T = N + M$ |
# | $s$ | 一个数的字节，fp32 是 4 |
#
# 照这个数法看真的网络：七个块是七座山，两个联合块，五个并行块，最高点都在拼接注意力与 MLP 的地方。

# %% [markdown] lang="en" twin="83befaeb"
# At most three were alive at once: 12,000. The plain way counts too much: views and in-place writes bring no memory, and nothing was subtracted for the dead. A tensor is a window; the memory is in the storage behind it:
#
# $$\text{live} = \sum_{\text{storage}} \text{bytes}, \qquad \text{peak} = \max_{\text{time}}\; \text{live}$$
#
# | Symbol | Meaning |
# | --- | --- |
# | storage | a stretch of memory; several tensors may share it, the last to let go frees it |
# | new storage | one that stands behind none of the inputs |
# | $B, N, M, D$ | batch, patches, text tokens, width; $T = N + M$ |
# | $s$ | bytes of one number, 4 in fp32 |
#
# Counted so, the real network shows seven hills for its two joint and five parallel blocks; the summits are where attention and MLP are joined.


# %% tags=["export"]
def storages(value: Any) -> dict[int, torch.UntypedStorage]:
    """The storages behind all tensors in ``value`` (tuples, lists and dicts are looked into), each once, by address."""
    tensors = (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
    return {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}


def tensor_bytes(value: Any) -> int:
    """Σ bytes of the storages behind all tensors in ``value``: a view is free, yet it keeps its whole storage."""
    return sum(storage.nbytes() for storage in storages(value).values())


def weight_bytes(*modules: nn.Module) -> int:
    """Bytes of all parameters and buffers; tied weights count once."""
    return tensor_bytes([[*module.parameters(), *module.buffers()] for module in modules])


def latent_bytes(shape: Sequence[int], batch: int = 1, itemsize: int = 4) -> int:
    """B · C · h · w · itemsize: one batch of latents of ``shape`` (C, h, w) or (C, T, h, w)."""
    return batch * math.prod(shape) * itemsize


# %% tags=["export"]
class LiveBytes(TorchDispatchMode):
    """Bytes of the storages made inside this block: ``now`` alive, ``peak`` at the most; ``allocations`` counts them.

    An operation's output is new unless it shares its storage with an argument: views and in-place writes bring nothing,
    weights and inputs from outside are not counted. What a kernel borrows while it runs, and what NumPy holds, is not
    seen.
    """

    def __init__(self):
        super().__init__()
        self.now, self.peak, self.allocations = 0, 0, 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = () if func is torch.ops.aten.lift_fresh.default else storages((args, kwargs))  # torch.tensor is new
        for key, storage in storages(out).items():
            if key not in given and key not in self._alive:
                self._alive.add(key)
                self.now, self.allocations = self.now + storage.nbytes(), self.allocations + 1
                weakref.finalize(storage, self._free, key, storage.nbytes()).atexit = False
        self.peak = max(self.peak, self.now)
        return out

    def _free(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self.now -= size


# %% tags=["check"]
with LiveBytes() as live:
    y = small_world(weight)
    assert live.now == tensor_bytes(y) == 4000 and live.peak == 12_000  # the dead are subtracted
    torch.mul(weight[::2], 2, out=weight[1::2]), y.add_(1), weight.split(10)
assert live.allocations == 3  # no view, no write in place, nothing from outside, however it is looked at
assert tensor_bytes([weight[0], {"again": weight}]) == 4000  # one number keeps all thousand; twice the same is once
assert storages((y, y[1:])).keys() == storages(y).keys() != storages(weight).keys()

# %% tags=["hide"]
import itertools
import os
from course.figures import COLORS, plt, show
from diffusion_engine.model_folder import load_model
from diffusion_engine.text_conditioning import encode_prompt, stack_prompts

model, words = load_model(), ["red apple", "火箭"]


def embed(prompts: list[str]):  # with the prompt, without it
    sides = [[encode_prompt(model.text_encoder, model.tokenizer, text) for text in (p, "")] for p in prompts]
    return tuple(stack_prompts(list(side)) for side in zip(*sides))


cond, _ = embed(words)
noise = torch.randn(2, 4, 32, 32, generator=torch.Generator().manual_seed(0))  # two pictures of 128 × 128
call = (noise, torch.full((2,), 500.0), *cond)


class History(LiveBytes):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.seen = [*getattr(self, "seen", []), (self.now, func.__name__)]
        return out


def ledger_peak(run) -> int:  # the highest balance: + at every allocation, − at every release
    with torch.no_grad(), torch.autograd.profiler.profile(profile_memory=True) as prof:
        run()
    entries = [event for event in prof.kineto_results.events() if event.name() == "[memory]"]
    return max(itertools.accumulate(event.nbytes() for event in sorted(entries, key=lambda e: e.start_ns())))


os.environ["KINETO_LOG_LEVEL"] = "99"  # no chatter from the profiler
with torch.no_grad(), History() as history:
    model.dit(*call)
summits = [name for bytes_, name in history.seen if bytes_ == history.peak]
assert summits == ["cat.default"] * 5 and history.now == 0  # five joinings, and nothing stays behind

fig, ax = plt.subplots(figsize=(6.4, 2.7))
alive = torch.tensor([bytes_ for bytes_, _ in history.seen]) / 1e6
ax.fill_between(range(len(alive)), alive, color=COLORS[0], alpha=0.25, lw=0)
ax.plot(alive, color=COLORS[0], lw=1.2)
ax.axhline(alive.max(), color=COLORS[3], lw=1, ls="--")
ax.text(2, alive.max() * 1.02, f"peak {alive.max():.2f} MB, {len(summits)} times", color=COLORS[3])
ax.set(
    title="One forward pass: each block builds a hill and takes it down again", xlabel="operation", ylabel="alive, MB"
)
for place, name in ((0.28, "two joint blocks"), (0.78, "five parallel blocks")):
    ax.text(place, 0.05, name, transform=ax.transAxes, ha="center")
ax.set(xlim=(0, len(alive)), ylim=(0, alive.max() * 1.18))
show(fig, alt="Live bytes over the operations of one forward pass: two low hills, then five equal higher ones")

# %% [markdown] lang="zh"
# ## 双缓冲：更新不再申请内存
#
# 写成 $x + h\,v$，每一步都要两块新内存。其实和可以写进旧的一块，只是不能写进 $x$ 自己：预览还要读它。于是备两块：读前面，写后面，再交换名字：
#
# $$\text{back} \leftarrow h\,v + \text{front}, \qquad \text{front} \leftrightarrow \text{back}$$
#
# Heun 和多步法也不要第三块。它**不是**加速，时间几乎全在网络里；得到的是不变的地址，录成 CUDA 图正需要。代价是回调拿到的潜变量会被盖掉，要留就 `clone`。

# %% [markdown] lang="en" twin="284a8568"
# ## Ping-pong: an update that allocates nothing
#
# Written as $x + h\,v$, each step takes two new pieces of memory. The sum may go into an old one, but not into $x$ itself, which a preview still reads. So keep two: read the front, write the back, exchange the names:
#
# $$\text{back} \leftarrow h\,v + \text{front}, \qquad \text{front} \leftrightarrow \text{back}$$
#
# Heun and multistep need no third. It is **no** speed-up: the time is in the network. You gain fixed addresses, as a CUDA graph needs, and pay with overwritten latents: `clone` what a callback keeps.


# %% tags=["export"]
class LatentBuffer:
    """Two latents allocated once: a solver reads ``front`` and writes ``back``, then `swap` exchanges the two names.

    Hand it to `denoise` or `generate`; one run at a time. Both addresses stay for good, as a captured graph needs them to.

    Args:
        shape: of a batch, (B, C, H, W) or (B, C, T, H, W). dtype: of the latents. device: where they live.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"):
        self.front = torch.zeros(*shape, dtype=dtype, device=device)
        self.back = torch.zeros_like(self.front)

    def load(self, latents: Tensor) -> Tensor:
        """Copy ``latents`` into ``front`` and return it.

        Raises:
            ValueError: another shape, dtype or kind of device than the buffer's.
        """
        mine, given = ((tuple(x.shape), x.dtype, x.device.type) for x in (self.front, latents))
        if given != mine:
            raise ValueError(f"latents are {given}, the buffer is {mine}; try LatentBuffer{given}")
        return self.front.copy_(latents)

    def swap(self) -> None:
        """``back``, just written, becomes ``front``; no number is copied."""
        self.front, self.back = self.back, self.front


# %% tags=["hide"]
from diffusion_engine.pipeline import denoise
from diffusion_engine.scheduler import SOLVERS, make_schedule


def refused(call, *arguments, **named) -> str:
    try:
        call(*arguments, **named)
    except ValueError as error:
        return str(error)
    raise AssertionError(f"{arguments} were accepted")


fig, ax = plt.subplots(figsize=(6.4, 2.0))
for step in range(4):
    left, down = 2.2 * step, step % 2 == 0
    for row in (0, 1):
        reads = step % 2 == row
        ax.add_patch(plt.Rectangle((left, -row), 1.2, 0.6, fc=COLORS[0] if reads else COLORS[1]))
        words_ = f"x{step}" if reads else f"x{step + 1}"
        ax.text(left + 0.6, 0.3 - row, words_, color="white", ha="center", va="center", fontsize=11)
    ends = [(left + 0.6, -0.4), (left + 0.6, 0.0)]
    ax.annotate("", *(ends if down else ends[::-1]), arrowprops={"arrowstyle": "-|>", "color": "black"})
    ax.text(left + 0.7, -0.2, "+ h·v", va="center")
    ax.text(left + 0.6, -1.35, f"step {step + 1}", ha="center")
for row, name in enumerate(("memory A", "memory B")):
    ax.text(-0.2, 0.3 - row, name, ha="right", va="center")
ax.set(xlim=(-1.5, 8.0), ylim=(-1.5, 0.7))
ax.axis("off")
ax.set_title("Two places take turns: blue is read, orange is written")
show(fig, alt="Two rows of memory over four steps: each step reads one row and writes the next latents into the other")

schedule, pair, places = make_schedule(8, shift=2.0), LatentBuffer(noise.shape), set()
bent = lambda x, sigma: places.add(x.data_ptr()) or torch.sin(3 * x) + sigma  # noqa: E731
still = lambda x, sigma: noise  # noqa: E731, costs no memory, so that the update stands alone
walked = {name: denoise(bent, noise, schedule, name, buffer=pair).latents for name in SOLVERS}

# %% tags=["check"]
assert torch.equal(pair.load(noise), noise)  # copied in
assert len(places) == 2  # twenty-four steps, thirty-two calls, two addresses
for name, solver in SOLVERS.items():
    assert torch.equal(walked[name], denoise(bent, noise, schedule, name).latents)  # the same bits
    with LiveBytes() as paired:
        solver(still, pair.front, 0.5, 0.4, (noise, -0.1) if name == "multistep" else (), pair.back)
    assert paired.allocations == 0  # nothing at all

# %% tags=["check"]
kept: list[Tensor] = []
denoise(bent, noise, schedule, callback=lambda info: kept.extend([info.latents, info.latents.clone()]), buffer=pair)
assert torch.equal(kept[0], kept[13]) and not torch.equal(kept[0], kept[1])  # step 7 has moved in where step 1 was
print(refused(pair.load, noise[:1]))

# %% [markdown] lang="zh"
# ## 公式：动手之前就知道
#
# 权重和潜变量只是乘法。激活要数清山顶上谁还活着：并行块里 $x$、$h$、注意力的结果各 1 份，GELU 之后 4 份，拼起来 5 份，共 12 份 $T D$；文字和位置另外放着。解码最宽处是三张半分辨率的特征图（feature map）：
#
# $$\text{activations} = B\,s\,D\,(12\,T + 2\,M + 4) + s\,D\,N, \qquad \text{decode} = B\,s\,h\,w\,(6\cdot\text{width} + C + 4)$$

# %% [markdown] lang="en" twin="6ddb48c6"
# ## Formulas: known before you run
#
# Weights and latents are plain products. For activations, count who is alive on the summit: in a parallel block $x$, $h$ and attention's result once each, 4 after GELU, 5 joined: 12 times $T D$; text and positions lie beside. Decoding is widest with three feature maps at half resolution:
#
# $$\text{activations} = B\,s\,D\,(12\,T + 2\,M + 4) + s\,D\,N, \qquad \text{decode} = B\,s\,h\,w\,(6\cdot\text{width} + C + 4)$$


# %% tags=["export"]
def activation_bytes(
    config: DiTConfig,
    grid: tuple[int, int],
    text_tokens: int,
    batch: int = 1,
    itemsize: int = 4,
    fused: bool = True,
    chunk: int | None = None,
) -> int:
    """Peak of what one forward of a `DiT` makes, without gradients; T = N + M tokens of width D, s bytes a number.

    A parallel block: B · s · D · (12 T + M + 4), at the joining of attention and MLP; a joint block:
    B · s · D · (max(6 T, 2 T + 6 N, 2 T + 6 M) + 13), in attention or in one of the MLPs. The `Conditions` lie
    beside: B · s · D · M + s · D · N.

    Args:
        config, grid, text_tokens, batch: as in `flop_count`.
        itemsize: s.
        fused: False where attention lays its scores out: two of `score_bytes` then stand beside 6 T.
        chunk: queries that attention handles at a time.
    """
    n, m, unit = math.prod(grid), text_tokens, batch * itemsize * config.width
    t, rows = n + m, min(chunk or n + m, n + m)
    scores = 0 if fused else 2 * score_bytes(batch, config.heads, rows, t, itemsize)
    attending = (6 * t + (rows if chunk else 0)) * unit + scores
    parallel = max(12 * t * unit, attending) + (m + 4) * unit
    joint = max((2 * t + 6 * max(n, m)) * unit, attending) + 13 * unit
    block = max(parallel * (config.parallel_depth > 0), joint * (config.joint_depth > 0))
    return block + m * unit + n * unit // batch


# %% tags=["export"]
def decode_bytes(
    config: VAEConfig,
    height: int,
    width: int,
    batch: int = 1,
    itemsize: int = 4,
    tile: int | None = None,
    overlap: int = 8,
) -> int:
    """Peak of decoding (B, C, h, w) latents: three feature maps at half resolution, B · s · h · w · (6 · width + C + 4).

    In tiles the same for one tile, beside the whole picture (48 numbers a latent), its weights and the last part.

    Args:
        height, width: h and w in latents. tile, overlap: as in `tiled_decode`; None decodes the whole at once.
    """
    features, pixels = 6 * config.width + config.latent_channels + 4, config.factor**2
    if tile is None:
        return batch * itemsize * height * width * features
    part = math.prod(stop - start for start, stop in (even_tiles(side, tile, overlap)[0] for side in (height, width)))
    joined = 4 * pixels * (height * width * (3 * batch + 1) + 2 * part)  # always fp32
    return joined + batch * itemsize * part * (features + 3 * pixels)


# %% tags=["hide"]
from diffusion_engine.dit import DiT, parameter_count
from torch.nn.attention import SDPBackend, sdpa_kernel


def measured(net, side: int, batch: int = 1, kernel=SDPBackend.FLASH_ATTENTION, chunk: int | None = None):
    """(formula, measurement) of one forward on side × side latents."""
    prompt = [part[:batch] for part in cond]
    with torch.no_grad(), sdpa_kernel(kernel), LiveBytes() as live:
        net(torch.zeros(batch, 4, side, side), torch.zeros(batch), *prompt, chunk)
    sizes = (side // 4, side // 4), prompt[1].shape[1], batch, 4, kernel == SDPBackend.FLASH_ATTENTION, chunk
    return activation_bytes(net.config, *sizes), live.peak


def measured_decode(side: int, tile: int | None = None) -> tuple[int, int]:
    decode = model.vae.decode if tile is None else lambda z: tiled_decode(model.vae, z, tile, 14)
    with torch.no_grad(), LiveBytes() as live:
        decode(torch.zeros(1, 4, side, side))
    return decode_bytes(model.vae.config, side, side, 1, 4, tile, 14), live.peak


joint = DiT(DiTConfig(joint_depth=2, parallel_depth=0)).requires_grad_(False)
pairs = dict(weights=[(4 * parameter_count(model.dit.config), weight_bytes(model.dit))])
pairs["latents"] = [
    (latent_bytes(x.shape[1:], 2), tensor_bytes(x)) for x in (noise.clone(), torch.zeros(2, 4, 3, 8, 8))
]
pairs["activations"] = [
    measured(model.dit, 16),
    measured(model.dit, 32, 2),
    measured(model.dit, 48),
    measured(joint, 32),
]
pairs["scores"] = [measured(model.dit, 64, 1, SDPBackend.MATH, chunk) for chunk in (None, 64)]
pairs["decode"] = [measured_decode(16), measured_decode(40), measured_decode(40, 28)]

fig, ax = plt.subplots(figsize=(6.4, 3.0))
ax.plot([6e3, 6e7], [6e3, 6e7], color="0.7", lw=1)
for (name, points), mark in zip(pairs.items(), "osD^v"):
    ax.loglog(*zip(*points), mark, ms=6, label=name, alpha=0.85)
ax.set(
    title="Formula and measurement agree from 6 kB to 40 MB",
    xlabel="formula, bytes",
    ylabel="measured, bytes",
)
ax.legend(ncols=2)
show(
    fig,
    alt="Measured against computed bytes, log-log: weights, latents, activations, scores, decoding lie on the diagonal",
)

# %% tags=["check"]
worst = {name: max(abs(formula / found - 1) for formula, found in points) for name, points in pairs.items()}
print({name: f"{100 * off:.1f} %" for name, off in worst.items()})
assert worst["weights"] == worst["latents"] == 0 and max(worst.values()) < 0.03
assert pairs["scores"][0][1] - pairs["scores"][1][1] > 1.2 * score_bytes(
    1, 8, 260, 260, 4
)  # unfused: two tables at once
assert pairs["decode"][2][1] < 0.65 * pairs["decode"][1][1]  # four tiles of 27 instead of 40: more than the area tells

# %% [markdown] lang="zh"
# ## 每一站各有峰值
#
# 第 10 章的 `generate` 收一个计量器（meter）。这一个数字节，从不同时计时：看着每个算子，什么都慢。在 CUDA 上问分配器自己的峰值，每站先清零。基线（baseline）是早就在那里的：权重、备好的缓冲。

# %% [markdown] lang="en" twin="1453fa69"
# ## A peak for every stage
#
# `generate` of chapter 10 takes a meter. This one counts bytes and never times: watching every operation makes all of it slow. On CUDA it asks the allocator for its own peak, reset for each stage. The baseline is what was there before: weights, and buffers allocated ahead.


# %% tags=["export"]
class PeakMeter:
    """A meter for `generate`, as `Stopwatch` is, that counts bytes and never time: watching makes everything slower.

    ``with meter("decode"): …`` sets ``peak_bytes["decode"]``: the most that stood above ``baseline`` at once, what earlier
    stages left alive included. On CUDA the allocator's own peak, reset for each stage; elsewhere `LiveBytes`.

    Args:
        held: modules, tensors or nested tensors that are there before: ``baseline`` is their bytes (on CUDA: all that
            is allocated).
        device: where the work is done.
    """

    def __init__(self, *held: Any, device: torch.device | str = "cpu"):
        self.device, self.peak_bytes, self._live = torch.device(device), {}, LiveBytes()
        self.baseline = tensor_bytes([[*h.parameters(), *h.buffers()] if isinstance(h, nn.Module) else h for h in held])
        if self.device.type == "cuda":
            self.baseline = torch.cuda.memory_allocated(self.device)

    @property
    def total(self) -> int:
        """baseline + the largest peak."""
        return self.baseline + max(self.peak_bytes.values(), default=0)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        self._live.peak = self._live.now
        try:
            with nullcontext() if cuda else self._live:
                yield
        finally:
            peak = torch.cuda.max_memory_allocated(self.device) - self.baseline if cuda else self._live.peak
            self.peak_bytes[stage] = max(self.peak_bytes.get(stage, 0), peak)


# %% tags=["check"]
meter = PeakMeter(nn.Linear(10, 10), {"buffer": torch.zeros(50)})
for stage, size in (("first", 1000), ("second", 10), ("first", 10)):
    with meter(stage):
        kept.append(torch.zeros(size) + 1)  # two at once, one stays
assert meter.baseline == 440 + 200
assert meter.peak_bytes == {"first": 8000, "second": 4080}  # reset for each stage; what is still alive counts on
assert meter.total == 640 + 8000

# %% [markdown] lang="zh"
# ## 和真家伙对一对，并找出其余的去向
#
# 拿 PyTorch 分配器自己的流水账来对：网络一次前向，峰值相同。解码可能差一截：卷积内核运行时借一块工作区（workspace），用完就还，按算子数看不见。进程里剩下的是库、代码和没还的页面。权重再和 diffusers 自报的数对一对。

# %% [markdown] lang="en" twin="b71bfb19"
# ## Against the real thing, and where the rest goes
#
# Compare with the ledger of PyTorch's own allocator: for one forward of the network the peak is the same. Decoding may differ: a convolution's kernel borrows a workspace and returns it before it ends, unseen by a count of operations. The rest of a process is libraries, code, and pages not given back. Weights are held against what diffusers reports of itself.

# %% tags=["check"]
from diffusers import SD3Transformer2DModel

tiny = dict(num_layers=1, num_attention_heads=1, joint_attention_dim=8, caption_projection_dim=64)
theirs = SD3Transformer2DModel(**tiny, pos_embed_max_size=8)
assert weight_bytes(theirs) == theirs.get_memory_footprint()
assert abs(ledger_peak(lambda: model.dit(*call)) / history.peak - 1) < 0.01  # nothing is missed, nothing invented
borrowed = ledger_peak(lambda: model.vae.decode(noise)) / decode_bytes(model.vae.config, 32, 32, 2)
assert borrowed > 0.99  # decoding may also borrow a workspace

# %% [markdown] lang="zh"
# ## 给一个预算
#
# 现在反过来用公式：给定上限，选最快又装得下的路。每一条让步都不改变结果：
#
# | 让步 | 省在哪里 | 代价 |
# | --- | --- | --- |
# | 引导分两次前向 | 去噪减半 | 第 13 章来量 |
# | 注意力分批查询 | 分数；融合内核本来就没有 | 循环 |
# | 一次少解码几张 | 解码按张数 | 循环 |
# | 解码分片，重叠 $2r + 1$ | 解码按面积 | 重叠处重算 |

# %% [markdown] lang="en" twin="bc802f36"
# ## Give it a budget
#
# Now turn the formulas round: under a limit, choose the fastest way that fits. No concession changes the result:
#
# | Concession | What it saves | Price |
# | --- | --- | --- |
# | guidance in two forwards | half of denoising | chapter 13 measures it |
# | attention in chunks of queries | scores; a fused kernel has none | a loop |
# | fewer pictures decoded at a time | decoding, by their number | a loop |
# | decoding in tiles that share $2r + 1$ | decoding, by area | overlaps are computed twice |

# %% tags=["export"]
UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def parse_bytes(size: int | str) -> int:
    """``"2 GB"`` → 2 000 000 000, ``"1.5GiB"`` → 1.5 · 2³⁰; a whole number is bytes already.

    Raises:
        ValueError: no positive size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(k|[KMGT]i|[MGT]|)B?\s*", str(size))
    count = int(float(match[1]) * UNITS[match[2]]) if match and not isinstance(size, bool) else 0
    if count < 1:
        raise ValueError(f'{size!r} is no size in bytes; try "2 GB", "512 MiB" or a whole number')
    return count


def format_bytes(count: int) -> str:
    """Three digits in decimal units, rounded up: 55 779 696 → ``"55.8 MB"``, so that `parse_bytes` reads no less."""
    for prefix in ("", "k", "M", "G", "T"):
        unit = UNITS[prefix]
        digits = max(0, 3 - len(str(count // unit))) if prefix else 0
        rounded = -(-count * 10**digits // unit) / 10**digits
        if rounded < 1000 or prefix == "T":
            return f"{rounded:.{digits}f} {prefix}B"


# %% tags=["export"]
@dataclass(frozen=True)
class Plan:
    """How to stay below a budget; every choice is exact. ``str(plan)`` says what was chosen, and why.

    ``batched_cfg`` is for `guided_velocity`, ``attention_chunk`` for `DiT`, the rest for `planned_decode`.
    """

    budget: int
    weights: int
    batched_cfg: bool
    attention_chunk: int | None
    vae_batch: int | None  # pictures decoded at a time; None: all
    vae_tile: int | None
    vae_overlap: int
    peak_bytes: dict[str, int]  # expected, by stage, above the weights
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.reasons)


def planned_decode(vae: VAE, latents: Tensor, plan: Plan) -> Tensor:
    """``vae.decode(latents)``, as many pictures at a time and in such tiles as the plan says; equal to 1e-5."""
    tile, overlap = plan.vae_tile, plan.vae_overlap
    parts = latents.split(plan.vae_batch or len(latents))
    pictures = [vae.decode(part) if tile is None else tiled_decode(vae, part, tile, overlap) for part in parts]
    return torch.cat(pictures) if len(pictures) > 1 else pictures[0]


# %% tags=["export"]
@dataclass(frozen=True)
class _Job:
    """What is to be drawn, sides in latents; each stage's peak above the weights, with what is carried along."""

    dit: DiTConfig
    vae: VAEConfig
    height: int
    width: int
    text_tokens: int
    batch: int
    itemsize: int
    guided: bool
    fused: bool
    overlap: int

    def carried(self, latents: int) -> int:
        """Prompt embeddings of both sides, and so many batches of latents."""
        prompts = (1 + self.guided) * self.batch * (self.text_tokens + 1) * self.dit.text_width * self.itemsize
        return prompts + latents * latent_bytes((self.dit.latent_channels, self.height, self.width), self.batch)

    def encode(self) -> int:
        return 3 * self.carried(0) + 11 * self.text_tokens * self.dit.text_width * self.itemsize  # one at a time

    def denoise(self, batched: bool, chunk: int | None) -> int:
        grid, both = patch_grid(self.height, self.width, self.dit.patch), self.guided and batched
        sizes = grid, self.text_tokens, (1 + both) * self.batch, self.itemsize
        carried = self.carried(8) + both * self.carried(0)  # noise, the pair, velocities; prompts stacked
        return activation_bytes(self.dit, *sizes, self.fused, chunk) + carried

    def decode(self, batch: int | None, tile: int | None) -> int:
        done = 4 * 3 * self.vae.factor**2 * self.height * self.width * self.batch  # all pictures, fp32
        sizes = self.height, self.width, batch or self.batch, self.itemsize
        peak = decode_bytes(self.vae, *sizes, tile, self.overlap) + (done if batch else 0)
        return max(peak, 4 * done) + self.carried(2)  # at the end they become bytes

    def ways(self) -> tuple[dict, dict]:
        """Peak of every way to denoise and to decode, from the fastest to the smallest."""
        tokens = math.prod(patch_grid(self.height, self.width, self.dit.patch)) + self.text_tokens
        chunks = [] if self.fused else [2**k for k in range((tokens - 1).bit_length() - 1, 3, -1)]
        guidance = [(True, None)] + [(not self.guided, chunk) for chunk in [None] * self.guided + chunks]
        halves = [(self.batch >> k, None) for k in range(1, self.batch.bit_length())]
        tiles = [(1, tile) for tile in range(max(self.height, self.width) - 1, 2 * self.overlap - 1, -1)]
        decoding = [(None, None), *halves, *tiles]
        return {way: self.denoise(*way) for way in guidance}, {way: self.decode(*way) for way in decoding}


# %% tags=["export"]
def _reasons(job: _Job, guidance: tuple, pieces: tuple, denoising: dict, decoding: dict) -> Iterator[str]:
    """One line a stage: what it takes, what is done, and what the fastest way would have taken."""
    (batched, chunk), (pictures, tile) = guidance, pieces
    how = f"guidance in {'one forward' if batched else 'two forwards'}" if job.guided else "no guidance"
    how += f", attention by {chunk} queries" if chunk else ""
    what = f"{pictures or 'all'} of {job.batch} pictures at a time"
    if tile:
        tiles = "×".join(str(len(even_tiles(side, tile, job.overlap))) for side in (job.height, job.width))
        what += f", in {tiles} tiles that share {job.overlap} latents"
    for stage, said, way, ways in (("denoise", how, guidance, denoising), ("decode", what, pieces, decoding)):
        fastest = next(iter(ways))
        instead = "" if way == fastest else f", instead of {format_bytes(ways[fastest])}"
        yield f"{stage} {format_bytes(ways[way])}: {said}{instead}"


# %% tags=["export"]
RESERVE = 1.1  # peaks are expected a tenth higher than the formulas say


def plan_memory(
    budget: int | str,
    dit: DiTConfig,
    vae: VAEConfig,
    *,
    height: int,
    width: int,
    text_tokens: int,
    batch: int = 1,
    weights: int = 0,
    itemsize: int = 4,
    guided: bool = True,
    fused: bool = True,
) -> Plan:
    """The fastest way that fits: weights + 1.1 · max(encode, denoise, decode) ≤ budget.

    Denoising gives up batched guidance first, then, where attention is not fused, goes by ever smaller chunks; decoding
    goes by fewer pictures at a time, then by tiles. These overlap by 2 · radius + 1, so that they are exact, and are no
    smaller than twice that: below, most of the work would be done again.

    Args:
        budget: bytes, or a text for `parse_bytes`.
        height, width: pixels. batch: pictures. text_tokens: M of the longest prompt.
        weights: bytes that are always there. itemsize: bytes a number of activations.
        guided: whether there is an unconditional side. fused: see `activation_bytes`.

    Raises:
        ValueError: the budget is too small for every way (names the smallest that is enough), a side is no multiple of
            what the model draws, or no picture is asked for.
    """
    budget, step = parse_bytes(budget), vae.factor * dit.patch
    for name, count, unit in (("height", height, step), ("width", width, step), ("batch", batch, 1)):
        if count < 1 or count % unit:
            near = max(1, round(count / unit)) * unit
            raise ValueError(f"{name} {count} is not a positive multiple of {unit}; try {near}")
    with torch.device("meta"):  # no weights are made
        overlap = math.ceil(2 * receptive_radius(Decoder(vae)) + 1)
    sides = height // vae.factor, width // vae.factor
    job = _Job(dit, vae, *sides, text_tokens, batch, itemsize, guided, fused, overlap)
    denoising, decoding = job.ways()
    least = weights + math.ceil(RESERVE * max(job.encode(), min(denoising.values()), min(decoding.values())))
    if budget < least:
        needs = f"{format_bytes(budget)} cannot hold {batch} × {height}×{width} pixels"
        raise ValueError(f"{needs}; try {format_bytes(least)}, or fewer pictures at a time")
    fits = [next(way for way in ways if RESERVE * ways[way] <= budget - weights) for ways in (denoising, decoding)]
    peaks = {"encode": job.encode(), "denoise": denoising[fits[0]], "decode": decoding[fits[1]]}
    reasons = _reasons(job, *fits, denoising, decoding)
    head = (
        f"budget {format_bytes(budget)}, of which weights {format_bytes(weights)}, and a tenth of the rest in reserve"
    )
    return Plan(budget, weights, *fits[0], *fits[1], overlap, peaks, (head, *reasons))


# %%
asked = dict(height=128, width=128, text_tokens=cond.mask.shape[1], batch=2)
asked |= dict(
    dit=model.dit.config, vae=model.vae.config, weights=weight_bytes(model.dit, model.vae, model.text_encoder)
)
plans = [plan_memory(budget, **asked) for budget in ("2 GB", "61 MB", "59.3 MB")]
print(*plans, sep="\n\n")

# %% [markdown] lang="zh"
# 「2 GB」什么也不用让；越紧，让得越多。计划不兑现只是空话：照它真画一遍，量出的峰值必须低于预算，图必须还是那张图。装不下的预算要当场说清最少要多少；照那个数再要一次，就该行得通。

# %% [markdown] lang="en" twin="5a0d1a63"
# "2 GB" asks for no concession; the tighter, the more. A plan that is not kept is talk: draw by it, and the measured peak must stay below the budget, the picture must be the same. A budget too small is refused at once with the least that would do; ask again with that number, and it works.

# %% tags=["hide"]
from diffusion_engine.guidance import guided_velocity
from diffusion_engine.pipeline import generate


def draw(plan: Plan):
    def network(x, t, prompt):
        return model.dit(x, t, *prompt, chunk=plan.attention_chunk)

    pair = LatentBuffer(noise.shape)
    meter = PeakMeter(model.dit, model.vae, model.text_encoder, pair.front, pair.back)
    velocity = lambda both: guided_velocity(network, *both, scale=3.0, batched=plan.batched_cfg)  # noqa: E731
    decode = lambda z: planned_decode(model.vae, z, plan)  # noqa: E731
    parts = dict(encode=embed, velocity=velocity, decode=decode, shape=(4, 32, 32), meter=meter, buffer=pair)
    return generate(words, [0, 1], make_schedule(2), **parts), meter


drawn = [draw(plan) for plan in plans]
fig, ax = plt.subplots(figsize=(6.4, 2.9))
stages = ["encode", "noise", "denoise", "decode"]
for i, (plan, (result, _)) in enumerate(zip(plans, drawn)):
    heights = [result.peak_bytes[stage] / 1e6 for stage in stages]
    ax.bar([k + 0.27 * (i - 1) for k in range(4)], heights, 0.24, color=COLORS[i], label=format_bytes(plan.budget))
    if i:
        ax.axhline((plan.budget - plan.weights) / 1e6, color=COLORS[i], lw=1, ls="--")
ax.set_xticks(range(4), stages)
ax.set(
    title="Every stage stays under its budget (dashed); left free, decoding stands out", ylabel="peak above weights, MB"
)
ax.legend(title="budget")
show(
    fig, alt="Peak of each stage under three budgets: the tighter ones lower denoising and decoding below dashed lines"
)

# %% tags=["check"]
for plan, (result, meter) in zip(plans, drawn):
    assert meter.total <= plan.budget and result.seconds == {}  # the promise is kept; bytes, never time at once
    assert all(0.85 < result.peak_bytes[stage] / plan.peak_bytes[stage] <= 1.01 for stage in ("denoise", "decode"))
    assert torch.allclose(result.latents, drawn[0][0].latents, atol=1e-4)  # the same latents
    assert torch.allclose(planned_decode(model.vae, noise, plan), model.vae.decode(noise), atol=1e-4)  # and pictures
chosen = [(plan.batched_cfg, plan.vae_batch, plan.vae_tile) for plan in plans]
assert chosen == [(True, None, None), (True, 1, None), (False, 1, 31)]  # no need, no concession

# %% tags=["check"]
print(why := refused(plan_memory, "57 MB", **asked))
least = why.split("try ")[1].split(",")[0]
assert parse_bytes("2 GB") == 2 * 10**9 and parse_bytes("1.5 GiB") == 3 * 2**29
assert parse_bytes(format_bytes(parse_bytes(least) - 9)) == parse_bytes(least)  # rounded up
assert plan_memory(least, **asked).peak_bytes == plans[2].peak_bytes  # the least that it names is enough

# %% [markdown] lang="zh"
# ## 训练：激活检查点（activation checkpointing）
#
# 训练时块里的中间结果不能死，反向传播要读。检查点只留每块的输入 $T D$，反向时把这块再算一遍。$L$ 块，每块原来留 $c$ 份：
#
# $$c\,L\,B\,s\,T D \;\longrightarrow\; (L + c)\,B\,s\,T D, \qquad \text{arithmetic} \times \tfrac{4}{3}$$

# %% [markdown] lang="en" twin="477a9202"
# ## Training: activation checkpointing
#
# In training, what a block makes on the way may not die: the backward pass reads it. A checkpoint keeps only each block's input, $T D$, and runs the block again on the way back. With $L$ blocks that used to keep $c$ pieces each:
#
# $$c\,L\,B\,s\,T D \;\longrightarrow\; (L + c)\,B\,s\,T D, \qquad \text{arithmetic} \times \tfrac{4}{3}$$


# %% tags=["export"]
def checkpointed(block: nn.Module, *arguments: Any) -> Any:
    """block(*arguments) that keeps only its arguments for the backward pass, and runs the block again there.

    Hand it to a network: ``dit(…, run_block=checkpointed)``. The same gradients for about a third more arithmetic; the
    block must draw no random numbers.

    Source: Chen et al. 2016, "Training deep nets with sublinear memory cost".
    """
    return checkpoint(block, *arguments, use_reentrant=False, preserve_rng_state=False)


# %% tags=["hide"]
from operator import call as plainly
from diffusion_engine.training import flow_matching_loss


def training_step(depth: int, run_block) -> tuple[int, int, list[Tensor]]:
    """(bytes kept after the forward pass, peak of both passes, gradients) of one small step."""
    torch.manual_seed(0)
    net = DiT(DiTConfig(width=64, heads=4, patch=2, joint_depth=0, parallel_depth=depth))
    for p in net.parameters():
        nn.init.normal_(p, std=0.05)
        p.grad = torch.zeros_like(p)  # there before, so not counted
    velocity = lambda x, t, p: net(x, t, *p, run_block=run_block)  # noqa: E731
    with LiveBytes() as live:
        loss = flow_matching_loss(velocity, noise[:, :, :16, :16], cond, torch.Generator().manual_seed(1))
        kept = live.now
        loss.backward()
    return kept, live.peak, [p.grad for p in net.parameters()]


plain, saving = ([training_step(depth, run) for depth in (4, 8)] for run in (plainly, checkpointed))
piece = 2 * 4 * (64 + cond.mask.shape[1]) * 64  # B · s · T · D
per_block = [(deep[0] - shallow[0]) / (4 * piece) for shallow, deep in (plain, saving)]

# %% tags=["check"]
print("pieces of T · D that a block keeps:", [round(c, 1) for c in per_block], "without and with checkpoints")
assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(plain[1][2], saving[1][2]))  # the same gradients
assert max(grad.abs().max() for grad in saving[1][2]) > 1e-3  # and there are some
assert 1.0 <= per_block[1] < 1.1 and per_block[0] > 20  # one input a block
assert saving[1][1] < 0.35 * plain[1][1]

# %% [markdown] lang="zh"
# **到了这里**，引擎知道自己要多少内存，也守得住你给的上限。还没碰的是时间：哪些办法真省时间，哪些只是听上去快？第 13 章逐个验证，先证明相等，再量快慢。
#
# ## 三个问题
#
# 1. 预测：把图的边长加倍，去噪和解码的峰值各变几倍？不融合的分数呢？
# 2. 修改：只留一块，`front` 与 `back` 是同一个张量，欧拉还对吗？
# 3. 动手：回调里留下每一步的预览，去噪的峰值会随步数上涨。用 `PeakMeter` 证明。

# %% [markdown] lang="en" twin="68115a48"
# **Where we stand.** The engine knows how much memory it needs and keeps to the limit you set. Untouched so far is time: which savings really save some, and which only sound fast? Chapter 13 takes them one by one, equality first, the clock second.
#
# ## Three questions
#
# 1. Predict: double the picture's side. By how much do the peaks of denoising and decoding grow? And unfused scores?
# 2. Modify: keep one place only, `front` and `back` the same tensor. Is Euler still right?
# 3. Build: a callback keeps every step's preview, and the peak of denoising grows with the steps. Show it with `PeakMeter`.

# %% tags=["solution"]
# 1 · both grow with the area, fourfold (text tokens do not grow); scores with its square, sixteenfold
forwards = [activation_bytes(DiTConfig(), (g, g), 0) for g in (64, 128)]
assert round(forwards[1] / forwards[0], 2) == decode_bytes(VAEConfig(), 64, 64) / decode_bytes(VAEConfig(), 32, 32) == 4
assert score_bytes(1, 24, 128**2, 128**2) / score_bytes(1, 24, 64**2, 64**2) == 16

# %% tags=["solution"]
# 2 · no: the velocity overwrites x before x is added, so the step gives h·v + h·v
one = torch.full((4,), 5.0)
wrong = SOLVERS["euler"](lambda x, s: torch.ones(4), one, 1.0, 0.5, (), one).latents
assert torch.equal(wrong, torch.full((4,), -1.0))

# %% tags=["solution"]
# 3 · each preview kept is one more batch of latents, and stays alive
seen, peaks = [], {}
for name, keep in (("none", lambda data: None), ("all", seen.append)):
    with (meter := PeakMeter())("denoise"):
        denoise(bent, noise, schedule, callback=lambda info, keep=keep: keep(info.data), buffer=pair)
    peaks[name] = meter.total / latent_bytes((4, 32, 32), 2)
assert peaks["all"] - peaks["none"] > 4

# %% [markdown] lang="zh"
# ## 小结
#
# - 内存在存储里：视图免费，死了要减，进程的数字不可信。
# - 两块潜变量轮流读写：更新零申请，地址不变，逐比特相等；它不是加速。
# - 权重、潜变量、激活、分数、解码都有公式，与实测相差不到一成。
# - 预算先选最快的路，让步不改结果；装不下就说出最小的数。
# - 激活检查点每块只留一份输入，梯度不变。
#
# 笔记：潜变量缓冲（[`notes/08_latent_buffer`](../../notes/08_latent_buffer.zh.md)）。下一章：13。

# %% [markdown] lang="en" twin="1d715043"
# ## Recap
#
# - Memory is in storages: views are free, the dead are subtracted, the process's figure is no guide.
# - Two latents take turns: the update allocates nothing, addresses stay, the bits are equal; it is no speed-up.
# - Weights, latents, activations, scores and decoding have formulas within a tenth of the measurement.
# - A budget takes the fastest way that fits; no concession changes the result; one too small names the least.
# - Activation checkpointing keeps one input a block, and the gradients stay.
#
# Note: the latent buffer ([`notes/08_latent_buffer`](../../notes/08_latent_buffer.en.md)). Next: chapter 13.
