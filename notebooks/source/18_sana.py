# ---
# jupyter:
#   course:
#     minutes: 40
#     module: reference/sana
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown] lang="zh"
# # 18 · Sana：线性注意力（linear attention）
#
# 读完这一章，Sana 的网络就由你的零件搭成：注意力的代价只随词元数线性增长，不用位置编码，位置藏在卷积里。
#
# | 你会做出 | 你需要 | 时间 | 模块 |
# | --- | --- | --- | --- |
# | 线性注意力、带卷积的前馈网络、Sana 的对照表与网络 | 第 04 章的交叉注意力，第 05 章的调制表，第 15 章的 `load` | 40 分钟 | `diffusion_engine/reference/sana.py` |

# %% [markdown] lang="en" twin="b2f9f177"
# # 18 · Sana: linear attention
#
# After this chapter Sana's network stands on your parts: attention whose cost grows with the number of tokens, not its square, and no position embedding, because places hide in a convolution.
#
# | You build | You need | Time | Module |
# | --- | --- | --- | --- |
# | linear attention, a feed-forward network with a convolution, Sana's key map and network | the cross-attention of chapter 04, the modulation table of chapter 05, `load` of chapter 15 | 40 minutes | `diffusion_engine/reference/sana.py` |

# %% [markdown] lang="zh"
# **先想一想**：一张 4096×4096 的图，Sana 有 16384 个词元，每一层要比较两亿六千万对。可是 $q k^\top v$ 里没有括号。如果先算 $k^\top v$，会省下什么？又是谁不让我们这么算？

# %% [markdown] lang="en" twin="a2e2c6de"
# **Think first:** for a picture of 4096×4096 Sana has 16,384 tokens, and every layer compares 268 million pairs. Yet $q k^\top v$ has no brackets. What would be saved by computing $k^\top v$ first? And what forbids it?

# %% tags=["export"]
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffusion_engine.attention import CrossAttention, RMSNorm, SelfAttention
from diffusion_engine.dit import Conditions, patch_grid, patchify, unpatchify
from diffusion_engine.reference.checkpoint import KeyMap, flatten_patches, require
from diffusion_engine.reference.sd3 import at_each_step
from diffusion_engine.timestep_embedding import TimestepEmbedder
from diffusion_engine.transformer_block import Mod, ModulationTable, modulate

# %% [markdown] lang="zh"
# ## 哪里不同
#
# | | 我们的 DiT | Sana 1.6B |
# | --- | --- | --- |
# | 潜变量 | 4 通道，缩小 4 倍 | 32 通道，缩小 32 倍，图块 1×1 |
# | 块 | 双流，再并行 | 单流，20 块，宽 2240 |
# | 图像的注意力 | softmax | ReLU，线性 |
# | 文字 | 联合注意力 | 交叉注意力，前面没有归一化 |
# | 旋钮 | 每块一个线性层 | 共用一个，每块一张表 |
# | 前馈 | 两层 | 3×3 卷积加门控，2.5 倍 |
# | 位置 | 表 | 无 |

# %% [markdown] lang="en" twin="13d73a61"
# ## What differs
#
# | | Our DiT | Sana 1.6B |
# | --- | --- | --- |
# | latents | 4 channels, 4 times smaller | 32 channels, 32 times smaller, patches of 1×1 |
# | blocks | joint, then parallel | single-stream, 20 of width 2240 |
# | attention of the image | softmax | ReLU, linear |
# | text | joint attention | cross-attention without a norm before it |
# | knobs | a linear layer a block | one shared, a table a block |
# | feed-forward | two layers | 3×3 convolution and a gate, ratio 2.5 |
# | positions | a table | none |


# %% tags=["export"]
@dataclass(frozen=True)
class SanaConfig:
    """``config.json`` of diffusers' ``SanaTransformer2DModel``: its names, its defaults.

    Raises:
        ValueError: a variant that is not built here.
    """

    in_channels: int = 32
    out_channels: int | None = 32
    num_attention_heads: int = 70
    attention_head_dim: int = 32
    num_layers: int = 20
    num_cross_attention_heads: int = 20
    cross_attention_head_dim: int = 112
    cross_attention_dim: int = 2240
    caption_channels: int = 2304
    mlp_ratio: float = 2.5
    dropout: float = 0.0
    attention_bias: bool = False
    sample_size: int = 32
    patch_size: int = 1
    norm_elementwise_affine: bool = False
    norm_eps: float = 1e-6
    interpolation_scale: int | None = None
    guidance_embeds: bool = False
    guidance_embeds_scale: float = 0.1
    qk_norm: str | None = None
    timestep_scale: float = 1.0

    @property
    def width(self) -> int:
        """D = heads · head_dim."""
        return self.num_attention_heads * self.attention_head_dim

    def __post_init__(self):
        if self.qk_norm not in (None, "rms_norm_across_heads"):
            raise ValueError(f"qk_norm {self.qk_norm!r} is unknown; try 'rms_norm_across_heads' or None")
        require(self, norm_elementwise_affine=False, norm_eps=1e-6, interpolation_scale=None)


# %% [markdown] lang="zh"
# ## 换一对括号
#
# softmax 把 $q k^\top$ 整个包住，所以必须先算出 $N \times N$ 的表。换成 $\phi = \mathrm{ReLU}$，权重 $\phi(q_i)\,\phi(k_j)^\top$ 仍然非负，除以总和就是分布。先看直白的写法：
#
# $$y_i = \frac{\sum_j \phi(q_i)\,\phi(k_j)^\top v_j}{\sum_j \phi(q_i)\,\phi(k_j)^\top}$$

# %% [markdown] lang="en" twin="21aa0f50"
# ## Move the brackets
#
# softmax wraps all of $q k^\top$, so the table of $N \times N$ must be made first. With $\phi = \mathrm{ReLU}$ instead, the weights $\phi(q_i)\,\phi(k_j)^\top$ are still non-negative, and divided by their sum they are a distribution. First the plain way:
#
# $$y_i = \frac{\sum_j \phi(q_i)\,\phi(k_j)^\top v_j}{\sum_j \phi(q_i)\,\phi(k_j)^\top}$$


# %%
def quadratic(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The plain way: every pair, in a table of N × N."""
    weights = q.relu() @ k.relu().mT  # (B, H, N, N)
    return weights / weights.sum(-1, keepdim=True) @ v


rng = torch.Generator().manual_seed(0)
q, k, v = torch.randn(3, 2, 4, 50, 16, generator=rng)

# %% [markdown] lang="zh"
# 现在把 $\phi(q_i)$ 提到求和号外面。里面剩下的与 $i$ 无关，只算一次：一个 $D_h \times D_h$ 的矩阵和一个向量。给 $v$ 添一列 $1$，分子分母就一起算好了：
#
# $$y_i = \frac{\phi(q_i)\,\big[\sum_j \phi(k_j)^\top v_j\big]}{\phi(q_i)\,\big[\sum_j \phi(k_j)^\top\big]}$$
#
# ReLU 之后的和可能很大，所以这一段固定用 fp32。

# %% [markdown] lang="en" twin="e86b8b37"
# Now pull $\phi(q_i)$ out of the sums. What stays inside does not depend on $i$ and is computed once: a matrix of $D_h \times D_h$ and a vector. One more column of ones in $v$ gives both sums at a stroke:
#
# $$y_i = \frac{\phi(q_i)\,\big[\sum_j \phi(k_j)^\top v_j\big]}{\phi(q_i)\,\big[\sum_j \phi(k_j)^\top\big]}$$
#
# Sums behind a ReLU can grow large, so this part is always fp32.


# %% tags=["export"]
def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """φ(q) Σ φ(k)ᵀ v / φ(q) Σ φ(k)ᵀ with φ = ReLU, in every head, in fp32.

    q, k, v (B, H, N, Dh) → the same shape, fp32; zeros for a query that no key answers.
    Source: Katharopoulos et al. 2020; Xie et al. 2024 (Sana); diffusers' ``SanaLinearAttnProcessor2_0``.
    """
    q, k, v = q.relu().float(), k.relu().float(), v.float()
    v = F.pad(v, (0, 1), value=1.0)  # one more column: the sum of the weights
    both = q @ (k.mT @ v)  # (B, H, N, Dh + 1)
    return both[..., :-1] / (both[..., -1:] + 1e-15)


# %% tags=["check"]
assert torch.allclose(linear_attention(q, k, v), quadratic(q, k, v), atol=1e-5)  # other brackets, same numbers
ones = torch.ones_like(v)
assert torch.allclose(linear_attention(q, k, ones), ones, atol=1e-5)  # every row of weights is a distribution
assert not linear_attention(-q.abs(), k, v).any()  # a query that likes nothing gets nothing, no NaN

# %% tags=["hide"]
import matplotlib.pyplot as plt

from course.figures import COLORS, show

sides = torch.tensor([512, 1024, 2048, 4096])
tokens = (sides / 32) ** 2
softmax, linear, layers = 4 * tokens**2 * 2240, 4 * tokens * 32 * 2240, tokens * 2 * 2240**2 * (4 + 2 + 7.5)
fig, ax = plt.subplots(figsize=(5.6, 2.8))
for name, cost, color in (
    ("softmax", softmax, COLORS[3]),
    ("linear", linear, COLORS[0]),
    ("the block's other layers", layers, COLORS[5]),
):
    ax.loglog(sides, cost / 1e9, "o-", color=color, label=name)
ax.set(xticks=sides, xticklabels=[f"{s}²" for s in sides.tolist()], ylabel="GFLOP a block")
ax.minorticks_off()
ax.set(title="Softmax overtakes all other layers at 4096²", xlabel="picture")
ax.legend(loc="lower right")
show(
    fig,
    alt="Cost of one block against picture size: softmax attention overtakes all other layers near 4096 squared, linear attention stays far below.",
)


# %% tags=["export"]
class LinearAttention(SelfAttention):
    """`SelfAttention` with ReLU in place of softmax: (B, N, D) → (B, N, D) at a cost that grows with N."""

    def forward(self, x: Tensor, mask=None, rope=None, chunk=None) -> Tensor:
        return self.stream.merge(linear_attention(*self.stream.split(x)).to(x.dtype))


# %% [markdown] lang="zh"
# ## 位置藏在卷积里
#
# 线性注意力同样不认位置。Sana 不加位置编码，而是让前馈网络看邻居：先展宽，再用 3×3 的逐通道卷积，然后一半给另一半当门控。卷积在边上补零，于是词元也知道自己离边多远：
#
# $$\mathrm{ff}(x) = W_{\mathrm{out}}\big(u \odot \mathrm{SiLU}(g)\big), \qquad [u, g] = \mathrm{conv}_{3 \times 3}\big(\mathrm{SiLU}(W_{\mathrm{in}}\, x)\big)$$

# %% [markdown] lang="en" twin="1ff34bf3"
# ## Places hide in a convolution
#
# Linear attention does not know places either. Sana adds no position embedding; its feed-forward network looks at the neighbours instead: expand, a 3×3 convolution of each channel alone, then one half gates the other. Zeros beyond the edge even tell a token how far the edge is:
#
# $$\mathrm{ff}(x) = W_{\mathrm{out}}\big(u \odot \mathrm{SiLU}(g)\big), \qquad [u, g] = \mathrm{conv}_{3 \times 3}\big(\mathrm{SiLU}(W_{\mathrm{in}}\, x)\big)$$


# %% tags=["export"]
class ConvFeedForward(nn.Module):
    """Expand → 3×3 convolution of each channel alone, over the grid → u ⊙ SiLU(g) → project: (B, N, D) → (B, N, D).

    hidden = ratio · width, twice that wide before the gate.
    Source: Xie et al. 2024 (Sana), "Mix-FFN"; diffusers' ``GLUMBConv``.
    """

    def __init__(self, width: int, ratio: float):
        super().__init__()
        hidden = int(ratio * width)
        self.expand = nn.Linear(width, 2 * hidden)
        self.depthwise = nn.Conv2d(2 * hidden, 2 * hidden, 3, padding=1, groups=2 * hidden)
        self.out = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        weight, bias = self.expand.weight.expand(len(x), -1, -1), self.expand.bias.unsqueeze(-1)
        x = torch.baddbmm(bias, weight, x.mT)  # (B, 2·hidden, N): channels first, as the convolution wants them
        x = self.depthwise(F.silu(x, inplace=not x.requires_grad).unflatten(-1, grid)).flatten(2)
        value, gate = x.chunk(2, dim=1)  # (B, hidden, N) each
        return self.out((value * F.silu(gate)).mT)


# %%
def redraw(module: nn.Module) -> nn.Module:
    """Every weight anew, so that no table is zero and no norm is one: outputs of order one."""
    for weight in module.requires_grad_(False).parameters():
        weight.copy_(torch.randn(weight.shape, generator=rng) / (weight[0].numel() if weight.ndim > 1 else 4) ** 0.5)
    return module.eval()


ff, look, x = (
    redraw(ConvFeedForward(24, 2.5)),
    redraw(LinearAttention(24, 2, None)),
    torch.randn(1, 35, 24, generator=rng),
)

# %% tags=["check"]
order = torch.randperm(35, generator=rng)
assert torch.allclose(look(x[:, order]), look(x)[:, order], atol=1e-5)  # attention: no places at all
poked = x.clone()
poked[:, 17] += 1  # row 2, column 3 of a grid of 5 by 7
moved = (ff(poked, (5, 7)) - ff(x, (5, 7))).abs().amax(-1).reshape(5, 7) > 1e-6
assert moved.nonzero().tolist() == [[r, c] for r in (1, 2, 3) for c in (2, 3, 4)]  # exactly the neighbours

# %% tags=["check"]
from diffusers.models.transformers.sana_transformer import GLUMBConv

real = redraw(GLUMBConv(24, 24, 2.5, residual_connection=False))
for mine, name in {"expand": "conv_inverted", "depthwise": "conv_depth", "out": "conv_point"}.items():
    for leaf, value in getattr(real, name).named_parameters():
        ff.get_parameter(f"{mine}.{leaf}").copy_(value.reshape(ff.get_parameter(f"{mine}.{leaf}").shape))
assert torch.allclose(ff(x, (5, 7)), real(x.mT.unflatten(-1, (5, 7))).flatten(2).mT, atol=1e-5)  # the real part

# %% tags=["hide"]
far, base, maps = redraw(ConvFeedForward(24, 2.5)), torch.randn(1, 13 * 21, 24, generator=rng), []
poked = base.clone()
poked[:, 6 * 21 + 10] += 1
for _ in range(5):
    base, poked = base + far(base, (13, 21)), poked + far(poked, (13, 21))
    maps.append((poked - base).abs().mean(-1).reshape(13, 21))
fig, axes = plt.subplots(1, 3, figsize=(6.6, 1.9))
for ax, depth in zip(axes, (1, 3, 5)):
    ax.imshow(maps[depth - 1] > 1e-7, cmap="Blues", vmin=0, vmax=1.4)
    ax.set(title=f"after {depth} block{'s' * (depth > 1)}", xticks=[], yticks=[])
fig.suptitle("One touched token: convolutions pass it on, a ring a block", x=0.01, ha="left", fontsize=11)
show(
    fig,
    alt="Three grids: the change of one token reaches a square of 3, of 7 and of 11 places after one, three and five blocks.",
)

# %% [markdown] lang="zh"
# ## 块
#
# 其余都是旧相识：第 05 章的调制表，第 04 章的交叉注意力（前面没有归一化，也没有门控）。和 `DiTBlock` 相比，只是前馈网络还要知道网格的形状。

# %% [markdown] lang="en" twin="ad1b7daf"
# ## The block
#
# The rest is familiar: the modulation table of chapter 05, the cross-attention of chapter 04, with no norm before it and no gate. Compared with `DiTBlock`, only the feed-forward network also needs the grid.


# %% tags=["export"]
class SanaBlock(nn.Module):
    """Linear self-attention, cross-attention to the text without a gate, gated convolution; knobs from a table.

    forward(x (B, N, D), shared knobs (B, 6 · D), text (B, M, Dt), text_mask (B, M) bool, grid); shared knobs may be two
    `Mod` made before, and text the keys and values that `CrossAttention.keys_values` made.
    Source: Xie et al. 2024 (Sana); diffusers' ``SanaTransformerBlock``.
    """

    def __init__(self, c: SanaConfig):
        super().__init__()
        norm, width = "rms_across" if c.qk_norm else None, c.width
        options = {"head_dim": c.cross_attention_head_dim, "eps": 1e-5}
        self.modulation = ModulationTable(width, 2)
        self.attn = LinearAttention(width, c.num_attention_heads, norm, bias=c.attention_bias, eps=1e-5)
        self.cross = CrossAttention(width, c.num_cross_attention_heads, c.cross_attention_dim, norm, **options)
        self.ff = ConvFeedForward(width, c.mlp_ratio)

    def forward(self, x, shared, text, text_mask, grid):
        for_attn, for_ff = self.modulation(shared)
        x = torch.addcmul(x, for_attn.gate, self.attn(modulate(x, for_attn)))
        x = x + self.cross(x, text, text_mask)
        return torch.addcmul(x, for_ff.gate, self.ff(modulate(x, for_ff), grid))


# %% tags=["export"]
BLOCK = {"modulation.table": "scale_shift_table"}
BLOCK |= {"attn.stream.qkv": "attn1.{to_q,to_k,to_v}", "attn.stream.out": "attn1.to_out.0"}
BLOCK |= {"cross.q": "attn2.to_q", "cross.kv": "attn2.{to_k,to_v}", "cross.out": "attn2.to_out.0"}
BLOCK |= {f"attn.stream.norm_{a}": f"attn1.norm_{a}" for a in "qk"}
BLOCK |= {f"cross.norm_{a}": f"attn2.norm_{a}" for a in "qk"}
SANA_BLOCK = BLOCK | {"ff.expand": "ff.conv_inverted", "ff.depthwise": "ff.conv_depth", "ff.out": "ff.conv_point"}


# %% tags=["export"]
def sana_keys(config: SanaConfig) -> KeyMap:
    """Where each tensor of `Sana` lies in diffusers' checkpoint."""
    names = {"image_in": "patch_embed.proj", "knobs": "time_embed.linear", "text_norm": "caption_norm"}
    time = "time_embed." + "emb." * (not config.guidance_embeds)
    mlps = {"time_in.mlp": f"{time}timestep_embedder", "guidance_in.mlp": f"{time}guidance_embedder"}
    for ours, theirs in (mlps | {"text_in": "caption_projection"}).items():
        names |= {f"{ours}.{2 * i}": f"{theirs}.linear_{i + 1}" for i in (0, 1)}
    names |= {f"blocks.*.{ours}": f"transformer_blocks.*.{theirs}" for ours, theirs in SANA_BLOCK.items()}
    names |= {"table": "scale_shift_table", "out": "proj_out"}
    flat = ("image_in.weight", "blocks.*.ff.expand.weight", "blocks.*.ff.out.weight")
    return KeyMap(names, changes=dict.fromkeys(flat, flatten_patches))


# %% [markdown] lang="zh"
# ## 网络
#
# 1×1 的卷积就是线性层，对照表里用 `flatten_patches` 摊平。收尾也用一张小表：它加上时间向量本身，而不是六个旋钮。`conditions` 与 `velocity` 的分工同第 06 章。Sana-Sprint 还有 QK 归一化和引导嵌入，配置里打开就是。

# %% [markdown] lang="en" twin="59b804b6"
# ## The network
#
# A convolution of 1×1 is a linear layer; the key map flattens it with `flatten_patches`. The end has a small table, too: added to the time vector itself, not to the six knobs. `conditions` and `velocity` share the work as in chapter 06. Sana-Sprint has QK norms and embedded guidance besides, switched on by the configuration.


# %% tags=["export"]
def last_mod(table: Tensor, cond: Tensor | Mod) -> Mod:
    """Shift and scale before the last layer: table (2, D) + cond (B, D) or (B, N, D); a `Mod` passes unchanged."""
    if isinstance(cond, Mod):
        return cond
    return Mod(*(table + cond.reshape(len(cond), -1, 1, cond.shape[-1])).unbind(-2))  # (B, 1 or N, D) each


# %% tags=["export"]
class Sana(nn.Module):
    """Velocity network of Sana, and of Sana-Sprint with QK norms and guidance; the arguments are those of `DiT`.

    Source: Xie et al. 2024; diffusers ``sana_transformer.py``.
    """

    Config, key_map = SanaConfig, staticmethod(sana_keys)

    def __init__(self, config: SanaConfig):
        super().__init__()
        self.config, c, width = config, config, config.width
        self.min_multiple = c.patch_size  # latent height and width must be multiples of this
        self.image_in = nn.Linear(c.patch_size**2 * c.in_channels, width)
        self.text_in = nn.Sequential(nn.Linear(c.caption_channels, width), nn.GELU("tanh"), nn.Linear(width, width))
        self.text_norm = RMSNorm(width, eps=1e-5)
        self.time_in, self.guidance_in = TimestepEmbedder(width), TimestepEmbedder(width) if c.guidance_embeds else None
        self.knobs, self.table = nn.Linear(width, 6 * width), nn.Parameter(torch.zeros(2, width))
        self.blocks = nn.ModuleList(SanaBlock(c) for _ in range(c.num_layers))
        self.out = nn.Linear(width, c.patch_size**2 * (c.out_channels or c.in_channels))

    def forward(self, latents, t, text, text_mask=None, pooled=None, guidance=None) -> Tensor:
        """Velocity (B, C, H, W) at t = 1000 · σ, (B,), under text (B, M, 2304), text_mask (B, M); pooled is unused."""
        return self.velocity(latents, self.conditions(latents.shape[1:], t, text, text_mask, pooled, guidance))

    def conditions(self, shape, t, text, text_mask=None, pooled=None, guidance=None) -> Conditions:
        """All of a forward that looks at no latent, whatever their ``shape``; every block's text is the same tokens."""
        cond = self.time_in(t * self.config.timestep_scale)  # (B, D)
        if guidance is not None:
            cond = cond + self.guidance_in(guidance.float())
        text, shared, depth = self.text_norm(self.text_in(text)), self.knobs(F.silu(cond)), len(self.blocks)
        return Conditions([text] * depth, text_mask, None, [shared] * depth + [cond])

    def velocity(self, latents, given: Conditions) -> Tensor:
        """The rest of `forward`: velocity (B, C, H, W) of the latents under given conditions."""
        p, grid = self.config.patch_size, patch_grid(*latents.shape[-2:], self.config.patch_size)
        x = self.image_in(patchify(latents, p))  # (B, N, D)
        for block, shared, text in zip(self.blocks, given.cond, given.text):
            x = block(x, shared, text, given.text_mask, grid)
        return unpatchify(self.out(modulate(x, last_mod(self.table, given.cond[-1]))), p, grid)

    def hoist(self, shape, times, text, text_mask=None, pooled=None, guidance=None) -> list[Conditions]:
        """`conditions` for all times (S,), see `work_ahead`; ``shape`` is that of the latents without the batch."""
        guidance = None if guidance is None else guidance.repeat(len(times))
        given = self.conditions(shape, times.repeat_interleave(len(text)), text, text_mask, pooled, guidance)
        return work_ahead(self, given, len(times))

    def as_diffusers(self, hidden_states, encoder_hidden_states, timestep, guidance=None, encoder_attention_mask=None):
        """The same under diffusers' names; its ``timestep`` is already scaled."""
        mask = None if encoder_attention_mask is None else encoder_attention_mask.bool()
        t = timestep.float() / self.config.timestep_scale
        return self(hidden_states, t, encoder_hidden_states, mask, None, guidance)


# %%
import tempfile
from pathlib import Path

from diffusion_engine.reference.checkpoint import DropIn, load

SIZES = dict(in_channels=4, out_channels=4, num_attention_heads=4, attention_head_dim=12, num_layers=2, sample_size=8)
SIZES |= dict(num_cross_attention_heads=3, cross_attention_head_dim=16, cross_attention_dim=48, caption_channels=24)
SPRINT = dict(qk_norm="rms_norm_across_heads", guidance_embeds=True, timestep_scale=1000.0)
room, real = tempfile.TemporaryDirectory(), torch.arange(7) < torch.tensor([[7], [4]])
latents, text = torch.randn(2, 4, 4, 6, generator=rng), torch.randn(2, 7, 24, generator=rng)

# %% [markdown] lang="zh"
# ## 对一对
#
# diffusers 写下两个很小的检查点：Sana 和 Sana-Sprint。图是长方形，第二句话有三个补位词元，要用掩码遮住。

# %% [markdown] lang="en" twin="68132a7c"
# ## Against diffusers
#
# diffusers writes two very small checkpoints, a Sana and a Sana-Sprint. The picture is a rectangle, and the second prompt ends in three tokens of padding, which a mask hides.

# %% tags=["check"]
from diffusers import SanaTransformer2DModel

theirs, ours, t, w = {}, {}, torch.tensor([987.6, 3.2]), torch.tensor([0.45, 0.1])
for name, extra, scale in (("Sana", {}, None), ("Sprint", SPRINT, w)):
    theirs[name] = redraw(SanaTransformer2DModel(**SIZES, **extra))
    theirs[name].save_pretrained(Path(room.name) / name)
    ours[name] = load(Sana, Path(room.name) / name)
    times = t * extra.get("timestep_scale", 1.0)  # diffusers' pipeline scales; we scale inside
    expected = theirs[name](latents, text, times, scale, encoder_attention_mask=real.long()).sample
    assert (ours[name](latents, t, text, real, None, scale) - expected).abs().max() < 1e-5
    print(f"{name}: velocities of size {expected.std():.1f} differ by less than 1e-5")

# %% tags=["check"]
noise = torch.where(real[..., None], text, 100.0)
sana, velocity = ours["Sana"], ours["Sana"](latents, t, text, real)
assert torch.allclose(sana(latents, t, noise, real), velocity, atol=1e-5)  # padding has no say
assert (
    sana(latents.flip(2), t, text, real).flip(2) - velocity
).abs().mean() > 0.01  # the convolution knows up and down

# %% tags=["check"]
truth = theirs["Sana"](latents, text, t, encoder_attention_mask=real.long()).sample
mine = DropIn(load(Sana, Path(room.name) / "Sana", dtype=torch.bfloat16))
half = SanaTransformer2DModel.from_pretrained(Path(room.name) / "Sana", torch_dtype=torch.bfloat16)
call = dict(timestep=t, encoder_attention_mask=real.long(), encoder_hidden_states=text.bfloat16())
errors = [(net(latents.bfloat16(), **call).sample - truth).square().mean().sqrt() for net in (mine, half)]
assert errors[0] < 1.25 * errors[1]  # in bf16 no further from the fp32 truth than diffusers itself

# %% [markdown] lang="zh"
# ## 与潜变量无关的
#
# 这一家能提出来的最多。图像从不改动文字：交叉注意力里，每块的键和值一张图只算一次，所有步共用，掩码照旧。旋钮只看时间，连同每块的小表，开跑前一次加好。每一步剩下的，只有图像自己。

# %% [markdown] lang="en" twin="95970b69"
# ## What no latent changes
#
# In this family most can be hoisted. The image never changes the text: keys and values of every block's cross-attention are made once a picture and shared by all steps, under the same mask. Knobs look at time alone and are added to every block's table before the first step. What is left for a step is the image itself.


# %% tags=["export"]
def work_ahead(model: nn.Module, given: Conditions, steps: int) -> list[Conditions]:
    """`Conditions` of S · B times as S `Conditions` of B, see `at_each_step`, whose knobs, keys and values are made.

    One product a layer for all times. Knobs take S · B · blocks · 6 · D numbers, keys and values B · blocks · 2 · M · D.
    ``model`` has ``blocks`` with ``modulation`` and ``cross``, and a ``table`` at the end.
    """
    knobs = [block.modulation(shared) for block, shared in zip(model.blocks, given.cond)]
    text = [block.cross.keys_values(text) for block, text in zip(model.blocks, given.text)]
    return at_each_step(given._replace(text=text), [*knobs, last_mod(model.table, given.cond[-1])], steps)


# %% tags=["check"]
times = torch.tensor([1000.0, 640.5, 3.25])
for name, scale in {"Sprint": w, "Sana": None}.items():
    ahead = ours[name].hoist(latents.shape[1:], times, noise, real, None, scale)  # padding still has no say
    for time, given in zip(times, ahead, strict=True):
        expected = ours[name](latents, time.expand(2), text, real, None, scale)
        assert torch.allclose(ours[name].velocity(latents, given), expected, atol=1e-5)  # ahead, or block by block
assert ahead[0].text is ahead[2].text and isinstance(ahead[0].text[1], tuple)  # keys and values, shared by all steps
assert sana.hoist(latents.shape[1:], times, text, real | True)[0].text_mask is None  # nothing to hide

# %% [markdown] lang="zh"
# 做旋钮、做键和值的权重，开跑以后没人再读，可以离开内存。数一数占多少，再像第 16 章那样让梯度核对：从 `velocity` 往回走，只有它们收不到梯度。

# %% [markdown] lang="en" twin="1cc7029a"
# Once the walk begins, nobody reads the weights that made knobs, keys and values; they could leave memory. Count them, and let the gradient confirm it as in chapter 16: going back from `velocity`, they alone receive none.


# %%
def read_ahead_only(name: str) -> bool:
    parts = ("text_", "time_in", "knobs", "table")
    return name.startswith(parts) or any(part in name for part in ("modulation", "cross.kv", "cross.norm_k"))


with torch.device("meta"):
    sizes = {name: weight.numel() for name, weight in Sana(SanaConfig()).named_parameters()}
idle = sum(size for name, size in sizes.items() if read_ahead_only(name))
print(f"Sana 1.6B: {idle / 1e9:.2f} of {sum(sizes.values()) / 1e9:.2f} billion weights are read by hoist alone")

# %% tags=["check"]
sana.requires_grad_(True).velocity(latents, ahead[0]).sum().backward()
sana.requires_grad_(False)
for name, weight in sana.named_parameters():
    assert (weight.grad is None) == read_ahead_only(name), name  # no gradient reaches what was made ahead

# %% [markdown] lang="zh"
# ## 住进 SanaPipeline
#
# 流水线照跑，只换 `transformer`；提示词嵌入和掩码直接给，批里先无条件、后有条件。

# %% [markdown] lang="en" twin="f24d5c02"
# ## Inside SanaPipeline
#
# The pipeline runs as it is, with another `transformer`; prompt embeddings and masks are handed in, and its batch holds uncond first.

# %% tags=["check"]
from diffusers import FlowMatchEulerDiscreteScheduler, SanaPipeline

pipe = SanaPipeline(None, None, None, theirs["Sana"], FlowMatchEulerDiscreteScheduler(shift=3.0))
pipe.set_progress_bar_config(disable=True)
words = dict(prompt_embeds=text[1:], prompt_attention_mask=real[1:].long())
words |= dict(negative_prompt="", **{f"negative_{name}": value.flip(1) for name, value in words.items()})
ask = dict(height=128, width=192, num_inference_steps=4, output_type="latent", use_resolution_binning=False, **words)
ask["negative_prompt"] = None
expected = pipe(**ask, generator=torch.Generator().manual_seed(7)).images
pipe.transformer = DropIn(sana)
assert (pipe(**ask, generator=torch.Generator().manual_seed(7)).images - expected).abs().max() < 1e-4

# %%
with torch.device("meta"):
    count = sum(weight.numel() for weight in Sana(SanaConfig()).parameters())
print(f"Sana 1.6B: {count / 1e9:.2f} billion weights, {2 * count / 1e9:.1f} GB in bf16")

# %% [markdown] lang="zh"
# ## 在 diffusers 里，这些在哪儿
#
# | 我们 | diffusers |
# | --- | --- |
# | `linear_attention` | `attention_processor.py`，`SanaLinearAttnProcessor2_0` |
# | `ConvFeedForward` | `sana_transformer.py`，`GLUMBConv` |
# | `SanaBlock` | `SanaTransformerBlock` |
# | `time_in` 与 `knobs` | `normalization.py`，`AdaLayerNormSingle` |
# | 收尾的小表 | `SanaModulatedNorm` |
# | `text_in` | `embeddings.py`，`PixArtAlphaTextProjection` |
#
# **还缺什么**：2K 和 4K 版本带一张插值的位置表，这里会拒绝；DC-AE 和 Gemma 由第 24 章去借。到此为止都是图，第 19 章起，潜变量多了一根时间轴。
#
# ## 三个问题
#
# 1. 预测：把 ReLU 去掉（$\phi(x) = x$），哪条检查会变红？
# 2. 修改：在 bf16 里算线性注意力，误差大多少？
# 3. 动手：先算 $k^\top v$ 能不能一块一块地加？写出来，证明内存里从不需要整个 $k$。

# %% [markdown] lang="en" twin="7bd3dba0"
# ## Where this lives in diffusers
#
# | Ours | diffusers |
# | --- | --- |
# | `linear_attention` | `attention_processor.py`, `SanaLinearAttnProcessor2_0` |
# | `ConvFeedForward` | `sana_transformer.py`, `GLUMBConv` |
# | `SanaBlock` | `SanaTransformerBlock` |
# | `time_in` and `knobs` | `normalization.py`, `AdaLayerNormSingle` |
# | the small table at the end | `SanaModulatedNorm` |
# | `text_in` | `embeddings.py`, `PixArtAlphaTextProjection` |
#
# **What is missing:** the 2K and 4K versions carry an interpolated position table and are refused; DC-AE and Gemma are borrowed in chapter 24. So far all was pictures; from chapter 19 on, latents have an axis of time.
#
# ## Three questions
#
# 1. Predict: without the ReLU ($\phi(x) = x$), which check turns red?
# 2. Modify: compute linear attention in bf16. How much larger is the error?
# 3. Build: can $k^\top v$ be summed chunk by chunk? Write it; show that all of $k$ need never be in memory.

# %% tags=["solution"]
# 1 · "a distribution" survives, for a sum of weights still divides; but the sum may pass zero, and outputs explode
plain = q @ (k.mT @ F.pad(v, (0, 1), value=1.0))
assert (plain[..., :-1] / plain[..., -1:]).abs().max() > 20 * v.abs().max()
assert linear_attention(q, k, v).abs().max() <= v.abs().max()  # with the ReLU it is an average, never larger

# %% tags=["solution"]
# 2 · sums over all tokens lose digits: many times the rounding of the inputs alone
exact, b = linear_attention(q, k, v), [tensor.bfloat16() for tensor in (q, k, v)]
sums = b[0].relu() @ (b[1].relu().mT @ F.pad(b[2], (0, 1), value=1.0))
rounded, island = sums[..., :-1] / sums[..., -1:], linear_attention(*b)
assert (rounded - exact).abs().mean() > 1.2 * (island - exact).abs().mean()

# %% tags=["solution"]
# 3 · a sum may be taken in any order; this is also how a stream of tokens could be attended to
total = torch.zeros(2, 4, 16, 17)
for part_k, part_v in zip(k.split(8, dim=2), v.split(8, dim=2)):
    total += part_k.relu().mT @ F.pad(part_v, (0, 1), value=1.0)
both = q.relu() @ total
assert torch.allclose(both[..., :-1] / both[..., -1:], linear_attention(q, k, v), atol=1e-5)

# %% [markdown] lang="zh"
# ## 小结
#
# - 把 softmax 换成 ReLU，括号就能移动：代价从 $N^2$ 变成 $N$，数字和直白写法一样。
# - 分母是多出来的一列 $1$；这一段总在 fp32 里算。
# - 没有位置编码：3×3 卷积每块把消息传给一圈邻居，补零告诉词元边在哪里。
# - 文字走交叉注意力，补位由掩码遮住；旋钮来自一张共用的表。
# - 与 diffusers 相比，速度相差不到 $10^{-5}$，流水线的潜变量不到 $10^{-4}$。
#
# 阅读卡片：Sana（[`papers/07_sana`](../../papers/07_sana.zh.md)）。下一章：19。

# %% [markdown] lang="en" twin="54217959"
# ## Recap
#
# - With ReLU for softmax the brackets may move: the cost falls from $N^2$ to $N$, and the numbers equal the plain way's.
# - The denominator is one more column of ones; this part is always computed in fp32.
# - No position embedding: a 3×3 convolution passes news on by one ring a block, and its zeros tell where the edge is.
# - Text takes the cross-attention, a mask hides padding; knobs come from one shared table.
# - Against diffusers the velocity is within $10^{-5}$, the pipeline's latents within $10^{-4}$.
#
# Reading card: Sana ([`papers/07_sana`](../../papers/07_sana.en.md)). Next: chapter 19.
