# ---
# jupyter:
#   course:
#     minutes: 45
#     module: transformer_block
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown] lang="zh"
# # 05 · AdaLN 与变换器块（transformer block）
#
# 读完这一章，一个条件向量就能指挥几百个词元：你会做出三种变换器块，它们出生时什么都不改，抄过权重后与 SD3、FLUX、Wan 的块数值一致。
#
# | 你会做出 | 你需要 | 时间 | 模块 |
# | --- | --- | --- | --- |
# | 调制、AdaLN-Zero、单流块、双流块、并行块 | 第 03 章的条件向量，第 04 章的注意力 | 45 分钟 | `diffusion_engine/transformer_block.py` |

# %% [markdown] lang="en" twin="6a4ffc92"
# # 05 · AdaLN and the transformer block
#
# After this chapter one condition vector steers hundreds of tokens: you build three transformer blocks that change nothing on the day they are born, and equal SD3's, FLUX's and Wan's once the weights are copied.
#
# | You build | You need | Time | Module |
# | --- | --- | --- | --- |
# | modulation, AdaLN-Zero, the single-stream, joint and parallel blocks | the condition of chapter 03, the attention of chapter 04 | 45 minutes | `diffusion_engine/transformer_block.py` |

# %% [markdown] lang="zh"
# **先想一想**：网络已经有了时钟（第 03 章），图块也能彼此看见（第 04 章）。现在要让一个向量「$t = 900$，画火箭」影响每一层的每一个词元。加到词元上？当作一个额外的词元？还是别的办法？写下你的选择，再写下它的代价。

# %% [markdown] lang="en" twin="4cfc2747"
# **Think first:** the network has a clock (chapter 03), and patches see each other (chapter 04). Now one vector, "$t = 900$, draw a rocket", must reach every token in every layer. Add it to the tokens? Make it one more token? Something else? Write down your choice, and what it costs.

# %% tags=["export"]
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffusion_engine.attention import (
    Heads,
    JointAttention,
    QKNorm,
    Rope,
    SelfAttention,
    attention,
    rms_normalize,
)

# %% [markdown] lang="zh"
# ## 先把音量归零
#
# 想象一张调音台。每路声音进来时响度不一，所以先统一音量，旋钮的刻度才有意义。LayerNorm 做的就是这件事，$\mu$ 和 $\sigma$ 是这个词元自己的均值和标准差（这里的 $\sigma$ 不是噪声水平）：
#
# $$\mathrm{LN}(x) = \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}}$$

# %% [markdown] lang="en" twin="419f93b2"
# ## First, level the volume
#
# Picture a mixing desk. Tracks arrive at different loudness; level them first, or the marks on the knobs mean nothing. LayerNorm does just that, with $\mu$ and $\sigma$ the token's own mean and standard deviation (this $\sigma$ is no noise level):
#
# $$\mathrm{LN}(x) = \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}}$$

# %%
token = torch.tensor([1.0, 2.0, 3.0, 10.0])
louder = 3 * token + 5
print((token - token.mean()) / token.std(correction=0))
print((louder - louder.mean()) / louder.std(correction=0))  # the same: loudness and offset are gone

# %% [markdown] lang="zh"
# ## 三个旋钮
#
# 音量归零之后，条件来决定新的音量，这就是自适应层归一化（adaptive layer norm，AdaLN）。每个特征一个推子 $\gamma$，一个偏移 $\beta$：
#
# $$\mathrm{modulate}(x) = (1 + \gamma) \odot \mathrm{LN}(x) + \beta$$
#
# 写成 $1 + \gamma$，零就表示「不动」。归一化之后均值是 $0$、标准差是 $1$，所以旋钮取常数时，输出的均值就是 $\beta$，标准差就是 $|1 + \gamma|$：漏掉那个 $1$，形状照旧，检查会变红。
#
# | 记号 | 形状 | 含义 |
# | --- | --- | --- |
# | $x$ | $(B, N, D)$ | 词元 |
# | $c$ | $(B, D)$ | 条件：时间加提示词 |
# | $\beta, \gamma, \alpha$ | $(B, 1, D)$ | 偏移（shift）、缩放（scale）、门控（gate，稍后登场） |

# %% [markdown] lang="en" twin="6bdeaa51"
# ## Three knobs
#
# With the volume levelled, the condition sets a new one: adaptive layer norm, AdaLN. Each feature has a fader $\gamma$ and an offset $\beta$:
#
# $$\mathrm{modulate}(x) = (1 + \gamma) \odot \mathrm{LN}(x) + \beta$$
#
# Written as $1 + \gamma$, zero means "leave it". After the norm the mean is $0$ and the deviation $1$, so with constant knobs the output has mean $\beta$ and deviation $|1 + \gamma|$: forget the $1$, and the shapes survive but the check turns red.
#
# | Symbol | Shape | Meaning |
# | --- | --- | --- |
# | $x$ | $(B, N, D)$ | tokens |
# | $c$ | $(B, D)$ | the condition: time plus prompt |
# | $\beta, \gamma, \alpha$ | $(B, 1, D)$ | shift, scale, gate (enters later) |


# %% tags=["export"]
class Mod(NamedTuple):
    """What the condition says to one sub-layer: shift β, scale γ and gate α, each (B, 1, D), or (B, N, D) per token.

    ``gate`` is None where nothing is added back to a residual stream.
    """

    shift: Tensor
    scale: Tensor
    gate: Tensor | None = None


def normalize(x: Tensor, kind: str = "layer") -> Tensor:
    """LayerNorm or RMSNorm over the last axis, without weights, computed in fp32, ε = 1e-6.

    Args:
        x: (…, D), any float dtype; the result has the same.
        kind: "layer", (x − μ) / sqrt(σ² + ε), or "rms", x / sqrt(mean(x²) + ε) (LTX-Video).

    Raises:
        ValueError: another kind.
    """
    if kind == "layer":
        return F.layer_norm(x, x.shape[-1:], eps=1e-6)  # fp32 inside, whatever x is
    if kind == "rms":
        return rms_normalize(x)
    raise ValueError(f"norm {kind!r} is unknown; try 'layer' or 'rms'")


def modulate(x: Tensor, mod: Mod, norm: str = "layer") -> Tensor:
    """(1 + γ) · norm(x) + β: tokens x (B, N, D) → (B, N, D). Zero shift and scale give the plain norm.

    Source: Perez et al. 2017 (FiLM); Peebles & Xie 2023 (DiT), §3.2.
    """
    return torch.addcmul(mod.shift, normalize(x, norm), 1 + mod.scale)  # β + norm(x) · (1 + γ), in one pass


# %% tags=["check"]
x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0)) * 7 - 3
out = modulate(x, Mod(shift=torch.tensor(0.5), scale=torch.tensor(-0.7)))
assert torch.allclose(out.mean(-1), torch.full((2, 5), 0.5), atol=1e-5)
assert torch.allclose(out.std(-1, correction=0), torch.full((2, 5), 0.3), atol=1e-5)
assert torch.allclose(modulate(3 * x + 5, Mod(torch.zeros(1), torch.zeros(1))), normalize(x), atol=1e-5)

# %% tags=["hide"]
import matplotlib.pyplot as plt

from course.figures import show

fig, ax = plt.subplots(figsize=(6.4, 2.6))
settings = {"β 0, γ 0: plain LayerNorm": (0.0, 0.0), "β 3, γ −0.5: louder base, quieter detail": (3.0, -0.5)}
settings["β 0, γ 2: three times as loud"] = (0.0, 2.0)
for label, (shift, scale) in settings.items():
    values = modulate(x, Mod(torch.tensor(shift), torch.tensor(scale))).flatten()
    ax.hist(values.numpy(), bins=60, range=(-8, 8), histtype="step", linewidth=1.6, label=label)
ax.set(title="The same token values under three conditions", xlabel="feature after modulation", ylabel="count")
ax.legend(loc="upper left", fontsize=8)
show(fig, alt="Three histograms of the same features: plain, shifted right and narrow, and three times as wide.")

# %% [markdown] lang="zh"
# ## 条件怎样转动旋钮
#
# 一个线性层读条件，一次写出所有旋钮的位置：$[\beta, \gamma, \alpha, \dots] = W\,\mathrm{SiLU}(c) + b$。权重和偏置从零开始，所以出生时所有旋钮都在零位。
#
# 同一个样本的词元共用一组旋钮，因此每个旋钮的形状是 $(B, 1, D)$。少了中间那个 $1$，平时会报错，偏偏在 $B = N$ 时悄悄通过：第 $i$ 个词元用了第 $i$ 个样本的旋钮。

# %% [markdown] lang="en" twin="64675bdf"
# ## How the condition turns the knobs
#
# One linear layer reads the condition and writes every knob at once: $[\beta, \gamma, \alpha, \dots] = W\,\mathrm{SiLU}(c) + b$. Weights and bias start at zero, so at birth every knob stands at zero.
#
# All tokens of a sample share one set of knobs; hence the shape $(B, 1, D)$ of each. Leave out the $1$, and $B = N$ passes in silence: token $i$ is steered by the knobs of sample $i$.


# %% tags=["export"]
def split_mods(flat: Tensor, n: int, gate: bool = True) -> list[Mod]:
    """Cut knobs (B, k·n·D), or (B, N, k·n·D) per token, into n `Mod`s in the order shift, scale, gate; k = 3 or 2."""
    k = 3 if gate else 2
    flat = flat.unsqueeze(1) if flat.ndim == 2 else flat  # (B, 1, k·n·D): one set for all tokens of a sample
    parts = flat.chunk(k * n, dim=-1)
    return [Mod(*parts[k * i : k * i + k]) for i in range(n)]


class Modulation(nn.Module):
    """Linear(SiLU(c)): condition (B, D) → n × `Mod`; all zero at init, so every gate starts closed.

    Args:
        width: D. n: sub-layers to steer.
        gate: whether each gets a gate, too (without one: AdaLN, as before a final layer).

    forward(c) → n × `Mod`; knobs that were made before, a list of `Mod`, pass unchanged.

    Raises:
        ValueError: the condition is not (B, D), or (B, N, D) for knobs per token.

    Source: Peebles & Xie 2023 (DiT), AdaLN-Zero.
    """

    def __init__(self, width: int, n: int, gate: bool = True):
        super().__init__()
        self.n, self.gate = n, gate
        self.linear = nn.Linear(width, (3 if gate else 2) * n * width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, cond: Tensor | list[Mod]) -> list[Mod]:
        if isinstance(cond, list):
            return cond
        if cond.ndim not in (2, 3) or cond.shape[-1] != self.linear.in_features:
            raise ValueError(f"condition has shape {tuple(cond.shape)}; expected (B, {self.linear.in_features})")
        return split_mods(self.linear(F.silu(cond)), self.n, self.gate)


# %% tags=["check"]
rng, modulation = torch.Generator().manual_seed(1), Modulation(64, 1)
x, cond = torch.randn(4, 4, 64, generator=rng), torch.randn(4, 64, generator=rng)  # B = N: the dangerous case
nn.init.normal_(modulation.linear.weight, generator=rng)
alone = torch.cat([modulate(x[i : i + 1], *modulation(cond[i : i + 1])) for i in range(4)])
(mod,) = modulation(cond)
assert torch.allclose(modulate(x, mod), alone, atol=1e-5)  # a sample in a batch is the sample alone
assert not torch.allclose(modulate(x, Mod(*[knob.squeeze(1) for knob in mod])), alone, atol=0.1)  # same shape, wrong

# %% [markdown] lang="zh"
# ## 总开关：门控
#
# 变换器块有两个子层：注意力在词元之间交换信息，前馈网络让每个词元自己想一想。每个子层都先读调制过的 $x$，结果乘上门控再加回残差：
#
# $$x \leftarrow x + \alpha_1 \odot \mathrm{attn}(\mathrm{modulate}_1(x)), \qquad x \leftarrow x + \alpha_2 \odot \mathrm{ff}(\mathrm{modulate}_2(x))$$
#
# 门控为零，块就是恒等映射。这就是 AdaLN-Zero 的 Zero。代码里 `torch.addcmul(x, α, y)` 就是 $x + \alpha \odot y$，一遍算完，不留中间张量。

# %% [markdown] lang="en" twin="4fe5eb96"
# ## The main switch: the gate
#
# A transformer block has two sub-layers: attention passes information between tokens, the feed-forward network lets each token think for itself. Each reads a modulated $x$; its result goes through a gate and back onto the residual:
#
# $$x \leftarrow x + \alpha_1 \odot \mathrm{attn}(\mathrm{modulate}_1(x)), \qquad x \leftarrow x + \alpha_2 \odot \mathrm{ff}(\mathrm{modulate}_2(x))$$
#
# With the gate at zero the block is the identity. That is the Zero in AdaLN-Zero. In code `torch.addcmul(x, α, y)` is $x + \alpha \odot y$ in one pass, with no tensor in between.


# %% tags=["export"]
def gelu(hidden: Tensor, approximate: str = "tanh") -> Tensor:
    """GELU of what a layer has just made; in its place unless a gradient needs it: nothing in a block is as wide."""
    if hidden.requires_grad:
        return F.gelu(hidden, approximate=approximate)
    return torch.ops.aten.gelu_(hidden, approximate=approximate)


class FeedForward(nn.Sequential):
    """Linear → GELU (tanh form) → Linear on every token alone: width → hidden → width.

    Args:
        width: D. ratio: hidden = ratio · width.
        hidden: the hidden width itself, where a model does not use a whole ratio (Wan2.1: 1536 → 8960).
    """

    def __init__(self, width: int, ratio: int = 4, hidden: int | None = None):
        hidden = ratio * width if hidden is None else hidden
        super().__init__(nn.Linear(width, hidden), nn.GELU("tanh"), nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        return self[2](gelu(self[0](x), self[1].approximate))


class DiTBlock(nn.Module):
    """x ← x + α₁ · attn(modulate(x)); x ← x + α₂ · ff(modulate(x)): the AdaLN-Zero block, (B, N, D) → (B, N, D).

    Args:
        width: D. heads: H. qk_norm: as in `SelfAttention`.
        norm: "layer" or "rms", see `normalize`.
        table: knobs from a `ModulationTable` on a shared vector instead of a `Modulation` of its own.
        cross: a module called as cross(x, text, text_mask); added between the two sub-layers, without a gate.
        cross_norm: whether a LayerNorm with weights stands before it (Wan2.1: yes; Sana, LTX-Video: no).
        ff: a feed-forward network in place of `FeedForward(width)`.
        options: ``bias``, ``head_dim``, ``eps`` of `Heads`.

    forward(x (B, N, D), cond (B, D), or (B, 6·D) with a table; mask, rope and chunk as in `SelfAttention`; text, text_mask
    as ``cross`` takes them). Source: Peebles & Xie 2023 (DiT); Chen et al. 2023 (PixArt-α) for table and cross.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        qk_norm: QKNorm = True,
        *,
        norm: str = "layer",
        table: bool = False,
        cross: nn.Module | None = None,
        cross_norm: bool = False,
        ff: nn.Module | None = None,
        **options,
    ):
        super().__init__()
        self.norm = norm
        self.modulation = ModulationTable(width, 2) if table else Modulation(width, 2)
        self.attn = SelfAttention(width, heads, qk_norm, **options)
        self.ff = FeedForward(width) if ff is None else ff
        self.cross, self.cross_norm = cross, nn.LayerNorm(width, eps=1e-6) if cross_norm else nn.Identity()

    def forward(self, x, cond, mask=None, rope: Rope | None = None, chunk=None, text=None, text_mask=None) -> Tensor:
        for_attn, for_ff = self.modulation(cond)
        x = torch.addcmul(x, for_attn.gate, self.attn(modulate(x, for_attn, self.norm), mask, rope, chunk))
        if self.cross is not None:
            x = x + self.cross(self.cross_norm(x), text, text_mask)
        return torch.addcmul(x, for_ff.gate, self.ff(modulate(x, for_ff, self.norm)))


# %% tags=["check"]
torch.manual_seed(0)
block, x, cond, target = DiTBlock(64, 4), torch.randn(3, 10, 64), torch.randn(3, 64), torch.randn(3, 10, 64)
for loudness in (0.0, 1.0, 1000.0):
    assert torch.equal(block(x, loudness * cond), x)  # a new block hands its input on, bit for bit

# %% [markdown] lang="zh"
# ## 为什么要从「不说话」开始
#
# 随机的层只会帮倒忙。叠四十八层，门控全开和全关各试一次，看信号还剩多少像输入。

# %% [markdown] lang="en" twin="cb1ab3dc"
# ## Why begin in silence
#
# Random layers only do harm. Stack forty-eight of them, once with every gate open, once with every gate closed, and see how much of the input is left.


# %% tags=["hide"]
@torch.no_grad()
def through_depth(gate: float, depth: int = 48) -> list[tuple[float, float]]:
    """Size, and likeness to the input, after each of ``depth`` random blocks whose gates all stand at ``gate``."""
    torch.manual_seed(0)
    start = signal = torch.randn(1, 16, 64)
    story = []
    for _ in range(depth):
        block = DiTBlock(64, 4)
        for weight in [p for p in [*block.attn.parameters(), *block.ff.parameters()] if p.ndim == 2]:
            nn.init.xavier_uniform_(weight)
        block.modulation.linear.bias.unflatten(0, (2, 3, 64))[:, 2].fill_(gate)
        signal = block(signal, torch.zeros(1, 64))
        likeness = F.cosine_similarity(signal.flatten(), start.flatten(), dim=0).item()
        story.append((signal.pow(2).mean().sqrt().item(), likeness))
    return story


fig, axes = plt.subplots(1, 2, figsize=(6.8, 2.6))
for gate in (0.0, 0.1, 1.0):
    for ax, curve in zip(axes, zip(*through_depth(gate))):
        ax.plot(range(1, 49), curve, label=f"gate {gate:g}")
axes[0].set(title="Open gates: the signal swells …", xlabel="blocks passed", ylabel="root mean square")
axes[1].set(title="… and forgets its input", xlabel="blocks passed", ylabel="cosine with the input", ylim=(0, 1.05))
axes[0].legend()
show(fig, alt="With gates at one the signal grows fivefold and loses its input; with gates at zero it stays as it was.")

# %% [markdown] lang="zh"
# 但是，门控为零会不会让梯度也为零，永远学不动？把 $x' = x + \alpha \odot f(\gamma, \beta)$ 求导：$\partial x' / \partial \alpha = f \neq 0$，而 $\partial x' / \partial \gamma$ 带着因子 $\alpha = 0$。所以第一步只有门控在学；门一开，其余的都醒来。

# %% [markdown] lang="en" twin="b78f2bb5"
# But does a gate at zero not also zero the gradients, for good? Differentiate $x' = x + \alpha \odot f(\gamma, \beta)$: $\partial x' / \partial \alpha = f \neq 0$, while $\partial x' / \partial \gamma$ carries the factor $\alpha = 0$. In the first step only the gates learn; once they open, everything else wakes up.

# %% tags=["check"]
((block(x, cond) - target) ** 2).mean().backward()
knobs = block.modulation.linear.weight.grad.unflatten(0, (2, 3, 64)).abs().amax(dim=(2, 3))  # (sub-layer, knob)
assert (knobs[:, 2] > 0).all() and (knobs[:, :2] == 0).all()  # gates first
assert all((p.grad == 0).all() for p in block.ff.parameters())
torch.optim.SGD(block.parameters(), lr=1.0).step()
((block(x, cond) - target) ** 2).mean().backward()
assert all(p.grad.abs().max() > 0 for p in block.parameters())  # nothing is dead

# %% [markdown] lang="zh"
# ## 恒等检查看不见的错
#
# 门关着的时候，门后面无论错成什么样，块都是恒等映射：偏移和缩放对调，它一样绿。所以从这里起，先把门打开再检查。下面的笨办法一次只算一个样本、一个词元，和公式逐字对应。

# %% [markdown] lang="en" twin="0fd84bcb"
# ## What the identity check cannot see
#
# While the gates are closed, anything may be wrong behind them and the block is still the identity: swap shift and scale, and the check stays green. So from here on, open the gates before you check. The plain version below takes one sample and one token at a time, word for word the formula.


# %%
def open_gates(module: nn.Module, seed: int = 0) -> nn.Module:
    """Give every weight a random value, so that nothing hides behind a zero."""
    generator = torch.Generator().manual_seed(seed)
    for p in module.parameters():
        nn.init.normal_(p, std=0.15, generator=generator)
    return module.eval()


def block_by_loops(block: DiTBlock, x: Tensor, cond: Tensor) -> Tensor:
    x = x.clone()
    for b in range(len(x)):
        b1, g1, a1, b2, g2, a2 = block.modulation.linear(F.silu(cond[b])).view(6, -1)
        normed = [(token - token.mean()) / (token.var(correction=0) + 1e-6).sqrt() for token in x[b]]
        x[b] += a1 * block.attn(torch.stack([(1 + g1) * token + b1 for token in normed])[None])[0]
        for n, token in enumerate(x[b]):
            normed = (token - token.mean()) / (token.var(correction=0) + 1e-6).sqrt()
            x[b, n] += a2 * block.ff((1 + g2) * normed + b2)
    return x


# %% tags=["check"]
with torch.no_grad():
    slow = block_by_loops(open_gates(block), x, cond)
    assert torch.allclose(block(x, cond), slow, atol=1e-5)
    order = torch.randperm(10)
    assert torch.allclose(block(x[:, order], cond), block(x, cond)[:, order], atol=1e-5)  # no token has a place yet
    other = torch.cat([cond[:1] + 1, cond[1:]])
    assert torch.equal(block(x, other)[1:], block(x, cond)[1:])  # a condition steers its own sample alone

# %% [markdown] lang="zh"
# ## 文字也是词元：双流块
#
# SD3 的问题是：提示词有几十个词元，怎么和图像一起走？共用一套权重，会逼着两种语言用同一副耳朵。MMDiT（multimodal DiT）给图像 $x$ 和文字 $y$ 各一套权重、各一组旋钮，只在注意力里会合：
#
# $$[a, b] = \mathrm{attn}(\mathrm{modulate}(x),\, \mathrm{modulate}'(y)), \qquad x \leftarrow x + \alpha \odot a, \qquad y \leftarrow y + \alpha' \odot b$$

# %% [markdown] lang="en" twin="72b59de0"
# ## Words are tokens too: the joint block
#
# SD3 asks: a prompt is a few dozen tokens; how do they travel with the image? One set of weights would make two languages share one pair of ears. MMDiT (multimodal DiT) gives image $x$ and text $y$ weights and knobs of their own, and lets them meet in the attention alone:
#
# $$[a, b] = \mathrm{attn}(\mathrm{modulate}(x),\, \mathrm{modulate}'(y)), \qquad x \leftarrow x + \alpha \odot a, \qquad y \leftarrow y + \alpha' \odot b$$


# %% tags=["export"]
class JointBlock(nn.Module):
    """MMDiT block: image and text tokens have weights and knobs of their own and meet in one attention.

    Args:
        width: D. heads: H. qk_norm: as in `JointAttention`.
        last: the text only feeds keys and values and goes no further; its knobs have no gate then.
        options: ``text_first``, ``bias``, ``head_dim``, ``eps`` of `JointAttention`.

    forward(x (B, N, D), text (B, M, D), cond (B, D), text_mask (B, M) bool, rope over N + M tokens) → image tokens and text
    tokens, None for the text of a last block. cond may also be a pair, one for the image and one for the text. Source: Esser et al. 2024 (SD3), figure 2; FLUX.1's double blocks.
    """

    def __init__(self, width: int, heads: int, qk_norm: QKNorm = True, last: bool = False, **options):
        super().__init__()
        self.last = last
        self.image_modulation = Modulation(width, 2)
        self.text_modulation = Modulation(width, 1, gate=False) if last else Modulation(width, 2)
        self.attn = JointAttention(width, heads, qk_norm, text_out=not last, **options)
        self.image_ff, self.text_ff = FeedForward(width), None if last else FeedForward(width)

    def forward(self, x, text, cond, text_mask=None, rope: Rope | None = None, chunk: int | None = None):
        for_image, for_text = cond if isinstance(cond, tuple) else (cond, cond)
        image_mods, text_mods = self.image_modulation(for_image), self.text_modulation(for_text)
        a, b = self.attn(modulate(x, image_mods[0]), modulate(text, text_mods[0]), text_mask, rope, chunk)
        x = torch.addcmul(x, image_mods[0].gate, a)
        text = text if self.last else torch.addcmul(text, text_mods[0].gate, b)
        del a, b  # nothing below reads them, and the widest tensors come next
        x = torch.addcmul(x, image_mods[1].gate, self.image_ff(modulate(x, image_mods[1])))
        if self.last:
            return x, None
        return x, torch.addcmul(text, text_mods[1].gate, self.text_ff(modulate(text, text_mods[1])))


# %% tags=["check"]
torch.manual_seed(1)
joint, text, text_mask = JointBlock(64, 4), torch.randn(3, 7, 64), torch.arange(7) < torch.tensor([[7], [5], [1]])
same_x, same_text = joint(x, text, cond, text_mask)
assert torch.equal(same_x, x) and torch.equal(same_text, text)  # both streams begin as the identity

with torch.no_grad():
    image_out, text_out = open_gates(joint)(x, text, cond, text_mask)
    real, noise = text_mask[..., None], torch.randn(3, 7, 64)
    moved = joint(x, torch.where(real, text, noise), cond, text_mask)[0]
    assert torch.allclose(moved, image_out, atol=1e-5)  # padding says nothing …
    moved = joint(x, torch.where(real, noise, text), cond, text_mask)[0]
    assert (moved - image_out).abs().amax(dim=-1).min() > 0  # … real words reach every patch

# %% [markdown] lang="zh"
# ## 和 SD3 对一对
#
# diffusers 的 `JointTransformerBlock` 是 SD3 的块。把它的权重按名字倒进我们的块：$q, k, v$ 三个矩阵叠成一个，其余一一对应；严格载入，一个也不许漏。

# %% [markdown] lang="en" twin="07ad493c"
# ## Against SD3
#
# diffusers' `JointTransformerBlock` is SD3's block. Pour its weights into ours by name: the three matrices for $q, k, v$ are stacked into one, all others go over one by one. The load is strict; none may be left behind.


# %%
def poured(theirs: nn.Module, names: dict[str, str]) -> dict[str, Tensor]:
    """Their weights under our names; several of theirs, separated by blanks, are stacked into one of ours."""
    state = theirs.state_dict()
    return {
        f"{ours}.{kind}": torch.cat([state[f"{name}.{kind}"] for name in group.split()])
        for ours, group in names.items()
        for kind in ("weight", "bias")
        if f"{group.split()[0]}.{kind}" in state
    }


SD3 = {"image_modulation.linear": "norm1.linear", "text_modulation.linear": "norm1_context.linear"}
SD3 |= {"attn.image.qkv": "attn.to_q attn.to_k attn.to_v", "attn.image.out": "attn.to_out.0"}
SD3 |= {"attn.text.qkv": "attn.add_q_proj attn.add_k_proj attn.add_v_proj", "attn.text.out": "attn.to_add_out"}
SD3 |= {f"attn.image.norm_{a}": f"attn.norm_{a}" for a in "qk"}
SD3 |= {f"attn.text.norm_{a}": f"attn.norm_added_{a}" for a in "qk"}
SD3 |= {"image_ff.0": "ff.net.0.proj", "image_ff.2": "ff.net.2"}
SD3 |= {"text_ff.0": "ff_context.net.0.proj", "text_ff.2": "ff_context.net.2"}

# %% tags=["check"]
from diffusers.models.attention import JointTransformerBlock

theirs, ours = open_gates(JointTransformerBlock(64, 4, 16, qk_norm="rms_norm")), JointBlock(64, 4)
ours.load_state_dict(poured(theirs, SD3))
with torch.no_grad():
    their_text, their_image = theirs(x, text, cond)  # mind the order of what it returns
    our_image, our_text = ours(x, text, cond)
assert torch.allclose(our_image, their_image, atol=1e-4) and torch.allclose(our_text, their_text, atol=1e-4)

# %% [markdown] lang="zh"
# 最后一块有个陷阱。文字在那里只供键和值，diffusers 改用 `AdaLayerNormContinuous`，它的顺序是先缩放、后偏移，别处都是先偏移、后缩放。形状一样，照抄就错；所以载入时要把两半对调。

# %% [markdown] lang="en" twin="1adfa695"
# The last block holds a trap. There the text only supplies keys and values, and diffusers switches to `AdaLayerNormContinuous`, which stores scale first and shift second, while everything else stores shift first. The shapes agree, a plain copy is wrong; the two halves must be swapped on load.

# %% tags=["check"]
theirs = open_gates(JointTransformerBlock(64, 4, 16, qk_norm="rms_norm", context_pre_only=True))
ours, plain = JointBlock(64, 4, last=True), poured(theirs, SD3)
swapped = {name: w.roll(64, dims=0) if name.startswith("text_modulation") else w for name, w in plain.items()}
for state, right in ((plain, False), (swapped, True)):  # both load without a word
    ours.load_state_dict(state)
    assert torch.allclose(ours(x, text, cond)[0], theirs(x, text, cond)[1], atol=1e-4) == right

# %% [markdown] lang="zh"
# ## 一次做完：并行块
#
# 走过几个双流块，文字和图像已经说同一种话，可以接成一串、共用权重。FLUX 的后三十八块再进一步：注意力和前馈网络读同一个调制过的 $h$，并排算，一个线性层收尾：
#
# $$x \leftarrow x + \alpha \odot W_{\mathrm{out}}\,[\,\mathrm{attn}(h),\; \mathrm{GELU}(W_{\mathrm{in}} h)\,], \qquad h = \mathrm{modulate}(x)$$
#
# 归一化少一次，旋钮少一半，矩阵更大更少。FLUX 把文字排在前面，我们把图像排在前面：只要每个词元带着自己的旋转角走，全注意力不在乎顺序。

# %% [markdown] lang="en" twin="1e8b686f"
# ## All at once: the parallel block
#
# After a few joint blocks, text and image speak one language and can share weights, as one row. FLUX's last thirty-eight blocks go further: attention and feed-forward network read the same modulated $h$ side by side, and one linear layer joins them:
#
# $$x \leftarrow x + \alpha \odot W_{\mathrm{out}}\,[\,\mathrm{attn}(h),\; \mathrm{GELU}(W_{\mathrm{in}} h)\,], \qquad h = \mathrm{modulate}(x)$$
#
# One norm less, half the knobs, fewer and larger matrices. FLUX puts text first, we put it last: full attention does not care, as long as tokens keep their angles.


# %% tags=["export"]
class ParallelBlock(nn.Module):
    """x ← x + α · W [attn(h), GELU(W_in h)] with h = modulate(x): FLUX's single-stream block, (B, N, D) → (B, N, D).

    Args:
        width: D. heads: H. qk_norm: as in `SelfAttention`. ratio: hidden width of the MLP over D.
        eps: of the norms of queries and keys.

    forward(x (B, N, D), cond (B, D), mask, rope, chunk). Source: Dehghani et al. 2023 (ViT-22B); FLUX.1 `SingleStreamBlock`.
    """

    def __init__(self, width: int, heads: int, qk_norm: QKNorm = True, ratio: int = 4, eps: float = 1e-6):
        super().__init__()
        self.modulation = Modulation(width, 1)
        self.stream = Heads(width, heads, qk_norm, out=False, eps=eps)
        self.ff_in = nn.Linear(width, ratio * width)
        self.out = nn.Linear(width + ratio * width, width)

    def forward(self, x: Tensor, cond: Tensor, mask=None, rope: Rope | None = None, chunk: int | None = None) -> Tensor:
        (mod,) = self.modulation(cond)
        h = modulate(x, mod)
        q, k, v = self.stream.split(h, rope)
        attended = self.stream.merge(attention(q, k, v, mask, chunk))  # (B, N, D)
        del q, k, v  # nothing below reads them, and the widest tensors come next
        return torch.addcmul(x, mod.gate, self.out(torch.cat([attended, gelu(self.ff_in(h))], dim=-1)))


# %% tags=["check"]
from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock

FLUX = {"modulation.linear": "norm.linear", "stream.qkv": "attn.to_q attn.to_k attn.to_v", "ff_in": "proj_mlp"}
FLUX |= {"stream.norm_q": "attn.norm_q", "stream.norm_k": "attn.norm_k", "out": "proj_out"}
theirs, ours = open_gates(FluxSingleTransformerBlock(64, 4, 16)), ParallelBlock(64, 4)
assert torch.equal(ours(x, cond), x)  # before the load: the identity
ours.load_state_dict(poured(theirs, FLUX))
angle = torch.randn(17, 8, generator=torch.Generator().manual_seed(5))  # text first: 7 + 10 tokens
with torch.no_grad():
    full = [a.repeat_interleave(2, dim=-1) for a in (angle.cos(), angle.sin())]
    their_text, their_image = theirs(x, text, cond, image_rotary_emb=full)
    angle = torch.cat([angle[7:], angle[:7]])  # image first: the angles move with their tokens
    out = ours(torch.cat([x, text], dim=1), cond, rope=Rope(angle.cos(), angle.sin()))
assert torch.allclose(out, torch.cat([their_image, their_text], dim=1), atol=1e-4)

# %% [markdown] lang="zh"
# ## 旋钮的价钱
#
# 一个单流块（`DiTBlock`；FLUX 用这个名字叫它的并行块）里，注意力有 $4D^2$ 个权重，前馈网络 $8D^2$，调制 $6D^2$：三分之一的参数在转旋钮！但是旋钮每个样本只算一次，别的每个词元都要算（一次乘加算两次运算）：
#
# $$\text{FLOPs} = \underbrace{12 D^2}_{\text{modulation}} + N \cdot \underbrace{24 D^2}_{\text{linear layers}} + \underbrace{4 N^2 D}_{\text{attention}}$$

# %% [markdown] lang="en" twin="e157522a"
# ## What the knobs cost
#
# In a single-stream block (`DiTBlock`; FLUX calls its parallel ones by this name) attention has $4D^2$ weights, the feed-forward network $8D^2$, modulation $6D^2$: a third of the parameters turns knobs! But the knobs are computed once a sample, everything else once a token (a multiply-add counts as two operations):
#
# $$\text{FLOPs} = \underbrace{12 D^2}_{\text{modulation}} + N \cdot \underbrace{24 D^2}_{\text{linear layers}} + \underbrace{4 N^2 D}_{\text{attention}}$$

# %% tags=["check"]
from torch.utils.flop_counter import FlopCounterMode

parts = {name: sum(p.numel() for p in part.parameters() if p.ndim == 2) for name, part in block.named_children()}
assert [parts[name] for name in ("attn", "ff", "modulation")] == [4 * 64**2, 8 * 64**2, 6 * 64**2]
with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH), FlopCounterMode(display=False) as counter:
    block(x, cond)  # 3 samples of 10 tokens; the counter cannot look into the CPU's fused attention, hence MATH
assert counter.get_total_flops() == 3 * (12 * 64**2 + 10 * 24 * 64**2 + 4 * 10**2 * 64)

# %%
total, knobs = 19 * 2 * (12 + 6) + 38 * (12 + 3), 19 * 2 * 6 + 38 * 3  # FLUX.1: 19 joint, 38 parallel blocks, in D²
print(f"FLUX.1: {total * 3072**2 / 1e9:.1f} billion weights in blocks, {knobs / total:.0%} of them turn knobs")
rest = 4608 * (2 * (total - knobs) + 57 * 4 * 4608 / 3072)  # 4,608 tokens, 57 blocks; a multiply-add is two
print(f"… and take {2 * knobs / (2 * knobs + rest):.4%} of the work for a picture of 1024×1024")

# %% [markdown] lang="zh"
# 两个结论。第一，旋钮只取决于 $t$ 和提示词，同一步里所有词元共用，第 13 章会把它们提前算好。第二，参数可以省：PixArt、Wan、Sana、LTX 只用**一个**共享线性层，每块再加一张自己的小表 $T_\ell$，参数从 $6D^2$ 降到 $6D$。提示词改走交叉注意力，下面拿 Wan 的块来对：
#
# $$[\beta, \gamma, \alpha, \dots]_\ell = W\,\mathrm{SiLU}(c) + T_\ell$$

# %% [markdown] lang="en" twin="e02e60d5"
# Two conclusions. First, the knobs depend on $t$ and the prompt alone, and all tokens of a step share them; chapter 13 computes them ahead. Second, parameters can be saved: PixArt, Wan, Sana and LTX use **one** shared linear layer, and each block adds a small table $T_\ell$, $6D$ numbers instead of $6D^2$. The prompt takes the cross-attention; Wan's block below is the judge:
#
# $$[\beta, \gamma, \alpha, \dots]_\ell = W\,\mathrm{SiLU}(c) + T_\ell$$


# %% tags=["export"]
class ModulationTable(nn.Module):
    """Knobs of one block = shared knobs + a table of the block's own: (B, 3·n·D) → n × `Mod`.

    The shared knobs are made once for all blocks, Linear(SiLU(c)), or per token (B, N, 3·n·D). The table starts at zero.
    Knobs that were made before, a list of `Mod`, pass unchanged.

    Raises:
        ValueError: the shared vector does not have 3·n·D entries.

    Source: Chen et al. 2023 (PixArt-α), "AdaLN-single"; also Sana, Wan2.1, LTX-Video.
    """

    def __init__(self, width: int, n: int):
        super().__init__()
        self.n = n
        self.table = nn.Parameter(torch.zeros(3 * n, width))

    def forward(self, shared: Tensor | list[Mod]) -> list[Mod]:
        if isinstance(shared, list):
            return shared
        if shared.ndim not in (2, 3) or shared.shape[-1] != self.table.numel():
            rows, width = self.table.shape
            raise ValueError(f"shared knobs have shape {tuple(shared.shape)}; expected (B, {rows} · {width})")
        return split_mods(shared + self.table.flatten(), self.n)


# %% tags=["check"]
from diffusers.models.transformers.transformer_wan import WanTransformerBlock

from diffusion_engine.attention import CrossAttention

WAN = {"attn.stream.qkv": "attn1.to_q attn1.to_k attn1.to_v", "attn.stream.out": "attn1.to_out.0"}
WAN |= {"cross.q": "attn2.to_q", "cross.kv": "attn2.to_k attn2.to_v", "cross.out": "attn2.to_out.0"}
WAN |= {"cross_norm": "norm2", "ff.0": "ffn.net.0.proj", "ff.2": "ffn.net.2"}
WAN |= {f"attn.stream.norm_{a}": f"attn1.norm_{a}" for a in "qk"} | {f"cross.norm_{a}": f"attn2.norm_{a}" for a in "qk"}
theirs, shared = open_gates(WanTransformerBlock(64, 96, 4, cross_attn_norm=True)), torch.randn(3, 6, 64)
words = CrossAttention(64, 4, qk_norm="rms_across")
ours = DiTBlock(64, 4, "rms_across", table=True, cross=words, cross_norm=True, ff=FeedForward(64, hidden=96))
ours.load_state_dict(poured(theirs, WAN) | {"modulation.table": theirs.scale_shift_table[0]})
assert torch.allclose(ours(x, shared.flatten(1), text=text), theirs(x, text, shared, None), atol=1e-4)

# %% tags=["check"]
try:
    ours(x, cond)
except ValueError as error:
    print(error)
else:
    raise AssertionError("a condition was taken for knobs")

# %% [markdown] lang="zh"
# **到了这里**，引擎有了三种块，真实模型的骨架就由它们搭成：SD3 只用双流块，FLUX 先双流后并行，Wan 用带表的单流块加交叉注意力。可是块眼里只有词元，没有图。第 06 章问：一张长方形的图怎样变成词元，又怎样变回来？
#
# ## 三个问题
#
# 1. 预测：如果条件 $c$ 恒为零，训练时旋钮还会动吗？
# 2. 修改：只把 $\beta$ 和 $\gamma$ 的顺序对调，本章哪些检查会变红，哪些看不见？
# 3. 动手：不用调制，把条件当作一个额外的词元接在前面，证明块仍能读到它，并算出它的代价。

# %% [markdown] lang="en" twin="b3c32c9d"
# **Where we stand.** The engine has three blocks, and real models are built from them: SD3 from joint blocks alone, FLUX from joint, then parallel ones, Wan from single-stream blocks with tables and cross-attention. But a block sees tokens, not a picture. Chapter 06 asks: how does a rectangular picture become tokens, and a picture again?
#
# ## Three questions
#
# 1. Predict: if the condition $c$ is always zero, can training still move the knobs?
# 2. Modify: swap the order of $\beta$ and $\gamma$ alone. Which checks of this chapter turn red, and which cannot see it?
# 3. Build: without modulation, put the condition in front as one more token; show that the block can still read it, and count what it costs.

# %% tags=["solution"]
# 1 · yes, but all conditions alike: SiLU(0) = 0 silences the weights, the bias still learns one setting for every t
learner = Modulation(64, 1)
sum(part.sum() for part in learner(torch.zeros(3, 64))[0]).backward()
assert (learner.linear.weight.grad == 0).all() and (learner.linear.bias.grad != 0).all()

# %% tags=["solution"]
# 2 · the identity and the gradients' gate pattern stay green; the loop version, SD3 and FLUX turn red
turned = DiTBlock(64, 4)
turned.modulation.forward = lambda c: [Mod(m.scale, m.shift, m.gate) for m in Modulation.forward(turned.modulation, c)]
with torch.no_grad():
    assert torch.equal(turned(x, cond), x)
    assert not torch.allclose(open_gates(turned)(x, cond), block_by_loops(turned, x, cond), atol=0.01)

# %% tags=["solution"]
# 3 · one more row in attention: 24 D² + 8 N D more FLOPs a sample, but no 6 D² parameters
unsteered = open_gates(DiTBlock(64, 4))
neutral = torch.zeros(3, 64)  # the knobs stay put
with torch.no_grad():
    first, second = (unsteered(torch.cat([c[:, None], x], dim=1), neutral)[:, 1:] for c in (cond, cond.flip(0)))
assert (first - second).abs().amax(dim=(1, 2))[[0, 2]].min() > 0.01

# %% [markdown] lang="zh"
# ## 小结
#
# - 先归一化，再由条件决定音量：$(1 + \gamma) \odot \mathrm{LN}(x) + \beta$。
# - 门控从零开始，块生来是恒等映射；第一步只有门控在学，随后全都醒来。
# - 恒等检查看不见关着的门后面：先开门，再检查。
# - 三种块与 diffusers 的 SD3、FLUX、Wan 块数值一致（误差小于 $10^{-4}$）；最后一块要把缩放和偏移对调。
# - 调制占三分之一的参数，几乎不占运算；一张小表可以代替它。
#
# 阅读卡片：DiT（[`papers/03_dit`](../../papers/03_dit.zh.md)）、SD3（[`papers/05_sd3`](../../papers/05_sd3.zh.md)）。下一章：06。

# %% [markdown] lang="en" twin="ccd47f72"
# ## Recap
#
# - Normalise first, then let the condition set the volume: $(1 + \gamma) \odot \mathrm{LN}(x) + \beta$.
# - Gates start at zero and a block is born as the identity; the gates learn first, then everything wakes up.
# - The identity check cannot see behind closed gates: open them, then check.
# - The three blocks equal diffusers' SD3, FLUX and Wan blocks (within $10^{-4}$); in the last block scale and shift swap places.
# - Modulation holds a third of the parameters and next to none of the work; a small table can replace it.
#
# Reading cards: DiT ([`papers/03_dit`](../../papers/03_dit.en.md)), SD3 ([`papers/05_sd3`](../../papers/05_sd3.en.md)). Next: chapter 06.
