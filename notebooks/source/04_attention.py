# ---
# jupyter:
#   course:
#     minutes: 60
#     module: attention
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown] lang="zh"
# # 04 · 注意力（attention）
#
# 读完这一章，画面里每个图块都能看见其他所有图块，也能看见文字：你会写出图像和文字同场的注意力，并证明省内存的写法给出同样的结果。
#
# | 你会做出 | 你需要 | 时间 | 模块 |
# | --- | --- | --- | --- |
# | 自注意力、联合注意力、交叉注意力、QK 归一化、旋转位置编码、掩码 | 矩阵乘法，第 03 章那些转动的针 | 60 分钟 | `diffusion_engine/attention.py` |

# %% [markdown] lang="en" twin="b9d2e429"
# # 04 · Attention
#
# After this chapter every patch of a picture sees every other patch, and the text too: you write the attention in which image and words meet, and prove that the version that saves memory gives the same result.
#
# | You build | You need | Time | Module |
# | --- | --- | --- | --- |
# | self-attention, joint attention, cross-attention, QK-norm, rotary position embedding, masks | matrix products, the turning hands of chapter 03 | 60 minutes | `diffusion_engine/attention.py` |

# %% [markdown] lang="zh"
# **先想一想**：左上角画了一只眼睛，右下角那只要和它配成对。一层 $3 \times 3$ 卷积只看得到邻居，$16 \times 16$ 的网格要叠十五层，消息才走得到对角。你会怎样让两个图块直接对话？

# %% [markdown] lang="en" twin="29589b1c"
# **Think first:** an eye is drawn at the top left; the one at the bottom right must match it. A $3 \times 3$ convolution sees neighbours only: on a $16 \times 16$ grid it takes fifteen layers for word to reach the far corner. How would you let two patches talk directly?

# %% tags=["export"]
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# %% [markdown] lang="zh"
# ## 一个图块发问
#
# 图块（patch）是画面切成的小方块，一个图块就是一个词元（token）。每个图块举三张牌：查询（query）是「我在找什么」，键（key）是「我是什么样」，值（value）是「我有什么可说」。查询和谁的键合得来，就多听谁的值。先造一个知道答案的小世界：蓝天、红太阳、海，海上一条同样红的船。

# %% [markdown] lang="en" twin="6ffea650"
# ## A patch asks
#
# A patch is a small square cut from the picture; each patch is one token. Every patch holds up three cards: the query, "what I look for"; the key, "what I am like"; the value, "what I have to say". It listens most to the values whose keys fit its query. First a small world with a known answer: blue sky, a red sun, the sea, and on it a boat in the same red.

# %%
scene = torch.tensor([0.55, 0.75, 0.95]).repeat(16, 16, 1)  # sky
scene[9:] = torch.tensor([0.10, 0.35, 0.60])  # sea
scene[2:6, 2:6] = scene[10:13, 9:14] = torch.tensor([0.90, 0.25, 0.15])  # a sun of 16 patches, a boat of 15
tokens = scene.flatten(0, 1)  # (N, 3): 256 patches, row by row
asks = 6 * (tokens - tokens.mean(dim=0))  # query and key at once: "who has my colour?"

# %% [markdown] lang="zh"
# ## 公式，逐项搭起来
#
# 合不合得来，用内积来量；除以 $\sqrt{D_h}$，分数的大小就不随维数涨；softmax 把一行分数变成一个分布；最后按这个分布取值的平均：
#
# $$\mathrm{attention}(q, k, v) = \mathrm{softmax}\!\left(\frac{q\,k^\top}{\sqrt{D_h}}\right) v$$
#
# | 记号 | 形状 | 含义 |
# | --- | --- | --- |
# | $q$ | $(B, H, N, D_h)$ | $N$ 个查询；把 $D$ 个分量切成 $H$ 段，每段叫一个头，各算各的 |
# | $k,\ v$ | $(B, H, M, D_h)$ | $M$ 个键和值；自注意力里 $M = N$ |
# | 结果 | $(B, H, N, D_h)$ | 每个查询听到的话 |
#
# 下面的滑块让发问的图块沿对角线往下走。先猜：轮到海发问时，谁会回答？

# %% [markdown] lang="en" twin="3499d359"
# ## The formula, term by term
#
# An inner product measures the fit; dividing by $\sqrt{D_h}$ keeps scores from growing with the dimension; softmax turns a row of scores into a distribution; the result is the mean of the values under it:
#
# $$\mathrm{attention}(q, k, v) = \mathrm{softmax}\!\left(\frac{q\,k^\top}{\sqrt{D_h}}\right) v$$
#
# | Symbol | Shape | Meaning |
# | --- | --- | --- |
# | $q$ | $(B, H, N, D_h)$ | $N$ queries; the $D$ components are cut into $H$ parts, the heads, which work side by side |
# | $k,\ v$ | $(B, H, M, D_h)$ | $M$ keys and values; in self-attention $M = N$ |
# | result | $(B, H, N, D_h)$ | what each query heard |
#
# In the slider below the patch that asks walks down the diagonal. Guess first: who answers when it is the sea's turn?


# %%
def naive_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    scores = q @ k.mT / q.shape[-1] ** 0.5  # (…, N, M)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    weights = scores.softmax(dim=-1)  # each row sums to 1
    return weights @ v, weights


heard, weights = naive_attention(asks, asks, tokens)

# %% tags=["hide"]
from course.figures import plt, show
from course.sliders import slider


def draw_map(k: int):
    fig, axes = plt.subplots(1, 2, figsize=(6, 3.3), subplot_kw={"xticks": [], "yticks": []})
    axes[0].imshow(scene).axes.set_title(f"Patch ({k}, {k}) asks …")
    axes[1].imshow(weights[k * 16 + k].reshape(16, 16), cmap="magma", vmin=0).axes.set_title("… and these answer")
    for ax in axes:
        ax.plot(k, k, "o", color="white", mec="black")
        ax.spines[:].set_visible(False)
    return fig


slider(
    draw_map,
    [1, 3, 5, 7, 8, 9, 10, 12, 14],
    label="patch",
    alt="A scene with sky, sea, a red sun and a red boat; the patch at {} lights up every patch of its colour.",
    start=1,
    text=lambda k: f"({k}, {k})",
    live=range(16),
)

# %% tags=["check"]
assert torch.allclose(weights.sum(dim=-1), torch.ones(256)) and (weights >= 0).all()  # every row is a distribution
boat = weights[3 * 16 + 3].reshape(16, 16)[10:13, 9:14]
assert abs(boat.sum() - 15 / 31) < 1e-4  # 16 + 15 red patches answer alike: the boat's share is known
assert torch.allclose(heard[3 * 16 + 3], scene[3, 3], atol=1e-4)  # red hears red
mean, _ = naive_attention(0 * asks, asks, tokens)
assert torch.allclose(mean, tokens.mean(dim=0).expand(256, 3), atol=1e-6)  # who asks nothing hears the average

# %% [markdown] lang="zh"
# ## 没有先后，也没有因果
#
# 语言模型给注意力加因果（causal）掩码：词元只看过去，所以旧的键和值可以留着不动（KV 缓存）。图块没有先后，去噪每一步又改动所有词元：这里永远是全注意力。打乱词元，结果只是跟着打乱。

# %% [markdown] lang="en" twin="df373320"
# ## No order, no causality
#
# Language models mask attention causally: a token sees only the past, so old keys and values may be kept (the KV cache). Patches have no order, and denoising changes every token at every step: here attention is always full. Shuffle the tokens and the result is merely shuffled along.

# %% tags=["check"]
torch.manual_seed(0)
x = torch.randn(6, 8)
order = torch.tensor([5, 2, 0, 4, 1, 3])
assert torch.allclose(naive_attention(x[order], x[order], x[order])[0], naive_attention(x, x, x)[0][order], atol=1e-6)
past = torch.ones(6, 6, dtype=torch.bool).tril()  # under a causal mask that fails
causal, shuffled = naive_attention(x, x, x, past)[0], naive_attention(x[order], x[order], x[order], past)[0]
assert not torch.allclose(shuffled, causal[order], atol=1e-2)

# %% [markdown] lang="zh"
# ## 分数矩阵的价钱
#
# 朴素写法要把 $N \times M$ 的分数整个摆出来。每个数占 $s$ 字节时，一层要用：
#
# $$\text{bytes} = B \cdot H \cdot N \cdot M \cdot s$$
#
# 边长翻倍，图块变四倍，这张表变十六倍。FLUX 画 $1024^2$ 有 4096 个图块加 512 个文字词元；Wan2.1 的 480p 短片有 32,760 个。

# %% [markdown] lang="en" twin="c0bda319"
# ## What the score matrix costs
#
# The naive form lays out all $N \times M$ scores. With $s$ bytes a number, one layer takes:
#
# $$\text{bytes} = B \cdot H \cdot N \cdot M \cdot s$$
#
# Twice the side is four times the patches and sixteen times this table. FLUX at $1024^2$ has 4096 patches and 512 text tokens; a 480p clip of Wan2.1 has 32,760.


# %% tags=["export"]
def score_bytes(batch: int, heads: int, queries: int, keys: int, itemsize: int = 2) -> int:
    """Bytes of one layer's naive scores: B · H · N · M · itemsize (2 for bf16, 4 for fp32)."""
    return batch * heads * queries * keys * itemsize


# %% tags=["check"]
assert weights.nbytes == score_bytes(1, 1, 256, 256, itemsize=4)  # the formula is the tensor
flux = score_bytes(1, heads=24, queries=4096 + 512, keys=4096 + 512)
wan = score_bytes(1, heads=12, queries=21 * 30 * 52, keys=21 * 30 * 52)  # 1.3B model, 81 frames at 480 × 832
print(f"FLUX {flux / 1e9:.2f} GB a layer, Wan {wan / 1e9:.1f} GB a layer")
assert round(flux / 1e9, 2) == 1.02 and round(wan / 1e9, 1) == 25.8

# %% [markdown] lang="zh"
# ## 不摆出来，也能算对
#
# 每一行只和自己的分数有关，所以可以一次只算一批查询（chunk）：数学上完全相等。融合内核更进一步：边读键边记住目前的最大值与总和，分数随算随丢。PyTorch 的 `scaled_dot_product_attention`（SDPA）会替你挑一个这样的内核，引擎平时只调用它一次。

# %% [markdown] lang="en" twin="7d60302c"
# ## Right without laying it out
#
# Each row depends on its own scores alone, so queries can be handled a chunk at a time: exactly the same result. A fused kernel goes further: it reads the keys with a running maximum and sum and drops each score after use. PyTorch's `scaled_dot_product_attention` (SDPA) picks such a kernel for you; the engine normally calls it once.


# %% tags=["export"]
def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, chunk: int | None = None, scale: float | None = None
) -> Tensor:
    """softmax(scale · q kᵀ) v in every head; full: each query sees every key that the mask leaves, never causal.

    Args:
        q: queries (B, H, N, Dh).
        k: keys (B, H, M, Dh).
        v: values (B, H, M, Dh).
        mask: bool with four axes, True where a key may be seen. (B, 1, 1, M) hides padding (see `key_mask`);
            (B, 1, N, M) is general and costs N · M. A query that may see nothing gets zeros.
        chunk: queries handled at a time: exact, at most chunk · M scores a head; None makes one fused call.
        scale: factor on the scores; None is 1 / sqrt(Dh).

    Returns:
        (B, H, N, Dh).

    Raises:
        ValueError: not a value for each key, or queries not as wide as keys; a mask that is not bool or has not four
            axes; a ``chunk`` that is no positive whole number.

    Source: Vaswani et al. 2017, §3.2; Rabe & Staats 2021 (chunks); Dao et al. 2022 (fused).
    """
    if k.shape[-2] != v.shape[-2] or q.shape[-1] != k.shape[-1]:
        found = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        raise ValueError(f"{found} do not fit; a value for each key, and queries as wide as keys")
    if mask is not None and (mask.dtype != torch.bool or mask.ndim != 4):
        found = f"{mask.dtype} {tuple(mask.shape)}"
        raise ValueError(f"mask is {found}; expected torch.bool (B, 1, 1, M), True where a key may be seen")
    if chunk is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    if not isinstance(chunk, int) or chunk < 1:
        raise ValueError(f"chunk {chunk} is no positive number of queries; try 64 or None")
    out = torch.empty_like(q)
    for start in range(0, q.shape[-2], chunk):
        rows = slice(start, start + chunk)
        row_mask = mask if mask is None or mask.shape[-2] == 1 else mask[..., rows, :]
        out[..., rows, :] = F.scaled_dot_product_attention(q[..., rows, :], k, v, attn_mask=row_mask, scale=scale)
    return out


# %% tags=["check"]
q, k, v = torch.randn(2, 4, 50, 16), torch.randn(2, 4, 70, 16), torch.randn(2, 4, 70, 16)
some = torch.rand(2, 1, 50, 70) > 0.3  # a general mask
for mask in (None, some, some[:, :, :1]):
    truth, _ = naive_attention(q, k, v, mask)
    for chunk in (None, 1, 7, 50, 1000):
        assert torch.allclose(attention(q, k, v, mask, chunk), truth, atol=1e-6)
assert all(torch.allclose(attention(q, k, v, None, c, scale=0.5), attention(2 * q, k, v), atol=1e-5) for c in (None, 7))

# %% tags=["hide"]
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode


class LargestResult(TorchDispatchMode):
    """Remembers the bytes of the largest tensor that any operation returned."""

    bytes = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        for item in result if isinstance(result, tuple | list) else [result]:
            self.bytes = max(self.bytes, item.untyped_storage().nbytes() if isinstance(item, Tensor) else 0)
        return result


def largest(function, n: int, *options) -> int:
    x = torch.ones(1, 8, n, 32)
    with LargestResult() as meter:
        function(x, x, x, *options)
    return meter.bytes


def plain_chunks(*qkv):  # chunks around the unfused kernel, for machines that have no other
    with sdpa_kernel(SDPBackend.MATH):
        return attention(*qkv, None, 64)


sizes = [64, 128, 256, 512, 1024]
fig, ax = plt.subplots(figsize=(6.4, 2.9))
for name, function in [("naive", naive_attention), ("chunks of 64", plain_chunks), ("fused", attention)]:
    ax.loglog(sizes, [largest(function, n) / 1e6 for n in sizes], "o-", label=name)
ax.loglog(sizes, [score_bytes(1, 8, n, n, 4) / 1e6 for n in sizes], "k:", label="formula")
ax.set(title="Naive grows with N², chunks and the fused kernel with N", xlabel="tokens N", ylabel="largest tensor, MB")
ax.legend()
show(fig, alt="Largest tensor against tokens, log-log: naive follows the formula, slope two; the others have slope one")

# %% [markdown] lang="zh"
# ## 补出来的词元不许说话
#
# 一批提示词长短不一，短的要补齐（padding），补出来的键不能被看见。要藏键，只需 $(B, 1, 1, M)$ 的掩码：每个样本一行，所有头、所有查询共用。写成 $(N, N)$ 的大表，刚省下的 $N^2$ 又回来了。全被遮住的查询，结果是零（只用 softmax 会得到 NaN）。

# %% [markdown] lang="en" twin="ae3218e5"
# ## Padding must not speak
#
# The prompts of a batch differ in length; short ones are padded, and padded keys must not be seen. Hiding keys takes a mask of shape $(B, 1, 1, M)$: one row a sample, for all heads and queries. Written out as $(N, N)$ it brings back the $N^2$ just saved. A fully masked query gives zeros, where softmax alone gives NaN.


# %% tags=["export"]
def key_mask(real: Tensor) -> Tensor:
    """Which tokens are real, (B, M) bool, as a mask on keys (B, 1, 1, M): one row for all heads and queries.

    Raises:
        ValueError: ``real`` is not bool or not (B, M).
    """
    if real.dtype != torch.bool or real.ndim != 2:
        found = f"{real.dtype} {tuple(real.shape)}"
        raise ValueError(f"token mask is {found}; expected torch.bool (B, M), True where a token is real; try .bool()")
    return real[:, None, None, :]


def joint_mask(text_mask: Tensor | None, num_image_tokens: int, text_first: bool = False) -> Tensor | None:
    """Key mask (B, 1, 1, N + M) for image and text in one sequence: every image token may be seen, text where real.

    Args:
        text_mask: (B, M) bool, True where a text token is real; None hides nothing and returns None.
        num_image_tokens: N.
        text_first: the text stands before the image, as in FLUX and CogVideoX.

    Raises:
        ValueError: see `key_mask`.
    """
    if text_mask is None:
        return None
    sides = (0, num_image_tokens) if text_first else (num_image_tokens, 0)
    return F.pad(key_mask(text_mask), sides, value=True)


# %% tags=["check"]
real = torch.arange(70) < torch.tensor([[70], [40]])  # (B, M): the second prompt has 40 tokens
hidden = attention(q, k, v, key_mask(real))
assert torch.allclose(hidden[1:], attention(q[1:], k[1:, :, :40], v[1:, :, :40]), atol=1e-6)  # hidden is absent
image_first, text_first = joint_mask(real, 50), joint_mask(real, 50, text_first=True)  # (B, 1, 1, 50 + 70)
assert image_first[..., :50].all() and torch.equal(image_first[:, 0, 0, 50:], real) and joint_mask(None, 50) is None
assert text_first[..., 70:].all() and torch.equal(text_first[:, 0, 0, :70], real)  # the image is always seen
blind = some.clone()
blind[:, :, 3] = False  # a query that may see nothing
assert all((attention(q, k, v, blind, chunk)[:, :, 3] == 0).all() for chunk in (None, 7))  # hears zeros, no NaN
nothing_hidden = key_mask(torch.ones(1, 1024, dtype=torch.bool))
assert largest(attention, 1024, nothing_hidden) == largest(attention, 1024)  # by the figure's meter: a mask is free
assert largest(attention, 1024) < score_bytes(1, 8, 1024, 1024, itemsize=4) / 8
try:
    attention(q, k, v, key_mask(real).float())  # 0 and 1 would be added to the scores, and hide nothing
except ValueError as error:
    print(error)
else:
    raise AssertionError("a mask that hides nothing was accepted")

# %% [markdown] lang="zh"
# ## QK 归一化：别让嗓门代替内容
#
# 训练久了，$q$ 和 $k$ 会越长越大，softmax 的输出被挤成非 0 即 1（Dehghani 等人 2023 年在大模型里看到）。先把它们归一化（normalization），再乘一个学来的权重 $w$：
#
# $$\mathrm{RMS}(x) = w \odot \frac{x}{\sqrt{\mathrm{mean}(x^2) + \epsilon}}$$
#
# | 写法 | 在哪里取平均 | 谁在用 |
# | --- | --- | --- |
# | `None` | – | SD3、Sana |
# | `"rms"`（默认） | 每个头内部 | SD3.5、FLUX、HunyuanVideo |
# | `"rms_across"` | 所有头一起 | Wan、LTX |
# | `"layer"` | 每个头，还减去均值 | CogVideoX |

# %% [markdown] lang="en" twin="23509b79"
# ## QK-norm: content, not volume
#
# In long training $q$ and $k$ keep growing, until softmax is all or nothing (seen in large models by Dehghani et al. 2023). So normalise them first, then multiply by a learned weight $w$:
#
# $$\mathrm{RMS}(x) = w \odot \frac{x}{\sqrt{\mathrm{mean}(x^2) + \epsilon}}$$
#
# | Written | The mean is over | Used by |
# | --- | --- | --- |
# | `None` | – | SD3, Sana |
# | `"rms"` (default) | each head | SD3.5, FLUX, HunyuanVideo |
# | `"rms_across"` | all heads at once | Wan, LTX |
# | `"layer"` | each head, mean taken off too | CogVideoX |


# %% tags=["export"]
def rms_normalize(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(mean(x²) + eps) over the last axis, computed in fp32: (…, D) → the same, in x's dtype."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    return (x * torch.rsqrt(length.square() / x.shape[-1] + eps)).to(x.dtype)


class RMSNorm(nn.Module):
    """y = w · x / sqrt(mean(x²) + eps) over the last axis; all but w in fp32, see `rms_normalize`.

    The normalised x has x's dtype again before w multiplies it (Zhang & Sennrich 2019)."""

    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return rms_normalize(x, self.eps) * self.weight


class RMSNormAcrossHeads(RMSNorm):
    """RMSNorm with one mean for all heads of a token: x (B, H, N, Dh), dim = H · Dh weights, head by head."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2).flatten(-2)).unflatten(-1, (x.shape[1], -1)).transpose(1, 2)


QKNorm = str | bool | None  # "rms" or True, "rms_across", "layer"; None or False for none
QK_NORMS = {None: nn.Identity, "rms": RMSNorm, "rms_across": RMSNormAcrossHeads, "layer": nn.LayerNorm}


def qk_norm_layer(kind: QKNorm, heads: int, head_dim: int, eps: float = 1e-6) -> nn.Module:
    """The norm of queries or keys (B, H, N, Dh), H = heads, Dh = head_dim, with ``eps`` inside every kind's root.

    Args:
        kind: "rms" or True, Dh weights, per head; "rms_across", H · Dh weights, over all heads; "layer", LayerNorm, Dh,
            per head; None or False, none.

    Raises:
        ValueError: another kind.
    """
    if (kind := "rms" if kind is True else kind or None) not in QK_NORMS:
        raise ValueError(f'qk_norm {kind!r} is unknown; try "rms", "rms_across", "layer" or None')
    return QK_NORMS[kind](heads * head_dim if kind == "rms_across" else head_dim, eps)


# %% tags=["check"]
loud = q * torch.tensor([100.0, 1, 1, 1]).reshape(4, 1, 1)  # one head shouts
per_head, across, layer = (qk_norm_layer(kind, heads=4, head_dim=16) for kind in ("rms", "rms_across", "layer"))
assert torch.allclose(per_head(loud), per_head(q), atol=1e-4)  # volume is gone, head by head
assert across(loud)[:, 1].abs().max() < 0.1 * across(q)[:, 1].abs().max()  # together, the loud head drowns the others
assert torch.allclose(across(q).transpose(1, 2).flatten(-2).square().mean(-1), torch.ones(2, 50), atol=1e-4)
assert torch.allclose(layer(q + 3), layer(q), atol=1e-4) and not torch.allclose(per_head(q + 3), per_head(q), atol=0.1)
across.weight.data = torch.arange(64) / 64  # weights run head by head
assert torch.allclose(across(q)[0, 3, 0, 5] / across(q)[0, 1, 0, 5], q[0, 3, 0, 5] / q[0, 1, 0, 5] * 53 / 21, rtol=1e-4)
assert torch.equal(RMSNorm(16).half()(torch.full((1, 16), 6e4).half()), torch.ones(1, 16).half())  # squared in fp32
assert torch.allclose(rms_normalize(q), F.rms_norm(q, (16,), eps=1e-6), atol=1e-6)  # torch's own agrees
assert all(qk_norm_layer(kind, 4, 16, eps=1e4)(q).abs().max() < 0.1 for kind in ("rms", "rms_across", "layer"))
assert (per_head(1000 * q) @ per_head(1000 * k).mT / 4).abs().max() <= 4 + 1e-4  # no score exceeds sqrt(Dh)

# %% [markdown] lang="zh"
# ## 旋转位置编码：转过的角度就是位置
#
# 注意力不知道谁在哪。旋转位置编码（RoPE）把第 03 章的针装进每个头：相邻两个分量成一对，按位置 $p$ 转 $\omega_i p$，$\omega_i = \theta^{-2i/d}$。图块有行有列，就让前 $d$ 个分量管行，其余管列（axial）；每个轴的 $i$ 都从 0 数起：
#
# $$\begin{pmatrix} x'_{2i} \\ x'_{2i+1} \end{pmatrix} = \begin{pmatrix} \cos \omega_i p & -\sin \omega_i p \\ \sin \omega_i p & \cos \omega_i p \end{pmatrix} \begin{pmatrix} x_{2i} \\ x_{2i+1} \end{pmatrix}, \qquad \langle R_a q, R_b k \rangle = \langle R_{a+c}\, q, R_{b+c}\, k \rangle$$
#
# 只有位置差算数。文字没有位置：不转。把一对看成一个复数，转就是乘 $e^{\mathrm{i}\omega_i p}$。

# %% [markdown] lang="en" twin="9af40fec"
# ## RoPE: the angle is the place
#
# Attention does not know where anything is. Rotary position embedding (RoPE) builds the hands of chapter 03 into every head: adjacent components form a pair, turned by $\omega_i p$ at position $p$, $\omega_i = \theta^{-2i/d}$. Patches have a row and a column: the first $d$ components watch the row, the rest the column (axial), $i$ from 0 each time:
#
# $$\begin{pmatrix} x'_{2i} \\ x'_{2i+1} \end{pmatrix} = \begin{pmatrix} \cos \omega_i p & -\sin \omega_i p \\ \sin \omega_i p & \cos \omega_i p \end{pmatrix} \begin{pmatrix} x_{2i} \\ x_{2i+1} \end{pmatrix}, \qquad \langle R_a q, R_b k \rangle = \langle R_{a+c}\, q, R_{b+c}\, k \rangle$$
#
# Only the offset counts. Text has no place: no turn. Read a pair as a complex number, and a turn is one product with $e^{\mathrm{i}\omega_i p}$.


# %% tags=["export"]
class Rope(NamedTuple):
    """The turn of every token, as cosines and sines: (N, Dh/2) fp32; axes before these may broadcast to B and H.

    Pair i is components 2i and 2i + 1 (FLUX, Wan, HunyuanVideo); with ``halves`` it is i and i + Dh/2.
    """

    cos: Tensor
    sin: Tensor
    halves: bool = False


def grid_positions(*sizes: int) -> Tensor:
    """Position of every token of a grid, row by row, the last axis fastest: whole numbers (N, A) from 0.

    Args:
        sizes: any number A of axes, such as (h, w) or (t, h, w); N is their product.
    """
    axes = torch.meshgrid(*(torch.arange(size) for size in sizes), indexing="ij")
    return torch.stack(axes, dim=-1).flatten(0, -2)


def axial_rope(positions: Tensor, axes_dim: tuple[int, ...], theta: float = 10_000.0, halves: bool = False) -> Rope:
    """Angles ω_i · p with ω_i = theta^(-2i / dim), i = 0 … dim/2 − 1, axis after axis; in fp64, kept in fp32.

    Args:
        positions: (N, A), one column an axis, whole or fractional.
        axes_dim: dim of each axis, the components of a head that it turns, all even; their sum is Dh (FLUX: 16, 56, 56).
        theta: the larger, the slower the slow turns (HunyuanVideo: 256).
        halves: see `Rope`.

    Raises:
        ValueError: positions and ``axes_dim`` disagree, or an entry is no positive even number.

    Source: Su et al. 2021; Black Forest Labs, flux ``math.py``.
    """
    if positions.ndim != 2 or positions.shape[-1] != len(axes_dim):
        raise ValueError(f"positions are {tuple(positions.shape)}; axes_dim {axes_dim} wants (N, {len(axes_dim)})")
    angles = []
    for axis, dim in enumerate(axes_dim):
        if dim < 2 or dim % 2:
            low = max(2, dim // 2 * 2)
            raise ValueError(f"axes_dim {axes_dim} has {dim}, no positive even number; try {low} or {low + 2}")
        omega = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)  # (dim/2,)
        angles.append(positions[:, axis, None].cpu().double() * omega)  # (N, dim/2)
    angle = torch.cat(angles, dim=-1)  # (N, Dh/2)
    return Rope(angle.cos().float().to(positions.device), angle.sin().float().to(positions.device), halves)


# %% tags=["export"]
def apply_rope(x: Tensor, rope: Rope) -> Tensor:
    """Turn every pair of every head by its token's angle, in fp32: x (B, H, N, Dh) → the same shape and dtype.

    Raises:
        ValueError: the last two axes of the turns are not (N, Dh/2).
    """
    tokens, pairs = rope.cos.shape[-2:]
    if x.shape[-2:] != (tokens, 2 * pairs):
        found = f"{x.shape[-2]} tokens of {x.shape[-1]}"
        raise ValueError(f"x has {found} but rope turns {tokens} of {2 * pairs}; pad_rope adds tokens that stay")
    y = x.float()
    if rope.halves:
        y0, y1 = y.chunk(2, dim=-1)  # (B, H, N, Dh/2) each
        return torch.cat([y0 * rope.cos - y1 * rope.sin, y1 * rope.cos + y0 * rope.sin], dim=-1).to(x.dtype)
    if y.stride(-1) != 1 or y.storage_offset() % 2 or any(step % 2 for step in y.stride()[:-1]):
        y = y.clone(memory_format=torch.contiguous_format)  # pairs must lie side by side, from an even place on
    turned = torch.view_as_complex(y.unflatten(-1, (-1, 2))) * torch.complex(rope.cos, rope.sin)  # (y0 + i·y1) · e^iωp
    return torch.view_as_real(turned).flatten(-2).to(x.dtype)


def pad_rope(rope: Rope, before: int = 0, after: int = 0) -> Rope:
    """Add tokens with angle zero, which stay as they are: text before or after the image's tokens."""
    sides = (0, 0, before, after)
    return rope._replace(cos=F.pad(rope.cos, sides, value=1.0), sin=F.pad(rope.sin, sides))


# %% tags=["check"]
places = grid_positions(5, 10)  # 50 patches: row, column
for halves in (False, True):
    here, there = (axial_rope(p, (4, 12), halves=halves) for p in (places, places + torch.tensor([3, -2])))
    turned, moved = apply_rope(q, here), apply_rope(q, there)
    assert torch.allclose(turned @ turned.mT, moved @ moved.mT, atol=1e-4)  # only the offset counts
    assert torch.allclose(turned.norm(dim=-1), q.norm(dim=-1), atol=1e-5)  # a turn stretches nothing
    assert apply_rope(q.bfloat16(), here).dtype == torch.bfloat16  # turned in fp32, handed back as it came

# %% tags=["check"]
rope = axial_rope(places, (4, 12))
hand = apply_rope(torch.eye(16)[0].expand(1, 1, 50, 16), rope)[0, 0, 10, :2]  # the fast hand at patch (1, 0)
assert torch.allclose(hand, torch.tensor([0.5403, 0.8415]), atol=1e-4)  # cos 1, sin 1: one radian, anticlockwise
assert torch.equal(apply_rope(q, rope)[:, :, 3, :4], q[:, :, 3, :4])  # patch (0, 3): the row's pairs do not turn
assert torch.equal(apply_rope(k, pad_rope(rope, before=20))[:, :, :20], k[:, :, :20])  # text stays as it is
assert pad_rope(axial_rope(places, (4, 12), halves=True), 1).halves and grid_positions(5).shape == (5, 1)

# %% tags=["hide"]
ones = torch.ones(1, 1, 256, 32)
turned = apply_rope(ones, axial_rope(grid_positions(16, 16), (16, 16)))
maps = [naive_attention(2 * x, 2 * x, ones)[1][0, 0].reshape(16, 16, 16, 16) for x in (ones, turned)]
fig, axes = plt.subplots(1, 3, figsize=(6.4, 2.5))
for ax, (place, image) in zip(axes, [((4, 4), maps[0]), ((4, 4), maps[1]), ((11, 9), maps[1])]):
    ax.imshow(image[place], cmap="magma", vmin=0)
    ax.plot(place[1], place[0], "o", color="white", mec="black", ms=4)
    ax.set(title=f"asked from {place}", xticks=[], yticks=[])
axes[0].set_title("without RoPE: all alike")
fig.suptitle("One question, asked from two places: with RoPE it means “near me”", fontsize=11, x=0.01, ha="left")
show(fig, alt="Three maps of equal tokens: flat without RoPE, with RoPE a bright spot around the place that asks")

# %% [markdown] lang="zh"
# ## 装成模块
#
# 一条数据流进出注意力的路总是一样：一次投影得到 $q, k, v$，切成 $H$ 个头，归一化；算完再拼回来，投影出去。投影的输出先排全部 $q$，再 $k$，再 $v$；每一份里一个头接一个头。`Heads` 就是这条路。只有一条流时，它就是自注意力（self-attention）。

# %% [markdown] lang="en" twin="a4892086"
# ## Into modules
#
# A stream always takes the same way into attention and out: one projection to $q, k, v$, cut into $H$ heads, normalised; afterwards joined again and projected out. The projection gives all of $q$, then $k$, then $v$, each of them head by head. `Heads` is that way. With one stream alone, it makes self-attention.


# %% tags=["export"]
def head_width(width: int, heads: int) -> int:
    """Dh = width / heads.

    Raises:
        ValueError: it is no whole number, or one of them is not positive.
    """
    if heads < 1 or width < 1 or width % heads:
        near = min((h for h in range(1, width + 1) if width % h == 0), key=lambda h: abs(h - heads), default=1)
        raise ValueError(f"width {width} is not a multiple of heads {heads}; try {near} heads, or give head_dim")
    return width // heads


class Stacked(nn.Linear):
    """Several linear layers of one input, their rows stacked in one matrix and asked one at a time.

    Args:
        width: of the input. out: of each layer's output. parts: how many. bias: as in ``nn.Linear``.

    forward(x (…, width), part from 0) → (…, out).
    """

    def __init__(self, width: int, out: int, parts: int, bias: bool = True):
        super().__init__(width, parts * out, bias)
        self.parts = parts

    def forward(self, x: Tensor, part: int) -> Tensor:
        bias = None if self.bias is None else self.bias.chunk(self.parts)[part]
        return F.linear(x, self.weight.chunk(self.parts)[part], bias)


class Heads(nn.Module):
    """One stream's way into attention and out: tokens (B, N, D) → q, k, v (B, H, N, Dh); heads → (B, N, D).

    Args:
        width: D.
        heads: H.
        qk_norm: norm of queries and keys, see `qk_norm_layer`.
        out: whether the stream reads the result (an output projection exists).
        bias: whether q, k and v have a bias.
        head_dim: Dh where it is not D / H.
        eps: of the norms.

    Raises:
        ValueError: D is no multiple of H, or an unknown norm.
    """

    def __init__(self, width: int, heads: int, qk_norm: QKNorm = True, out=True, bias=True, head_dim=None, eps=1e-6):
        super().__init__()
        head_dim = head_dim or head_width(width, heads)
        self.heads = heads
        self.qkv = Stacked(width, heads * head_dim, 3, bias)
        self.norm_q, self.norm_k = (qk_norm_layer(qk_norm, heads, head_dim, eps) for _ in "qk")
        self.out = nn.Linear(heads * head_dim, width) if out else None

    def split(self, x: Tensor, rope: Rope | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens (B, N, D) → q and k, normalised and turned by ``rope``, and v: (B, H, N, Dh) each."""
        parts, turn = self.parts(x), nn.Identity() if rope is None else partial(apply_rope, rope=rope)
        return turn(next(parts)), turn(next(parts)), next(parts)

    def parts(self, x: Tensor) -> Iterator[Tensor]:
        """Normalised q and k, and v, one after the other: each is projected when its turn comes, to hold less at once.

        The 3 · H · Dh rows of ``qkv`` are all of q, then k, then v, each of them head by head.
        """
        for part, norm in enumerate((self.norm_q, self.norm_k, nn.Identity())):
            yield norm(self.qkv(x, part).unflatten(-1, (self.heads, -1)).transpose(1, 2))

    def merge(self, heads: Tensor) -> Tensor:
        """Heads (B, H, N, Dh) → tokens (B, N, D); without an output projection (B, N, H · Dh)."""
        joined = heads.transpose(1, 2).flatten(-2)  # (B, N, H · Dh)
        return joined if self.out is None else self.out(joined)


class SelfAttention(nn.Module):
    """Every token sees every token, itself included; never causal: (B, N, D) → (B, N, D).

    Args:
        width: D.
        heads: H.
        qk_norm: see `qk_norm_layer`.
        options: ``bias``, ``head_dim``, ``eps`` of `Heads`.
    """

    def __init__(self, width: int, heads: int, qk_norm: QKNorm = True, **options):
        super().__init__()
        self.stream = Heads(width, heads, qk_norm, **options)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, rope: Rope | None = None, chunk: int | None = None
    ) -> Tensor:
        """Tokens x (B, N, D); ``mask``, ``chunk`` as in `attention`; ``rope`` turns all N tokens."""
        q, k, v = self.stream.split(x, rope)
        heads = attention(q, k, v, mask, chunk)
        del q, k, v  # nothing below reads them
        return self.stream.merge(heads)


# %% tags=["check"]
layer, x, order = SelfAttention(64, heads=4), torch.randn(2, 50, 64), torch.randperm(50)
assert torch.allclose(layer(x[:, order]), layer(x)[:, order], atol=1e-6)  # a set of tokens …
placed, elsewhere = layer(x, rope=rope), layer(x, rope=axial_rope(places + 7, (4, 12)))
assert not torch.allclose(layer(x[:, order], rope=rope), placed[:, order], atol=1e-3)  # … until they have places,
assert torch.allclose(placed, elsewhere, atol=1e-5)  # of which only the offsets count
changed = x + (torch.arange(50) == 49)[:, None]  # the last token alone
assert (layer(changed) - layer(x)).abs().amax(-1).min() > 1e-5  # reaches all others: never causal


# %% [markdown] lang="zh"
# ## 文字进场的两条路
#
# 联合注意力（joint attention，SD3、FLUX）：图像和文字各有投影，查询、键、值各接成一条序列，互相看。交叉注意力（cross-attention，Sana、Wan、LTX）：图像发问，文字只作答，自己不变；所以文字的键值可以算一次、每步再用。

# %% [markdown] lang="en" twin="fed7db12"
# ## Two ways in for text
#
# Joint attention (SD3, FLUX): image and text have projections of their own; queries, keys and values are joined into one sequence, and all see each other. Cross-attention (Sana, Wan, LTX): the image asks, the text only answers and stays as it is; so its keys and values can be computed once and used at every step.


# %% tags=["export"]
class JointAttention(nn.Module):
    """Image and text tokens, each with its own projections, in one attention (MMDiT, Esser et al. 2024).

    Args:
        width: D of both streams.
        heads: H.
        qk_norm: see `qk_norm_layer`.
        text_out: whether the text reads the result; in SD3's last block it only feeds keys and values.
        text_first: order in the common sequence; matters to ``rope`` alone (FLUX: True).
        options: ``bias``, ``head_dim``, ``eps`` of `Heads`.
    """

    def __init__(
        self, width: int, heads: int, qk_norm: QKNorm = True, text_out: bool = True, text_first: bool = False, **options
    ):
        super().__init__()
        self.text_first = text_first
        self.image = Heads(width, heads, qk_norm, **options)
        self.text = Heads(width, heads, qk_norm, out=text_out, **options)

    def forward(
        self,
        x: Tensor,
        text: Tensor,
        text_mask: Tensor | None = None,
        rope: Rope | None = None,
        chunk: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Image tokens x (B, N, D) and text (B, M, D) → both anew; None for the text without ``text_out``.

        ``text_mask`` (B, M) bool is True where a text token is real; ``rope`` turns all N + M tokens in the common
        order (`pad_rope` makes it from the image's); ``chunk`` as in `attention`.
        """
        order = -1 if self.text_first else 1
        streams = ((self.image, x), (self.text, text))[::order]
        # (B, H, N + M, Dh) each, joined one after the other: no name keeps the parts, so their memory ends here
        q, k, v = map(lambda *p: torch.cat(p, dim=-2), *(stream.parts(tokens) for stream, tokens in streams))
        if rope is not None:
            q = apply_rope(q, rope)
            k = apply_rope(k, rope)
        sizes = [x.shape[1], text.shape[1]][::order]
        heads = attention(q, k, v, joint_mask(text_mask, x.shape[1], self.text_first), chunk)
        del q, k, v  # nothing below reads them
        for_image, for_text = heads.split(sizes, dim=-2)[::order]
        return self.image.merge(for_image), self.text.merge(for_text) if self.text.out is not None else None


# %% tags=["export"]
class CrossAttention(nn.Module):
    """Image tokens ask, text tokens answer: x (B, N, D), text (B, M, Dt) → (B, N, D).

    Args:
        width: D.
        heads: H.
        text_width: Dt where it is not D.
        qk_norm, bias, head_dim, eps: see `Heads`.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        text_width: int | None = None,
        qk_norm: QKNorm = True,
        bias: bool = True,
        head_dim: int | None = None,
        eps: float = 1e-6,
    ):
        super().__init__()
        head_dim = head_dim or head_width(width, heads)
        self.heads = heads
        self.q = nn.Linear(width, heads * head_dim, bias=bias)
        self.kv = nn.Linear(text_width or width, 2 * heads * head_dim, bias=bias)
        self.norm_q = qk_norm_layer(qk_norm, heads, head_dim, eps)
        self.norm_k = qk_norm_layer(qk_norm, heads, head_dim, eps)
        self.out = nn.Linear(heads * head_dim, width)

    def keys_values(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (B, H, M, Dh) of text (B, M, Dt): the same at every denoising step.

        The outputs of ``kv`` are all of k, then v, each head by head; k is normalised.
        """
        k, v = self.kv(text).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.norm_k(k), v

    def attend(
        self, x: Tensor, k: Tensor, v: Tensor, text_mask: Tensor | None = None, chunk: int | None = None
    ) -> Tensor:
        """Ask keys and values that `keys_values` made; ``text_mask`` (B, M) bool, True where a token is real."""
        q = self.norm_q(self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2))  # (B, H, N, Dh)
        heads = attention(q, k, v, None if text_mask is None else key_mask(text_mask), chunk)
        del q
        return self.out(heads.transpose(1, 2).flatten(-2))

    def forward(self, x: Tensor, text, text_mask: Tensor | None = None, chunk: int | None = None) -> Tensor:
        """x (B, N, D) asks text (B, M, Dt), or what `keys_values` made of it, a tuple."""
        keys, values = text if isinstance(text, tuple) else self.keys_values(text)
        return self.attend(x, keys, values, text_mask, chunk)


# %% tags=["check"]
text, text_mask = torch.randn(2, 20, 64), torch.arange(20) < torch.tensor([[20], [12]])
noisy = torch.where(text_mask[..., None], text, 100 * torch.randn(2, 20, 64))  # garbage where the padding is
joint, cross, image_first = JointAttention(64, heads=4), CrossAttention(64, heads=4), pad_rope(rope, after=20)
a, b = joint(x, text, text_mask, rope=image_first)
a2, b2 = joint(x, noisy, text_mask, rope=image_first)
assert torch.allclose(a, a2, atol=1e-6) and torch.allclose(b[text_mask], b2[text_mask], atol=1e-6)  # padding is mute
assert torch.allclose(cross(x, text, text_mask), cross(x, noisy, text_mask), atol=1e-6)
assert torch.equal(cross(x, cross.keys_values(text), text_mask), cross(x, text, text_mask))  # made ahead: the same
assert JointAttention(64, heads=4, text_out=False)(x, text)[1] is None  # a text that reads nothing
assert torch.allclose(cross.keys_values(text)[0].square().mean(-1), torch.ones(2, 4, 20), atol=1e-2)  # QK-norm …
nn.init.zeros_(cross.q.bias)
assert torch.allclose(cross(50 * x, text), cross(x, text), atol=1e-3)  # … on both sides: shouting does not help

joint.text_first = True  # another order of the same set gives the same answer
text_first = pad_rope(rope, before=20)
assert all(torch.allclose(c, d, atol=1e-6) for c, d in zip((a, b), joint(x, text, text_mask, rope=text_first)))
for stream in (joint.image, joint.text):  # one set of weights for both: plain self-attention over text and image
    stream.load_state_dict(layer.stream.state_dict())
whole = layer(torch.cat([text, x], dim=1), joint_mask(text_mask, 50, text_first=True), text_first)
assert torch.allclose(torch.cat(joint(x, text, text_mask, text_first)[::-1], dim=1), whole, atol=1e-6)

# %% [markdown] lang="zh"
# ## 和真家伙对一对
#
# SD3 在 diffusers 里用 `Attention` 加 `JointAttnProcessor2_0`。它的三个投影分开存，我们拼成一个矩阵；把权重抄过去之后，两种 QK 归一化都要一致。然后是 FLUX 的旋转和 Sana 的交叉注意力。

# %% [markdown] lang="en" twin="8ba6c6de"
# ## Against the real thing
#
# In diffusers SD3 uses `Attention` with `JointAttnProcessor2_0`. It keeps three projections apart, we hold them as one matrix; with weights copied, both kinds of QK-norm must agree. Then FLUX's rotation and Sana's cross-attention.

# %% tags=["check"]
from diffusers.models.attention_processor import Attention, JointAttnProcessor2_0


def copy_stream(stream: Heads, projections, out, norms) -> None:
    """Put separate q, k, v projections, an output projection and two norms (or None) into one of our streams."""
    weight, bias = (torch.cat([getattr(p, name) for p in projections]) for name in ("weight", "bias"))
    stream.qkv.load_state_dict({"weight": weight, "bias": bias})
    stream.out.load_state_dict(out.state_dict())
    for mine, other in zip((stream.norm_q, stream.norm_k), norms):
        mine.load_state_dict({"weight": nn.init.normal_(other.weight)} if other else {})


three, one = Stacked(64, 16, parts=3), torch.eye(64)  # three layers that share a matrix, asked one at a time
assert torch.allclose(torch.cat([three(one, i) for i in range(3)], dim=-1), F.linear(one, three.weight, three.bias))
sizes = dict(query_dim=64, heads=4, dim_head=16, bias=True, eps=1e-6)
for theirs_norm, ours_norm in [(None, None), ("rms_norm", "rms")]:
    joined = dict(added_kv_proj_dim=64, context_pre_only=False, qk_norm=theirs_norm, processor=JointAttnProcessor2_0())
    a, ours = Attention(**sizes, **joined), JointAttention(64, heads=4, qk_norm=ours_norm)
    copy_stream(ours.image, (a.to_q, a.to_k, a.to_v), a.to_out[0], (a.norm_q, a.norm_k))
    added = a.add_q_proj, a.add_k_proj, a.add_v_proj
    copy_stream(ours.text, added, a.to_add_out, (a.norm_added_q, a.norm_added_k))
    for mine, other in zip(ours(x, text), a(x, text)):
        assert torch.allclose(mine, other, atol=1e-5)

# %% tags=["check"]
from diffusers.models.embeddings import apply_rotary_emb, get_1d_rotary_pos_embed
from diffusers.models.transformers.transformer_flux import FluxPosEmbed

ids = torch.cat([torch.zeros(20, 3), grid_positions(1, 5, 10)])  # FLUX: text first, at place zero; an empty first axis
rope = pad_rope(axial_rope(grid_positions(1, 5, 10), (4, 6, 6)), before=20)
assert torch.allclose(apply_rope(k, rope), apply_rotary_emb(k, FluxPosEmbed(10_000, [4, 6, 6])(ids)), atol=1e-6)
assert axial_rope(ids, (4, 6, 6), theta=256.0).sin[:, 6].max() > rope.sin[:, 6].max()  # a small theta turns faster
line = torch.arange(70)
table = get_1d_rotary_pos_embed(16, line, use_real=True, repeat_interleave_real=False)  # halves
by_halves = apply_rope(k, axial_rope(line[:, None], (16,), halves=True))
assert torch.allclose(by_halves, apply_rotary_emb(k, table, use_real_unbind_dim=-2), atol=1e-5)

theirs = Attention(**sizes, cross_attention_dim=64)
theirs.to_q.load_state_dict(cross.q.state_dict())
for other, weight, bias in zip((theirs.to_k, theirs.to_v), cross.kv.weight.chunk(2), cross.kv.bias.chunk(2)):
    other.load_state_dict({"weight": weight, "bias": bias})
theirs.to_out[0].load_state_dict(cross.out.state_dict())
cross.norm_q = cross.norm_k = nn.Identity()  # as in Sana
bias = torch.where(text_mask, 0.0, -10_000.0)[:, None]  # their mask is a number to add
assert torch.allclose(cross(x, text, text_mask), theirs(x, text, attention_mask=bias), atol=1e-6)

# %% [markdown] lang="zh"
# **到了这里**，图块和文字能互相看见了。可是时间还插不上话：同一层在 $t = 900$ 和 $t = 50$ 做的是同一件事。下一章让第 03 章的条件向量去调制（modulate）每一层，并让网络从「什么也不做」起步。
#
# ## 三个问题
#
# 1. 预测：忘了除以 $\sqrt{D_h}$，$D_h = 64$ 时，随机的 $q, k$ 会给出怎样的注意力图？
# 2. 修改：把旋转方向全部反过来。哪些检查看不出来？什么时候才会出事？
# 3. 动手：Sana 用线性注意力，$\phi(q)\big(\phi(k)^\top v\big)$ 除以 $\phi(q)\sum_m \phi(k_m)$，$\phi = \mathrm{ReLU}$。写出来，证明它的权重也是分布，却从不摆出 $N \times M$ 的表。

# %% [markdown] lang="en" twin="682d0205"
# **Where we stand.** Patches and words see each other. Time still has no say: a layer does the same thing at $t = 900$ and $t = 50$. The next chapter lets the condition of chapter 03 modulate every layer, and lets the network start from doing nothing at all.
#
# ## Three questions
#
# 1. Predict: forget to divide by $\sqrt{D_h}$, with $D_h = 64$. What attention maps do random $q, k$ give?
# 2. Modify: turn everything the other way round. Which checks cannot tell? When does it hurt?
# 3. Build: Sana uses linear attention, $\phi(q)\big(\phi(k)^\top v\big)$ over $\phi(q)\sum_m \phi(k_m)$ with $\phi = \mathrm{ReLU}$. Write it, and show that its weights are distributions too, though no $N \times M$ table is ever laid out.

# %% tags=["solution"]
# 1 · scores spread like a normal of deviation 8: each query hears almost one key alone
wide, keys = torch.randn(2, 1, 256, 64)
_, soft = naive_attention(wide, keys, keys)
_, hard = naive_attention(8 * wide, keys, keys)  # sqrt(64) = 8, not divided out
assert soft.amax(dim=-1).mean() < 0.1 and hard.amax(dim=-1).mean() > 0.7

# %% tags=["solution"]
# 2 · lengths and offsets look right; it is a mirror world, harmless to train in, wrong for anybody else's weights
mirror = axial_rope(-places, (4, 12))
there, back = apply_rope(q, mirror), apply_rope(q, axial_rope(-places - 3, (4, 12)))
assert torch.allclose(there @ there.mT, back @ back.mT, atol=1e-4)
assert not torch.allclose(there, apply_rope(q, axial_rope(places, (4, 12))), atol=0.1)

# %% tags=["solution"]
# 3 · the small (Dh, Dh) table first, and the same answer as the big one
fq, fk = q.relu(), k.relu()
linear = fq @ (fk.mT @ v) / (fq @ fk.sum(dim=-2, keepdim=True).mT)
table = (fq @ fk.mT) / (fq @ fk.mT).sum(dim=-1, keepdim=True)
assert torch.allclose(table.sum(dim=-1), torch.ones(2, 4, 50)) and (table >= 0).all()
assert torch.allclose(linear, table @ v, atol=1e-4)

# %% [markdown] lang="zh"
# ## 小结
#
# - 注意力是一行行的分布：问得投合，就听得多；没有先后，永远不因果。
# - 朴素的分数表占 $B H N M s$ 字节；分批和融合都精确，内存只随 $N$ 线性增长。
# - 藏键用 $(B, 1, 1, M)$ 的布尔掩码，不花内存。
# - QK 归一化管住嗓门，旋转位置编码只看位置差，文字不转。
# - 联合注意力互相看，交叉注意力单向问；与 diffusers 一致（误差小于 $10^{-5}$）。
#
# 阅读卡片：SD3（[`papers/05_sd3`](../../papers/05_sd3.zh.md)）、FLUX.1（[`papers/06_flux`](../../papers/06_flux.zh.md)）。下一章：05，AdaLN 与变换器块。

# %% [markdown] lang="en" twin="ef6d7b19"
# ## Recap
#
# - Attention is rows of distributions: a better fit is heard more; no order, never causal.
# - The naive score table takes $B H N M s$ bytes; chunks and the fused kernel are exact and grow with $N$ only.
# - Hide keys with a bool mask $(B, 1, 1, M)$; it costs no memory.
# - QK-norm rules the volume, RoPE sees offsets only, text does not turn.
# - Joint attention looks both ways, cross-attention asks one way; equal to diffusers' (within $10^{-5}$).
#
# Reading cards: SD3 ([`papers/05_sd3`](../../papers/05_sd3.en.md)), FLUX.1 ([`papers/06_flux`](../../papers/06_flux.en.md)). Next: chapter 05, AdaLN and the transformer block.
