# ---
# jupyter:
#   course:
#     minutes: 40
#     module: reference/hunyuan_video
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown] lang="zh"
# # 22 · HunyuanVideo
#
# 读完这一章，HunyuanVideo 的网络就由你的零件搭成：骨架是 FLUX 的双流加并行，词元有了时间，语言模型的文字先精炼一遍再进来。
#
# | 你会做出 | 你需要 | 时间 | 模块 |
# | --- | --- | --- | --- |
# | 文字精炼器、裁掉填充、三轴位置、HunyuanVideo 的对照表与网络 | 第 05 章的两种块，第 14 章的视频图块，第 15 章的 `load` | 40 分钟 | `diffusion_engine/reference/hunyuan_video.py` |

# %% [markdown] lang="en" twin="7bf8e386"
# # 22 · HunyuanVideo
#
# After this chapter HunyuanVideo's network stands on your own parts: the frame is FLUX's, joint then parallel; tokens have a time; and the words of a language model are refined before they come in.
#
# | You build | You need | Time | Module |
# | --- | --- | --- | --- |
# | a text refiner, padding cut off, three-axis positions, HunyuanVideo's key map and network | two blocks of chapter 05, the video patches of chapter 14, `load` of chapter 15 | 40 minutes | `diffusion_engine/reference/hunyuan_video.py` |

# %% [markdown] lang="zh"
# **先想一想**：HunyuanVideo 用大语言模型 LLaMA 读提示词。语言模型是因果（causal）的，每个词只看得见前面的词。那么在「一只猫，不，一只狗在跑」里，「猫」的向量知道自己被否定了吗？如果不知道，该在哪里补上？写下你的猜测。

# %% [markdown] lang="en" twin="93a60c8f"
# **Think first:** HunyuanVideo reads prompts with LLaMA, a large language model. A language model is causal, every word sees the words before it alone. So in "a cat, no, a dog is running", does the vector of "cat" know that it was taken back? If not, where should that be mended? Write down your guess.

# %% tags=["export"]
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffusion_engine.attention import Rope, SelfAttention, axial_rope, grid_positions, joint_mask, key_mask, pad_rope
from diffusion_engine.dit import Conditions, FinalLayer
from diffusion_engine.optimizations import by_step
from diffusion_engine.reference.checkpoint import KeyMap, flatten_patches, require, swap_halves
from diffusion_engine.reference.cogvideox import channels_last
from diffusion_engine.reference.flux import CONDITION, PARALLEL, ConditionEmbedder
from diffusion_engine.reference.sd3 import JOINT
from diffusion_engine.transformer_block import JointBlock, ParallelBlock
from diffusion_engine.video import video_grid, video_patchify, video_unpatchify

# %% [markdown] lang="zh"
# ## 哪里不同
#
# | | 我们的 DiT | FLUX.1 dev | HunyuanVideo |
# | --- | --- | --- | --- |
# | 块 | 2 双流，5 并行 | 19 双流，38 并行 | 20 双流，40 并行 |
# | 次序 | 图像在前 | 文字在前 | 视频在前 |
# | 图块 | $(p, p, C)$ | $(C, p, p)$ | 进 $(1, 2, 2, C)$，出 $(C, 1, 2, 2)$ |
# | 位置 | 一张表 | 旋转，$\theta = 10\,000$ | 旋转，$\theta = 256$，有时间轴 |
# | 文字 | 一层线性 | 一层线性，无掩码 | 精炼器（refiner），有掩码 |

# %% [markdown] lang="en" twin="43af383f"
# ## What differs
#
# | | Our DiT | FLUX.1 dev | HunyuanVideo |
# | --- | --- | --- | --- |
# | blocks | 2 joint, 5 parallel | 19 joint, 38 parallel | 20 joint, 40 parallel |
# | order | image first | text first | video first |
# | patches | $(p, p, C)$ | $(C, p, p)$ | in $(1, 2, 2, C)$, out $(C, 1, 2, 2)$ |
# | positions | a table | turns, $\theta = 10\,000$ | turns, $\theta = 256$, with a time axis |
# | text | one linear layer | one linear layer, no mask | a refiner, with a mask |


# %% tags=["export"]
@dataclass(frozen=True)
class HunyuanVideoConfig:
    """``config.json`` of diffusers' ``HunyuanVideoTransformer3DModel``: its names, its defaults.

    Raises:
        ValueError: a model that starts from a picture, axes that do not add up to a head, another MLP or QK norm.
    """

    in_channels: int = 16
    out_channels: int | None = 16
    num_attention_heads: int = 24
    attention_head_dim: int = 128
    num_layers: int = 20
    num_single_layers: int = 40
    num_refiner_layers: int = 2
    mlp_ratio: float = 4.0
    patch_size: int = 2
    patch_size_t: int = 1
    qk_norm: str = "rms_norm"
    guidance_embeds: bool = True
    text_embed_dim: int = 4096
    pooled_projection_dim: int = 768
    rope_theta: float = 256.0
    rope_axes_dim: tuple[int, ...] = (16, 56, 56)
    image_condition_type: str | None = None

    def __post_init__(self):
        require(self, mlp_ratio=4.0, qk_norm="rms_norm")
        require(self, image_condition_type=None, in_channels=self.out_channels or self.in_channels)  # from text alone
        if sum(self.rope_axes_dim) != self.attention_head_dim:
            raise ValueError(f"rope_axes_dim {self.rope_axes_dim} must add up to a head's {self.attention_head_dim}")


# %% tags=["check"]
for entries in ({"image_condition_type": "token_replace"}, {"in_channels": 33}, {"rope_axes_dim": (16, 56, 64)}):
    try:
        HunyuanVideoConfig(**entries)
    except ValueError as error:
        print(error)
    else:
        raise AssertionError(f"{entries} were taken")

# %% [markdown] lang="zh"
# ## 位置：时间也转，而且转得快
#
# 每个视频词元有三个坐标：帧、行、列。一个头的 128 个数里，16、56、56 个跟着三根轴转（第 04 章），$\theta = 256$。文字排在后面，一律不转：
#
# $$\text{video}: (\text{frame}, \text{row}, \text{column}), \qquad \omega_i = 256^{-2i/d}$$

# %% [markdown] lang="en" twin="f25c79e5"
# ## Positions: time turns too, and fast
#
# Every video token has three coordinates: frame, row, column. Of a head's 128 numbers, 16, 56 and 56 turn with the three axes (chapter 04), and $\theta = 256$. The text stands behind and never turns:
#
# $$\text{video}: (\text{frame}, \text{row}, \text{column}), \qquad \omega_i = 256^{-2i/d}$$


# %% tags=["export"]
def video_rope(grid: tuple[int, int, int], config: HunyuanVideoConfig, text_tokens: int, device=None) -> Rope:
    """Turns of f · h · w + M tokens: the video's by frame, row and column; the M of the text behind it stay."""
    rope = axial_rope(grid_positions(*grid).to(device), config.rope_axes_dim, config.rope_theta)
    return pad_rope(rope, after=text_tokens)


# %% tags=["hide"]
import matplotlib.pyplot as plt

from course.figures import COLORS, show

fig, ax = plt.subplots(figsize=(7.2, 2.7))
spans = {"frame": (16, 33), "row": (56, 45), "column": (56, 80)}
for theta, color in ((256.0, COLORS[0]), (10_000.0, COLORS[3])):
    first = 0
    for dim, size in spans.values():
        turns = (size - 1) * theta ** (-torch.arange(0, dim, 2) / dim) / (2 * torch.pi)
        where = torch.arange(first, first + dim // 2)
        ax.plot(where, turns, "o-", markersize=2.5, color=color, label=f"θ = {theta:,.0f}" if first == 0 else None)
        first += dim // 2
for name, x in (("frame", 4), ("row", 22), ("column", 50)):
    ax.text(x - 0.5, 22, name, ha="center", fontsize=9)
ax.axhline(0.01, color="#718096", linewidth=0.8, linestyle="--", label="a hundredth of a turn")
ax.vlines((7.5, 35.5), 0.0005, 40, color="#cbd5e0", linewidth=0.8)
ax.set(yscale="log", xlabel="pair of a head", ylabel="turns across the clip", ylim=(0.0005, 40))
ax.set_title("With θ = 256 no hand stands still across 129 frames of 720p")
ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
show(
    fig,
    alt="Turns of 64 pairs across a clip on a log scale: for theta 256 all stay above a hundredth, for 10,000 many fall below.",
)

# %% tags=["check"]
from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoRotaryPosEmbed

rng = torch.Generator().manual_seed(0)
latents = torch.randn(2, 4, 3, 6, 10, generator=rng)
cos, sin = HunyuanVideoRotaryPosEmbed(2, 1, [16, 56, 56], 256.0)(
    latents
)  # every angle twice, once for each of its pair
rope = video_rope((3, 3, 5), HunyuanVideoConfig(), 7)
assert torch.allclose(rope.cos[:45], cos[:, ::2], atol=1e-5) and torch.allclose(rope.sin[:45], sin[:, ::2], atol=1e-5)
assert (rope.cos[45:] == 1).all() and (rope.sin[45:] == 0).all() and len(rope.cos) == 52  # text never turns

# %% [markdown] lang="zh"
# ## 图块：进来和出去不一样
#
# 进来是三维卷积，`flatten_patches` 把它摊成线性层，次序 $(pt, ph, pw, C)$，正是第 14 章的。出去时 diffusers 把通道放在最前，$(C, pt, ph, pw)$：读最后一层时把行的次序换过来，用第 21 章的 `channels_last`，网络里就只有一种次序。

# %% [markdown] lang="en" twin="3bdc2641"
# ## Patches: in and out differ
#
# In comes a 3-D convolution, which `flatten_patches` lays out as a linear layer in the order $(pt, ph, pw, C)$ of chapter 14. On the way out diffusers has channels first, $(C, pt, ph, pw)$: chapter 21's `channels_last` puts the last layer's rows in order as they are read, and the network knows one order only.

# %% tags=["check"]
conv, last = nn.Conv3d(4, 8, (1, 2, 2), (1, 2, 2)).requires_grad_(False), nn.Linear(8, 16).requires_grad_(False)
tokens = F.linear(video_patchify(latents, (1, 2, 2)), flatten_patches(conv.weight), conv.bias)  # (2, 45, 8)
assert torch.allclose(tokens, conv(latents).flatten(2).transpose(1, 2), atol=1e-6)
unpacked = last(tokens).reshape(2, 3, 3, 5, 4, 1, 2, 2).permute(0, 4, 1, 5, 2, 6, 3, 7)  # as diffusers unpacks
packed = F.linear(tokens, channels_last(last.weight, 4), channels_last(last.bias, 4))
clip = unpacked.flatten(6, 7).flatten(4, 5).flatten(2, 3)
assert torch.allclose(video_unpatchify(packed, (1, 2, 2), (3, 3, 5)), clip, atol=1e-6)

# %% [markdown] lang="zh"
# ## 精炼器：让每个词看见整句话
#
# 进网络之前，文字先过两个小块，注意力双向，前后都看得见。门由时间和整句话的平均决定，平均只算真的词元 $R$：
#
# $$\begin{aligned} c &= \mathrm{MLP}_t(e(t)) + \mathrm{MLP}_p\Big(\tfrac{1}{|R|} \sum_{i \in R} x_i\Big), \quad (\alpha_1, \alpha_2) = W\, \mathrm{SiLU}(c) \\ h &\leftarrow h + \alpha_1 \odot \mathrm{attn}(\mathrm{LN}(h)), \quad h \leftarrow h + \alpha_2 \odot \mathrm{ff}(\mathrm{LN}(h)) \end{aligned}$$
#
# $c$ 由第 17 章的 `ConditionEmbedder` 来做，不带引导。和我们的块比：只有门，没有缩放和平移；归一化有自己的权重；没有 QK 归一化；中间是 SiLU。一个词有两条路传给别的词：注意力，和开门的平均。

# %% [markdown] lang="en" twin="6057f2a5"
# ## The refiner: every word sees the whole sentence
#
# Before the network, the text passes two small blocks whose attention looks both ways. Their gates come from the time and the sentence's mean, over real tokens $R$ alone:
#
# $$\begin{aligned} c &= \mathrm{MLP}_t(e(t)) + \mathrm{MLP}_p\Big(\tfrac{1}{|R|} \sum_{i \in R} x_i\Big), \quad (\alpha_1, \alpha_2) = W\, \mathrm{SiLU}(c) \\ h &\leftarrow h + \alpha_1 \odot \mathrm{attn}(\mathrm{LN}(h)), \quad h \leftarrow h + \alpha_2 \odot \mathrm{ff}(\mathrm{LN}(h)) \end{aligned}$$
#
# $c$ comes from chapter 17's `ConditionEmbedder`, without guidance. Compared with our blocks: gates only, no scale and shift; norms with weights; no QK norm; SiLU in the middle. A word reaches the others two ways: by attention, and by the mean that opens the gates.


# %% tags=["export"]
class RefinerBlock(nn.Module):
    """x ← x + α₁ · attn(LN(x)); x ← x + α₂ · ff(LN(x)): text tokens (B, M, D) → (B, M, D), gated by cond (B, D).

    ``width`` is D, ``heads`` H. Source: HunyuanVideo ``token_refiner.py``, ``IndividualTokenRefinerBlock``.
    """

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.gates = nn.Linear(width, 2 * width)
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.attn = SelfAttention(width, heads, qk_norm=None)
        self.ff = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, cond: Tensor, mask: Tensor | None = None) -> Tensor:
        for_attn, for_ff = self.gates(F.silu(cond)).unsqueeze(1).chunk(2, dim=-1)  # (B, 1, D) each
        x = torch.addcmul(x, for_attn, self.attn(self.norm1(x), mask))
        return torch.addcmul(x, for_ff, self.ff(self.norm2(x)))


# %% tags=["export"]
class TokenRefiner(nn.Module):
    """Tokens of a causal language model (B, M, Dt) → tokens that saw the whole sentence (B, M, D), at t (B,).

    Args:
        text_width: Dt. width: D. heads: H. depth: number of `RefinerBlock`.

    forward(text, t, real): ``real`` (B, M) bool is True where a token is no padding; None: all are.

    Source: HunyuanVideo ``token_refiner.py``, ``SingleTokenRefiner``.
    """

    def __init__(self, text_width: int, width: int, heads: int, depth: int):
        super().__init__()
        self.text_in, self.cond_in = nn.Linear(text_width, width), ConditionEmbedder(width, text_width, guidance=False)
        self.blocks = nn.ModuleList(RefinerBlock(width, heads) for _ in range(depth))

    def forward(self, text: Tensor, t: Tensor, real: Tensor | None = None) -> Tensor:
        shares = torch.ones(text.shape[:2], device=text.device) if real is None else real.float()
        mean = (text * shares.unsqueeze(-1)).sum(1) / shares.sum(1, keepdim=True)  # (B, Dt), in fp32
        cond = self.cond_in(t, mean.to(text.dtype))
        x, mask = self.text_in(text), None if real is None else key_mask(real)
        for block in self.blocks:
            x = block(x, cond, mask)
        return x


# %%
import tempfile
from pathlib import Path

from diffusion_engine.reference.checkpoint import DropIn, load

SIZES = dict(num_layers=2, num_single_layers=2, num_attention_heads=4, attention_head_dim=16, rope_axes_dim=(4, 6, 6))
SIZES |= dict(in_channels=4, out_channels=4, text_embed_dim=32, pooled_projection_dim=24)
room, theirs, ours = tempfile.TemporaryDirectory(), {}, {}


def redraw(module: nn.Module) -> nn.Module:
    """Every weight anew, so that no gate is shut and no norm is one: outputs of order one."""
    for weight in module.requires_grad_(False).parameters():
        weight.copy_(torch.randn(weight.shape, generator=rng) / (weight[0].numel() if weight.ndim > 1 else 4) ** 0.5)
    return module.eval()


def one_prompt(refiner: TokenRefiner, words: Tensor, t: Tensor) -> Tensor:
    """The plain way: one prompt (M, Dt) without its padding, so nothing has to be hidden."""
    cond = refiner.cond_in(t[None], words.mean(0, keepdim=True))
    x = refiner.text_in(words)[None]
    for block in refiner.blocks:
        x = block(x, cond)
    return x[0]


# %% tags=["check"]
refiner = redraw(TokenRefiner(32, 64, heads=4, depth=2))
text, pooled = torch.randn(2, 9, 32, generator=rng), torch.randn(2, 24, generator=rng)
t, w = torch.tensor([987.6, 3.2]), torch.tensor([6.0, 1.0])
real = torch.arange(9) < torch.tensor([[4], [7]])  # prompts of four and of seven tokens, padded to nine
refined = refiner(text, t, real)
for i, length in enumerate((4, 7)):
    assert torch.allclose(refined[i, :length], one_prompt(refiner, text[i, :length], t[i]), atol=1e-5)

# %% tags=["check"]
block, x, cond = refiner.blocks[0], torch.randn(1, 4, 64, generator=rng), torch.randn(1, 64, generator=rng)
other = torch.cat([x[:, :3], -x[:, 3:]], dim=1)  # another last word under the same gates
heard = (block(other, cond) - block(x, cond)).abs().amax(-1)
assert (heard > 1e-4).all()  # every earlier word has heard of it: here "cat" learns that it was taken back
assert (refiner(text, t.flip(0), real) - refined).abs().mean() > 0.01  # noise level counts: no prompt cache here
filled = torch.where(real[..., None], text, 100.0)
assert torch.allclose(refiner(filled, t, real)[real], refined[real], atol=1e-5)  # padding never speaks

# %% [markdown] lang="zh"
# ## 填充：先裁掉
#
# 流水线把每句话补到 256 个词元。diffusers 在精炼器里用 $M \times M$ 的掩码，连填充的**提问**也管；可是填充的回答没人听，管住键就够。再进一步：大家都是填充的列，整列裁掉；什么也不剩要遮，就不要掩码。

# %% [markdown] lang="en" twin="eb0c3f1e"
# ## Padding: cut it off first
#
# The pipeline pads each prompt to 256 tokens. In its refiner diffusers uses a mask of $M \times M$, which also rules what padding may **ask**; but nobody listens to padding's answers, so hiding keys is enough. One step further: a column that is padding in every sample is cut off; and where nothing is left to hide, no mask is needed.


# %% tags=["export"]
def trim_padding(text: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Text (B, M, D) and mask (B, M) without the columns that are padding everywhere; no mask where all is real.

    Exact: padding is never seen. One prompt alone needs no mask at all, and attention is free to run its fastest way.

    Raises:
        ValueError: a sample without a real token.
    """
    if real is None:
        return text, None
    empty = (~real.any(dim=1)).nonzero().flatten().tolist()
    if empty:
        raise ValueError(f"text_mask hides all {real.shape[1]} tokens of sample {empty[0]}; leave at least one")
    used = real.any(dim=0)
    text, real = text[:, used], real[:, used]
    return text, None if real.all() else real


# %% tags=["check"]
trimmed, left = trim_padding(text, real)
assert trimmed.shape == (2, 7, 32) and torch.equal(left, real[:, :7])  # nine columns, two of them padding for both
assert torch.allclose(refiner(trimmed, t, left)[left], refined[real], atol=1e-5)
alone, no_mask = trim_padding(text[:1], real[:1])
assert no_mask is None and torch.equal(alone, text[:1, :4])  # one prompt: nothing to hide
assert torch.equal(trim_padding(text.flip(1), real.flip(1))[0], trimmed.flip(1))  # padded on the left: just the same
try:
    trim_padding(text, real & (t > 100)[:, None])
except ValueError as error:
    print(error)
else:
    raise AssertionError("an empty prompt was taken")

# %% tags=["hide"]
theirs_mask = real[:1, :, None] & real[:1, None, :]
theirs_mask[..., 0] = True  # so that a padded query has something to see
masks = {"diffusers: M × M": theirs_mask[0], "keys only: one row": real[:1], "trimmed: no mask": torch.ones(4, 4)}
fig, axes = plt.subplots(1, 3, figsize=(6.6, 2.7), width_ratios=(9, 9, 4))
for ax, (name, mask) in zip(axes, masks.items()):
    (rows, columns), kinds = mask.shape, ["w"] * 4 + ["p"] * 5
    ax.pcolormesh(mask.float(), cmap="Blues", vmin=0, vmax=1.3, edgecolors="#a0aec0", linewidth=0.6)
    ax.set_title(name, fontsize=9)
    ax.set(aspect="equal", anchor="N", ylim=(rows, 0), xlabel="key", yticks=[])
    ax.set_xticks([i + 0.5 for i in range(columns)], kinds[:columns], fontsize=8)
axes[0].set_yticks([i + 0.5 for i in range(9)], kinds, fontsize=8)
axes[0].set_ylabel("query: w word, p padding", fontsize=9)
fig.suptitle("Who may be seen: three masks, the same answers for the words", fontsize=10, x=0.01, ha="left")
show(
    fig,
    alt="Three masks for four words padded to nine: a square with a column for padded queries, one row, a full 4 by 4.",
)

# %% [markdown] lang="zh"
# ## 谁来乘一千
#
# 引导强度像 FLUX dev 那样嵌入：$c = \mathrm{MLP}_t + \mathrm{MLP}_w(e(1000\,w)) + \mathrm{MLP}_p$。可是这里乘一千的是**流水线**，而 FLUX 是网络自己乘。所以 `forward` 收 $w$，`as_diffusers` 收 $1000\,w$。半精度里先乘再存，会变成多少？

# %% [markdown] lang="en" twin="051c65e7"
# ## Who multiplies by a thousand
#
# The guidance scale is embedded as in FLUX dev: $c = \mathrm{MLP}_t + \mathrm{MLP}_w(e(1000\,w)) + \mathrm{MLP}_p$. But here it is the **pipeline** that multiplies; in FLUX the network does. So `forward` takes $w$, `as_diffusers` takes $1000\,w$. Multiplied and kept in half precision, what becomes of it?

# %%
for scale in (6.0, 5.9, 1.0):
    print(f"1000 · {scale} in bf16: {(torch.tensor(scale, dtype=torch.bfloat16) * 1000).item():.0f}")

# %% [markdown] lang="zh"
# ## 对照表与网络
#
# 块里的名字和 FLUX 一样，第 16、17 章的表接着用；多出来的是精炼器。三处要动手脚：分块卷积、收尾的旋钮、最后一层的行。网络和 FLUX 并排看：多了裁填充、精炼器和掩码，文字站在后面，`video_rope` 给它零角度。

# %% [markdown] lang="en" twin="b62fb6ac"
# ## The key map and the network
#
# Names inside the blocks are FLUX's, so the tables of chapters 16 and 17 serve again; the refiner is new. Three tensors change on the way: the patch convolution, the knobs of the end, the rows of the last layer. Beside FLUX the network has trimming, a refiner and a mask, and the text stands behind, with angles of zero from `video_rope`.


# %% tags=["export"]
REFINER = {"gates": "norm_out.linear", "norm1": "norm1", "norm2": "norm2", "attn.stream.out": "attn.to_out.0"}
REFINER |= {"attn.stream.qkv": "attn.{to_q,to_k,to_v}", "ff.0": "ff.net.0.proj", "ff.2": "ff.net.2"}


def hunyuan_video_keys(config: HunyuanVideoConfig) -> KeyMap:
    """Where each tensor of `HunyuanVideo` lies in diffusers' checkpoint."""
    names = {"image_in": "x_embedder.proj", "refiner.text_in": "context_embedder.proj_in"}
    parts = {
        "cond_in": ("time_text_embed", CONDITION),
        "refiner.cond_in": ("context_embedder.time_text_embed", CONDITION),
        "refiner.blocks.*": ("context_embedder.token_refiner.refiner_blocks.*", REFINER),
        "joint_blocks.*": ("transformer_blocks.*", JOINT),
        "parallel_blocks.*": ("single_transformer_blocks.*", PARALLEL),
    }
    for ours, (theirs, inside) in parts.items():
        names |= {f"{ours}.{here}": f"{theirs}.{there}" for here, there in inside.items()}
    names |= {"final.modulation": "norm_out.linear", "final.linear": "proj_out"}
    changes = {"image_in.weight": flatten_patches, "final.modulation": swap_halves}
    return KeyMap(names, changes | {"final.linear": partial(channels_last, channels=config.in_channels)})


# %% tags=["export"]
def run_as_diffusers(
    model, hidden_states, timestep, encoder_hidden_states, encoder_attention_mask, pooled_projections, guidance=None
) -> Tensor:
    """`HunyuanVideo` under diffusers' names; timestep is t, guidance 1000 · w, not read without an embedder."""
    scale, shape = guidance if model.config.guidance_embeds else None, hidden_states.shape[1:]
    rest = encoder_hidden_states, encoder_attention_mask.bool(), pooled_projections, scale
    return model.velocity(hidden_states, model.conditions(shape, timestep.float(), *rest, unit=1))


# %% tags=["export"]
class HunyuanVideo(nn.Module):
    """Velocity network of HunyuanVideo; the arguments are those of chapter 06's `DiT`, and ``guidance``.

    Source: Kong et al. 2024; Tencent, HunyuanVideo ``models.py``; diffusers ``transformer_hunyuan_video.py``.
    """

    Config, key_map, as_diffusers = HunyuanVideoConfig, staticmethod(hunyuan_video_keys), run_as_diffusers

    def __init__(self, config: HunyuanVideoConfig):
        super().__init__()
        self.config, c, heads = config, config, config.num_attention_heads
        self.patch = (c.patch_size_t, c.patch_size, c.patch_size)
        self.min_multiple = c.patch_size  # latent height and width must be multiples of this
        width, patch_dim = heads * c.attention_head_dim, c.patch_size_t * c.patch_size**2 * c.in_channels
        self.image_in, self.final = nn.Linear(patch_dim, width), FinalLayer(width, patch_dim)
        self.refiner = TokenRefiner(c.text_embed_dim, width, heads, c.num_refiner_layers)
        self.cond_in = ConditionEmbedder(width, c.pooled_projection_dim, c.guidance_embeds)
        self.joint_blocks = nn.ModuleList(JointBlock(width, heads) for _ in range(c.num_layers))
        self.parallel_blocks = nn.ModuleList(ParallelBlock(width, heads) for _ in range(c.num_single_layers))

    def forward(self, latents, t, text, text_mask=None, pooled=None, guidance=None) -> Tensor:
        """Velocity (B, C, F, H, W) at t = 1000 · σ, (B,), under text (B, M, 4096), pooled (B, 768), guidance w, (B,)."""
        return self.velocity(latents, self.conditions(latents.shape[1:], t, text, text_mask, pooled, guidance))

    def conditions(self, shape, t, text, text_mask=None, pooled=None, guidance=None, unit: float = 1000) -> Conditions:
        """All that `velocity` reads besides latents of ``shape`` (C, F, h, w); ``unit`` · guidance is embedded."""
        cond, (text, mask) = self.cond_in(t, pooled, guidance, unit), trim_padding(text, text_mask)
        text = self.refiner(text, t, mask)
        rope = video_rope(video_grid(shape[1:], self.patch), self.config, text.shape[1], text.device)
        return Conditions(text, mask, rope, [cond] * (len(self.joint_blocks) + len(self.parallel_blocks) + 1))

    def velocity(self, latents: Tensor, given: Conditions) -> Tensor:
        """The rest of `forward`: velocity of the latents under given conditions."""
        x, (text, mask, rope, cond) = self.image_in(video_patchify(latents, self.patch)), given
        n, cond = x.shape[1], iter(cond)
        del given  # the text that the first block rewrites ends there
        for block in self.joint_blocks:
            x, text = block(x, text, next(cond), mask, rope)
        x, mask = torch.cat([x, text], dim=1), joint_mask(mask, n)  # (B, N + M, D)
        for block in self.parallel_blocks:
            x = block(x, next(cond), mask, rope)
        return video_unpatchify(self.final(x[:, :n], next(cond)), self.patch, video_grid(latents.shape[2:], self.patch))

    def hoist(self, shape, times, text, text_mask=None, pooled=None, guidance=None) -> list[Conditions]:
        """`conditions` for all times (S,), equal to 1e-5: prompts refined in one batch of S · B, one product a layer.

        Keeps S · B · (M · D + all knobs) numbers; row s · B + b is sample b at step s.
        """
        words = (text, text_mask, pooled, guidance)
        many = [x if x is None else x.repeat(len(times), *[1] * (x.ndim - 1)) for x in words]
        given = self.conditions(shape, times.repeat_interleave(len(text)), *many)
        cond = given.cond[-1]  # (S · B, D)
        knobs = [(block.image_modulation(cond), block.text_modulation(cond)) for block in self.joint_blocks]
        knobs += [*(block.modulation(cond) for block in self.parallel_blocks), self.final.knobs(cond)]
        rows = by_step((given.text, given.text_mask, knobs), len(times))
        return [given._replace(text=text, text_mask=mask, cond=cond) for text, mask, cond in rows]


# %% [markdown] lang="zh"
# ## 对一对
#
# diffusers 写下两个很小的检查点，一个带引导嵌入，一个不带。短片有 3 帧 6×10 的潜变量，两句话长短不一，时间和强度各不相同。

# %% [markdown] lang="en" twin="93a8d7b7"
# ## Against diffusers
#
# diffusers writes two very small checkpoints, one with embedded guidance and one without. The clip has 3 latent frames of 6×10, the two prompts differ in length, and so do time and scale.

# %% tags=["check"]
from diffusers import HunyuanVideoTransformer3DModel

for name, scale in {"plain": None, "distilled": w}.items():
    theirs[name] = redraw(HunyuanVideoTransformer3DModel(**SIZES, guidance_embeds=scale is not None))
    theirs[name].save_pretrained(Path(room.name) / name)
    ours[name] = load(HunyuanVideo, Path(room.name) / name)
    expected = theirs[name](latents, t, text, real.long(), pooled, 1000 * w).sample
    assert (ours[name](latents, t, text, real, pooled, scale) - expected).abs().max() < 1e-5

# %% tags=["check"]
net = ours["distilled"]
refined, velocity = theirs["distilled"].context_embedder(text, t, real), net(latents, t, text, real, pooled, w)
assert torch.allclose(net.refiner(text, t, real)[real], refined[real], atol=1e-5)  # Hunyuan's refiner, real tokens
assert torch.allclose(net(latents, t, filled, real, pooled, w), velocity, atol=1e-5)  # padding never speaks
for i, length in enumerate((4, 7)):  # each clip alone, without its padding: the batch makes no difference
    alone = [tensor[i : i + 1] for tensor in (latents, t, text[:, :length], pooled, w)]
    assert torch.allclose(net(*alone[:3], None, *alone[3:])[0], velocity[i], atol=1e-5)

# %% tags=["check"]
for name, scale in (("distilled", None), ("plain", w)):
    try:
        ours[name](latents, t, text, real, pooled, scale)
    except ValueError as error:
        print(error)
    else:
        raise AssertionError(f"{name} took guidance {scale}")

# %% tags=["check"]
halves = [latents.bfloat16(), t, text.bfloat16(), real.long(), pooled.bfloat16(), 1000 * w]
truth = theirs["distilled"](latents, t, text, real.long(), pooled, 1000 * w).sample
mine = DropIn(load(HunyuanVideo, Path(room.name) / "distilled", dtype=torch.bfloat16))
half = HunyuanVideoTransformer3DModel.from_pretrained(Path(room.name) / "distilled", torch_dtype=torch.bfloat16)
errors = [(network(*halves).sample - truth).square().mean().sqrt() for network in (mine, half)]
assert errors[0] < 1.25 * errors[1]  # in bf16 no further from the fp32 truth than diffusers itself

# %% [markdown] lang="zh"
# ## 与潜变量无关的
#
# 旋钮和旋转照例提前（第 13 章）。精炼器虽然听时间，却不看潜变量：所有时刻的提示词排成一批，一次精炼完。块里的键和值不行：每一块都改写文字。提前之后没有人再读的权重，占四分之一以上。

# %% [markdown] lang="en" twin="5073e8a6"
# ## What no latent changes
#
# Knobs and turns go ahead as ever (chapter 13). The refiner listens to the time, yet looks at no latent: the prompts of all times stand in one batch and are refined in one go. Keys and values inside the blocks cannot: every block rewrites the text. More than a quarter of the weights is read by nobody afterwards.

# %% tags=["check"]
road = torch.tensor([987.6, 500.0, 3.2])
for name, scale in (("plain", None), ("distilled", w)):
    ahead = ours[name].hoist(latents.shape[1:], road, text, real, pooled, scale)
    for when, given in zip(road, ahead):
        expected = ours[name](latents, when.expand(2), text, real, pooled, scale)
        assert torch.allclose(ours[name].velocity(latents, given), expected, atol=1e-5)  # as without, each time
assert net.hoist(latents.shape[1:], road, text, real | True, pooled, w)[0].text_mask is None  # nothing to hide

# %% [markdown] lang="zh"
# ## 住进 HunyuanVideoPipeline
#
# 流水线照跑，只换 `transformer`，连一个很小的视频 VAE 也带上：3 帧潜变量解成 9 帧。然后是我们自己的循环：第 02 章的噪声表，移位 7，第 10 章的 `denoise`。引导已经在网络里，每步只跑一遍。

# %% [markdown] lang="en" twin="d34a51ec"
# ## Inside HunyuanVideoPipeline
#
# The pipeline runs as it is, with another `transformer`, and with a very small video VAE: 3 latent frames decode to 9. Then comes our own loop: the schedule of chapter 02 with shift 7, `denoise` of chapter 10. Guidance is inside the network, so one run a step is enough.

# %% tags=["check"]
from diffusers import AutoencoderKLHunyuanVideo, FlowMatchEulerDiscreteScheduler, HunyuanVideoPipeline

vae = dict(latent_channels=4, block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4)
parts = {"transformer": theirs["distilled"], "vae": redraw(AutoencoderKLHunyuanVideo(**vae))}
parts |= {"scheduler": FlowMatchEulerDiscreteScheduler(shift=7.0)}
pipe = HunyuanVideoPipeline(**parts, text_encoder=None, tokenizer=None, text_encoder_2=None, tokenizer_2=None)
pipe.set_progress_bar_config(disable=True)
prompt = dict(prompt_embeds=text[:1], prompt_attention_mask=real[:1], pooled_prompt_embeds=pooled[:1])
ask = prompt | dict(height=48, width=80, num_frames=9, num_inference_steps=4, guidance_scale=6.0)
make = lambda **how: pipe(**ask, **how, generator=torch.Generator().manual_seed(7)).frames  # noqa: E731
latents_of_theirs, clip = make(output_type="latent"), make(output_type="pt")
pipe.transformer = DropIn(net)
assert (make(output_type="latent") - latents_of_theirs).abs().max() < 1e-4
assert (make(output_type="pt") - clip).abs().max() < 1 / 255 and clip.shape == (1, 9, 3, 48, 80)

# %% tags=["check"]
from diffusion_engine.pipeline import denoise, initial_noise
from diffusion_engine.scheduler import Schedule

pipe.scheduler.save_pretrained(room.name)
schedule = Schedule.from_config(room.name, 4, grid="even")
noise = initial_noise([7], (4, 3, 6, 10))
step = lambda x, sigma: net(x, torch.tensor([1000 * sigma]), text[:1], real[:1], pooled[:1], w[:1])  # noqa: E731
assert (denoise(step, noise, schedule).latents - latents_of_theirs).abs().max() < 1e-4

# %% tags=["hide"]
import re

weights = dict(net.requires_grad_(True).named_parameters())
arrived = torch.autograd.grad(net.velocity(latents, given).sum(), weights.values(), allow_unused=True)
unread = {re.sub(r"\d+", "*", name) for name, gradient in zip(weights, arrived) if gradient is None}
net.requires_grad_(False)
with torch.device("meta"):
    sizes = {name: weight.numel() for name, weight in HunyuanVideo(HunyuanVideoConfig()).named_parameters()}
once = sum(size for name, size in sizes.items() if re.sub(r"\d+", "*", name) in unread) / 1e9
count, tokens = sum(sizes.values()) / 1e9, 33 * 45 * 80 + 256
print(f"{count:.2f} billion weights, {2 * count:.1f} GB in bf16; {once:.2f} billion of them are read only ahead")
print(f"129 frames of 720p with their text: {tokens} tokens")
print(f"a mask of all pairs {tokens**2 / 1e9:.1f} GB, one row {tokens / 1e3:.0f} kB")

# %% [markdown] lang="zh"
# ## 在 diffusers 里，这些在哪儿
#
# | 我们 | diffusers，`transformer_hunyuan_video.py` |
# | --- | --- |
# | `image_in`、`video_patchify` | `HunyuanVideoPatchEmbed` |
# | `video_rope` | `HunyuanVideoRotaryPosEmbed`，`HunyuanVideoAttnProcessor2_0` 第 3 步 |
# | `RefinerBlock`、`TokenRefiner` | `HunyuanVideoIndividualTokenRefinerBlock`、`HunyuanVideoTokenRefiner` |
# | `cond_in` | `HunyuanVideoConditionEmbedding` |
# | `JointBlock` | `HunyuanVideoTransformerBlock` |
# | `ParallelBlock` | `HunyuanVideoSingleTransformerBlock` |
# | `trim_padding` | 没有：填充一路算到底 |
# | `joint_mask` | `forward` 第 3 步：数出真词元，遮住后面 |
# | $1000\,w$ | `pipeline_hunyuan_video.py`，“6. Prepare guidance condition” |
#
# **还缺什么**：LLaMA、CLIP 和 VAE，都是借的；从一张图开始的两种模型，这里拒绝，问题 3 动手做一种。diffusers 数词元的办法要求填充在右边，我们两边都行。
#
# ## 三个问题
#
# 1. 预测：把潜变量的帧倒过来，速度会跟着倒过来吗？只有一帧呢？
# 2. 修改：把 $\theta$ 换成 $10\,000$，速度变多少？形状会提醒你吗？
# 3. 动手：`token_replace` 型的首帧是给定的图：它的词元用 $t = 0$ 且不带引导的条件。用逐词元的旋钮搭出来。

# %% [markdown] lang="en" twin="a44871a7"
# ## Where this lives in diffusers
#
# | Ours | diffusers, `transformer_hunyuan_video.py` |
# | --- | --- |
# | `image_in`, `video_patchify` | `HunyuanVideoPatchEmbed` |
# | `video_rope` | `HunyuanVideoRotaryPosEmbed`, `HunyuanVideoAttnProcessor2_0`, step 3 |
# | `RefinerBlock`, `TokenRefiner` | `HunyuanVideoIndividualTokenRefinerBlock`, `HunyuanVideoTokenRefiner` |
# | `cond_in` | `HunyuanVideoConditionEmbedding` |
# | `JointBlock` | `HunyuanVideoTransformerBlock` |
# | `ParallelBlock` | `HunyuanVideoSingleTransformerBlock` |
# | `trim_padding` | none: padding is computed to the end |
# | `joint_mask` | `forward`, step 3: it counts real tokens and hides what follows |
# | $1000\,w$ | `pipeline_hunyuan_video.py`, "6. Prepare guidance condition" |
#
# **What is missing:** LLaMA, CLIP and the VAE, which are borrowed; the two models that start from a picture, refused here, one of them built in question 3. diffusers counts tokens, so its padding must stand on the right; ours may stand on either side.
#
# ## Three questions
#
# 1. Predict: reverse the frames of the latents. Is the velocity reversed along? And with a single frame?
# 2. Modify: put $\theta$ to $10\,000$. How far does the velocity move? Do the shapes warn you?
# 3. Build: in a `token_replace` model the first frame is a given picture: its tokens take a condition with $t = 0$ and no guidance. Build it with knobs per token.

# %% tags=["solution"]
# 1 · no: turns tell before from after; with one frame there is nothing to reverse
backwards = net(latents.flip(2), t, text, real, pooled, w).flip(2)
assert (backwards - velocity).abs().mean() > 0.001
one = latents[:, :, :1]
assert torch.equal(net(one.flip(2), t, text, real, pooled, w), net(one, t, text, real, pooled, w))

# %% tags=["solution"]
# 2 · every shape fits and no error comes; on this small grid the velocity still moves, a hundred times the tolerance
from dataclasses import replace

net.config = replace(net.config, rope_theta=10_000.0)
moved = (net(latents, t, text, real, pooled, w) - velocity).abs().max()
net.config = replace(net.config, rope_theta=256.0)
print(f"largest change {moved:.2f} for velocities of size {velocity.std():.1f}")
assert moved > 1e-3

# %% tags=["solution"]
# 3 · modulation takes (B, N, D): one condition a token; the checkpoint's names and shapes are those of the plain model
picture_first = redraw(HunyuanVideoTransformer3DModel(**SIZES, image_condition_type="token_replace"))
picture_first.save_pretrained(Path(room.name) / "first")
config = Path(room.name) / "first" / "config.json"
config.write_text(config.read_text().replace('"token_replace"', "null"))
base = load(HunyuanVideo, config.parent)


def with_first_frame(net: HunyuanVideo, latents, t, text, pooled, w) -> Tensor:
    x, grid = net.image_in(video_patchify(latents, (1, 2, 2))), (3, 3, 5)
    cond, text = net.cond_in(t, pooled, w), net.refiner(text, t)
    still = net.cond_in.time_in(0 * t) + net.cond_in.pooled_in(pooled)
    n, m, first = x.shape[1], text.shape[1], (torch.arange(x.shape[1] + text.shape[1]) < 15)[:, None]
    knobs = torch.where(first, still[:, None], cond[:, None])  # (B, N + M, D)
    rope = video_rope(grid, net.config, m)
    for block in net.joint_blocks:
        x, text = block(x, text, (knobs[:, :n], cond), None, rope)
    x = torch.cat([x, text], dim=1)
    for block in net.parallel_blocks:
        x = block(x, knobs, None, rope)
    return video_unpatchify(net.final(x[:, :n], cond), (1, 2, 2), grid)


expected = picture_first(latents, t, text, torch.ones(2, 9), pooled, 1000 * w).sample
assert torch.allclose(with_first_frame(base, latents, t, text, pooled, w), expected, atol=1e-5)

# %% [markdown] lang="zh"
# ## 小结
#
# - HunyuanVideo 是 FLUX 的骨架：双流再并行，只是视频在前，文字在后，多了掩码。
# - 语言模型是因果的：两层双向的精炼器让每个词看见整句话，门由时间和整句的平均决定。
# - 填充从不发言：裁掉整列，一句话就连掩码也不要。
# - 只有视频词元旋转，三根轴，$\theta = 256$；引导强度由流水线乘一千。
# - fp32 下速度与 diffusers 相差不到 $10^{-5}$，流水线和我们的循环的潜变量相差不到 $10^{-4}$。
#
# 阅读卡片：HunyuanVideo（[`papers/10_hunyuan_video`](../../papers/10_hunyuan_video.zh.md)）。下一章：23。

# %% [markdown] lang="en" twin="94f94b3e"
# ## Recap
#
# - HunyuanVideo is FLUX's frame, joint then parallel, with the video first, the text behind, and a mask.
# - A language model is causal: two refiner layers that look both ways let every word see the whole sentence, gated by the time and the sentence's mean.
# - Padding never speaks: cut off whole columns, and one prompt needs no mask at all.
# - Only video tokens turn, about three axes with $\theta = 256$; the pipeline multiplies the guidance scale by a thousand.
# - In fp32 the velocity is within $10^{-5}$ of diffusers'; latents of the pipeline and of our own loop are within $10^{-4}$.
#
# Reading card: HunyuanVideo ([`papers/10_hunyuan_video`](../../papers/10_hunyuan_video.en.md)). Next: chapter 23.
