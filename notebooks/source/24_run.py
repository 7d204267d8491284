# ---
# jupyter:
#   course:
#     minutes: 40
#     module: reference/run
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown] lang="zh"
# # 24 · 整条流水线：跑起来，量一量（run）
#
# 读完这一章，真实家族从提示词走到图片：循环、噪声表、引导和变换器是你的，文本编码器和 VAE 向 diffusers 借；结果与它的流水线对得上。
#
# | 你会做出 | 你需要 | 时间 | 模块 |
# | --- | --- | --- | --- |
# | 借来的零件、一条循环、用完就放、与 diffusers 对照、账本 | 第 08、10、12 章，第 15–23 章的家族与走法 | 40 分钟 | `diffusion_engine/reference/run.py` |

# %% [markdown] lang="en" twin="1ef150f4"
# # 24 · Whole pipelines: run them, measure them
#
# After this chapter real families go from prompt to picture: loop, schedule, guidance and transformer are yours, text encoders and VAE are borrowed from diffusers; and the result agrees with its pipeline.
#
# | You build | You need | Time | Module |
# | --- | --- | --- | --- |
# | borrowed parts, one loop, parts let go after use, a comparison with diffusers, the books | chapters 08, 10, 12, the families and their ways of chapters 15–23 | 40 minutes | `diffusion_engine/reference/run.py` |

# %% [markdown] lang="zh"
# **先想一想**：FLUX 的变换器 24 GB，文本编码器近 10 GB，VAE 不到 1 GB。内存只有 28 GB，还能跑吗？写下你的办法，再写下它多花的时间花在哪里。

# %% [markdown] lang="en" twin="00419be1"
# **Think first:** FLUX's transformer takes 24 GB, its text encoders nearly 10, the VAE less than one. Can it run in 28 GB of memory? Write down how, and where the extra time goes.

# %% tags=["export"]
import gc
import inspect
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from diffusion_engine.guidance import guided_velocity
from diffusion_engine.memory_manager import PeakMeter, format_bytes
from diffusion_engine.optimizations import PromptTable, Upcast, multiplies
from diffusion_engine.pipeline import Result, Stopwatch, generate, to_pictures
from diffusion_engine.reference.checkpoint import find_folder, hub_cache, load, read_json
from diffusion_engine.reference.families import FAMILIES, Facts, Family
from diffusion_engine.scheduler import Schedule
from diffusion_engine.text_conditioning import PromptEmbeds

# %% tags=["hide"]
import matplotlib.pyplot as plt

from course.figures import COLORS, show

sizes = {"text encoders": 9.8, "transformer": 23.8, "VAE": 0.2, "denoising": 0.6, "decoding": 1.6}  # GB, bf16, 1024²
fig, ax = plt.subplots(figsize=(6.4, 2.4))
for row, stages in enumerate((["text encoders"], ["transformer", "denoising"], ["VAE", "decoding"], list(sizes)[:4])):
    left = 0.0
    for name in stages:
        color = COLORS[list(sizes).index(name)]
        ax.barh(row, sizes[name], left=left, color=color, label=name if row < 3 else None)
        left += sizes[name]
ax.axvline(28, color="black", linestyle="--", linewidth=1)
ax.text(28.3, -0.3, "28 GB", fontsize=8)
ax.set(yticks=range(4), yticklabels=["encode", "denoise", "decode", "all at once"], xlabel="GB", ylim=(3.6, -0.6))
ax.set(title="FLUX.1: every stage fits into 28 GB, all parts at once do not")
fig.legend(ncols=5, loc="outside lower center", fontsize=8)
show(
    fig,
    alt="Bars of gigabytes: encoding, denoising and decoding each stay below a line at 28, all parts together pass it.",
)

# %% [markdown] lang="zh"
# ## 各家的规矩
#
# 变换器之外，七个家族只差几条规矩：几步、引导怎么给、补位要不要遮、一个潜变量管几帧几像素、怎么走。规矩写在 `families.py`，一家一个类，只写与众不同的地方；循环就只有一份。

# %% [markdown] lang="en" twin="2b8bae15"
# ## House rules
#
# Outside the transformer, seven families differ in a few rules only: how many steps, how guidance is given, whether padding is hidden, how many frames and pixels a latent covers, how to walk. They stand in `families.py`, one class a family that says only what is out of the ordinary; one loop is enough.

# %%
for name, family in FAMILIES.items():
    size = f"{family.frames} × {family.height} × {family.width}"
    guidance, padding = "an input" if family.embedded else "outside", "hidden" if family.masked else "seen"
    walk = next(way for way in ("Euler", "DPM", "UniPC", "DDIM") if way in family.scheduler)
    print(f"{name:14}{size:17}{family.steps} steps of {walk:6} guidance {guidance:9} padding {padding}")

# %% tags=["check"]
assert list(FAMILIES) == ["sd3", "flux", "sana", "wan", "ltx", "cogvideox", "hunyuan_video"]
assert [name for name, family in FAMILIES.items() if family.embedded] == ["flux", "hunyuan_video"]
assert [family.is_clip for family in FAMILIES.values()] == [False] * 3 + [True] * 4

# %% [markdown] lang="zh"
# ## 一个很小的世界
#
# 真实的权重和分词器这里都下载不到。`write_tiny` 于是让 diffusers 和 transformers 写下七个很小的流水线文件夹：权重随机，文本编码器各有两三层，分词器用随引擎发布的那一个。从文字到图片，每一站都走到；有权重的机器上，同样的代码读同样格式的文件夹。

# %% [markdown] lang="en" twin="f477f221"
# ## A very small world
#
# Neither real weights nor tokenizers can be fetched here. So `write_tiny` lets diffusers and transformers write seven very small pipeline folders: random weights, text encoders of two or three layers, and the tokenizer that ships with the engine. Every station from words to picture is passed; on a machine with weights the same code reads folders of the same kind.

# %% tags=["check"]
import tempfile

from diffusion_engine.reference.tiny import write_tiny

room = tempfile.TemporaryDirectory()
folders = {name: write_tiny(name, Path(room.name) / name) for name in FAMILIES}
again = write_tiny("sd3", Path(room.name) / "again")
for part in ("transformer", "vae", "text_encoder_3"):
    mine, same = (next((home / part).glob("*.safetensors")).read_bytes() for home in (folders["sd3"], again))
    assert mine == same  # the same seed writes the same bytes

# %% [markdown] lang="zh"
# ## 借来的零件
#
# 三类零件：文本编码器、变换器、VAE。谁先用到，谁先装；打开 `offload`，要用下一件时先放掉手上那件，内存里从来只有一件。于是最大的一件说了算，而不是总和：
#
# $$M_{\mathrm{kept}} = \sum_i w_i + \max_i a_i, \qquad M_{\mathrm{offload}} = \max_i\,(w_i + a_i)$$
#
# $w_i$ 是一件的权重，$a_i$ 是它工作时的激活值。

# %% [markdown] lang="en" twin="9824855f"
# ## Borrowed parts
#
# Three kinds of parts: text encoders, transformer, VAE. Each is loaded when first used; with `offload` it is let go when the next is asked for, so that memory holds one at a time. Then the largest decides, and not the sum:
#
# $$M_{\mathrm{kept}} = \sum_i w_i + \max_i a_i, \qquad M_{\mathrm{offload}} = \max_i\,(w_i + a_i)$$
#
# Here $w_i$ are a part's weights and $a_i$ its activations at work.


# %% tags=["export"]
class Parts:
    """The parts of a pipeline's folder, each loaded when it is first asked for.

    Args:
        folder: as diffusers' ``save_pretrained`` writes it. name: of the family.
        device, dtype: of every part. offload: let the others go when another is asked for, so that the largest part
            decides how much memory is needed, and not the sum. hoist: the transformer makes once, for all steps, what
            looks at no latent; equal to 1e-5.
    """

    def __init__(self, folder: Path, name: str, device="cpu", dtype=torch.float32, offload=False, hoist=False):
        self.folder, self.family, self.device, self.dtype = Path(folder), FAMILIES[name], device, dtype
        self.offload, self.hoist = offload, hoist
        self.upcast = torch.device(device).type == "cpu" and not multiplies(dtype)  # kept so, multiplied in fp32
        self.kept: dict[str, Any] = {}

    def get(self, part: str) -> Any:
        """``transformer`` (ours), ``vae`` or ``encoders`` (diffusers' and transformers')."""
        if part not in self.kept:
            if self.offload:
                self.kept.clear()
                gc.collect()
            self.kept[part] = self._load(part)
        return self.kept[part]

    def _load(self, part: str) -> Any:
        if part == "transformer":
            return load(self.family.kind, self.folder / "transformer", self.device, self.dtype)
        if part == "encoders":
            if not (self.folder / "text_encoder").is_dir():
                raise ValueError(f"{self.folder} holds no text_encoder to read the prompt; try a whole pipeline's folder")
            return borrow_pipeline(self, transformer=None, vae=None)
        from diffusers import AutoModel

        vae = AutoModel.from_pretrained(str(self.folder), subfolder="vae", torch_dtype=self.dtype)
        return vae.to(self.device).eval().requires_grad_(False)

    def modules(self) -> list[nn.Module]:
        """What is loaded now."""
        found = [self.kept[part] for part in ("transformer", "vae") if part in self.kept]
        pipe = self.kept.get("encoders")
        return found + [m for m in (pipe.components.values() if pipe else ()) if isinstance(m, nn.Module)]


# %% tags=["export", "hide"]
def borrow_pipeline(parts: Parts, **given: Any) -> Any:
    """diffusers' own pipeline from the folder, nothing fetched; what the folder lacks is None."""
    import diffusers
    import transformers

    for library in (diffusers.utils, transformers):
        library.logging.disable_progress_bar()
    kind = getattr(diffusers, parts.family.pipeline)
    names = [p.name for p in inspect.signature(kind).parameters.values() if p.default in (p.empty, None)]
    absent = {name: None for name in names if not (parts.folder / name).is_dir()} | given
    pipe = kind.from_pretrained(parts.folder, **absent, torch_dtype=parts.dtype, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(parts.device)


def find_pipeline(model: str | Path, download: bool = False) -> Path:
    """The folder of a whole pipeline: a folder, or a hub id in the local cache; ``download`` fetches all its parts.

    Raises:
        ValueError: neither; with ``download``: absent, gated, or no connection.
    """
    if download and not Path(model).is_dir():
        from diffusers import DiffusionPipeline

        try:
            DiffusionPipeline.download(str(model), cache_dir=hub_cache())
        except OSError as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(f"model {model} cannot be fetched: {reason}") from None
    return find_folder(model).parent


# %% tags=["check"]
parts = Parts(folders["sd3"], "sd3", offload=True)
parts.get("transformer"), parts.get("encoders")
vae = parts.get("vae")
assert parts.modules() == [vae]  # the others were let go
z = torch.randn(1, 4, 4, 6, generator=torch.Generator().manual_seed(0))
decoded = vae.decode(z / 1.5305 + 0.0609).sample  # first the scale, then the shift
assert torch.allclose(FAMILIES["sd3"].decode(vae, z), decoded, atol=1e-6)

# %% [markdown] lang="zh"
# ## 一张订单
#
# 订单里没写的，用家族自己的。尺寸先查清楚：VAE 缩小几倍，图块多大，都在配置里。

# %% [markdown] lang="en" twin="92f90c2a"
# ## An order
#
# What an order leaves open, the family fills in. The size is checked first: how much the VAE shrinks and how large a patch is stands in the configurations.


# %% tags=["export", "hide"]
@dataclass(frozen=True)
class Order:
    """What is asked for; None takes the family's own."""

    prompt: str = "a red apple"
    negative: str = ""
    seed: int = 0
    steps: int | None = None
    guidance: float | None = None
    height: int | None = None
    width: int | None = None
    frames: int | None = None

    def within(self, family: Family) -> "Order":
        """The same with the family's own where nothing was given."""
        return replace(self, **{f.name: getattr(family, f.name) for f in fields(self) if getattr(self, f.name) is None})


# %% tags=["export"]
def latent_shape(parts: Parts, order: Order) -> tuple[tuple[int, ...], int]:
    """(C, h, w) or (C, T, h, w) of the latents, and their number of tokens, as transformer's and VAE's configurations say.

    Raises:
        ValueError: a side or a number of frames that the family does not draw; names the nearest.
    """
    config, vae = (read_json(parts.folder / part / "config.json") for part in ("transformer", "vae"))
    (time, side), packed, patch = parts.family.factors(vae), parts.family.packed, config.get("patch_size", 1)
    patch = patch[-1] if isinstance(patch, list) else patch
    unit = side * packed * patch
    for name, pixels in (("height", order.height), ("width", order.width)):
        if pixels < unit or pixels % unit:
            near = max(1, round(pixels / unit)) * unit
            raise ValueError(f"{name} {pixels} is not a multiple of {unit}; try {near}")
    if order.frames > 1 and not parts.family.is_clip:
        raise ValueError(f"frames {order.frames} are too many for a family that draws pictures; try 1")
    if (order.frames - 1) % time:
        below = (order.frames - 1) // time * time + 1
        raise ValueError(f"{order.frames} frames are not {time}k + 1; try {below} or {below + time}")
    grid = ((order.frames - 1) // time + 1, order.height // side, order.width // side)
    tokens = grid[0] * grid[1] * grid[2] // (packed * patch) ** 2
    return (config["in_channels"] // packed**2, *grid[0 if parts.family.is_clip else 1 :]), tokens


# %% tags=["check"]
small = Order(steps=4, height=64, width=96)
sizes = {name: latent_shape(Parts(folder, name), replace(small, frames=1)) for name, folder in folders.items()}
assert sizes["sd3"] == sizes["flux"] == ((4, 8, 12), 24)  # FLUX folds in the loop, not in the latents
assert sizes["sana"] == ((4, 16, 24), 384) and sizes["wan"] == sizes["cogvideox"] == ((4, 1, 8, 12), 24)
clip = latent_shape(Parts(folders["ltx"], "ltx"), replace(small, frames=17))
assert clip == ((8, 3, 2, 3), 18)  # a latent covers 8 frames and 32 pixels a side
assert small.within(FAMILIES["flux"]) == replace(small, guidance=3.5, frames=1)  # what is given stays

# %% [markdown] lang="zh"
# ## 循环
#
# 第 10 章的 `generate` 原样拿来：给它编码、速度、解码三个函数。速度里是第 08 章的引导，再里面是我们的变换器。时间和潜变量一直是 fp32，进变换器才换精度。打开 `hoist`，与潜变量无关的，变换器在第一步之前全部算好，和第 13 章一样。

# %% [markdown] lang="en" twin="69346c29"
# ## The loop
#
# `generate` of chapter 10 serves as it is: hand it three functions, for encoding, velocity and decoding. Inside the velocity is the guidance of chapter 08, and inside that our transformer. Time and latents stay fp32; precision changes at the transformer's door. With `hoist` the transformer makes all that looks at no latent before the first step, as in chapter 13.


# %% tags=["export"]
@torch.no_grad()
def encode(parts: Parts, prompts: tuple[str, str]) -> tuple[PromptEmbeds, PromptEmbeds | None]:
    """Prompt and negative prompt, read by the folder's text encoders; diffusers warns of words that it cuts off.

    Raises:
        ValueError: the folder has none.
    """
    from diffusers.utils import logging

    pipe, before = parts.get("encoders"), logging.get_verbosity()
    logging.set_verbosity_warning()
    try:
        return parts.family.encode(pipe, *prompts, parts.device)
    finally:
        logging.set_verbosity(before)


def network(parts: Parts, guidance: float, schedule: Schedule) -> Callable[[Tensor, Tensor, PromptEmbeds], Tensor]:
    """The transformer as chapter 08 calls it: (x, t, prompt) → velocity, fp32 outside, ``parts.dtype`` inside.

    Args:
        schedule: where it will be asked, and what it is told as time there.
    """
    family, vae, made = parts.family, read_json(parts.folder / "vae" / "config.json"), PromptTable()

    def run(x: Tensor, t: Tensor, *prompt: Tensor | None, **more) -> Tensor:
        net = parts.get("transformer")
        if not parts.hoist:
            return net(x, t, *prompt, **more)

        def ahead() -> dict[float, Any]:
            times = family.times(parts.folder, schedule)
            return dict(zip(times.tolist(), net.hoist(x.shape[1:], times.to(x.device), *prompt, **more)))

        return net.velocity(x, made.get(tuple(y for y in prompt if y is not None), ahead)[t[0].item()])

    velocity = family.network(run, parts.folder, schedule)

    def model(x: Tensor, t: Tensor, prompt: PromptEmbeds) -> Tensor:
        net = parts.get("transformer")
        text, pooled = prompt.tokens.to(parts.dtype), prompt.pooled.to(parts.dtype)
        mask, extra = prompt.mask if family.masked else None, family.extra(net, x, guidance, vae)
        return velocity(x.to(parts.dtype), t, text, mask, pooled, **extra).float()

    return model


# %% tags=["export"]
def draw(parts: Parts, order: Order, meter: Callable | None = None, callback: Callable | None = None) -> Result:
    """Chapter 10's loop on a real family: our transformer, schedule and guidance, the borrowed encoders and VAE.

    Returns:
        a `Result`; of a clip its images are the frames.

    Raises:
        ValueError: a size that the family cannot draw, or a scheduler that is not followed.
    """
    order = order.within(parts.family)
    shape, tokens = latent_shape(parts, order)
    scale = 1.0 if parts.family.embedded else order.guidance  # where it is embedded, one forward a step
    schedule, solver = parts.family.road(parts.folder, order.steps, tokens)
    with Upcast() if parts.upcast else nullcontext():
        return generate(
            [order.prompt],
            [order.seed],
            schedule,
            encode=lambda prompts: encode(parts, (prompts[0], order.negative)),
            velocity=lambda condition: guided_velocity(network(parts, order.guidance, schedule), *condition, scale),
            decode=lambda latents: parts.family.decode(parts.get("vae"), latents),
            shape=shape,
            device=parts.device,
            latents=parts.family.noise(order.seed, shape),
            solver=solver,
            meter=meter,
            callback=callback,
        )


# %%
orders = {name: replace(small, frames=9 if family.is_clip else 1) for name, family in FAMILIES.items()}
results = {name: draw(Parts(folder, name), orders[name]) for name, folder in folders.items()}
for name, result in results.items():
    frames = f"{len(result.images)} of {result.images[0].size}"
    print(f"{name:14}latents {tuple(result.latents.shape)}, {result.step} steps, pictures: {frames}")

# %% tags=["check"]
for name, folder in folders.items():
    ahead = draw(Parts(folder, name, hoist=True), orders[name]).latents
    assert torch.allclose(ahead, results[name].latents, atol=1e-4) and ahead.std() > 0.1, name

# %% tags=["hide"]
from course.figures import image_grid

pictures = [result.images[-1].resize((192, 128), 0) for result in results.values()]
alt = "Seven small pictures of coloured noise, one from each family with random weights; of clips the last frame."
title = "Random weights draw noise; the way there is the real one"
image_grid(pictures, list(results), columns=4, alt=alt, title=title, size=1.5)

# %% [markdown] lang="zh"
# ## 和 diffusers 对一对
#
# 同一个文件夹、同样的种子和文字，交给 diffusers 自己的流水线和变换器。潜变量允许差 $10^{-4}$，图片允许差一个灰度级。

# %% [markdown] lang="en" twin="f015d42a"
# ## Against diffusers
#
# The same folder, seed and words go to diffusers' own pipeline and transformer. Latents may differ by $10^{-4}$, pictures by one level in 255.


# %% tags=["export"]
def draw_theirs(parts: Parts, order: Order) -> tuple[Tensor, list]:
    """The same order through diffusers' pipeline, from words on: latents laid out as ours, and pictures."""
    family, order, pipe = parts.family, order.within(parts.family), borrow_pipeline(parts)
    asked = {"prompt": order.prompt} | ({} if family.embedded else {"negative_prompt": order.negative})
    asked |= family.settings | {"height": order.height, "width": order.width, "num_inference_steps": order.steps}
    asked |= {"num_frames": order.frames} if family.is_clip else {}
    rng = torch.Generator().manual_seed(order.seed)
    output = pipe(**asked, guidance_scale=order.guidance, generator=rng, output_type="latent")
    latents = output.frames if family.is_clip else output.images
    latents = family.unpacked(latents, latent_shape(parts, order)[0]).float()
    with torch.no_grad():
        return latents, to_pictures(family.decode(pipe.vae, latents))


# %% tags=["check"]
import numpy as np

for name, folder in folders.items():
    latents, pictures = draw_theirs(Parts(folder, name), orders[name])
    assert (results[name].latents - latents).abs().max() < 1e-4
    levels = [np.abs(np.subtract(mine, theirs, dtype=int)) for mine, theirs in zip(results[name].images, pictures)]
    assert len(pictures) == len(results[name].images) and np.max(levels) <= 1
    print(f"{name}: latents within 1e-4, pictures within one level")

# %% tags=["check"]
frugal = draw(Parts(folders["flux"], "flux", offload=True), orders["flux"])
assert torch.equal(frugal.latents, results["flux"].latents)  # letting go changes no bit

# %% [markdown] lang="zh"
# ## 账本
#
# 跑之前就能算账：权重是参数个数乘字节数；去噪时最宽的一步约 $12\,D$ 个数一个词元（第 12 章）；解码时约有三张 256 通道的全尺寸特征图：
#
# $$a_{\mathrm{denoise}} \approx 12\, B\, D\, N\, s, \qquad a_{\mathrm{decode}} \approx 3 \cdot 256 \cdot F H W s$$
#
# 参数个数由 `recipes/models.py` 按各家的配置数出来；$F$ 是一次解的帧数：视频的 VAE 有的几帧几帧地解（Wan、CogVideoX），有的一次解完。

# %% [markdown] lang="en" twin="39fabf75"
# ## The books
#
# The bill can be drawn up ahead: weights are parameters times bytes; denoising takes about $12\,D$ numbers a token at its widest (chapter 12); decoding about three maps of 256 channels at full size:
#
# $$a_{\mathrm{denoise}} \approx 12\, B\, D\, N\, s, \qquad a_{\mathrm{decode}} \approx 3 \cdot 256 \cdot F H W s$$
#
# The weights are counted by `recipes/models.py` from the configurations; $F$ is the frames decoded at once: some VAEs of clips take a few at a time (Wan, CogVideoX), others all.


# %% tags=["export", "hide"]
class Need(NamedTuple):
    """Bytes that a run needs, by part."""

    encoders: int
    transformer: int
    vae: int
    denoise: int
    decode: int

    def kept(self) -> int:
        """Every part in memory at once."""
        return self.encoders + self.transformer + self.vae + max(self.denoise, self.decode)

    def offloaded(self) -> int:
        """One part at a time: the largest stage."""
        return max(self.encoders, self.transformer + self.denoise, self.vae + self.decode)


# %% tags=["export"]
def needs(facts: Facts, order: Order, batch: int = 2, itemsize: int = 2) -> Need:
    """Bytes by formula: weights · s; denoise B · s · 12 · D · N; decode 3 maps of 256 channels, all frames at once or a few.

    Args:
        order: with height, width and frames. batch: B, samples a forward, 2 with batched guidance. itemsize: s, 2 for bf16.
    """
    billion = [round(1e9 * size) * itemsize for size in (facts.encoders, facts.transformer, facts.vae)]
    tokens = ((order.frames - 1) // facts.frames + 1) * (order.height // facts.side) * (order.width // facts.side)
    pixels = order.height * order.width * min(order.frames, facts.decoded or order.frames)
    return Need(*billion, batch * itemsize * 12 * facts.width * tokens, itemsize * 3 * 256 * pixels)


def memory_here(device: str = "cpu") -> int:
    """Bytes of memory that this machine, or its GPU, has."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def verdict(found: bool, need: Need, memory: int) -> str:
    """runs, runs with offload, or blocked, and by what."""
    if not found:
        return "blocked: no weights here"
    if need.kept() <= memory:
        return "runs"
    if need.offloaded() <= memory:
        return "runs with offload"
    return f"blocked: needs {format_bytes(need.offloaded())} even with offload"


# %% tags=["export", "hide"]
def list_families(order: Order = Order(), device: str = "cpu") -> list[dict[str, str]]:
    """One row a family: weights here or where, licence, bytes by formula at one size, the verdict on this machine."""
    rows = []
    for name, family in FAMILIES.items():
        facts, asked = family.facts, order.within(family)
        try:
            found = str(find_folder(facts.hub).parent)
        except ValueError:
            found = ""
        need = needs(facts, asked, batch=1 if family.embedded else 2)
        row = {"family": name, "weights": found or f"none; get {facts.hub} with --download", "licence": facts.licence}
        row |= {"size": f"{asked.height} × {asked.width}" + (f", {asked.frames} frames" if family.is_clip else "")}
        row |= {part: format_bytes(size) for part, size in need._asdict().items()}
        row |= {"kept": format_bytes(need.kept()), "offloaded": format_bytes(need.offloaded())}
        rows.append(row | {"verdict": verdict(bool(found), need, memory_here(device))})
    return rows


# %% tags=["check"]
flux = FAMILIES["flux"]
need = needs(flux.facts, Order().within(flux), batch=1)
assert need.transformer == 2 * 11_901_000_000 and need.denoise == 2 * 12 * 3072 * 64 * 64  # 4,096 tokens
assert need.offloaded() == need.transformer + need.denoise < 28e9 < need.kept()  # 28 GB: only with offload
wan = FAMILIES["wan"]
assert needs(wan.facts, Order().within(wan), batch=1).denoise == 2 * 12 * 1536 * 32_760  # chapter 14's number
assert needs(wan.facts, Order(frames=1).within(wan)).decode == 2 * 768 * 480 * 832

# %% tags=["check"]
said = [verdict(True, need, size).split(":")[0] for size in (60e9, 28e9, 8e9)]
assert said == ["runs", "runs with offload", "blocked"] and "no weights" in verdict(False, need, 10**15)
assert [row["family"] for row in list_families()] == list(FAMILIES)

# %% [markdown] lang="zh"
# ## 量一量
#
# 数字节会拖慢一切，所以跑两遍：一遍计时，一遍计字节（第 12 章的 `PeakMeter`，CPU 和 CUDA 都行）。命令行的 `--profile` 把它画成一张 SVG。

# %% [markdown] lang="en" twin="544a4c37"
# ## Measure
#
# Counting bytes slows everything, so there are two runs: one for time, one for bytes (`PeakMeter` of chapter 12, on CPU and CUDA). On the command line `--profile` draws it as an SVG.


# %% tags=["export"]
def profile(parts: Parts, order: Order) -> dict[str, tuple[float, int]]:
    """Stage → (seconds, peak bytes above the parts that were loaded before), measured in two runs.

    Counting bytes slows everything down, so the seconds are another run's.
    """
    seconds = draw(parts, order, Stopwatch(lambda: synchronize(parts.device))).seconds
    meter = PeakMeter(*parts.modules(), device=parts.device)
    draw(parts, order, meter)
    return {stage: (seconds[stage], meter.peak_bytes[stage]) for stage in seconds}


def synchronize(device) -> None:
    """Wait for the work that a GPU has in hand."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


# %% tags=["export", "hide"]
def profile_picture(measured: dict[str, tuple[float, int]]) -> str:
    """Two bars a stage, seconds and peak bytes, as an SVG document."""
    most = [max(values) or 1 for values in zip(*measured.values())]
    bars = []
    for row, (stage, values) in enumerate(measured.items()):
        bars.append(f'<text x="8" y="{40 * row + 32}">{stage}</text>')
        labels = (f"{values[0]:.2f} s", format_bytes(values[1]))
        for k, (value, largest, label, color) in enumerate(zip(values, most, labels, ("#2b6cb0", "#dd6b20"))):
            y, length = 40 * row + 12 + 16 * k, 1 + 300 * value / largest
            bars.append(f'<rect x="90" y="{y}" width="{length:.1f}" height="13" fill="{color}"/>')
            bars.append(f'<text x="{96 + length:.1f}" y="{y + 11}">{label}</text>')
    size = f'width="500" height="{40 * len(measured) + 16}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *bars, "</svg>"])


# %% tags=["check"]
measured = profile(Parts(folders["sd3"], "sd3"), orders["sd3"])
assert list(measured) == ["encode", "noise", "denoise", "decode"]
assert measured["denoise"][1] > measured["noise"][1] >= 4 * 4 * 8 * 12  # at least the latents, fp32
drawing = profile_picture({"slow": (2.0, 10), "wide": (1.0, 40)})
assert drawing.count("<rect") == 5 and drawing.count('width="301.0"') == 2  # the longest of each kind
assert 'width="151.0"' in drawing and 'width="76.0"' in drawing

# %% [markdown] lang="zh"
# ## 在 diffusers 里，这些在哪儿
#
# | 我们 | diffusers |
# | --- | --- |
# | `draw` | 各家 `pipeline_*.py` 的 `__call__` |
# | `Family.encode` | `encode_prompt` |
# | `Parts(offload=True)` | `enable_model_cpu_offload`（搬走，不丢掉） |
# | `Family.decode` | `__call__` 末尾，`vae.decode` 与 `VaeImageProcessor`、`VideoProcessor` |
#
# **还缺什么**：真实权重没有在这里跑过，一切都在很小的随机权重上证明；CogVideoX 1.5 和图生视频不在这条循环里。
#
# ## 三个问题
#
# 1. 预测：`offload` 打开时，画一张图要装载几次？连画两张呢？
# 2. 修改：同样的订单，把精度换成 bf16，潜变量差多少？
# 3. 动手：引导强度等于 1 时，负面提示词不该有任何作用，证明它。

# %% [markdown] lang="en" twin="fbfb1fac"
# ## Where this lives in diffusers
#
# | Ours | diffusers |
# | --- | --- |
# | `draw` | `__call__` of every `pipeline_*.py` |
# | `Family.encode` | `encode_prompt` |
# | `Parts(offload=True)` | `enable_model_cpu_offload` (moves away, does not let go) |
# | `Family.decode` | the end of `__call__`, `vae.decode` and `VaeImageProcessor`, `VideoProcessor` |
#
# **What is missing:** no real weights have run here, everything is proven on very small random ones; CogVideoX 1.5 and image-to-video are not in this loop.
#
# ## Three questions
#
# 1. Predict: with `offload`, how many loads does a picture take? And two in a row?
# 2. Modify: the same order in bf16. How far are the latents off?
# 3. Build: at a guidance scale of 1 the negative prompt must not matter. Show it.

# %% tags=["solution"]
# 1 · three, and every further picture the same again: nothing waits for the next one
counted, loads = Parts(folders["sd3"], "sd3", offload=True), []
load_part = counted._load
counted._load = lambda part: loads.append(part) or load_part(part)
for _ in range(2):
    draw(counted, orders["sd3"])
assert loads == ["encoders", "transformer", "vae"] * 2

# %% tags=["solution"]
# 2 · a few thousandths of their size after three steps: latents and time stayed fp32, the network rounded
half = draw(Parts(folders["sd3"], "sd3", dtype=torch.bfloat16), orders["sd3"]).latents
off = (half - results["sd3"].latents).std() / results["sd3"].latents.std()
assert 1e-4 < off < 0.05

# %% tags=["solution"]
# 3 · one forward a step, and the negative prompt is never asked
plain, cross = (
    draw(Parts(folders["sd3"], "sd3"), replace(orders["sd3"], guidance=1.0, negative=n)) for n in ("", "ugly")
)
assert torch.equal(plain.latents, cross.latents)

# %% [markdown] lang="zh"
# ## 小结
#
# - 家族之间的差别一家写一个类，循环只有第 10 章那一份；片子不过是多一个轴。
# - 文本编码器和 VAE 借 diffusers 的，其余都是我们的；潜变量相差不到 $10^{-4}$，图片不到一级。
# - 用完就放：内存由最大的一件决定，结果一位不差，代价是反复装载。
# - 账先算好：权重、去噪、解码各要多少字节，这台机器跑不跑得动。
# - 这里只有很小的随机权重，分词器是随引擎发布的那一个；真实权重没有跑过。
#
# 下一章：附录 A1。

# %% [markdown] lang="en" twin="f68992c8"
# ## Recap
#
# - What differs between families is one small class each; the loop is the one of chapter 10, and a clip is one axis more.
# - Text encoders and VAE are borrowed from diffusers, the rest is ours; latents agree within $10^{-4}$, pictures within one level.
# - Let go after use: memory is decided by the largest part, no bit changes, and the price is loading again.
# - The bill is drawn up ahead: bytes for weights, denoising, decoding, and whether this machine can.
# - Only very small random weights have run here, with the tokenizer that ships; real ones have not.
#
# Next: appendix A1.
