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
# # 23 · 整条流水线：跑起来，量一量（run）
#
# 读完这一章，真实家族从提示词走到图片：循环、噪声表、引导和变换器是你的，文本编码器和 VAE 向 diffusers 借；结果与它的流水线对得上。
#
# | 你会做出 | 你需要 | 时间 | 模块 |
# | --- | --- | --- | --- |
# | 借来的零件、一条循环、用完就放、与 diffusers 对照、账本 | 第 08、10、12 章，第 15–18 章的家族 | 40 分钟 | `diffusion_engine/reference/run.py` |

# %% [markdown] lang="en" twin="42f1c05a"
# # 23 · Whole pipelines: run them, measure them
#
# After this chapter real families go from prompt to picture: loop, schedule, guidance and transformer are yours, text encoders and VAE are borrowed from diffusers; and the result agrees with its pipeline.
#
# | You build | You need | Time | Module |
# | --- | --- | --- | --- |
# | borrowed parts, one loop, parts let go after use, a comparison with diffusers, the books | chapters 08, 10, 12, the families of chapters 15–18 | 40 minutes | `diffusion_engine/reference/run.py` |

# %% [markdown] lang="zh"
# **先想一想**：FLUX 的变换器 24 GB，文本编码器近 10 GB，VAE 不到 1 GB。内存只有 28 GB，还能跑吗？写下你的办法，再写下它多花的时间花在哪里。

# %% [markdown] lang="en" twin="00419be1"
# **Think first:** FLUX's transformer takes 24 GB, its text encoders nearly 10, the VAE less than one. Can it run in 28 GB of memory? Write down how, and where the extra time goes.

# %% tags=["export"]
import gc
import hashlib
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from diffusion_engine.dit import unpatchify
from diffusion_engine.guidance import guided_velocity
from diffusion_engine.memory_manager import PeakMeter, format_bytes
from diffusion_engine.pipeline import Result, Stopwatch, generate, to_pictures
from diffusion_engine.reference.checkpoint import find_folder, hub_cache, load, read_json
from diffusion_engine.reference.flux import Flux
from diffusion_engine.reference.sana import Sana
from diffusion_engine.reference.sd3 import SD3
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
# 变换器之外，家族之间只差几条规矩：噪声表从哪张格子开始、默认几步、引导怎么给、补位要不要遮。写成一张表，循环就只有一份。

# %% [markdown] lang="en" twin="c979797e"
# ## House rules
#
# Outside the transformer, families differ in a few rules only: which grid the schedule begins with, how many steps, how guidance is given, whether padding is hidden. Put into a table, one loop is enough.


# %% tags=["export"]
class Recipe(NamedTuple):
    """What a family's pipeline does around its transformer.

    Args:
        kind: our transformer. pipeline, transformer: diffusers' classes. grid: base grid of its schedule, see `make_schedule`. steps, guidance: its defaults.
        masked: whether the transformer is told which text tokens are padding.
        embedded: guidance is fed to the network, which then runs once a step.
    """

    kind: type
    pipeline: str
    transformer: str
    grid: str
    steps: int
    guidance: float
    masked: bool = False
    embedded: bool = False


RECIPES = {
    "sd3": Recipe(SD3, "StableDiffusion3Pipeline", "SD3Transformer2DModel", "double", 28, 7.0),
    "flux": Recipe(Flux, "FluxPipeline", "FluxTransformer2DModel", "even", 28, 3.5, embedded=True),
    "sana": Recipe(Sana, "SanaPipeline", "SanaTransformer2DModel", "double", 20, 4.5, masked=True),
}

# %% [markdown] lang="zh"
# ## 一个很小的世界
#
# 真实的权重和分词器这里都下载不到。于是让 diffusers 写下三个很小的流水线文件夹，权重随机；提示词嵌入由文字的哈希值抽出：数据流是真的，词义不是。有权重的机器上，同样的代码读同样格式的文件夹。

# %% [markdown] lang="en" twin="8bc6be58"
# ## A very small world
#
# Neither real weights nor tokenizers can be fetched here. So diffusers writes three very small pipeline folders with random weights, and prompt embeddings are drawn from the text's hash: the flow of data is real, the meaning of words is not. On a machine with weights the same code reads folders of the same kind.


# %% tags=["export", "hide"]
KL = {"block_out_channels": (8, 8, 8, 8), "latent_channels": 4, "norm_num_groups": 4, "layers_per_block": 1}
KL |= {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
DC = {"latent_channels": 4, "attention_head_dim": 4, "upsample_block_type": "interpolate", "decoder_act_fns": "silu"}
for side in ("encoder", "decoder"):
    DC |= {f"{side}_block_types": "ResBlock", f"{side}_block_out_channels": (8, 8, 8)}
    DC |= {f"{side}_layers_per_block": (1, 1, 1), f"{side}_qkv_multiscales": ((), (), ())}

# %% tags=["export", "hide"]
TINY = {  # family → our config's entries, the VAE's class and entries, the scheduler's entries
    "sd3": (
        {"sample_size": 16, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 4, "in_channels": 4}
        | {"out_channels": 4, "joint_attention_dim": 32, "pooled_projection_dim": 24, "caption_projection_dim": 64}
        | {"pos_embed_max_size": 12, "qk_norm": "rms_norm", "dual_attention_layers": [0]},
        ("AutoencoderKL", KL | {"scaling_factor": 1.5305, "shift_factor": 0.0609}),
        {"shift": 3.0},
    ),
    "flux": (
        {"in_channels": 16, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16, "guidance_embeds": True}
        | {
            "num_attention_heads": 4,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 24,
            "axes_dims_rope": [4, 6, 6],
        },
        ("AutoencoderKL", KL | {"scaling_factor": 0.3611, "shift_factor": 0.1159}),
        {"use_dynamic_shifting": True},
    ),
    "sana": (
        {"in_channels": 4, "out_channels": 4, "num_attention_heads": 4, "attention_head_dim": 12, "num_layers": 2}
        | {"num_cross_attention_heads": 3, "cross_attention_head_dim": 16, "cross_attention_dim": 48}
        | {"caption_channels": 24, "sample_size": 8},
        ("AutoencoderDC", DC | {"scaling_factor": 0.41407}),
        {"shift": 3.0},
    ),
}


# %% tags=["export", "hide"]
def write_tiny(name: str, folder: str | Path, seed: int = 0) -> Path:
    """A pipeline folder as diffusers writes it, of a few thousand random weights and without text encoders.

    Raises:
        ValueError: an unknown family.
    """
    if name not in TINY:
        raise ValueError(f"family {name!r} is unknown; try {', '.join(TINY)}")
    import diffusers

    sizes, (vae_kind, vae_sizes), scheduling = TINY[name]
    kind = getattr(diffusers, RECIPES[name].pipeline)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = getattr(diffusers, RECIPES[name].transformer)(**sizes)
        vae = getattr(diffusers, vae_kind)(**vae_sizes)
        for weight in net.requires_grad_(False).parameters():  # a fresh one has zeros, which hide faults
            weight.copy_(torch.randn(weight.shape) / (weight[0].numel() if weight.ndim > 1 else 4) ** 0.5)
    made = {"transformer": net, "vae": vae, "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(**scheduling)}
    names = [p.name for p in inspect.signature(kind).parameters.values() if p.default in (p.empty, None)]
    kind(**dict.fromkeys(names) | made).save_pretrained(folder)
    return Path(folder)


# %% tags=["check"]
import tempfile

room = tempfile.TemporaryDirectory()
folders = {name: write_tiny(name, Path(room.name) / name) for name in TINY}
again = write_tiny("sd3", Path(room.name) / "again")
for part in ("transformer", "vae"):
    mine, same = (next((home / part).glob("*.safetensors")).read_bytes() for home in (folders["sd3"], again))
    assert mine == same  # the same seed writes the same bytes

# %% [markdown] lang="zh"
# ## 借来的零件
#
# 三类零件：文本编码器、变换器、VAE。谁先用到，谁先装；打开 `offload`，要用下一件时先放手上一件，内存里从来只有一件。于是最大的一件说了算，而不是总和：
#
# $$M_{\mathrm{kept}} = \sum_i w_i + \max_i a_i, \qquad M_{\mathrm{offload}} = \max_i\,(w_i + a_i)$$
#
# $w_i$ 是一件的权重，$a_i$ 是它工作时的激活值。

# %% [markdown] lang="en" twin="062d855f"
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
            decides how much memory is needed, and not the sum.
    """

    def __init__(self, folder: Path, name: str, device="cpu", dtype=torch.float32, offload: bool = False):
        self.folder, self.name, self.device, self.dtype, self.offload = Path(folder), name, device, dtype, offload
        self.has_encoders = (self.folder / "text_encoder").is_dir()
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
            return load(RECIPES[self.name].kind, self.folder / "transformer", self.device, self.dtype)
        if part == "encoders":
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

    diffusers.utils.logging.disable_progress_bar()
    kind = getattr(diffusers, RECIPES[parts.name].pipeline)
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


def decode(vae: nn.Module, latents: Tensor) -> Tensor:
    """Latents (B, C, h, w) → images (B, 3, H, W) in −1 … 1: vae.decode(latents / scale + shift)."""
    shift = getattr(vae.config, "shift_factor", None) or 0.0
    return vae.decode((latents / vae.config.scaling_factor + shift).to(vae.dtype), return_dict=False)[0].float()


# %% tags=["export", "hide"]
def encode_prompt(pipe: Any, name: str, prompt: str, negative: str, device) -> tuple[PromptEmbeds, PromptEmbeds | None]:
    """Prompt and negative prompt through the pipeline's own text encoders."""
    if name == "sd3":
        text, no_text, pooled, no_pooled = pipe.encode_prompt(prompt, None, None, device, negative_prompt=negative)
        return words(text, None, pooled), words(no_text, None, no_pooled)
    if name == "flux":
        text, pooled, _ = pipe.encode_prompt(prompt, None, device)
        return words(text, None, pooled), None
    text, mask, no_text, no_mask = pipe.encode_prompt(prompt, True, negative, device=device)
    return words(text, mask), words(no_text, no_mask)


def words(text: Tensor, mask: Tensor | None = None, pooled: Tensor | None = None) -> PromptEmbeds:
    """`PromptEmbeds` with every token real, or with nothing pooled, where a family has no use for it."""
    mask = torch.ones(text.shape[:2], dtype=torch.bool, device=text.device) if mask is None else mask.bool()
    return PromptEmbeds(text, mask, text[:, 0, :0] if pooled is None else pooled)


# %% tags=["export"]
def drawn_prompt(model: nn.Module, text: str, tokens: int = 7) -> PromptEmbeds:
    """Embeddings drawn from the text's hash, for a folder without text encoders: the data flow is real, the words not."""
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
    rng, config = torch.Generator().manual_seed(seed), model.config
    width = getattr(config, "joint_attention_dim", None) or config.caption_channels
    pooled = getattr(config, "pooled_projection_dim", 0)
    return words(torch.randn(1, tokens, width, generator=rng), None, torch.randn(1, pooled, generator=rng))


# %% tags=["check"]
parts = Parts(folders["sd3"], "sd3", offload=True)
apple, same, pear = (drawn_prompt(parts.get("transformer"), text) for text in ("apple", "apple", "pear"))
assert torch.equal(apple.tokens, same.tokens) and not torch.equal(apple.tokens, pear.tokens)
vae = parts.get("vae")
assert parts.modules() == [vae]  # the transformer was let go

# %% tags=["check"]
z = torch.randn(1, 4, 4, 6, generator=torch.Generator().manual_seed(0))
assert torch.allclose(
    decode(vae, z), vae.decode(z / 1.5305 + 0.0609).sample, atol=1e-6
)  # first the scale, then the shift

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
    height: int = 1024
    width: int = 1024

    def within(self, recipe: Recipe) -> "Order":
        """The same with the recipe's steps and guidance where none were given."""
        return replace(
            self,
            steps=recipe.steps if self.steps is None else self.steps,
            guidance=recipe.guidance if self.guidance is None else self.guidance,
        )


# %% tags=["export"]
def latent_shape(folder: Path, name: str, height: int, width: int) -> tuple[int, int, int, int]:
    """(C, h, w) of the latents, and the patch: what the configurations of transformer and VAE say.

    Raises:
        ValueError: a side that is no multiple of what the family draws.
    """
    config, vae = (read_json(folder / part / "config.json") for part in ("transformer", "vae"))
    packed = 2 if name == "flux" else 1
    factor = 2 ** (len(vae.get("block_out_channels") or vae["encoder_block_out_channels"]) - 1)
    unit = factor * packed * config["patch_size"]
    for side, pixels in (("height", height), ("width", width)):
        if pixels < unit or pixels % unit:
            raise ValueError(f"{side} {pixels} is not a multiple of {unit}; try {max(1, round(pixels / unit)) * unit}")
    return config["in_channels"] // packed**2, height // factor, width // factor, packed * config["patch_size"]


# %% tags=["check"]
assert latent_shape(folders["sd3"], "sd3", 64, 96) == (4, 8, 12, 2)
assert latent_shape(folders["flux"], "flux", 64, 96) == (4, 8, 12, 2)  # packed in the loop, not in the latents
assert latent_shape(folders["sana"], "sana", 64, 96) == (4, 16, 24, 1)
assert Order(steps=3).within(RECIPES["flux"]) == Order(steps=3, guidance=3.5)  # what is given stays

# %% [markdown] lang="zh"
# ## 循环
#
# 第 10 章的 `generate` 原样拿来：给它编码、速度、解码三个函数。速度里是第 08 章的引导，再里面是我们的变换器。时间和潜变量一直是 fp32，进变换器才换精度。

# %% [markdown] lang="en" twin="a2149920"
# ## The loop
#
# `generate` of chapter 10 serves as it is: hand it three functions, for encoding, velocity and decoding. Inside the velocity is the guidance of chapter 08, and inside that our transformer. Time and latents stay fp32; precision changes at the transformer's door.


# %% tags=["export"]
def encode(parts: Parts, prompts: tuple[str, str]) -> tuple[PromptEmbeds, PromptEmbeds | None]:
    """Prompt and negative prompt, by the folder's text encoders or, where it has none, by `drawn_prompt`."""
    if parts.has_encoders:
        return encode_prompt(parts.get("encoders"), parts.name, *prompts, parts.device)
    drawn = [drawn_prompt(parts.get("transformer"), text) for text in prompts]
    return tuple(PromptEmbeds(*(x.to(parts.device, x.dtype) for x in side)) for side in drawn)


def network(parts: Parts, guidance: float) -> Callable[[Tensor, Tensor, PromptEmbeds], Tensor]:
    """The transformer as chapter 08 calls it: (x, t, prompt) → velocity, fp32 outside, ``parts.dtype`` inside."""
    masked = RECIPES[parts.name].masked

    def model(x: Tensor, t: Tensor, prompt: PromptEmbeds) -> Tensor:
        net = parts.get("transformer")
        embedded = getattr(net, "guidance_in", None) is not None
        extra = {"guidance": torch.full((len(x),), guidance, device=x.device)} if embedded else {}
        text, pooled = prompt.tokens.to(parts.dtype), prompt.pooled.to(parts.dtype)
        return net(x.to(parts.dtype), t, text, prompt.mask if masked else None, pooled, **extra).float()

    return model


# %% tags=["export"]
def draw(parts: Parts, order: Order, meter: Callable | None = None, callback: Callable | None = None) -> Result:
    """Chapter 10's loop on a real family: our transformer, schedule and guidance, the borrowed encoders and VAE.

    Raises:
        ValueError: a size that the family cannot draw, or a scheduler that is not followed.
    """
    recipe = RECIPES[parts.name]
    order = order.within(recipe)
    *shape, patch = latent_shape(parts.folder, parts.name, order.height, order.width)
    tokens = shape[1] * shape[2] // patch**2
    schedule = Schedule.from_config(parts.folder / "scheduler", order.steps, num_tokens=tokens, grid=recipe.grid)

    def velocity(condition: tuple[PromptEmbeds, PromptEmbeds | None]) -> Callable:
        scale = 1.0 if recipe.embedded else order.guidance
        return guided_velocity(network(parts, order.guidance), *condition, scale)

    stages = {"encode": lambda prompts: encode(parts, (prompts[0], order.negative)), "velocity": velocity}
    stages |= {
        "decode": lambda latents: decode(parts.get("vae"), latents),
        "shape": shape,
        "device": parts.device,
        "meter": meter,
        "callback": callback,
    }
    return generate([order.prompt], [order.seed], schedule, **stages)


# %%
order = Order(steps=3, height=64, width=96)
results = {name: draw(Parts(folder, name), order) for name, folder in folders.items()}
for name, result in results.items():
    print(f"{name}: latents {tuple(result.latents.shape)}, picture {result.images[0].size}, {result.step} steps")

# %% tags=["hide"]
from course.figures import image_grid

pictures = [result.images[0].resize((192, 128), 0) for result in results.values()]
alt = "Three small pictures of coloured noise, one from each family with random weights."
image_grid(pictures, list(results), alt=alt, title="Random weights draw noise; the way there is the real one", size=1.9)

# %% [markdown] lang="zh"
# ## 和 diffusers 对一对
#
# 同一个文件夹、同样的种子和提示词嵌入，交给 diffusers 自己的流水线和变换器。潜变量允许差 $10^{-4}$，图片允许差一个灰度级。

# %% [markdown] lang="en" twin="7e3d09fc"
# ## Against diffusers
#
# The same folder, seed and prompt embeddings go to diffusers' own pipeline and transformer. Latents may differ by $10^{-4}$, pictures by one level in 255.


# %% tags=["export"]
def draw_theirs(parts: Parts, order: Order) -> tuple[Tensor, list]:
    """The same order through diffusers' pipeline and diffusers' transformer: latents (1, C, h, w) and pictures."""
    order, name, pipe = order.within(RECIPES[parts.name]), parts.name, borrow_pipeline(parts)
    cond, uncond = encode(parts, (order.prompt, order.negative))
    asked = {"prompt_embeds": cond.tokens.to(parts.dtype), "pooled_prompt_embeds": cond.pooled.to(parts.dtype)}
    asked |= {"prompt_attention_mask": cond.mask.long()} if name == "sana" else {}
    if name != "flux":
        asked["negative_prompt_embeds"] = uncond.tokens.to(parts.dtype)
        asked["negative_pooled_prompt_embeds"] = uncond.pooled.to(parts.dtype)
    if name == "sana":
        asked = {key: value for key, value in asked.items() if "pooled" not in key}
        asked |= {"negative_prompt_attention_mask": uncond.mask.long(), "use_resolution_binning": False}
        asked["negative_prompt"] = None
    sizes = {"height": order.height, "width": order.width, "num_inference_steps": order.steps}
    rng = torch.Generator().manual_seed(order.seed)
    latents = pipe(**asked, **sizes, guidance_scale=order.guidance, generator=rng, output_type="latent").images
    if name == "flux":
        c, h, w, patch = latent_shape(parts.folder, name, order.height, order.width)
        latents = unpatchify(latents, patch, (h // patch, w // patch), channels_first=True)
    with torch.no_grad():
        return latents.float(), to_pictures(decode(pipe.vae, latents.float()))


# %% tags=["check"]
import numpy as np

for name, folder in folders.items():
    latents, (picture,) = draw_theirs(Parts(folder, name), order)
    assert (results[name].latents - latents).abs().max() < 1e-4
    levels = np.abs(np.asarray(picture, int) - np.asarray(results[name].images[0], int))
    assert levels.max() <= 1
    print(f"{name}: latents within 1e-4, pictures within one level")

# %% tags=["check"]
for name in ("flux", "sana"):
    frugal = draw(Parts(folders[name], name, offload=True), order)
    assert torch.equal(frugal.latents, results[name].latents)  # letting go changes no bit

# %% [markdown] lang="zh"
# ## 账本
#
# 跑之前就能算账：权重是参数个数乘字节数；去噪时最宽的一步约 $12\,D$ 个数一个词元（第 12 章）；解码时约有三张 256 通道的全尺寸特征图：
#
# $$a_{\mathrm{denoise}} \approx 12\, B\, D\, N\, s, \qquad a_{\mathrm{decode}} \approx 3 \cdot 256 \cdot H W s$$
#
# 编码器和 VAE 的大小抄自各家的模型卡，是近似值。

# %% [markdown] lang="en" twin="becd5b3d"
# ## The books
#
# The bill can be drawn up ahead: weights are parameters times bytes; denoising takes about $12\,D$ numbers a token at its widest (chapter 12); decoding about three maps of 256 channels at full size:
#
# $$a_{\mathrm{denoise}} \approx 12\, B\, D\, N\, s, \qquad a_{\mathrm{decode}} \approx 3 \cdot 256 \cdot H W s$$
#
# The sizes of encoders and VAEs are from the models' cards, and approximate.


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


class Facts(NamedTuple):
    """What is published of a family: its hub id and licence, sizes in billions of weights, D, and bytes a pixel decodes to.

    ``factor``: pixels a token has a side; ``frames``: frames a token covers (0 for pictures).
    """

    hub: str
    licence: str
    transformer: float
    encoders: float
    vae: float
    width: int
    factor: int
    frames: int = 0


FACTS = {
    "sd3": Facts("stabilityai/stable-diffusion-3.5-medium", "Stability Community, gated", 2.24, 5.6, 0.08, 1536, 16),
    "flux": Facts("black-forest-labs/FLUX.1-dev", "FLUX.1 dev non-commercial, gated", 11.9, 4.9, 0.08, 3072, 16),
    "sana": Facts("Efficient-Large-Model/Sana_1600M_1024px_diffusers", "NSCL v2-custom", 1.6, 2.6, 0.31, 2240, 32),
}


# %% tags=["export"]
def needs(facts: Facts, height: int, width: int, batch: int = 2, itemsize: int = 2) -> Need:
    """Bytes by formula: weights · itemsize; denoise B · s · 12 · D · N; decode 3 maps of 256 channels at full size.

    Args:
        batch: samples a forward, 2 with batched guidance. itemsize: s, 2 for bf16.
    """
    billion = [round(1e9 * size) * itemsize for size in (facts.encoders, facts.transformer, facts.vae)]
    tokens = height * width // facts.factor**2
    return Need(*billion, batch * itemsize * 12 * facts.width * tokens, 3 * 256 * height * width * itemsize)


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
def list_families(height: int = 1024, width: int = 1024, device: str = "cpu") -> list[dict[str, str]]:
    """One row a family: weights here or where, licence, bytes by formula, the verdict on this machine."""
    rows = []
    for name, facts in FACTS.items():
        try:
            found = str(find_folder(facts.hub).parent)
        except ValueError:
            found = ""
        need = needs(facts, height, width)
        row = {"family": name, "weights": found or f"none; get {facts.hub} with --download", "licence": facts.licence}
        row |= {part: format_bytes(size) for part, size in need._asdict().items()}
        row |= {"kept": format_bytes(need.kept()), "offloaded": format_bytes(need.offloaded())}
        rows.append(row | {"verdict": verdict(bool(found), need, memory_here(device))})
    return rows


# %% tags=["check"]
need = needs(FACTS["flux"], 1024, 1024, batch=1)
assert need.transformer == 2 * 11_900_000_000 and need.denoise == 2 * 12 * 3072 * 64 * 64  # 4,096 tokens
assert need.offloaded() == need.transformer + need.denoise < 28e9 < need.kept()  # 28 GB: only with offload
said = [verdict(True, need, size).split(":")[0] for size in (60e9, 28e9, 8e9)]
assert said == ["runs", "runs with offload", "blocked"] and "no weights" in verdict(False, need, 10**15)
assert [row["family"] for row in list_families()] == list(FACTS)

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
measured = profile(Parts(folders["sd3"], "sd3"), order)
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
# | `encode_prompt` | 同名方法 |
# | `Parts(offload=True)` | `enable_model_cpu_offload`（搬走，不丢掉） |
# | `decode` | `__call__` 末尾，`vae.decode` 与 `VaeImageProcessor` |
#
# **还缺什么**：真实权重没有在这里跑过，一切都在很小的随机权重上证明；Sana 自己的 DPM-Solver 噪声表这里会拒绝；视频家族还没有接进这条循环。
#
# ## 三个问题
#
# 1. 预测：`offload` 打开时，画一张图要装载几次？连画三张呢？
# 2. 修改：同样的订单，把精度换成 bf16，潜变量差多少？
# 3. 动手：引导强度等于 1 时，负面提示词不该有任何作用，证明它。

# %% [markdown] lang="en" twin="57f8206b"
# ## Where this lives in diffusers
#
# | Ours | diffusers |
# | --- | --- |
# | `draw` | `__call__` of every `pipeline_*.py` |
# | `encode_prompt` | the method of the same name |
# | `Parts(offload=True)` | `enable_model_cpu_offload` (moves away, does not let go) |
# | `decode` | the end of `__call__`, `vae.decode` and `VaeImageProcessor` |
#
# **What is missing:** no real weights have run here, everything is proven on very small random ones; Sana's own DPM-Solver schedule is refused; the video families are not in this loop yet.
#
# ## Three questions
#
# 1. Predict: with `offload`, how many loads does a picture take? And three in a row?
# 2. Modify: the same order in bf16. How far are the latents off?
# 3. Build: at a guidance scale of 1 the negative prompt must not matter. Show it.

# %% tags=["solution"]
# 1 · two (three with text encoders), and every further picture the same again: nothing waits for the next one
counted, loads = Parts(folders["sd3"], "sd3", offload=True), []
load_part = counted._load
counted._load = lambda part: loads.append(part) or load_part(part)
for _ in range(3):
    draw(counted, order)
assert loads == ["transformer", "vae"] * 3

# %% tags=["solution"]
# 2 · a few thousandths of their size after three steps: latents and time stayed fp32, the network rounded
half = draw(Parts(folders["sd3"], "sd3", dtype=torch.bfloat16), order).latents
off = (half - results["sd3"].latents).std() / results["sd3"].latents.std()
assert 1e-4 < off < 0.05

# %% tags=["solution"]
# 3 · one forward a step, and the negative prompt is never asked
plain, cross = (draw(Parts(folders["sd3"], "sd3"), replace(order, guidance=1.0, negative=n)) for n in ("", "ugly"))
assert torch.equal(plain.latents, cross.latents)

# %% [markdown] lang="zh"
# ## 小结
#
# - 家族之间的差别写成一张表，循环只有第 10 章那一份。
# - 文本编码器和 VAE 借 diffusers 的，其余都是我们的；潜变量相差不到 $10^{-4}$，图片不到一级。
# - 用完就放：内存由最大的一件决定，结果一位不差，代价是反复装载。
# - 账先算好：权重、去噪、解码各要多少字节，这台机器跑不跑得动。
# - 这里只有很小的随机权重；提示词嵌入由哈希抽出，没有分词器。
#
# 下一章：附录 A1。

# %% [markdown] lang="en" twin="c9353479"
# ## Recap
#
# - What differs between families is a table; the loop is the one of chapter 10.
# - Text encoders and VAE are borrowed from diffusers, the rest is ours; latents agree within $10^{-4}$, pictures within one level.
# - Let go after use: memory is decided by the largest part, no bit changes, and the price is loading again.
# - The bill is drawn up ahead: bytes for weights, denoising, decoding, and whether this machine can.
# - Here are only very small random weights; prompt embeddings come from a hash, there is no tokenizer.
#
# Next: appendix A1.
