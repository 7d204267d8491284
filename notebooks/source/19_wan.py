# ---
# jupyter:
#   course:
#     minutes: 45
#     module: reference/wan
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown] lang="zh"
# # 19 · Wan2.1：文字在一旁，旋钮共用
#
# 读完这一章，Wan2.1 的网络就由你的零件搭成：文生视频的 1.3B 和 14B，图生视频的 14B；速度和 diffusers 逐个数字对得上，画出的短片也一样。
#
# | 你会做出 | 你需要 | 时间 | 模块 |
# | --- | --- | --- | --- |
# | fp32 的旋钮、文字加图像的交叉注意力、Wan 的对照表与网络 | 第 05 章的调制表，第 14 章的视频词元，第 15 章的 `load` | 45 分钟 | `diffusion_engine/reference/wan.py` |

# %% [markdown] lang="en" twin="60e11661"
# # 19 · Wan2.1: text at the side, knobs shared
#
# After this chapter Wan2.1's network stands on your parts: text-to-video in 1.3B and 14B, image-to-video in 14B. Its velocity agrees with diffusers number by number, and so do the clips.
#
# | You build | You need | Time | Module |
# | --- | --- | --- | --- |
# | knobs in fp32, cross-attention to text and image, Wan's key map and network | the modulation table of chapter 05, the video tokens of chapter 14, `load` of chapter 15 | 45 minutes | `diffusion_engine/reference/wan.py` |

# %% [markdown] lang="zh"
# **先想一想**：你的提示词只有六个词元，Wan 的网络却总是看到 512 个：后面补上 506 个全零的向量，而且**没有掩码**。零进了注意力，是什么也不做，还是会改变画面？

# %% [markdown] lang="en" twin="f76471ff"
# **Think first:** your prompt has six tokens, yet Wan's network always sees 512: 506 vectors of zeros follow, and there is **no mask**. What do zeros do in an attention: nothing, or do they change the picture?

# %% tags=["export"]
import math
from dataclasses import dataclass
from operator import itemgetter

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffusion_engine.attention import CrossAttention, attention, axial_rope, grid_positions, qk_norm_layer
from diffusion_engine.dit import Conditions
from diffusion_engine.reference.checkpoint import KeyMap, flatten_patches, require
from diffusion_engine.reference.sana import BLOCK, last_mod, work_ahead
from diffusion_engine.timestep_embedding import TimestepEmbedder
from diffusion_engine.transformer_block import DiTBlock, FeedForward, Mod, modulate
from diffusion_engine.video import rope_axes, video_grid, video_patchify, video_unpatchify

# %% [markdown] lang="zh"
# ## 哪里不同
#
# | | 第 14 章的视频 DiT | Wan2.1 1.3B | 14B |
# | --- | --- | --- | --- |
# | 块、宽、头 | 5、256、8 | 30、1536、12 | 40、5120、40 |
# | 图块 | 1×4×4 | 1×2×2 | 1×2×2 |
# | 旋钮 | 每块一个线性层 | 共用一个，每块一张表，fp32 | 同左 |
# | QK 归一化 | 每个头 | 跨所有的头 | 同左 |
# | 交叉注意力前 | 无 | 带权重的归一化 | 同左 |
# | 文字 | 带掩码，有汇总向量 | 512 个，补零，无掩码 | 同左 |
# | 前馈 | 4 倍 | 8960 | 13824 |
#
# 三轴旋转和视频词元一字不改，第 14 章已经和 Wan 对过数。

# %% [markdown] lang="en" twin="f04baaae"
# ## What differs
#
# | | The video DiT of chapter 14 | Wan2.1 1.3B | 14B |
# | --- | --- | --- | --- |
# | blocks, width, heads | 5, 256, 8 | 30, 1536, 12 | 40, 5120, 40 |
# | patch | 1×4×4 | 1×2×2 | 1×2×2 |
# | knobs | a linear layer a block | one shared, a table a block, fp32 | the same |
# | QK norm | per head | across all heads | the same |
# | before cross-attention | nothing | a norm with weights | the same |
# | text | masked, with a pooled vector | 512 tokens, zeros at the end, no mask | the same |
# | feed-forward | ratio 4 | 8960 | 13824 |
#
# Three-axis rotation and video tokens stay as they are: chapter 14 compared them with Wan.


# %% tags=["export"]
@dataclass(frozen=True)
class WanConfig:
    """``config.json`` of diffusers' ``WanTransformer3DModel``: its names, its defaults (the 14B).

    Raises:
        ValueError: a variant that is not built here, or a head that three axes cannot share.
    """

    patch_size: tuple[int, int, int] = (1, 2, 2)
    num_attention_heads: int = 40
    attention_head_dim: int = 128
    in_channels: int = 16
    out_channels: int | None = 16
    text_dim: int = 4096
    freq_dim: int = 256
    ffn_dim: int = 13824
    num_layers: int = 40
    cross_attn_norm: bool = True
    qk_norm: str | None = "rms_norm_across_heads"
    eps: float = 1e-6
    image_dim: int | None = None
    added_kv_proj_dim: int | None = None
    rope_max_seq_len: int = 1024
    pos_embed_seq_len: int | None = None

    @property
    def width(self) -> int:
        """D = heads · head_dim."""
        return self.num_attention_heads * self.attention_head_dim

    def __post_init__(self):
        rope_axes(self.attention_head_dim)
        require(self, qk_norm="rms_norm_across_heads", eps=1e-6, pos_embed_seq_len=None)
        require(self, added_kv_proj_dim=self.image_dim and self.width)  # an image has the width of the model


# %% [markdown] lang="zh"
# ## 零不是「没有」
#
# 提示词后面补的是零向量，可线性层有偏置：$W \cdot 0 + b = b$。于是每个零都变成**同一个**词元，有自己的键和值。设它的分数是 $s_0$，一共 $m$ 个：
#
# $$y = \frac{\sum_j e^{s_j} v_j + m\, e^{s_0} v_0}{\sum_j e^{s_j} + m\, e^{s_0}}$$
#
# | 记号 | 形状 | 含义 |
# | --- | --- | --- |
# | $s_j, v_j$ | 标量、$(D_h)$ | 第 $j$ 个词的分数和值 |
# | $m$ | 标量 | 零的个数 |
#
# 先用六个词、一个查询试试。

# %% [markdown] lang="en" twin="21f56af3"
# ## Zeros are not nothing
#
# What follows the prompt is zeros, but a linear layer has a bias: $W \cdot 0 + b = b$. Every zero becomes the **same** token, with a key and a value. Let its score be $s_0$, and let there be $m$ of them:
#
# $$y = \frac{\sum_j e^{s_j} v_j + m\, e^{s_0} v_0}{\sum_j e^{s_j} + m\, e^{s_0}}$$
#
# | Symbol | Shape | Meaning |
# | --- | --- | --- |
# | $s_j, v_j$ | scalar, $(D_h)$ | score and value of word $j$ |
# | $m$ | scalar | number of zeros |
#
# Try it with six words and one query.


# %%
from diffusion_engine.reference.checkpoint import DropIn, load, their_names


def plain(scores: Tensor, values: Tensor) -> Tensor:
    """Scores (M,) and values (M, Dh) → (Dh,): the plain way."""
    return scores.exp() @ values / scores.exp().sum()


rng = torch.Generator().manual_seed(0)
scores, values = torch.randn(7, generator=rng), torch.randn(7, 16, generator=rng)  # six words, then the zero
repeats = torch.tensor([1] * 6 + [506])
padded = plain(scores.repeat_interleave(repeats), values.repeat_interleave(repeats, dim=0))

# %% tags=["hide"]
import math

import matplotlib.pyplot as plt

from course.figures import COLORS, show

zeros = torch.arange(0, 507)
fig, ax = plt.subplots(figsize=(5.8, 2.8))
for below, name, color in ((0, "as high as words", COLORS[3]), (4, "4 lower", COLORS[1]), (8, "8 lower", COLORS[0])):
    share = 100 * 6 / (6 + zeros * math.exp(-below))
    ax.plot(zeros, share, color=color)
    ax.text(512, share[-1], f"zeros score\n{name}" if not below else name, color=color, va="center")
ax.set(title="Six words and 506 zeros: training must learn to look past them", xlabel="zeros after six words")
ax.set(ylabel="attention to the words, %", ylim=(0, 105), xlim=(0, 506))
show(
    fig,
    alt="Share of attention that six words keep against the number of zeros: one per cent at 506 zeros that score as high as words, 39 if they score 4 lower, 97 if 8 lower.",
)

# %% [markdown] lang="zh"
# 所以「补到 512」是模型的一部分：少补几个，画面就变。反过来，$m$ 个一样的词元也可以合成一个，只要给它的分数加上 $\log m$，因为 $m\, e^{s_0} = e^{s_0 + \log m}$。

# %% [markdown] lang="en" twin="b0329650"
# So "pad to 512" is part of the model: pad less, and the picture changes. Conversely, $m$ equal tokens may be merged into one whose score is larger by $\log m$, because $m\, e^{s_0} = e^{s_0 + \log m}$.

# %% tags=["check"]
merged = scores + repeats.log()
assert torch.allclose(plain(merged, values), padded, atol=1e-6)  # 506 zeros in one
assert (padded - plain(scores[:6], values[:6])).abs().max() > 0.1  # and they are seen

# %% [markdown] lang="zh"
# ## 图生视频：两次注意力，答案相加
#
# 图生视频时，潜变量有 36 个通道：噪声、掩码、编码后的第一帧。第一帧还经过一个图像编码器，得到 257 个向量。它们不和文字挤进同一个 softmax，否则文字的权重会被摊薄；图像有自己的键和值，同一个查询各问一次：
#
# $$y = W_o \big(\mathrm{attn}(q, K_{\text{text}}, V_{\text{text}}) + \mathrm{attn}(q, K_{\text{image}}, V_{\text{image}})\big)$$

# %% [markdown] lang="en" twin="def61fae"
# ## Image to video: two attentions, added
#
# For image-to-video, latents have 36 channels: noise, a mask, the encoded first frame. That frame also goes through an image encoder, which gives 257 vectors. They do not join the text's softmax, where they would thin out its weights; the image has its own keys and values, and one query asks both:
#
# $$y = W_o \big(\mathrm{attn}(q, K_{\text{text}}, V_{\text{text}}) + \mathrm{attn}(q, K_{\text{image}}, V_{\text{image}})\big)$$


# %% tags=["export"]
class WanCross(CrossAttention):
    """Video tokens x (B, N, D) ask the text (B, M, D) and the image (B, K, D): two attentions, their answers added.

    Args:
        width: D. heads: H. with_image: whether there are keys and values of an image, too.

    forward(x, text): a tensor; or text and image, a list; or what `keys_values` made of them, a tuple. Nothing is hidden.

    Source: Wan2.1, ``WanI2VCrossAttention``; diffusers' ``WanAttnProcessor``.
    """

    def __init__(self, width: int, heads: int, with_image: bool = False):
        super().__init__(width, heads, qk_norm="rms_across")
        self.image_kv = nn.Linear(width, 2 * width) if with_image else None
        self.norm_image_k = qk_norm_layer("rms_across", heads, width // heads) if with_image else None

    def keys_values(self, text: Tensor | list[Tensor]) -> tuple[Tensor, ...]:
        """Keys and values of the text, (B, H, M, Dh) each, and behind them those of the image, (B, H, K, Dh) each."""
        if not isinstance(text, list):
            return super().keys_values(text)
        k, v = self.image_kv(text[1]).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return *super().keys_values(text[0]), self.norm_image_k(k), v

    def forward(self, x: Tensor, text, text_mask: None = None) -> Tensor:
        k, v, *of_image = text if isinstance(text, tuple) else self.keys_values(text)
        q = self.norm_q(self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2))  # (B, H, N, Dh)
        heads = attention(q, k, v)
        if of_image:
            heads = heads + attention(q, *of_image)
        return self.out(heads.transpose(1, 2).flatten(-2))


# %%
def redraw(module: nn.Module) -> nn.Module:
    """Every weight anew, so that no table is zero and no norm is one: outputs of order one."""
    for weight in module.requires_grad_(False).parameters():
        weight.copy_(torch.randn(weight.shape, generator=rng) / (weight[0].numel() if weight.ndim > 1 else 4) ** 0.5)
    return module.eval()


cross = redraw(WanCross(24, 2, with_image=True))
x, text, image = (torch.randn(2, n, 24, generator=rng) for n in (15, 512, 5))

# %% tags=["check"]
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor

real = redraw(WanAttention(24, 2, 12, 1e-6, 0.0, 24, 12, WanAttnProcessor()))
places = {"q": "to_q", "kv": "{to_k,to_v}", "image_kv": "{add_k_proj,add_v_proj}", "out": "to_out.0"}
places |= {"norm_q": "norm_q", "norm_k": "norm_k", "norm_image_k": "norm_added_k"}
their = {n: [real.state_dict()[key] for key in their_names(KeyMap(places), n)] for n in cross.state_dict()}
cross.load_state_dict({name: torch.cat(parts) for name, parts in their.items()})
expected = real(x, torch.cat([image, text], dim=1))
assert torch.allclose(cross(x, [text, image]), expected, atol=1e-5)  # wants 512 words
said = cross(x, [text, image]) - cross(x, text)
apart = cross(x, [text[:, :7], image]) - cross(x, text[:, :7])
assert torch.allclose(said, apart, atol=1e-5)  # what the image says does not depend on the number of words

# %% [markdown] lang="zh"
# ## 旋钮留在 fp32
#
# 第 05 章的调制表这里原样用：一个线性层给所有的块，每块只加一张 $6 \times D$ 的表。新的是精度。bf16 在 1 附近的间隔是 $2^{-7}$，于是 $1 + \gamma$ 会把小于 $2^{-8}$ 的 $\gamma$ 整个吃掉。Wan 把表、归一化和门控都放在 fp32 里算，算完再回到 bf16。

# %% [markdown] lang="en" twin="a88e91f8"
# ## Knobs stay in fp32
#
# The modulation table of chapter 05 serves as it is: one linear layer for all blocks, and a table of $6 \times D$ a block. New is the precision. Near 1 bf16 has steps of $2^{-7}$, so $1 + \gamma$ swallows any $\gamma$ below $2^{-8}$ whole. Wan keeps tables, norms and gates in fp32 and returns to bf16 afterwards.


# %% tags=["export"]
class ExactNorm(nn.LayerNorm):
    """LayerNorm with weights over the last axis, in fp32 whatever the dtype of x: (…, D) → the same."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).to(x.dtype)


def exactly(x: Tensor, mod: Mod) -> Tensor:
    """(1 + γ) · LN(x) + β in fp32, then back to x's dtype: tokens (B, N, D) → the same."""
    return modulate(x.float(), mod).to(x.dtype)


# %%
tokens, still = torch.randn(1, 64, 256, generator=rng).bfloat16(), torch.zeros(1, 1, 256)


def gain(turn, scale: float, dtype=torch.float32) -> float:
    """By how much a knob γ really enlarges tokens, measured: should be γ."""
    size = lambda g: turn(tokens, Mod(still.to(dtype), torch.full_like(still, g).to(dtype))).float().std()  # noqa: E731
    return (size(scale) / size(0.0) - 1).item()


# %% tags=["check"]
assert abs(gain(exactly, 0.003) - 0.003) < 3e-4
assert gain(modulate, 0.003, torch.bfloat16) == 0  # the same knob in bf16: not there
assert exactly(tokens, Mod(still, still)).dtype == torch.bfloat16
norm = redraw(ExactNorm(256, eps=1e-6))
far = (3000 + 20 * tokens.float()).bfloat16()
assert torch.equal(norm(far), F.layer_norm(far.float(), (256,), norm.weight, norm.bias, 1e-6).bfloat16())

# %% tags=["hide"]
knobs = torch.linspace(0, 0.025, 60)
fig, ax = plt.subplots(figsize=(5.4, 2.7))
ax.plot(knobs, [gain(modulate, g, torch.bfloat16) for g in knobs.tolist()], color=COLORS[3], label="bf16 throughout")
ax.plot(knobs, [gain(exactly, g) for g in knobs.tolist()], color=COLORS[0], label="fp32 inside")
ax.set(title="A fine knob needs fp32: in bf16 it turns in clicks", xlabel="scale γ", ylabel="measured gain")
ax.legend(loc="upper left")
show(
    fig,
    alt="Measured gain against the scale knob: a straight line with fp32 inside, a staircase with a first flat step up to one 256th in bf16.",
)

# %% [markdown] lang="zh"
# ## 块
#
# `DiTBlock` 本来就有调制表、交叉注意力和它前面的归一化。改的只是三处：先转 fp32，加完门控再转回来，图像跟着文字走进来。

# %% [markdown] lang="en" twin="beee15f5"
# ## The block
#
# `DiTBlock` already has a table, cross-attention and the norm before it. Three things change: fp32 on the way in, back again after the gate, and an image that comes along with the text.


# %% tags=["export"]
class WanBlock(DiTBlock):
    """Self-attention, cross-attention behind a norm with weights, feed-forward; knobs from a table, all in fp32.

    forward(x (B, N, D), shared knobs (B, 6·D), or (B, N, 6·D), or a list of `Mod`, the turns, text as `WanCross` takes it).

    Source: Wan team 2025; diffusers' ``WanTransformerBlock``.
    """

    def __init__(self, c: WanConfig):
        width, heads = c.width, c.num_attention_heads
        parts = {"cross": WanCross(width, heads, c.image_dim is not None), "ff": FeedForward(width, hidden=c.ffn_dim)}
        super().__init__(width, heads, "rms_across", table=True, **parts)
        self.cross_norm = ExactNorm(width, eps=1e-6) if c.cross_attn_norm else nn.Identity()

    def forward(self, x, shared, rope, text) -> Tensor:
        for_attn, for_ff = self.modulation(shared)  # fp32, as the table is
        x = torch.addcmul(x, for_attn.gate, self.attn(exactly(x, for_attn), rope=rope)).to(x.dtype)
        x = x + self.cross(self.cross_norm(x), text)
        return torch.addcmul(x, for_ff.gate, self.ff(exactly(x, for_ff))).to(x.dtype)


# %%
SIZES = dict(num_attention_heads=2, attention_head_dim=24, text_dim=24, ffn_dim=80, num_layers=2, freq_dim=32)
block, shared = redraw(WanBlock(WanConfig(**SIZES))), torch.randn(2, 6 * 48, generator=rng)
rope = axial_rope(grid_positions(3, 2, 3), rope_axes(24))
x, text = torch.randn(2, 18, 48, generator=rng), torch.randn(2, 7, 48, generator=rng)
before = DiTBlock(48, 2, "rms_across", table=True, cross=block.cross, cross_norm=True, ff=block.ff)
before.load_state_dict(block.state_dict())

# %% tags=["check"]
whole = block(x, shared, rope, text)
assert torch.allclose(whole, before(x, shared, rope=rope, text=text), atol=1e-5)  # in fp32 it is chapter 05's block
shut = -block.modulation.table.flatten().expand(2, -1)  # shared knobs that cancel the table: all gates closed
assert torch.equal(block(x, shut, rope, text), x + block.cross(block.cross_norm(x), text))  # only the text speaks

# %% [markdown] lang="zh"
# ## 对照表与网络
#
# 块里的名字和 Sana 一样，表用第 18 章的 `BLOCK`。`fp32` 列出半精度里也不变的张量，和 diffusers 的 `_keep_in_fp32_modules` 相同。网络和第 14 章的 `VideoDiT` 并排看：没有汇总向量，旋钮共用，收尾用一张两行的表；`text_mask` 不是遮住，而是**置零**，和 Wan 的流水线一样。时间也可以每个词元一个，$(B, N)$：Wan2.2 的 5B 这样让第一帧保持干净。

# %% [markdown] lang="en" twin="3777675c"
# ## The key map and the network
#
# Names inside a block are Sana's, chapter 18's `BLOCK`. `fp32` lists what a half-precision load leaves alone: diffusers' `_keep_in_fp32_modules`. Beside chapter 14's `VideoDiT` the network has no pooled vector, shared knobs, and a table of two rows at the end. `text_mask` does not hide, it sets to **zero**, as Wan's pipeline does. Every token may have its own time, $(B, N)$: so Wan2.2's 5B keeps a first frame clean.

# %% tags=["export"]
WAN_BLOCK = BLOCK | {"cross_norm": "norm2", "ff.0": "ffn.net.0.proj", "ff.2": "ffn.net.2"}
WAN_BLOCK |= {"cross.image_kv": "attn2.{add_k_proj,add_v_proj}", "cross.norm_image_k": "attn2.norm_added_k"}


def wan_keys(config: WanConfig) -> KeyMap:
    """Where each tensor of `Wan` lies in diffusers' checkpoint; tables, norms and the time's layers stay fp32."""
    home, tables = "condition_embedder.", ("table", "blocks.*.modulation.table")
    names = {"patch_in": "patch_embedding", "knobs": f"{home}time_proj"}
    names |= {"table": "scale_shift_table", "out": "proj_out"}
    for ours, theirs in {"time_in.mlp": "time_embedder", "text_in": "text_embedder"}.items():
        names |= {f"{ours}.{2 * i}": f"{home}{theirs}.linear_{i + 1}" for i in (0, 1)}
    for i, theirs in {0: "norm1", 1: "ff.net.0.proj", 3: "ff.net.2", 4: "norm2"}.items():
        names[f"image_in.{i}"] = f"{home}image_embedder.{theirs}"
    names |= {f"blocks.*.{ours}": f"blocks.*.{theirs}" for ours, theirs in WAN_BLOCK.items()}
    return KeyMap(
        names,
        changes={"patch_in.weight": flatten_patches} | dict.fromkeys(tables, itemgetter(0)),  # (1, k, D) → (k, D)
        unused=("blocks.*.attn2.norm_added_q",),  # in old files, read by nobody
        fp32=(*tables, "time_in.mlp.*", "blocks.*.cross_norm", "image_in.0", "image_in.4"),
    )


# %% tags=["export"]
class Wan(nn.Module):
    """Velocity network of Wan2.1, text-to-video and image-to-video; the arguments are those of `VideoDiT`.

    Source: Wan team 2025; diffusers ``transformer_wan.py``.
    """

    Config, key_map = WanConfig, staticmethod(wan_keys)

    def __init__(self, config: WanConfig):
        super().__init__()
        self.config, c, width, patch = config, config, config.width, math.prod(config.patch_size)
        self.min_multiple = max(c.patch_size[1:])  # latent height and width must be multiples of this
        self.patch_in = nn.Linear(patch * c.in_channels, width)
        self.text_in = nn.Sequential(nn.Linear(c.text_dim, width), nn.GELU("tanh"), nn.Linear(width, width))
        self.time_in, self.knobs, self.image_in = TimestepEmbedder(width, c.freq_dim), nn.Linear(width, 6 * width), None
        if d := c.image_dim:
            layers = nn.Linear(d, d), nn.GELU(), nn.Linear(d, width)
            self.image_in = nn.Sequential(ExactNorm(d), *layers, ExactNorm(width))
        self.blocks = nn.ModuleList(WanBlock(c) for _ in range(c.num_layers))
        self.table = nn.Parameter(torch.zeros(2, width))
        self.out = nn.Linear(width, patch * (c.out_channels or c.in_channels))

    def forward(self, latents, t, text, text_mask=None, pooled=None, image=None) -> Tensor:
        """Velocity (B, C, F, H, W) of latents at t = 1000 · σ under text (B, M, 4096); pooled is unused.

        Args:
            t: (B,), or (B, N), one time a token (Wan2.2 5B).
            text_mask: (B, M) bool; where it is False the text is zero, as in training, and still seen.
            image: (B, K, 1280), image-to-video only; its latents are noise, mask and image latents, 36 channels.

        Raises:
            ValueError: latents that do not fit channels or patch, or an image where none belongs (or the reverse).
        """
        return self.velocity(latents, self.conditions(latents.shape[1:], t, text, text_mask, pooled, image))

    def conditions(self, shape, t, text, text_mask=None, pooled=None, image=None) -> Conditions:
        """All that `velocity` reads besides latents of ``shape`` (C, F, h, w); the rest as in `forward`."""
        c = self.config
        if len(shape) != 4 or shape[0] != c.in_channels:
            raise ValueError(f"latents have shape (B, {str([*shape])[1:-1]}); expected (B, {c.in_channels}, F, H, W)")
        if (image is None) != (c.image_dim is None):
            raise ValueError(f"image {'is missing' if image is None else 'given'}; image_dim {c.image_dim} decides")
        places = grid_positions(*video_grid(shape[1:], c.patch_size)).to(text.device)
        text = self.text_in(text if text_mask is None else text.masked_fill(~text_mask.unsqueeze(-1), 0))
        given = text if image is None else [text, self.image_in(image)]  # as `WanCross` takes them
        cond = self.time_in(t.flatten()).unflatten(0, t.shape).to(text.dtype)  # (B, D), or (B, N, D)
        rope, shared = axial_rope(places, rope_axes(c.attention_head_dim)), self.knobs(F.silu(cond))
        return Conditions([given] * c.num_layers, None, rope, [shared] * c.num_layers + [cond])

    def velocity(self, latents: Tensor, given: Conditions) -> Tensor:
        """The rest of `forward`: velocity of the latents under given conditions."""
        x = self.patch_in(video_patchify(latents, self.config.patch_size))  # (B, N, D)
        for block, shared, text in zip(self.blocks, given.cond, given.text):
            x = block(x, shared, given.positions, text)
        x = self.out(exactly(x, last_mod(self.table, given.cond[-1])))
        return video_unpatchify(x, self.config.patch_size, video_grid(latents.shape[2:], self.config.patch_size))

    def hoist(self, shape, times, text, text_mask=None, pooled=None, image=None) -> list[Conditions]:
        """`conditions` for all times (S,), see `work_ahead`; ``shape`` is that of the latents without the batch."""
        t = times.repeat_interleave(len(text))
        return work_ahead(self, self.conditions(shape, t, text, text_mask, pooled, image), len(times))

    def as_diffusers(self, hidden_states, timestep, encoder_hidden_states, encoder_hidden_states_image=None) -> Tensor:
        """The same under diffusers' names; ``timestep`` is t."""
        return self(hidden_states, timestep.float(), encoder_hidden_states, image=encoder_hidden_states_image)


# %% [markdown] lang="zh"
# ## 对一对
#
# diffusers 写下三个很小的检查点：一个像 1.3B，一个像 14B（头更多，更深），一个图生视频。三帧，长方形，批里两个样本，各有各的时间；第二句的后五个词元是零。图生视频时，diffusers 写死了 512 个文字词元。

# %% [markdown] lang="en" twin="ddfbc50a"
# ## Against diffusers
#
# diffusers writes three very small checkpoints: one like the 1.3B, one like the 14B (more heads, deeper), one for image-to-video. Three frames, a rectangle, two samples, each with a time of its own; the second prompt ends in five zeros. For image-to-video diffusers insists on 512 text tokens.

# %%
import tempfile
from pathlib import Path

VARIANTS = {"1.3B": {}, "14B": dict(num_attention_heads=4, attention_head_dim=16, num_layers=3, ffn_dim=172)}
VARIANTS |= {"image": dict(in_channels=36, image_dim=20, added_kv_proj_dim=48)}
room, words = tempfile.TemporaryDirectory(), torch.arange(12) < torch.tensor([[12], [7]])
latents, frame = torch.randn(2, 36, 3, 4, 6, generator=rng), torch.randn(2, 5, 20, generator=rng)
text, t = torch.randn(2, 12, 24, generator=rng).masked_fill(~words[..., None], 0), torch.tensor([987.6, 3.2])
calls = dict.fromkeys(VARIANTS, (latents[:, :16], t, text))
calls["image"], latents = (latents, t, F.pad(text, (0, 0, 0, 500)), frame), latents[:, :16]

# %% tags=["check"]
from diffusers import WanTransformer3DModel

theirs, ours = {}, {}
for name, extra in VARIANTS.items():
    folder, call = Path(room.name) / name, calls[name]
    theirs[name] = redraw(WanTransformer3DModel(**SIZES | extra))
    theirs[name].save_pretrained(folder)
    ours[name], expected = DropIn(load(Wan, folder)), theirs[name](*call).sample
    assert (ours[name](*call).sample - expected).abs().max() < 1e-5
    halves = [value if value is t else value.bfloat16() for value in call]
    half = WanTransformer3DModel.from_pretrained(folder, torch_dtype=torch.bfloat16)
    mine = DropIn(load(Wan, folder, dtype=torch.bfloat16))
    errors = [(net(*halves).sample - expected).square().mean().sqrt().item() for net in (mine, half)]
    assert errors[0] < 1.25 * errors[1]  # in bf16 no further from the fp32 truth than diffusers itself
    print(f"{name}: velocities of size {expected.std():.1f} differ by less than 1e-5")
assert all(block.modulation.table.dtype == torch.float32 for block in mine.model.blocks)

# %% tags=["check"]
wan, velocity = ours["1.3B"].model, ours["1.3B"](latents, t, text).sample
noise = torch.where(words[..., None], text, 100.0)
assert torch.equal(wan(latents, t, noise, words), velocity)  # what stood in the padding has no say …
shorter = wan(latents[1:], t[1:], text[1:, :7])
assert (shorter - velocity[1:]).abs().mean() > 0.01  # … but how much of it there is has
assert (wan(latents.flip(2), t, text).flip(2) - velocity).abs().max() > 0.01  # frames have an order
for wrong in ((latents[:, :4], t, text), (latents[..., :5], t, text), (latents, t, text, None, None, frame)):
    try:
        wan(*wrong)
    except ValueError as error:
        print(error)
    else:
        raise AssertionError("accepted")

# %% [markdown] lang="zh"
# ## 与潜变量无关的
#
# 时刻早已排定，提示词也不变：旋钮，文字和图像的键与值，旋转，都能在第一步之前为所有时刻一次算好（第 13 章）。`conditions` 只备料，块用到时才加工；`hoist` 全部提前加工，用第 18 章的 `work_ahead`。从此没有人再读这些权重，它们可以离开内存。

# %% [markdown] lang="en" twin="09f3f457"
# ## What no latent changes
#
# The times are fixed ahead, and the prompt stays: knobs, keys and values of text and image, and the turns can be made before the first step, for all times at once (chapter 13). `conditions` only gathers, and blocks do the work when they need it; `hoist` does all of it ahead, by chapter 18's `work_ahead`. From then on nobody reads those weights, and they may leave memory.

# %% tags=["check"]
road = torch.tensor([987.6, 500.0, 3.2])
for name, (x, _, said, *picture) in calls.items():
    net, rest = ours[name].model, (said, None, None, *picture) if picture else (noise, words)
    ahead = net.hoist(x.shape[1:], road, *rest)
    for when, given in zip(road, ahead):
        assert torch.allclose(net.velocity(x, given), net(x, when.expand(2), *rest), atol=1e-5)  # as without, each time
    assert given.text is ahead[0].text  # keys and values of all times are the same

# %% tags=["hide"]
import re

weights = dict(net.requires_grad_(True).named_parameters())  # image to video: it has them all
arrived = torch.autograd.grad(net.velocity(x, given).sum(), weights.values(), allow_unused=True)
unread = {re.sub(r"\d+", "*", name) for name, gradient in zip(weights, arrived) if gradient is None}
net.requires_grad_(False)
SMALL = {"num_attention_heads": 12, "num_layers": 30, "ffn_dim": 8960}
IMAGE = {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120}
for name, extra in {"1.3B": SMALL, "14B": {}, "14B, image to video": IMAGE}.items():
    with torch.device("meta"):
        model = Wan(WanConfig(**extra))
    sizes = {name: weight.numel() for name, weight in model.named_parameters()}
    count, ahead = sum(sizes.values()), sum(n for name, n in sizes.items() if re.sub(r"\d+", "*", name) in unread)
    saved = (len(model.blocks) - 1) * sum(weight.numel() for weight in model.knobs.parameters())
    print(f"{name}: {count / 1e9:.2f} billion weights, {ahead / 1e9:.2f} of them read only ahead;", end=" ")
    print(f"sharing knobs saves {100 * saved / (count + saved):.0f} %")

# %% [markdown] lang="zh"
# ## 住进 WanPipeline
#
# diffusers 的流水线照跑，只换 `transformer`。Wan 的文件要求 UniPC：它的噪声水平和整数时间第 02 章就有，两步的求解器则没有，所以这里用 diffusers 的。四步，引导强度 5，先条件、后无条件，各走一次前向。

# %% [markdown] lang="en" twin="2db16471"
# ## Inside WanPipeline
#
# diffusers' pipeline runs as it is, with another `transformer`. Wan's files ask for UniPC: chapter 02 has its noise levels and whole-numbered times, but not its two-step solver, so diffusers' own does the steps. Four of them, guidance scale 5, cond and uncond in two forwards.

# %%
ask = dict(height=32, width=48, num_frames=9, num_inference_steps=4, guidance_scale=5.0)
ask |= dict(prompt_embeds=text[:1], negative_prompt_embeds=text[1:])


def run(pipe, transformer, **options) -> Tensor | list:
    """What the pipeline gives with this transformer, from seed 7."""
    pipe.transformer = transformer
    return pipe(**ask, **{"output_type": "pil"} | options, generator=torch.Generator().manual_seed(7)).frames


# %% tags=["check"]
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline

vae = AutoencoderKLWan(4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True])
unipc = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
pipe = WanPipeline(None, None, redraw(vae), unipc, theirs["1.3B"])
pipe.set_progress_bar_config(disable=True)
expected = run(pipe, theirs["1.3B"], output_type="latent")
assert (run(pipe, ours["1.3B"], output_type="latent") - expected).abs().max() < 1e-4

# %% [markdown] lang="zh"
# ## 我们的循环
#
# 现在反过来：只借 VAE，其余全是自己的。噪声、欧拉步、引导、流水线来自第 02、08、10 章；对手是 diffusers 的流水线加它的 `FlowMatchEulerDiscreteScheduler`。Wan 的潜变量每个通道有自己的均值和标准差，解码前先还原。

# %% [markdown] lang="en" twin="cca9a0ec"
# ## Our own loop
#
# Now the reverse: only the VAE is borrowed. Noise, Euler steps, guidance and pipeline are those of chapters 02, 08 and 10; the opponent is diffusers' pipeline with its `FlowMatchEulerDiscreteScheduler`. Each channel of Wan's latents has a mean and a deviation of its own, put back before decoding.

# %%
import numpy as np

from diffusion_engine.guidance import guided_velocity
from diffusion_engine.pipeline import generate
from diffusion_engine.scheduler import make_schedule
from diffusion_engine.text_conditioning import PromptEmbeds

mean, std = (torch.tensor(side).reshape(-1, 1, 1, 1) for side in (vae.config.latents_mean, vae.config.latents_std))
prompts = [PromptEmbeds(text[i : i + 1], words[i : i + 1], text[i : i + 1, 0]) for i in (0, 1)]
drawn = generate(
    ["handed in as embeddings"],
    [7],
    make_schedule(4, shift=3.0, grid="double"),
    encode=lambda _: prompts,
    velocity=lambda pair: guided_velocity(lambda x, t, p: wan(x, t, *p), *pair, 5.0, batched=False),
    decode=lambda z: vae.decode(z * std + mean).sample.transpose(1, 2).flatten(0, 1),  # (B · T, 3, H, W)
    shape=(16, 3, 4, 6),
)

# %% tags=["check"]
from diffusers import FlowMatchEulerDiscreteScheduler

pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
assert (drawn.latents - run(pipe, theirs["1.3B"], output_type="latent")).abs().max() < 1e-4
clips = [np.stack([np.asarray(f, int) for f in clip]) for clip in (drawn.images, run(pipe, theirs["1.3B"])[0])]
assert clips[0].shape == (9, 32, 48, 3) and clips[0].std() > 10  # a clip, not one grey
assert np.abs(clips[0] - clips[1]).max() <= 1  # 1/255

# %% [markdown] lang="zh"
# ## 在 diffusers 里，这些在哪儿
#
# | 我们 | diffusers 的 `transformer_wan.py` |
# | --- | --- |
# | `WanCross` | `WanAttnProcessor.__call__`，里面写死了 512 |
# | `exactly`、`ExactNorm` | `FP32LayerNorm`，在 `WanTransformerBlock.forward` |
# | `modulation.table` | `scale_shift_table`，加上 `temb.float()` |
# | `time_in`、`knobs`、`text_in`、`image_in` | `WanTimeTextImageEmbedding` |
# | `conditions` 与 `hoist` | 没有：每一步从头算 |
# | `axial_rope` 与 `rope_axes` | `WanRotaryPosEmbed` |
# | `fp32` | `_keep_in_fp32_modules` |
# | 置零的 `text_mask` | `pipeline_wan.py`，`_get_t5_prompt_embeds` |
#
# **还缺什么**：首尾帧的模型这里会拒绝；umT5 和 VAE 要借；UniPC 的求解器不在第 02 章里。权重全是随机的：真的权重还没有跑过。下一章 LTX，同样的旋钮，更小的潜变量。
#
# ## 三个问题
#
# 1. 预测：把补的零真的遮住，速度会变吗？
# 2. 修改：让第一帧的 $t = 0$，其余照旧。什么变了？
# 3. 动手：用 7 个键代替 512 个，得到同样的数字。

# %% [markdown] lang="en" twin="e612842d"
# ## Where this lives in diffusers
#
# | Ours | diffusers' `transformer_wan.py` |
# | --- | --- |
# | `WanCross` | `WanAttnProcessor.__call__`, with 512 written into it |
# | `exactly`, `ExactNorm` | `FP32LayerNorm`, in `WanTransformerBlock.forward` |
# | `modulation.table` | `scale_shift_table`, plus `temb.float()` |
# | `time_in`, `knobs`, `text_in`, `image_in` | `WanTimeTextImageEmbedding` |
# | `conditions` and `hoist` | nowhere: everything anew at each step |
# | `axial_rope` and `rope_axes` | `WanRotaryPosEmbed` |
# | `fp32` | `_keep_in_fp32_modules` |
# | the `text_mask` of zeros | `pipeline_wan.py`, `_get_t5_prompt_embeds` |
#
# **What is missing:** the first-and-last-frame model is refused; umT5 and the VAE are borrowed; UniPC's solver is not in chapter 02. All weights here are random: real ones have not been run. Next is LTX, with the same knobs and smaller latents.
#
# ## Three questions
#
# 1. Predict: really hide the padded zeros. Does the velocity change?
# 2. Modify: let the first frame have $t = 0$ and leave the rest. What changes?
# 3. Build: 7 keys instead of 512, with the same numbers.

# %% tags=["solution"]
# 1 · yes: a mask takes their weight away, and the network was trained with the zeros
hidden = wan(latents[1:], t[1:], text[1:, :7])  # no zeros at all is what a mask amounts to
assert (hidden - velocity[1:]).abs().mean() > 0.02 * velocity.std()

# %% tags=["solution"]
# 2 · every frame: the first has other knobs, and all the others look at it; equal times change nothing
times = t[:, None].expand(-1, 18)
assert torch.allclose(wan(latents, times, text), velocity, atol=1e-5)
clean = torch.cat([torch.zeros(2, 6), times[:, 6:]], dim=1)  # 2 × 3 tokens a frame
moved = (wan(latents, clean, text) - velocity).abs().mean(dim=(0, 1, 3, 4))
assert moved[0] > moved[1:].max() > 1e-3
assert torch.allclose(wan(latents, clean, text), theirs["1.3B"](latents, clean, text).sample, atol=1e-5)

# %% tags=["solution"]
# 3 · 506 equal keys are one key with log 506 more
cross, six, x = wan.blocks[0].cross, wan.text_in(text[:1, :6]), torch.randn(1, 18, 48, generator=rng)
zero = wan.text_in(torch.zeros(1, 1, 24))
k, v = cross.keys_values(torch.cat([six, zero], dim=1))  # 7 keys
q = cross.norm_q(cross.q(x).unflatten(-1, (2, -1)).transpose(1, 2))
few = cross.out(F.scaled_dot_product_attention(q, k, v, repeats.log()[None]).transpose(1, 2).flatten(-2))
assert torch.allclose(few, cross(x, torch.cat([six, zero.expand(-1, 506, -1)], dim=1)), atol=1e-5)

# %% [markdown] lang="zh"
# ## 小结
#
# - 补的零经过偏置变成 506 个相同的词元：没有掩码，它们被看见，补多少是模型的一部分。
# - 图生视频多一套键和值：两次注意力，答案相加，不挤同一个 softmax。
# - 旋钮共用一个线性层，每块一张表，这里三种尺寸省下 22% 到 30% 的权重；表、归一化、门控都在 fp32 里。
# - 三轴旋转、视频词元、流水线一字不改；文字只从旁边进来，键、值和旋钮都能在第一步之前算好。
# - 与 diffusers 相比：速度差不到 $10^{-5}$，潜变量不到 $10^{-4}$，短片不超过 $1/255$。
#
# 阅读卡片：Wan2.1（[`papers/09_wan`](../../papers/09_wan.zh.md)）。下一章：20。

# %% [markdown] lang="en" twin="3915c3ce"
# ## Recap
#
# - Through a bias the padded zeros become 506 equal tokens: without a mask they are seen, and how many there are is part of the model.
# - Image-to-video has one more set of keys and values: two attentions, added, not crowded into one softmax.
# - One linear layer makes the knobs of all blocks, a table a block adjusts them, and 22 to 30 per cent of the weights are saved at these three sizes; tables, norms and gates are fp32.
# - Three-axis rotation, video tokens and the pipeline are unchanged; text enters at the side only, so keys, values and knobs can be made before the first step.
# - Against diffusers: velocities within $10^{-5}$, latents within $10^{-4}$, clips within $1/255$.
#
# Reading card: Wan2.1 ([`papers/09_wan`](../../papers/09_wan.en.md)). Next: chapter 20.
