# ---
# jupyter:
#   course:
#     minutes: 40
#     module: reference/sd3
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown] lang="zh"
# # 16 · SD3 与 SD3.5（MMDiT）
#
# 读完这一章，Stable Diffusion 3 和 3.5 的网络就由你的零件搭成：读 diffusers 的检查点，速度逐个数字对得上，还能住进它的流水线。
#
# | 你会做出 | 你需要 | 时间 | 模块 |
# | --- | --- | --- | --- |
# | 裁剪的位置表、双注意力块、SD3 的对照表与网络 | 第 05 章的双流块，第 06 章的 DiT，第 15 章的 `load` | 40 分钟 | `diffusion_engine/reference/sd3.py` |

# %% [markdown] lang="en" twin="396284bc"
# # 16 · SD3 and SD3.5 (MMDiT)
#
# After this chapter the networks of Stable Diffusion 3 and 3.5 stand on your own parts: they read diffusers' checkpoints, agree with it number by number, and live in its pipeline.
#
# | You build | You need | Time | Module |
# | --- | --- | --- | --- |
# | a cropped position table, the dual attention block, SD3's key map and network | the joint block of chapter 05, the DiT of chapter 06, `load` of chapter 15 | 40 minutes | `diffusion_engine/reference/sd3.py` |

# %% [markdown] lang="zh"
# **先想一想**：第 15 章里，第 06 章的 DiT 一行没改就读进了一个小 SD3，只是借用了我们的位置表。真的 SD3 有二十到八十亿参数。除了变大，你猜它的 `forward` 有几行和我们的不同？

# %% [markdown] lang="en" twin="d263be7d"
# **Think first:** in chapter 15 the DiT of chapter 06 read a small SD3 without one changed line, on our own position table. The real SD3 has two to eight billion weights. Apart from size, how many lines of its `forward` differ from ours? Guess.

# %% tags=["export"]
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from diffusion_engine.attention import SelfAttention
from diffusion_engine.dit import Conditions, FinalLayer, patch_grid, patchify, unpatchify
from diffusion_engine.optimizations import by_step
from diffusion_engine.reference.checkpoint import KeyMap, flatten_patches, swap_halves
from diffusion_engine.timestep_embedding import TimestepEmbedder
from diffusion_engine.transformer_block import JointBlock, Modulation, modulate

# %% [markdown] lang="zh"
# ## 哪里不同
#
# | | 我们的 DiT | SD3 | SD3.5 large | SD3.5 medium |
# | --- | --- | --- | --- | --- |
# | 块 | 双流，再并行 | 只有双流 | 只有双流 | 只有双流 |
# | 位置 | 公式，从零开始 | 表，取正中 | 表，取正中 | 表，取正中 |
# | QK 归一化 | 有 | 无 | 有 | 有 |
# | 图像自己的注意力 | 无 | 无 | 无 | 前 13 块 |
# | 汇总向量的宽度 | 同文字 | 2048，文字 4096 | 同左 | 同左 |
#
# 配置里的名字照抄 diffusers 的 `config.json`，默认值也一样。

# %% [markdown] lang="en" twin="c3a2cf68"
# ## What differs
#
# | | Our DiT | SD3 | SD3.5 large | SD3.5 medium |
# | --- | --- | --- | --- | --- |
# | blocks | joint, then parallel | joint only | joint only | joint only |
# | positions | a formula, from zero | a table, its middle | a table, its middle | a table, its middle |
# | QK norm | yes | no | yes | yes |
# | the image's own attention | no | no | no | the first 13 blocks |
# | width of the pooled vector | the text's | 2048, the text's is 4096 | the same | the same |
#
# The sizes keep the names and defaults of diffusers' `config.json`.


# %% tags=["export"]
@dataclass(frozen=True)
class SD3Config:
    """``config.json`` of diffusers' ``SD3Transformer2DModel``: its names, its defaults.

    Raises:
        ValueError: a text width that is not the model's, or an unknown QK norm.
    """

    sample_size: int = 128
    patch_size: int = 2
    in_channels: int = 16
    num_layers: int = 18
    attention_head_dim: int = 64
    num_attention_heads: int = 18
    joint_attention_dim: int = 4096
    caption_projection_dim: int = 1152
    pooled_projection_dim: int = 2048
    out_channels: int | None = 16
    pos_embed_max_size: int = 96
    dual_attention_layers: tuple[int, ...] = ()
    qk_norm: str | None = None

    @property
    def width(self) -> int:
        """D = heads · head_dim."""
        return self.num_attention_heads * self.attention_head_dim

    def __post_init__(self):
        if self.caption_projection_dim != self.width:
            raise ValueError(f"caption_projection_dim {self.caption_projection_dim} is not the width; try {self.width}")
        if self.qk_norm not in (None, "rms_norm"):
            raise ValueError(f"qk_norm {self.qk_norm!r} is unknown; try 'rms_norm' or None")


# %%
COMMON = {"pos_embed_max_size": 192, "num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536}
LARGE = {"num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432, "qk_norm": "rms_norm"}
DUAL = {"dual_attention_layers": tuple(range(13)), "qk_norm": "rms_norm", "pos_embed_max_size": 384}
RELEASED = {"SD3 medium": COMMON, "SD3.5 large": COMMON | LARGE, "SD3.5 medium": COMMON | DUAL}
RELEASED = {name: SD3Config(**entries) for name, entries in RELEASED.items()}
for name, config in RELEASED.items():
    print(f"{name}: {config.num_layers} blocks of width {config.width}, a table of {config.pos_embed_max_size}²")

# %% [markdown] lang="zh"
# ## 位置：从大表正中裁一块
#
# SD3 存着一张 $M \times M$ 的正余弦表，画 $h \times w$ 个图块时取正中那一块，于是大图小图共用同一个中心：
#
# $$\text{top} = \lfloor (M - h) / 2 \rfloor, \qquad \text{left} = \lfloor (M - w) / 2 \rfloor$$
#
# | 记号 | 形状 | 含义 |
# | --- | --- | --- |
# | $M$ | 标量 | 表的边长，96、192 或 384 |
# | 表 | $(M^2, D)$ | 一格一行 |

# %% [markdown] lang="en" twin="537bf0cb"
# ## Positions: the middle of a large table
#
# SD3 keeps a sine-cosine table of $M \times M$ places, and a picture of $h \times w$ patches takes the middle of it, so that small and large pictures share a centre:
#
# $$\text{top} = \lfloor (M - h) / 2 \rfloor, \qquad \text{left} = \lfloor (M - w) / 2 \rfloor$$
#
# | Symbol | Shape | Meaning |
# | --- | --- | --- |
# | $M$ | scalar | side of the table: 96, 192 or 384 |
# | table | $(M^2, D)$ | one row a place |


# %% tags=["export"]
def middle_of(table: Tensor, grid: tuple[int, int]) -> Tensor:
    """The middle (h, w) of a square table (1, M², D) of positions: (1, h · w, D).

    Raises:
        ValueError: the grid is larger than the table.
    """
    size = round(table.shape[1] ** 0.5)
    if max(grid) > size:
        raise ValueError(f"a grid of {grid[0]}×{grid[1]} patches is larger than the table of {size}×{size}; try {size}")
    top, left = (size - grid[0]) // 2, (size - grid[1]) // 2
    square = table.unflatten(1, (size, size))  # (1, M, M, D)
    return square[:, top : top + grid[0], left : left + grid[1]].flatten(1, 2)


# %% tags=["check"]
from diffusers.models.embeddings import PatchEmbed

patch_embed = PatchEmbed(32, 32, patch_size=2, in_channels=4, embed_dim=64, pos_embed_max_size=12)
table = patch_embed.pos_embed  # (1, 144, 64)
assert torch.equal(middle_of(table, (12, 12)), table)  # the middle of everything is everything

# %% tags=["check"]
for height, width in ((8, 8), (16, 6), (10, 24), (24, 24)):  # even and odd margins, and no margin at all
    assert torch.equal(middle_of(table, (height // 2, width // 2)), patch_embed.cropped_pos_embed(height, width))
try:
    middle_of(table, (13, 4))
except ValueError as error:
    print(error)
else:
    raise AssertionError("a grid outside the table was accepted")

# %% tags=["hide"]
import matplotlib.pyplot as plt

from course.figures import COLORS, show
from diffusion_engine.dit import sincos_2d

waves = sincos_2d((192, 192), 1536, scale=64 / 192)[:, 8].unflatten(0, (192, 192))
fig, ax = plt.subplots(figsize=(6.0, 3.2))
ax.imshow(waves, cmap="Greys", alpha=0.35)
for (h, w), color in {(64, 64): COLORS[3], (48, 84): COLORS[1], (32, 32): COLORS[2]}.items():
    label = f"{16 * w}×{16 * h} pixels: {h}×{w} places"
    corner = (95.5 - w / 2, 95.5 - h / 2)
    ax.add_patch(plt.Rectangle(corner, w, h, fill=False, edgecolor=color, linewidth=2, label=label))
ax.set(title="Every picture sits in the middle of one table", xlabel="column", ylabel="row")
ax.legend(loc="center left", bbox_to_anchor=(1.02, 0.5))
show(
    fig,
    alt="A wave of one feature over a table of 192 by 192 places, with the crops for three picture sizes around its centre.",
)

# %% [markdown] lang="zh"
# 表里的数字就是第 06 章的公式，只是间距按比例缩小、四段的顺序倒过来。那为什么还要从文件里读？因为训练时用的是哪张表，文件里存的就是哪张；算一张「应该一样」的，就多一个悄悄不同的机会。

# %% [markdown] lang="en" twin="f6705312"
# The numbers in the table are chapter 06's formula, with a scaled spacing and the four quarters in reverse. Why read it from the file, then? Because the file holds the table that was trained with; computing one that "should be the same" adds one more way to differ in silence.

# %% tags=["check"]
formula = sincos_2d((12, 12), 64, scale=16 / 12)  # 16 patches a side in training, 12 places here
reversed_quarters = torch.cat(formula.chunk(4, dim=-1)[::-1], dim=-1)
assert torch.allclose(table[0], reversed_quarters, atol=1e-5)
assert not torch.allclose(table[0], formula, atol=0.1)  # same numbers, other places: same shape

# %% [markdown] lang="zh"
# ## 图像自己再看一遍
#
# SD3.5 medium 的前 13 块多一个注意力：图像除了和文字一起看，还单独看自己。两个注意力读的是**同一个**归一化过的 $x$，各用各的旋钮：
#
# $$x \leftarrow x + \alpha_1 \odot \mathrm{joint}(\mathrm{modulate}_1(x), \text{text}) + \alpha_3 \odot \mathrm{self}(\mathrm{modulate}_3(x))$$
#
# 于是图像有九个旋钮，顺序是：联合注意力、前馈、自己的注意力。

# %% [markdown] lang="en" twin="34a770f6"
# ## The image looks once more, alone
#
# The first 13 blocks of SD3.5 medium have one more attention: besides looking together with the text, the image looks at itself alone. Both read the **same** normalised $x$, each with its own knobs:
#
# $$x \leftarrow x + \alpha_1 \odot \mathrm{joint}(\mathrm{modulate}_1(x), \text{text}) + \alpha_3 \odot \mathrm{self}(\mathrm{modulate}_3(x))$$
#
# So the image has nine knobs, in the order: joint attention, feed-forward, own attention.


# %% tags=["export"]
class DualBlock(JointBlock):
    """A `JointBlock` whose image also attends to itself: x ← x + α₁ · joint(x, text) + α₃ · attn2(x); then the feed-forward.

    Args:
        width: D. heads: H. qk_norm, last: as in `JointBlock`.

    Source: Stability AI, Stable Diffusion 3.5 medium (MMDiT-X).
    """

    def __init__(self, width: int, heads: int, qk_norm=True, last: bool = False):
        super().__init__(width, heads, qk_norm, last)
        self.image_modulation = Modulation(width, 3)  # joint attention, feed-forward, own attention
        self.attn2 = SelfAttention(width, heads, qk_norm)

    def forward(self, x, text, cond, text_mask=None, rope=None, chunk=None):
        for_image, for_text = cond if isinstance(cond, tuple) else (cond, cond)
        for_joint, for_ff, for_own = self.image_modulation(for_image)
        text_mods = self.text_modulation(for_text)
        a, b = self.attn(modulate(x, for_joint), modulate(text, text_mods[0]), text_mask, rope, chunk)
        own = self.attn2(modulate(x, for_own), chunk=chunk)
        x = torch.addcmul(torch.addcmul(x, for_joint.gate, a), for_own.gate, own)
        x = torch.addcmul(x, for_ff.gate, self.image_ff(modulate(x, for_ff)))
        if self.last:
            return x, None
        text = torch.addcmul(text, text_mods[0].gate, b)
        return x, torch.addcmul(text, text_mods[1].gate, self.text_ff(modulate(text, text_mods[1])))


# %%
def redraw(module: nn.Module, seed: int = 0) -> nn.Module:
    """Every weight anew, so that no gate is shut and no norm is one: outputs of order one."""
    rng = torch.Generator().manual_seed(seed)
    for weight in module.requires_grad_(False).parameters():
        weight.copy_(torch.randn(weight.shape, generator=rng) / (weight[0].numel() if weight.ndim > 1 else 4) ** 0.5)
    return module.eval()


from diffusion_engine.transformer_block import DiTBlock

rng = torch.Generator().manual_seed(2)

# %% tags=["check"]
plain, dual = redraw(JointBlock(64, 4)), redraw(DualBlock(64, 4), seed=1)
dual.load_state_dict({k: v for k, v in plain.state_dict().items() if "image_mod" not in k}, strict=False)
for name, wide in dual.image_modulation.linear.named_parameters():
    wide.copy_(torch.cat([plain.image_modulation.linear.get_parameter(name), torch.zeros_like(wide[: 3 * 64])]))
x, text, cond = (torch.randn(*shape, 64, generator=rng) for shape in ((3, 10), (3, 7), (3,)))
for ours, same in zip(dual(x, text, cond), plain(x, text, cond)):
    assert torch.allclose(ours, same, atol=1e-5)  # with the third gate shut, it is the joint block again

# %% tags=["check"]
alone = redraw(DiTBlock(64, 4), seed=6)
dual.attn2.load_state_dict(alone.attn.state_dict())
for name, wide in dual.image_modulation.linear.named_parameters():
    knobs = alone.modulation.linear.get_parameter(name)
    knobs[192:] = 0  # no feed-forward …
    wide.copy_(torch.cat([torch.zeros_like(knobs), knobs[:192]]))  # … no text: what is left is chapter 05's block
assert torch.allclose(dual(x, text, cond)[0], alone(x, cond), atol=1e-5)
knobs = dual.image_modulation(cond), dual.text_modulation(cond)
assert all(torch.equal(a, b) for a, b in zip(dual(x, text, knobs), dual(x, text, cond)))  # knobs made before the call

# %% [markdown] lang="zh"
# ## 对照表
#
# 块内的名字一张表，块外的一张表。三处要动手脚：分块卷积、收尾层、最后一块的文字旋钮（那里 diffusers 先存缩放）。

# %% [markdown] lang="en" twin="be493db0"
# ## The key map
#
# One table for names inside a block, one for the rest. Three tensors change on the way: the patch convolution, the final layer, and the text's knobs in the last block, where diffusers stores the scale first.


# %% tags=["export"]
JOINT = {
    "image_modulation.linear": "norm1.linear",
    "text_modulation.linear": "norm1_context.linear",
    "attn.image.qkv": "attn.{to_q,to_k,to_v}",
    "attn.image.out": "attn.to_out.0",
    "attn.text.qkv": "attn.{add_q_proj,add_k_proj,add_v_proj}",
    "attn.text.out": "attn.to_add_out",
    **{f"attn.image.norm_{a}": f"attn.norm_{a}" for a in "qk"},
    **{f"attn.text.norm_{a}": f"attn.norm_added_{a}" for a in "qk"},
    **{f"image_ff.{i}": f"ff.net.{name}" for i, name in {0: "0.proj", 2: "2"}.items()},
    **{f"text_ff.{i}": f"ff_context.net.{name}" for i, name in {0: "0.proj", 2: "2"}.items()},
}
OWN = {"attn2.stream.qkv": "attn2.{to_q,to_k,to_v}", "attn2.stream.out": "attn2.to_out.0"}
OWN |= {f"attn2.stream.norm_{a}": f"attn2.norm_{a}" for a in "qk"}


# %% tags=["export"]
def sd3_keys(config: SD3Config) -> KeyMap:
    """Where each tensor of `SD3` lies in diffusers' checkpoint."""
    names = {"image_in": "pos_embed.proj", "table": "pos_embed.pos_embed", "text_in": "context_embedder"}
    for ours, theirs in {"time_in.mlp": "timestep_embedder", "pooled_in": "text_embedder"}.items():
        names |= {f"{ours}.{2 * i}": f"time_text_embed.{theirs}.linear_{i + 1}" for i in (0, 1)}
    names |= {f"blocks.*.{ours}": f"transformer_blocks.*.{theirs}" for ours, theirs in (JOINT | OWN).items()}
    names |= {"final.modulation": "norm_out.linear", "final.linear": "proj_out"}
    last = f"blocks.{config.num_layers - 1}.text_modulation.linear"
    return KeyMap(names, {"image_in.weight": flatten_patches, "final.modulation": swap_halves, last: swap_halves})


# %% [markdown] lang="zh"
# ## 网络
#
# 和第 06 章并排看：`conditions` 与 `velocity` 里只有一行不同，位置从公式换成了表的正中；`hoist` 后面再讲。`as_diffusers` 把 diffusers 的参数名换成我们的；`Config` 和 `key_map` 是 `load` 要找的。

# %% [markdown] lang="en" twin="234fb21c"
# ## The network
#
# Put it beside chapter 06: one line of `conditions` and `velocity` differs, the middle of a table instead of the formula; `hoist` is for later. `as_diffusers` turns diffusers' argument names into ours; `Config` and `key_map` are what `load` looks for.


# %% tags=["export"]
class SD3(nn.Module):
    """Velocity network of Stable Diffusion 3 and 3.5; the arguments are those of chapter 06's `DiT`.

    Source: Esser et al. 2024; Stability AI, sd3-ref; diffusers ``transformer_sd3.py``.
    """

    Config, key_map = SD3Config, staticmethod(sd3_keys)

    def __init__(self, config: SD3Config):
        super().__init__()
        self.config, c, width = config, config, config.width
        self.image_in = nn.Linear(c.patch_size**2 * c.in_channels, width)
        self.register_buffer("table", torch.zeros(1, c.pos_embed_max_size**2, width))
        self.text_in = nn.Linear(c.joint_attention_dim, width)
        self.time_in = TimestepEmbedder(width)
        self.pooled_in = nn.Sequential(nn.Linear(c.pooled_projection_dim, width), nn.SiLU(), nn.Linear(width, width))
        kinds = [DualBlock if i in c.dual_attention_layers else JointBlock for i in range(c.num_layers)]
        options = {"heads": c.num_attention_heads, "qk_norm": c.qk_norm is not None}
        blocks = (kind(width, **options, last=i == c.num_layers - 1) for i, kind in enumerate(kinds))
        self.blocks = nn.ModuleList(blocks)
        self.final = FinalLayer(width, c.patch_size**2 * (c.out_channels or c.in_channels))

    @property
    def min_multiple(self) -> int:
        """Latent height and width must be multiples of this."""
        return self.config.patch_size

    def forward(self, latents, t, text, text_mask=None, pooled=None) -> Tensor:
        """Velocity (B, C, H, W) of latents at t = 1000 · σ, (B,), under text (B, M, 4096) and pooled (B, 2048)."""
        return self.velocity(latents, self.conditions(latents.shape[1:], t, text, text_mask, pooled))

    def conditions(self, shape, t, text, text_mask=None, pooled=None) -> Conditions:
        """All of a forward that looks at no latent; the latents will be ``shape`` (C, H, W). Knobs are left to the blocks."""
        cond = self.time_in(t) + self.pooled_in(pooled)  # (B, D)
        positions = middle_of(self.table, patch_grid(*shape[-2:], self.config.patch_size))
        return Conditions(self.text_in(text), text_mask, positions, [cond] * (len(self.blocks) + 1))

    def velocity(self, latents, given: Conditions) -> Tensor:
        """The rest of `forward`: velocity (B, C, H, W) of the latents under given conditions."""
        p, (text, mask, positions, cond) = self.config.patch_size, given
        x = self.image_in(patchify(latents, p)) + positions  # (B, N, D)
        del given, positions  # nothing below reads them
        for block, steer in zip(self.blocks, cond):
            x, text = block(x, text, steer, mask)
        return unpatchify(self.final(x, cond[-1]), p, patch_grid(*latents.shape[-2:], p))

    def hoist(self, shape, times, text, text_mask=None, pooled=None) -> list[Conditions]:
        """`conditions` at each of the times (S,) for the B prompts of one forward, with every knob made: S × `Conditions`.

        One product a layer serves all S · B conditions, step after step; text and positions are shared by all.
        """
        steps = len(times)
        given = self.conditions(shape, times.repeat_interleave(len(text)), text, text_mask, pooled.repeat(steps, 1))
        cond = given.cond[-1]  # (S · B, D)
        knobs = [(block.image_modulation(cond), block.text_modulation(cond)) for block in self.blocks]
        return at_each_step(given, [*knobs, self.final.knobs(cond)], steps)

    def as_diffusers(self, hidden_states, encoder_hidden_states, pooled_projections, timestep) -> Tensor:
        """The same under diffusers' names; ``timestep`` is t."""
        return self(hidden_states, timestep.float(), encoder_hidden_states, None, pooled_projections)


# %%
for name, config in RELEASED.items():
    with torch.device("meta"):
        count = sum(weight.numel() for weight in SD3(config).parameters())
    print(f"{name}: {count / 1e9:.2f} billion weights, {2 * count / 1e9:.1f} GB in bf16")

# %% [markdown] lang="zh"
# ## 对一对
#
# diffusers 写下两个很小的检查点，权重全部重新随机：一个是 SD3，一个是带 QK 归一化和双注意力的 SD3.5。图不是正方形，两个样本，各有各的时间。

# %% [markdown] lang="en" twin="7ed5774c"
# ## Against diffusers
#
# diffusers writes two very small checkpoints with all weights drawn anew: an SD3, and an SD3.5 with QK norms and dual attention. The picture is no square, there are two samples, each with its own time.

# %%
import tempfile
from pathlib import Path

from diffusion_engine.reference.checkpoint import DropIn, load

SIZES = dict(num_layers=3, num_attention_heads=4, attention_head_dim=16, in_channels=4, out_channels=4, sample_size=16)
SIZES |= dict(joint_attention_dim=32, pooled_projection_dim=24, caption_projection_dim=64, pos_embed_max_size=12)
VARIANTS = {"3": {}, "3.5": {"qk_norm": "rms_norm", "dual_attention_layers": (0, 1)}}
room = tempfile.TemporaryDirectory()
latents, text, pooled = (torch.randn(s, generator=rng) for s in ((2, 4, 8, 12), (2, 7, 32), (2, 24)))
t = torch.tensor([987.6, 3.2])

# %% tags=["check"]
from diffusers import SD3Transformer2DModel

theirs, ours = {}, {}
for name, extra in VARIANTS.items():
    theirs[name] = redraw(SD3Transformer2DModel(**SIZES, **extra))
    theirs[name].save_pretrained(Path(room.name) / name)
    ours[name] = load(SD3, Path(room.name) / name)
    expected = theirs[name](latents, text, pooled, t).sample
    assert (ours[name](latents, t, text, None, pooled) - expected).abs().max() < 1e-5
    print(f"SD{name}: velocities of size {expected.std():.1f} differ by less than 1e-5")

# %% [markdown] lang="zh"
# ## 与潜变量无关的
#
# 走完全程，每一步新来的只有潜变量。时刻早就排定，所以 `hoist` 在第一步之前把每块、每步的旋钮一次算完，位置和文字的入口也只做一次（第 13 章）。文字的键和值提不出来：联合注意力里，文字每过一块都要变，还读过图像。什么也不遮的掩码一并去掉：没有掩码，注意力可以走最快的路。

# %% [markdown] lang="en" twin="0bf6aa57"
# ## What no latent changes
#
# From the first step to the last, only the latents are new. All times are known, so before the first step `hoist` makes the knobs of every block at every step, and positions and the text's way in once (chapter 13). Keys and values of the text cannot be hoisted: every joint block changes the text, which has read the image. A mask that hides nothing goes, too, and attention may run its fastest way.


# %% tags=["export"]
def at_each_step(given: Conditions, knobs: list, steps: int) -> list[Conditions]:
    """`Conditions` of S · B times, step after step, as S `Conditions` of B, all else shared by them.

    A mask that hides nothing is dropped, so that attention is free to run its fastest way.

    Args:
        knobs: made for S · B samples, see `by_step`. steps: S.
    """
    mask = None if given.text_mask is None or bool(given.text_mask.all()) else given.text_mask
    return [given._replace(text_mask=mask, cond=cond) for cond in by_step(knobs, steps)]


# %% tags=["check"]
times, real = torch.tensor([1000.0, 640.5, 3.25]), torch.arange(7) < torch.tensor([[7], [4]])
padded = torch.where(real[..., None], text, 100.0)  # whatever stands in the padding
for network in ours.values():
    ahead = network.hoist(latents.shape[1:], times, padded, real, pooled)
    for time, given in zip(times, ahead, strict=True):
        expected = network(latents, time.expand(2), text, real, pooled)
        assert torch.allclose(network.velocity(latents, given), expected, atol=1e-5)  # ahead, or block by block
assert ahead[0].text is ahead[2].text and ahead[0].positions is ahead[2].positions  # made once, shared by all steps
assert network.hoist(latents.shape[1:], times, text, real | True, pooled)[0].text_mask is None  # nothing to hide

# %% [markdown] lang="zh"
# 算完旋钮，做旋钮的权重就没人再读，整段路上都可以离开内存。按名字数一数有多少；数得对不对，问梯度：从 `velocity` 往回走，只有它们收不到梯度。

# %% [markdown] lang="en" twin="b9608e57"
# Once the knobs are there, nobody reads the weights that made them: they could leave memory for the whole walk. Count them by name; and to be sure of the names, ask the gradient: going back from `velocity`, these weights alone receive none.


# %%
def read_ahead_only(name: str) -> bool:
    return "modulation" in name or name.startswith(("text_in", "time_in", "pooled_in"))


for name, config in RELEASED.items():
    with torch.device("meta"):
        sizes = {weight: tensor.numel() for weight, tensor in SD3(config).named_parameters()}
    idle = sum(size for weight, size in sizes.items() if read_ahead_only(weight))
    print(f"{name}: {idle / 1e9:.2f} of {sum(sizes.values()) / 1e9:.2f} billion weights are read by hoist alone")

# %% tags=["check"]
network.requires_grad_(True).velocity(latents, ahead[0]).sum().backward()
network.requires_grad_(False)
for name, weight in network.named_parameters():
    assert (weight.grad is None) == read_ahead_only(name), name

# %% [markdown] lang="zh"
# ## 半精度
#
# bf16 只有八位有效数字，误差不可能是 $10^{-5}$。公平的问法是：和 fp32 的真值相比，我们的误差大过 diffusers 自己的吗？为了看清，多取几个样本，比均方根：
#
# $$\mathrm{rms}(v_{\mathrm{bf16}} - v_{\mathrm{fp32}})$$

# %% [markdown] lang="en" twin="d17fa6da"
# ## Half precision
#
# bf16 has eight significant bits; an error of $10^{-5}$ is out of reach. The fair question: against the truth in fp32, is our error larger than diffusers' own? To see clearly, take several samples and compare root mean squares:
#
# $$\mathrm{rms}(v_{\mathrm{bf16}} - v_{\mathrm{fp32}})$$

# %% tags=["check"]
halves, errors = [tensor.bfloat16() for tensor in (latents, text, pooled)], {}
for name in VARIANTS:
    truth = theirs[name](latents, text, pooled, t).sample
    half = SD3Transformer2DModel.from_pretrained(Path(room.name) / name, torch_dtype=torch.bfloat16)
    mine = DropIn(load(SD3, Path(room.name) / name, dtype=torch.bfloat16))
    errors[name] = [(model(*halves, t).sample - truth).square().mean().sqrt().item() for model in (mine, half)]
    assert errors[name][0] < 1.25 * errors[name][1]  # the same rounding, in a slightly different order

# %% tags=["hide"]
fig, ax = plt.subplots(figsize=(5.2, 2.4))
for i, (label, color) in enumerate({"ours": COLORS[0], "diffusers": COLORS[5]}.items()):
    ax.bar([k + 0.3 * i for k in range(2)], [e[i] for e in errors.values()], width=0.28, color=color, label=label)
ax.set(xticks=[0.15, 1.15], xticklabels=[f"SD{name}" for name in errors], ylabel="rms error against fp32")
ax.set(title="bf16 costs both the same", ylim=(0, 1.35 * max(max(e) for e in errors.values())))
ax.legend(ncols=2, loc="upper right")
show(
    fig,
    alt="Two pairs of bars of nearly equal height: bf16 errors of our network and of diffusers', for SD3 and SD3.5.",
)

# %% [markdown] lang="zh"
# ## 住进 StableDiffusion3Pipeline
#
# 最后的考验：diffusers 的流水线照跑，只把 `transformer` 换成我们的替身。同样的种子、四步、引导强度 4，潜变量应当一样。提示词嵌入直接给，这样不需要文本编码器和分词器。

# %% [markdown] lang="en" twin="84268198"
# ## Inside StableDiffusion3Pipeline
#
# The last test: diffusers' own pipeline runs as it is, with our drop-in for its `transformer`. Same seed, four steps, guidance scale 4: the latents should agree. Prompt embeddings are handed in, so no text encoder and no tokenizer are needed.

# %% tags=["check"]
from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

absent = [f"{part}{i}" for part in ("text_encoder", "tokenizer") for i in ("", "_2", "_3")]
parts = {"transformer": theirs["3.5"], "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0)}
pipe = StableDiffusion3Pipeline(**parts, vae=None, **dict.fromkeys(absent))
pipe.set_progress_bar_config(disable=True)
prompts = {"prompt_embeds": text[:1], "pooled_prompt_embeds": pooled[:1]}
prompts |= {f"negative_{key}": -value for key, value in prompts.items()}
ask = dict(height=64, width=96, num_inference_steps=4, guidance_scale=4.0, output_type="latent", **prompts)
expected = pipe(**ask, generator=torch.Generator().manual_seed(7)).images
pipe.transformer = DropIn(ours["3.5"])
assert (pipe(**ask, generator=torch.Generator().manual_seed(7)).images - expected).abs().max() < 1e-4

# %% [markdown] lang="zh"
# ## 在 diffusers 里，这些在哪儿
#
# | 我们 | diffusers |
# | --- | --- |
# | `middle_of` | `embeddings.py`，`PatchEmbed.cropped_pos_embed` |
# | `image_in` 与 `patchify` | 同上，`PatchEmbed.proj` |
# | `time_in` 与 `pooled_in` | `CombinedTimestepTextProjEmbeddings` |
# | `JointBlock`、`DualBlock` | `attention.py`，`JointTransformerBlock` |
# | 九个旋钮 | `normalization.py`，`SD35AdaLayerNormZeroX` |
# | `FinalLayer` | `AdaLayerNormContinuous` 与 `proj_out` |
# | `forward` | `transformer_sd3.py`，`SD3Transformer2DModel.forward` |
#
# **还缺什么**：文本编码器和 VAE，第 24 章去借。FLUX 把文字放在前面，用旋转代替表，还多了一种块：第 17 章。
#
# ## 三个问题
#
# 1. 预测：位置表如果从左上角而不是正中裁，哪些图的速度不变？
# 2. 修改：让 `attn2` 读联合注意力之后的 $x$，速度会差多少？
# 3. 动手：不存表，用公式算出正中那一块，证明任意长方形都一致。

# %% [markdown] lang="en" twin="a665bc88"
# ## Where this lives in diffusers
#
# | Ours | diffusers |
# | --- | --- |
# | `middle_of` | `embeddings.py`, `PatchEmbed.cropped_pos_embed` |
# | `image_in` and `patchify` | the same, `PatchEmbed.proj` |
# | `time_in` and `pooled_in` | `CombinedTimestepTextProjEmbeddings` |
# | `JointBlock`, `DualBlock` | `attention.py`, `JointTransformerBlock` |
# | nine knobs | `normalization.py`, `SD35AdaLayerNormZeroX` |
# | `FinalLayer` | `AdaLayerNormContinuous` and `proj_out` |
# | `forward` | `transformer_sd3.py`, `SD3Transformer2DModel.forward` |
#
# **What is missing:** text encoders and the VAE, which chapter 24 borrows. FLUX puts the text first, turns instead of a table, and has one more kind of block: chapter 17.
#
# ## Three questions
#
# 1. Predict: if the table were cropped at its upper left instead of its middle, for which pictures would the velocity stay?
# 2. Modify: let `attn2` read $x$ after the joint attention. How far is the velocity off?
# 3. Build: without a table, compute its middle by the formula; show that any rectangle agrees.

# %% tags=["solution"]
# 1 · only pictures as large as the whole table: there the crop is everything
network = ours["3"]
corner = network.table.unflatten(1, (12, 12))[:, :4, :6].flatten(1, 2)
assert not torch.allclose(corner, middle_of(network.table, (4, 6)), atol=0.1)
assert torch.equal(network.table, middle_of(network.table, (12, 12)))

# %% tags=["solution"]
# 2 · clearly off, though every shape fits: the norm sees another x
for_joint, _, for_own = redraw(dual, seed=5).image_modulation(cond)
after = x + for_joint.gate * dual.attn(modulate(x, for_joint), torch.randn(3, 7, 64, generator=rng))[0]
late = dual.attn2(modulate(after, for_own))
assert (late - dual.attn2(modulate(x, for_own))).abs().mean() > 0.01

# %% tags=["solution"]
# 3 · start the count at the crop's corner; the quarters still stand in reverse
for grid in ((4, 6), (3, 12), (7, 2)):
    corner = tuple((12 - side) // 2 for side in grid)
    computed = sincos_2d(grid, 64, origin=corner, scale=16 / 2 / 12)
    assert torch.allclose(
        torch.cat(computed.chunk(4, dim=-1)[::-1], dim=-1), middle_of(network.table, grid)[0], atol=1e-5
    )

# %% [markdown] lang="zh"
# ## 小结
#
# - SD3 就是第 06 章的 DiT：只留双流块，位置改成一张表的正中。
# - 表里的数字是同一个公式，四段顺序倒过来；仍从文件里读，训练用的是哪张就是哪张。
# - SD3.5 medium 的图像多看自己一次，两个注意力读同一个归一化的 $x$。
# - fp32 下速度与 diffusers 相差不到 $10^{-5}$；bf16 的误差与它自己的相当。
# - 替身住进 diffusers 的流水线，潜变量相差不到 $10^{-4}$。
#
# 阅读卡片：SD3（[`papers/05_sd3`](../../papers/05_sd3.zh.md)）。下一章：17。

# %% [markdown] lang="en" twin="5ef6e705"
# ## Recap
#
# - SD3 is the DiT of chapter 06 with joint blocks only, and positions from the middle of a table.
# - The table holds the same formula with its quarters in reverse; it is still read from the file: what was trained with is what is used.
# - In SD3.5 medium the image looks at itself once more, and both attentions read the same normalised $x$.
# - In fp32 the velocity is within $10^{-5}$ of diffusers'; in bf16 the error is like its own.
# - The drop-in lives in diffusers' pipeline, with latents within $10^{-4}$.
#
# Reading card: SD3 ([`papers/05_sd3`](../../papers/05_sd3.en.md)). Next: chapter 17.
