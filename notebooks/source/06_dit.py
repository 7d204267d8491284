# ---
# jupyter:
#   course:
#     minutes: 50
#     module: dit
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown] lang="zh"
# # 06 · DiT：从图块到速度
#
# 读完这一章，你有了一个完整的速度网络：任意长方形的图切成词元，走过变换器块，再拼回一张图。你会当场训练一个小的，看它从噪声里画出彩色数字。
#
# | 你会做出 | 你需要 | 时间 | 模块 |
# | --- | --- | --- | --- |
# | 分块与还原、二维位置编码、`DiT`、参数与运算量公式、最小的去噪循环 | 第 01、02 章的采样，第 05 章的变换器块 | 50 分钟 | `diffusion_engine/dit.py` |

# %% [markdown] lang="en" twin="ca3c4190"
# # 06 · DiT: from patches to a velocity
#
# After this chapter you own a whole velocity network: any rectangle is cut into tokens, walks through transformer blocks, and becomes a picture again. You train a small one on the spot and watch it draw coloured digits out of noise.
#
# | You build | You need | Time | Module |
# | --- | --- | --- | --- |
# | patchify and unpatchify, 2-D positions, `DiT`, formulas for parameters and FLOPs, the smallest denoising loop | sampling from chapters 01 and 02, the blocks of chapter 05 | 50 minutes | `diffusion_engine/dit.py` |

# %% [markdown] lang="zh"
# **先想一想**：变换器块只认识一串词元。一张 $4 \times 6$ 的图，你会怎样切成一串，再保证能拼回去？如果有人把 $4 \times 6$ 的词元按 $6 \times 4$ 拼，形状会提醒你吗？

# %% [markdown] lang="en" twin="29e23341"
# **Think first:** a transformer block knows nothing but a row of tokens. How would you cut a $4 \times 6$ picture into a row, so that it can be put back? And if someone puts a $4 \times 6$ grid of tokens back as $6 \times 4$, will a shape warn you?

# %% tags=["export"]
import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import call
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffusion_engine.attention import joint_mask
from diffusion_engine.timestep_embedding import TimestepEmbedder, timestep_embedding
from diffusion_engine.transformer_block import JointBlock, Mod, ParallelBlock, modulate

# %% [markdown] lang="zh"
# ## 把图切成一串
#
# 像把拼图一行一行收进盒子：第 $n$ 个词元是第 $i$ 行、第 $j$ 列的图块，块里先走像素，再走通道：
#
# $$\mathrm{token}_{\,i w + j}\,[(a p + b)\,C + c] = x[c,\; i p + a,\; j p + b]$$
#
# | 记号 | 形状 | 含义 |
# | --- | --- | --- |
# | $x$ | $(B, C, H, W)$ | 潜变量，或者小图本身 |
# | $p$ | 标量 | 图块边长 |
# | $h, w$ | $H/p,\; W/p$ | 词元网格，$N = h w$ |
# | 词元 | $(B, N, p^2 C)$ | 每块的全部数值 |

# %% [markdown] lang="en" twin="23a58165"
# ## A picture as a row
#
# Like putting a jigsaw away row by row: token $n$ is the patch in row $i$, column $j$; inside it pixels come first, channels run fastest:
#
# $$\mathrm{token}_{\,i w + j}\,[(a p + b)\,C + c] = x[c,\; i p + a,\; j p + b]$$
#
# | Symbol | Shape | Meaning |
# | --- | --- | --- |
# | $x$ | $(B, C, H, W)$ | latents, or a small picture itself |
# | $p$ | scalar | side of a patch |
# | $h, w$ | $H/p,\; W/p$ | the grid of tokens, $N = h w$ |
# | tokens | $(B, N, p^2 C)$ | all numbers of each patch |


# %%
def patchify_by_loops(x: Tensor, p: int) -> Tensor:
    """One number at a time, word for word the formula."""
    B, C, H, W = x.shape
    tokens = torch.empty(B, H // p * (W // p), p * p * C)
    for i, j, a, b, c in torch.cartesian_prod(*map(torch.arange, (H // p, W // p, p, p, C))).tolist():
        tokens[:, i * (W // p) + j, (a * p + b) * C + c] = x[:, c, i * p + a, j * p + b]
    return tokens


patchify_by_loops(torch.arange(24.0).reshape(1, 1, 4, 6), 2)[0]  # 0…23 row by row: the first patch is 0, 1, 6, 7

# %% [markdown] lang="zh"
# 进引擎的版本只搬不算：先问切不切得整，切不整就报错，绝不悄悄丢掉一行；再把每条边拆成「第几块、块内第几个」，调换轴的顺序，合起来。真实模型有两种块内顺序：SD3、Wan 的输出是 $(p_h, p_w, c)$，FLUX 是 $(c, p_h, p_w)$。

# %% [markdown] lang="en" twin="8024e201"
# The engine's version moves and never computes. First it asks whether the sides divide, and refuses if not: no row is dropped in silence. Then it splits each side into "which patch" and "where inside", reorders the axes and joins them. Real models use two orders inside a patch: $(p_h, p_w, c)$ in the output of SD3 and Wan, $(c, p_h, p_w)$ in FLUX.


# %% tags=["export"]
def patch_grid(height: int, width: int, patch: int) -> tuple[int, int]:
    """(height / patch, width / patch), the grid of tokens.

    Raises:
        ValueError: a side is not a positive multiple of ``patch``; names the nearest ones.
    """
    for name, side in (("height", height), ("width", width)):
        if side < 1 or side % patch:
            below, above = side // patch * patch, -(-max(side, 1) // patch) * patch
            near = f"{below} or {above}" if below else f"{above}"
            raise ValueError(f"latent {name} {side} is not a multiple of patch {patch}; try {near}")
    return height // patch, width // patch


# %% tags=["export"]
def patchify(latents: Tensor, patch: int, channels_first: bool = False) -> Tensor:
    """(B, C, H, W) → tokens (B, H/p · W/p, p · p · C), row by row; inside a token the order is (ph, pw, c).

    Args:
        latents: any rectangle whose sides are multiples of ``patch``.
        patch: p.
        channels_first: order (c, ph, pw) inside a token, as FLUX packs its latents.

    Raises:
        ValueError: not four axes, a patch below 1, or a side that is no multiple of ``patch``.
    """
    if latents.ndim != 4:
        raise ValueError(f"latents have shape {tuple(latents.shape)}; expected (B, C, H, W)")
    if patch < 1:
        raise ValueError(f"patch {patch} is below 1; try 1")
    b, c, height, width = latents.shape
    h, w = patch_grid(height, width, patch)
    x = latents.reshape(b, c, h, patch, w, patch)  # (B, C, h, ph, w, pw)
    order = (0, 2, 4, 1, 3, 5) if channels_first else (0, 2, 4, 3, 5, 1)
    return x.permute(order).reshape(b, h * w, patch * patch * c)


def unpatchify(tokens: Tensor, patch: int, grid: tuple[int, int], channels_first: bool = False) -> Tensor:
    """The inverse of `patchify`: tokens (B, h · w, p · p · C) → (B, C, h · p, w · p), for ``grid`` = (h, w).

    Raises:
        ValueError: the tokens do not fill the grid, or do not hold whole patches.
    """
    b, n, d = tokens.shape
    h, w = grid
    if patch < 1:
        raise ValueError(f"patch {patch} is below 1; try 1")
    if n != h * w:
        raise ValueError(f"{n} tokens do not fill a grid of {h}×{w} = {h * w}")
    if d % patch**2:
        raise ValueError(f"tokens of {d} numbers are not whole {patch}×{patch} patches; try {d // patch**2 * patch**2}")
    inner = (d // patch**2, patch, patch) if channels_first else (patch, patch, d // patch**2)
    order = (0, 3, 1, 4, 2, 5) if channels_first else (0, 5, 1, 3, 2, 4)
    return tokens.reshape(b, h, w, *inner).permute(order).reshape(b, d // patch**2, h * patch, w * patch)


# %% tags=["check"]
for height, width in ((4, 6), (6, 4), (2, 8)):
    x = torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(height))
    assert torch.equal(patchify(x, 2), patchify_by_loops(x, 2))
    for order in (False, True):
        assert torch.equal(unpatchify(patchify(x, 2, order), 2, (height // 2, width // 2), order), x)

# %% tags=["hide"]
import matplotlib.pyplot as plt

from course.figures import image_grid, show

rows, columns = torch.meshgrid(torch.linspace(0, 1, 16), torch.linspace(0, 1, 24), indexing="ij")
scene = torch.stack([rows, columns, ((rows - 0.5) ** 2 + (columns - 0.5) ** 2 < 0.06).float()])[None]
tokens = patchify(scene, 4)  # a grid of 4×6
wrong_grid = unpatchify(tokens, 4, (6, 4))
wrong_order = unpatchify(tokens, 4, (4, 6), channels_first=True)
labels = ["16×24, patch 4", "put back as 6×4", "(c, ph, pw) for (ph, pw, c)"]
image_grid(
    [scene[0], wrong_grid[0], wrong_order[0]],
    labels,
    size=2.1,
    title="Two faults that no shape reports",
    alt="A colour ramp with a disc; the same put back on a swapped grid, torn; and with swapped inner order, striped.",
)

# %% [markdown] lang="zh"
# 中间那张：行列对调，词元数不变，图碎了。老代码用 $\sqrt{N}$ 猜边长，只在正方形上侥幸。右边那张：块内顺序错了，每块都花。
#
# 第二个错藏得深：很多模型用步长为 $p$ 的卷积来切块，它的权重按 $(c, p_h, p_w)$ 存。卷积就是线性层，但是载入前要先重排。

# %% [markdown] lang="en" twin="9452c095"
# In the middle rows and columns are swapped: as many tokens, a torn picture. Older code guesses the side as $\sqrt{N}$ and gets away with it on squares. On the right the order inside each patch is wrong.
#
# The second fault hides well: many models cut patches with a convolution of stride $p$, whose weights are stored as $(c, p_h, p_w)$. It is a linear layer, but must be reordered on load.

# %% tags=["check"]
conv, x = nn.Conv2d(3, 32, kernel_size=2, stride=2), torch.randn(2, 3, 6, 4)
by_conv = conv(x).flatten(2).transpose(1, 2)  # (B, N, 32)
plain, reordered = conv.weight.flatten(1), conv.weight.permute(0, 2, 3, 1).flatten(1)  # both (32, 12)
assert torch.allclose(F.linear(patchify(x, 2), reordered, conv.bias), by_conv, atol=1e-5)
assert not torch.allclose(F.linear(patchify(x, 2), plain, conv.bias), by_conv, atol=0.1)
assert torch.equal(patchify(x, 2, channels_first=True), F.unfold(x, 2, stride=2).transpose(1, 2))

# %% [markdown] lang="zh"
# ## 每块在哪里
#
# 第 04 章证明过：打乱词元，注意力的输出只是跟着打乱。不告诉它位置，天空和草地就没有上下之分。FLUX、Wan 用第 04 章的 RoPE；SD3 给每个词元加一个位置向量，我们也这样。第 03 章的正弦嵌入正好能用两次，一半说行号，一半说列号：
#
# $$\mathrm{pos}(i, j) = [\,e(i),\; e(j)\,] \in \mathbb{R}^D, \qquad e(\cdot) \in \mathbb{R}^{D/2}$$

# %% [markdown] lang="en" twin="055a18ec"
# ## Where each patch is
#
# Chapter 04 proved it: shuffle the tokens, and the output of attention is merely shuffled too. Unless it is told positions, sky and grass have no up and down. FLUX and Wan use the RoPE of chapter 04; SD3 adds a vector to each token, and so do we. The sinusoid of chapter 03 serves twice, one half for the row, one for the column:
#
# $$\mathrm{pos}(i, j) = [\,e(i),\; e(j)\,] \in \mathbb{R}^D, \qquad e(\cdot) \in \mathbb{R}^{D/2}$$


# %% tags=["export"]
def sincos_2d(
    grid: tuple[int, int], width: int, origin: tuple[float, float] = (0.0, 0.0), scale: float = 1.0
) -> Tensor:
    """Fixed positions (h · w, width), fp32: e(row) then e(column), each cosines first, as in `timestep_embedding`.

    Args:
        grid: (h, w), any rectangle.
        width: D, a multiple of 4.
        origin: row and column of the first token (SD3 crops the centre out of a larger table).
        scale: distance between neighbours (SD3: base size / largest size).

    Raises:
        ValueError: ``width`` is not a multiple of 4, or the grid is empty.

    Source: Dosovitskiy et al. 2020, appendix D.4; Peebles & Xie 2023 (DiT). diffusers stores the four quarters in
    reverse: sin(column), cos(column), sin(row), cos(row).
    """
    if width % 4 or width < 4:
        near = f"{width // 4 * 4} or {-(-width // 4) * 4}" if width > 4 else "4"
        raise ValueError(f"width {width} is not a multiple of 4; try {near}")
    if min(grid) < 1:
        raise ValueError(f"grid {grid[0]}×{grid[1]} is empty; try {max(1, grid[0])}×{max(1, grid[1])}")
    axes = [(first + torch.arange(n).float()) * scale for first, n in zip(origin, grid)]
    halves = [timestep_embedding(axis.flatten(), width // 2) for axis in torch.meshgrid(*axes, indexing="ij")]
    return torch.cat(halves, dim=-1)


# %%
def quarters_flipped(table: Tensor) -> Tensor:
    """diffusers' order of the same position: columns before rows, sines before cosines, so the quarters run backwards."""
    return table.unflatten(-1, (4, -1)).flip(-2).flatten(-2)


place = sincos_2d((8, 20), 64)
likeness = F.cosine_similarity(place[3 * 20 + 12], place, dim=-1).reshape(8, 20)  # row 3, column 12 against all
alt = "A bright spot at row 3, column 12, fading outwards along its row and its column."
image_grid([likeness], ["likeness to place (3, 12)"], size=2, alt=alt)

# %% tags=["check"]
from diffusers.models.embeddings import PatchEmbed, get_2d_sincos_pos_embed

theirs = get_2d_sincos_pos_embed(64, (7, 7), base_size=7, output_type="pt").float()
assert torch.allclose(quarters_flipped(sincos_2d((7, 7), 64)), theirs, atol=1e-5)
sd3 = PatchEmbed(height=32, width=32, patch_size=2, in_channels=4, embed_dim=64, pos_embed_max_size=24)
# SD3 cuts its rectangle out of the middle of one large table
centre = quarters_flipped(sincos_2d((6, 10), 64, origin=(9, 7), scale=16 / 24))  # 6×10 out of 24×24
assert torch.allclose(centre, sd3.cropped_pos_embed(12, 20)[0], atol=1e-5)

# %% [markdown] lang="zh"
# ## 出口
#
# 走完所有的块，词元要变回速度。最后一层是第 05 章的调制加一个线性层，没有门控：$v = W\,\mathrm{modulate}(x) + b$。$W$ 和 $b$ 从零开始，所以刚出生的网络处处回答 $v = 0$：什么都不懂的时候，就不乱动。

# %% [markdown] lang="en" twin="ebc1d394"
# ## The way out
#
# After the last block tokens become a velocity. The final layer is chapter 05's modulation and a linear layer, without a gate: $v = W\,\mathrm{modulate}(x) + b$. Both $W$ and $b$ start at zero, so a new-born network answers $v = 0$ everywhere: knowing nothing, it moves nothing.


# %% tags=["export"]
class FinalLayer(nn.Module):
    """v = W · ((1 + γ) · LN(x) + β) + b: tokens (B, N, D) → (B, N, out_dim); zero at init, so v = 0.

    forward(x, cond): the condition (B, D), or β and γ, (B, 1, D) each, as a tuple.

    Source: Peebles & Xie 2023 (DiT), ``FinalLayer``.
    """

    def __init__(self, width: int, out_dim: int):
        super().__init__()
        self.modulation = nn.Linear(width, 2 * width)
        self.linear = nn.Linear(width, out_dim)
        for layer in (self.modulation, self.linear):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def knobs(self, cond: Tensor) -> tuple[Tensor, Tensor]:
        """β and γ, (B, 1, D) each, of a condition (B, D)."""
        return self.modulation(F.silu(cond)).unsqueeze(1).chunk(2, dim=-1)

    def forward(self, x: Tensor, cond: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        shift, scale = cond if isinstance(cond, tuple) else self.knobs(cond)
        return self.linear(modulate(x, Mod(shift, scale)))


# %% [markdown] lang="zh"
# ## 整张网络
#
# 现在把零件接起来，先写下尺寸。我们的骨架混用两家：前几块是 SD3 的双流块，后几块是 FLUX 的并行块。提示词从两处进来：一串文字词元，和概括全句的一个向量（`pooled`），后者与时间相加成为条件。尺寸不合的，造的时候就报错。检查之前要先打乱零初始化，否则 $0 = 0$ 什么也没证明。

# %% [markdown] lang="en" twin="de184e5a"
# ## The whole network
#
# Now the parts come together; the sizes first. Our skeleton mixes two families: SD3's joint blocks in front, FLUX's parallel blocks behind. The prompt comes in twice: as text tokens, and summed up in one vector (`pooled`) that is added to time to make the condition. Sizes that cannot work are refused when it is built. Before checking, disturb the zero init, or $0 = 0$ proves nothing.


# %% tags=["export"]
@dataclass(frozen=True)
class DiTConfig:
    """Sizes of a DiT: joint_depth blocks as in SD3 come first, parallel_depth blocks as in FLUX follow.

    Raises:
        ValueError: a size below 1, no block at all, or a width that heads (or 4, for positions) do not divide.
    """

    latent_channels: int = 4
    patch: int = 4
    width: int = 256
    heads: int = 8
    joint_depth: int = 2
    parallel_depth: int = 5
    text_width: int = 256

    def __post_init__(self):
        for name in ("latent_channels", "patch", "width", "heads", "text_width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is not a positive number; try 1")
        if min(self.joint_depth, self.parallel_depth) < 0 or self.joint_depth + self.parallel_depth == 0:
            raise ValueError(f"depths {self.joint_depth} and {self.parallel_depth}: a DiT needs a block; try 1 and 0")
        rule = math.lcm(self.heads, 4)  # whole heads, and two sinusoids for positions
        if self.width % rule:
            near = f"{self.width // rule * rule or rule} or {-(-self.width // rule) * rule}"
            raise ValueError(f"width {self.width} is not a multiple of {rule} (heads {self.heads}, 4); try {near}")


# %% tags=["export"]
def check_inputs(
    config: DiTConfig, latents: Tensor, t: Tensor, text: Tensor, text_mask: Tensor | None, pooled: Tensor
) -> None:
    """Refuse what would otherwise fail deep inside, or broadcast in silence; see `DiT.forward`.

    Raises:
        ValueError: a shape that does not fit the config or the batch.
    """
    if latents.ndim != 4 or latents.shape[1] != config.latent_channels:
        raise ValueError(f"latents have shape {tuple(latents.shape)}; expected (B, {config.latent_channels}, H, W)")
    b, m, width = latents.shape[0], text.shape[1] if text.ndim == 3 else 1, config.text_width
    wanted = {"t": (t, (b,)), "text": (text, (b, m, width)), "pooled": (pooled, (b, width))}
    if text_mask is not None:
        wanted["text_mask"] = (text_mask, (b, m))
    for name, (given, shape) in wanted.items():
        if given.shape != shape:
            raise ValueError(f"{name} has shape {tuple(given.shape)}; expected {shape} for {b} latents")


class Conditions(NamedTuple):
    """All that a forward reads besides the latents.

    text (B, M, D), text_mask (B, M) or None, positions (N, D), and ``cond``: for every block, and for the final layer at
    the end, the condition (B, D), or knobs that were made from it ahead.
    """

    text: Tensor
    text_mask: Tensor | None
    positions: Tensor
    cond: list


# %% tags=["export"]
class DiT(nn.Module):
    """Velocity network v(x_σ, t, prompt): patchify → joint blocks → parallel blocks → unpatchify.

    Without parallel blocks the last joint block lets the text go (`JointBlock` with ``last``), as in SD3.
    Source: Peebles & Xie 2023 (DiT); Esser et al. 2024 (SD3); Black Forest Labs, FLUX.1.
    """

    def __init__(self, config: DiTConfig = DiTConfig()):
        super().__init__()
        self.config = c = config
        patch_dim = c.patch**2 * c.latent_channels
        self.image_in = nn.Linear(patch_dim, c.width)
        self.text_in = nn.Linear(c.text_width, c.width)
        self.time_in = TimestepEmbedder(c.width)
        self.pooled_in = nn.Sequential(nn.Linear(c.text_width, c.width), nn.SiLU(), nn.Linear(c.width, c.width))
        last = None if c.parallel_depth else c.joint_depth - 1
        self.joint_blocks = nn.ModuleList(JointBlock(c.width, c.heads, last=i == last) for i in range(c.joint_depth))
        self.parallel_blocks = nn.ModuleList(ParallelBlock(c.width, c.heads) for _ in range(c.parallel_depth))
        self.final = FinalLayer(c.width, patch_dim)

    @property
    def min_multiple(self) -> int:
        """Latent height and width must be multiples of this."""
        return self.config.patch

    def forward(self, latents, t, text, text_mask, pooled, chunk: int | None = None, run_block: Callable = call):
        """Velocity (B, C, H, W) of latents at time t under a prompt.

        Args:
            latents: x_σ (B, C, H, W), any rectangle whose sides are multiples of `min_multiple`.
            t: 1000 · σ, (B,).
            text: prompt tokens (B, M, Dt).
            text_mask: (B, M) bool, True where a token is real; None when all are.
            pooled: the prompt as one vector (B, Dt).
            chunk: queries that attention handles at a time, see `attention`; exact.
            run_block: called as run_block(block, *arguments) for every block; another way to run the same blocks.

        Raises:
            ValueError: a shape that does not fit the config or the batch.
        """
        check_inputs(self.config, latents, t, text, text_mask, pooled)
        grid = patch_grid(*latents.shape[-2:], self.config.patch)
        return self.velocity(latents, self.conditions(grid, t, text, text_mask, pooled), chunk, run_block)

    def conditions(self, grid: tuple[int, int], t: Tensor, text: Tensor, text_mask: Tensor | None, pooled: Tensor):
        """All of a forward that looks at no latent, see `Conditions`; arguments as in `forward`."""
        cond = self.time_in(t) + self.pooled_in(pooled)  # (B, D)
        parts = len(self.joint_blocks) + len(self.parallel_blocks) + 1
        return Conditions(self.text_in(text), text_mask, sincos_2d(grid, self.config.width).to(text), [cond] * parts)

    def velocity(self, latents: Tensor, given: Conditions, chunk: int | None = None, run_block: Callable = call):
        """The rest of `forward`: velocity (B, C, H, W) of the latents under given conditions."""
        p, text, mask, cond = self.config.patch, given.text, given.text_mask, iter(given.cond)
        x = self.image_in(patchify(latents, p)) + given.positions  # (B, N, D)
        for block in self.joint_blocks:
            x, text = run_block(block, x, text, next(cond), mask, None, chunk)
        n = x.shape[1]
        if self.parallel_blocks:
            x, mask = torch.cat([x, text], dim=1), joint_mask(mask, n)  # (B, N + M, D)
        for block in self.parallel_blocks:
            x = run_block(block, x, next(cond), mask, None, chunk)
        return unpatchify(self.final(x[:, :n], next(cond)), p, patch_grid(*latents.shape[-2:], p))


# %% tags=["check"]
torch.manual_seed(0)
net = DiT(DiTConfig(width=32, heads=4, joint_depth=1, parallel_depth=1, text_width=16)).requires_grad_(False)
text, pooled, t = torch.randn(2, 5, 16), torch.randn(2, 16), torch.tensor([900.0, 50.0])
mask = torch.arange(5) < torch.tensor([[5], [3]])
wide, tall = torch.randn(2, 4, 8, 12), torch.randn(2, 4, 12, 8)
assert (net(wide, t, text, mask, pooled) == 0).all()  # knowing nothing, it moves nothing
for p in net.parameters():
    nn.init.normal_(p, std=0.2)
for x in (wide, tall):
    v = net(x, t, text, mask, pooled)
    alone = net(x[1:], t[1:], text[1:, :3], None, pooled[1:])  # without the two padded words
    assert v.shape == x.shape and torch.allclose(v[1:], alone, atol=1e-4)
    assert torch.allclose(net(x, t, text, mask, pooled, chunk=4), v, atol=1e-5)  # four queries at a time
for time, said, sense in ((t.flip(0), text, pooled), (t, text.flip(0), pooled), (t, text, pooled.flip(0))):
    heard = net(wide, time, said, None, sense)  # time, words and pooled prompt all count
    assert not torch.allclose(heard, net(wide, t, text, None, pooled), atol=0.01)
turned = wide.unflatten(-1, (3, 4)).flip(-2).flatten(-2)  # whole patches change places, left and right
back = net(turned, t, text, mask, pooled).unflatten(-1, (3, 4)).flip(-2).flatten(-2)
assert not torch.allclose(back, net(wide, t, text, mask, pooled), atol=0.01)  # it knows where each patch is

# %% tags=["check"]
for argument in ((wide, t[:1]), (wide[:, :3], t), (wide[..., :10], t)):
    try:
        net(*argument, text, mask, pooled)
    except ValueError as error:
        print(error)
    else:
        raise AssertionError("a wrong shape was accepted")

# %% [markdown] lang="zh"
# ## 多少参数，多少运算
#
# 不跑网络也能算清。一个 $a \to b$ 的线性层有 $ab + b$ 个参数，每个词元 $2ab$ 次运算；$N$ 个图像词元、$M$ 个文字词元，注意力每块另加 $4(N+M)^2 D$。把第 05 章的账本按 $L$ 个块加起来：
#
# $$\mathrm{FLOPs} = \underbrace{24 D^2 (N + M)\,L}_{\text{linear layers}} + \underbrace{4 (N+M)^2 D\, L}_{\text{attention}} + \underbrace{24 D^2 L_{\text{joint}} + 6 D^2 L_{\text{par}}}_{\text{modulation}} + \text{in, out}$$

# %% [markdown] lang="en" twin="aad3cfe9"
# ## How many parameters, how much work
#
# Both can be told without running it. A linear layer $a \to b$ has $ab + b$ parameters and costs $2ab$ operations a token; with $N$ image and $M$ text tokens, attention adds $4(N+M)^2 D$ a block. Adding up the ledger of chapter 05 over $L$ blocks:
#
# $$\mathrm{FLOPs} = \underbrace{24 D^2 (N + M)\,L}_{\text{linear layers}} + \underbrace{4 (N+M)^2 D\, L}_{\text{attention}} + \underbrace{24 D^2 L_{\text{joint}} + 6 D^2 L_{\text{par}}}_{\text{modulation}} + \text{in, out}$$


# %% tags=["export"]
def parameter_count(config: DiTConfig) -> int:
    """Parameters of `DiT(config)` in closed form; a linear layer a → b has a·b + b."""
    c, d = config, config.width
    patch_dim, norms = c.patch**2 * c.latent_channels, 2 * (d // c.heads)

    def linear(*sizes: int) -> int:
        return sum(a * b + b for a, b in zip(sizes, sizes[1:]))

    stream = linear(d, 6 * d) + linear(d, 3 * d) + norms + linear(d, d) + linear(d, 4 * d, d)
    feeder = linear(d, 2 * d) + linear(d, 3 * d) + norms  # the text of a last joint block
    parallel = linear(d, 3 * d) + linear(d, 3 * d) + norms + linear(d, 4 * d) + linear(5 * d, d)
    joint = 2 * c.joint_depth * stream + (0 if c.parallel_depth else feeder - stream)
    ends = linear(patch_dim, d) + linear(c.text_width, d) + linear(256, d, d) + linear(c.text_width, d, d)
    return ends + joint + c.parallel_depth * parallel + linear(d, 2 * d) + linear(d, patch_dim)


def flop_count(config: DiTConfig, grid: tuple[int, int], text_tokens: int, batch: int = 1) -> int:
    """Floating-point operations of one forward in matrix products (a multiply-add is two), attention included.

    Args:
        config: the sizes.
        grid: (h, w), the grid of image tokens, see `patch_grid`.
        text_tokens: M, padding included.
        batch: B; the work is proportional to it.
    """
    c, d = config, config.width
    n, m, depth = grid[0] * grid[1], text_tokens, c.joint_depth + c.parallel_depth
    patch_dim = c.patch**2 * c.latent_channels
    once = (256 + c.text_width + 2 * d) * d + (12 * c.joint_depth + 3 * c.parallel_depth + 2) * d * d
    tokens = n * 2 * patch_dim * d + m * c.text_width * d + 12 * d * d * (n + m) * depth
    if not c.parallel_depth:  # the text of the last joint block: two knobs of six, no output, no feed-forward
        once, tokens = once - 4 * d * d, tokens - 9 * d * d * m
    return batch * (2 * (once + tokens) + 4 * (n + m) ** 2 * d * depth)


# %% tags=["check"]
from torch.utils.flop_counter import FlopCounterMode

for config in (DiTConfig(), DiTConfig(3, 2, 32, 4, 3, 0, 24), DiTConfig(8, 1, 64, 2, 0, 2, 16)):
    model = DiT(config)
    assert parameter_count(config) == sum(p.numel() for p in model.parameters())
    inputs = torch.zeros(2, config.latent_channels, 3 * config.patch, 5 * config.patch), torch.zeros(2)
    prompt = torch.zeros(2, 7, config.text_width), torch.ones(2, 7).bool(), torch.zeros(2, config.text_width)
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(*inputs, *prompt)
    assert counter.get_total_flops() == flop_count(config, (3, 5), 7, batch=2)

# %%
for patch in (8, 4, 2, 1):
    config, side = DiTConfig(patch=patch), 16 // patch
    work = flop_count(config, (side, side), text_tokens=8)
    size = parameter_count(config)
    print(f"patch {patch}: {side * side:3} tokens, {size / 1e6:.1f} M parameters, {work / 1e9:.2f} GFLOPs")

# %% [markdown] lang="zh"
# 图块减半，参数几乎不变，运算翻好几倍。DiT 论文的发现正是：画质跟着运算量走，而不是参数量。
#
# ## 最小的世界：七段数码
#
# 要看它真的会画，需要一个画得出、也判得清的世界：十个七段数码，四种颜色，每张 $16 \times 8$，长方形。浓淡随机，所以噪声不同，画也不同。

# %% [markdown] lang="en" twin="3a9c82cf"
# Halve the patch: the parameters hardly change, the work multiplies. The DiT paper's finding is just that: quality follows the FLOPs, not the parameters.
#
# ## The smallest world: seven segments
#
# To see it draw we need a world that code can draw and judge: ten seven-segment digits in four colours, each $16 \times 8$. Their depth of colour is random, so another noise is another picture.

# %% tags=["hide"]
COLOURS = {"red": (0.9, 0.15, 0.15), "green": (0.1, 0.65, 0.25), "blue": (0.15, 0.3, 0.9), "orange": (1.0, 0.6, 0.1)}
SEGMENTS = ["abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgedc", "abc", "abcdefg", "abcdfg"]
BARS = {"a": (2, 2, 2, 4), "g": (7, 2, 2, 4), "d": (12, 2, 2, 4)}  # top, left, height, width
BARS |= {"f": (2, 1, 6, 2), "b": (2, 5, 6, 2), "e": (8, 1, 6, 2), "c": (8, 5, 6, 2)}


def draw_digit(colour: str, digit: int, depth: float = 1.0) -> Tensor:
    """A picture (3, 16, 8) in −1…1: the digit on white, ``depth`` of its colour."""
    lit = torch.zeros(16, 8)
    for top, left, height, width in (BARS[segment] for segment in SEGMENTS[digit]):
        lit[top : top + height, left : left + width] = depth
    ink = torch.tensor(COLOURS[colour]).reshape(3, 1, 1)
    return 2 * (1 - lit + lit * ink) - 1


captions = [(colour, digit) for colour in COLOURS for digit in range(10)]
pictures = torch.stack([draw_digit(*caption) for caption in captions])  # (40, 3, 16, 8)
image_grid(
    list(pictures / 2 + 0.5),
    columns=20,
    size=0.33,
    alt="Forty seven-segment digits, 0 to 9 in red, green, blue and orange.",
    title="The whole world: forty captions",
)

# %% [markdown] lang="zh"
# 提示词是两个词：颜色和数字，每个词一个固定的随机向量，等到第 07 章才换成真的文本编码器。有四对组合从训练里拿走，比如红色的 7：它见过红，也见过 7，能不能合到一起？

# %% [markdown] lang="en" twin="836d44e2"
# A prompt is two words, colour and digit, each a fixed random vector; a real text encoder comes in chapter 07. Four pairs are kept out of training, red 7 among them: the network meets red, and meets 7, but can it put the two together?

# %%
words = torch.randn(14, 16, generator=torch.Generator().manual_seed(0))  # four colours, ten digits
word_ids = torch.tensor([[list(COLOURS).index(colour), 4 + digit] for colour, digit in captions])
unseen = torch.tensor([captions.index(pair) for pair in [("red", 7), ("green", 9), ("blue", 2), ("orange", 5)]])
seen = torch.tensor([i for i in range(40) if i not in unseen.tolist()])


def prompt(index: Tensor) -> tuple[Tensor, None, Tensor]:
    """Text tokens (B, 2, 16), no mask, and the pooled vector (B, 16) of captions by number."""
    text = words[word_ids[index]]
    return text, None, text.mean(dim=1)


# %% [markdown] lang="zh"
# ## 教它速度
#
# 训练就是第 01 章那一行：随机取一张图、一份噪声、一个 $\sigma$，站到直线上的 $x_\sigma$，猜速度 $\varepsilon - x_0$，误差平方取平均。全部训练代码就是下面的循环，第 11 章会把它做成能中断、能续跑的样子。

# %% [markdown] lang="en" twin="266dabdb"
# ## Teaching it the velocity
#
# Training is the one line of chapter 01: take a picture, a noise and a $\sigma$ at random, stand on the straight road at $x_\sigma$, guess the velocity $\varepsilon - x_0$, and average the squared error. The loop below is all of it; chapter 11 makes it resumable.

# %%
from diffusion_engine.rectified_flow import integrate, interpolate, predict_data, velocity_target
from diffusion_engine.scheduler import make_schedule

torch.manual_seed(0)
model = DiT(DiTConfig(latent_channels=3, patch=4, width=64, heads=4, joint_depth=1, parallel_depth=1, text_width=16))
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.98), weight_decay=0.0)
learning_rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=320, pct_start=0.1)
rng, losses = torch.Generator().manual_seed(0), []
for _ in range(320):
    index = seen[torch.randint(len(seen), (32,), generator=rng)]
    depth = 0.6 + 0.4 * torch.rand(32, 1, 1, 1, generator=rng)
    sigma = torch.sigmoid(0.3 + torch.randn(32, generator=rng))  # most often halfway, where the digit is decided
    data, noise = 1 + depth * (pictures[index] - 1), torch.randn(32, 3, 16, 8, generator=rng)
    velocity = model(interpolate(data, noise, sigma), 1000 * sigma, *prompt(index))
    loss = F.mse_loss(velocity, velocity_target(data, noise))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    learning_rate.step()
    losses.append(loss.item())

# %% tags=["check"]
start, end = sum(losses[:5]) / 5, sum(losses[-30:]) / 30
assert end < 0.1 * start  # v = 0 at birth costs about E‖ε − x0‖²; now less than a tenth of it
assert abs(start - ((pictures * 0.8 + 0.2).square().mean().item() + 1)) < 0.2

# %% [markdown] lang="zh"
# ## 最小的去噪循环
#
# 到此为止的六章，在这几行里碰头：噪声表给出 $\sigma$，网络读 $t = 1000\sigma$ 和提示词，回答速度，图沿着它走一步：
#
# $$x \leftarrow x + (\sigma_{\text{next}} - \sigma)\, v(x, 1000\,\sigma)$$

# %% [markdown] lang="en" twin="86bf036f"
# ## The smallest denoising loop
#
# All six chapters so far meet in these lines: the schedule hands out $\sigma$, the network reads $t = 1000\sigma$ and the prompt and answers with a velocity, and the picture takes one step along it:
#
# $$x \leftarrow x + (\sigma_{\text{next}} - \sigma)\, v(x, 1000\,\sigma)$$


# %%
def velocity_of(index: Tensor):
    """v(x, σ) of the network under these captions."""
    return lambda x, sigma: model(x, torch.full((len(x),), 1000 * sigma), *prompt(index))


@torch.no_grad()
def denoise(index: Tensor, noise: Tensor, steps: int = 12) -> tuple[Tensor, list[Tensor]]:
    x, previews, velocity = noise, [], velocity_of(index)
    for sigma, sigma_next in make_schedule(steps):
        v = velocity(x, sigma)
        previews.append(predict_data(x, v, sigma))  # where the road would end if it were straight
        x = x + (sigma_next - sigma) * v
    return x, previews


noise = torch.randn(40, 3, 16, 8, generator=torch.Generator().manual_seed(1))
drawn, previews = denoise(torch.arange(40), noise)

# %% tags=["hide"]
frames = [frame[unseen[0]] / 2 + 0.5 for frame in previews]
alt = "Two rows of drawn digits in four colours like the training pictures, then twelve previews of a red 7 forming."
title = "Drawn from noise; last row: how a red 7, never seen in training, takes shape"
image_grid([*(drawn / 2 + 0.5), *frames], columns=20, size=0.33, alt=alt, title=title)

# %% [markdown] lang="zh"
# 眼见不算，要判。每张画去找整个世界里离它最近的图，看标题对不对；再查循环本身：它和第 01 章的积分一位不差，见过的组合几乎全对。没见过的四对只打印，不强求。

# %% [markdown] lang="en" twin="f2d1c95b"
# Seeing is not judging. For each drawing find the nearest picture of the whole world and compare captions; and check the loop itself: it equals the integration of chapter 01, and the pairs seen in training are almost all right. The four unseen pairs are printed, not demanded.

# %% tags=["check"]
walked = integrate(torch.no_grad()(velocity_of(torch.arange(40))), noise, make_schedule(12).sigmas)
assert torch.allclose(drawn, walked, atol=1e-5)
world = torch.cat([1 + depth * (pictures - 1) for depth in (0.6, 0.8, 1.0)])
right = torch.cdist(drawn.flatten(1), world.flatten(1)).argmin(dim=1) % 40 == torch.arange(40)
assert right[seen].float().mean() >= 0.9
print("at least half of the unseen pairs drawn right:", right[unseen].sum().item() >= 2)

# %% [markdown] lang="zh"
# **到了这里**，引擎会画了，虽然世界只有四十张图。还缺三样：真正的提示词（第 07 章），让提示词更有力的引导（第 08 章），让图变大的 VAE（第 09 章）。下一章先问：一句话怎样变成网络读得懂的向量？
#
# ## 三个问题
#
# 1. 预测：训练时把 $t$ 换成 $\sigma$（忘了乘 1000），形状不变，结果会怎样？先想第 03 章。
# 2. 修改：把 `sincos_2d` 的行和列对调，哪些检查会红？训练好的网络还能用吗？
# 3. 动手：让它画一张 $16 \times 24$ 的图。形状没问题，画面呢？解释你看到的。

# %% [markdown] lang="en" twin="9759d165"
# **Where we stand.** The engine draws, though its world has only forty pictures. Three things are missing: real prompts (chapter 07), guidance that makes them count (08), a VAE for larger pictures (09). The next chapter asks: how does a sentence become vectors that the network can read?
#
# ## Three questions
#
# 1. Predict: feed $\sigma$ in place of $t$ (forget the factor 1000). The shapes stay; what happens? Think of chapter 03.
# 2. Modify: swap rows and columns in `sincos_2d`. Which checks turn red, and does the trained network still work?
# 3. Build: let it draw a picture of $16 \times 24$. The shapes are fine; is the picture? Explain what you see.

# %% tags=["solution"]
# 1 · every time looks like pure data (t below 1): the network believes the noise is nearly a finished picture
with torch.no_grad():
    fooled = model(noise, torch.full((40,), 1.0), *prompt(torch.arange(40)))
    honest = model(noise, torch.full((40,), 1000.0), *prompt(torch.arange(40)))
assert (fooled - honest).square().mean() > 0.05

# %% tags=["solution"]
# 2 · diffusers' parity turns red; shapes, round trips and v = 0 do not; the trained network loses its way
swapped = sincos_2d((7, 7), 64).roll(32, dims=-1)
assert not torch.allclose(quarters_flipped(swapped), theirs, atol=0.1)
assert not torch.allclose(sincos_2d((4, 2), 64).roll(32, dims=-1), sincos_2d((4, 2), 64), atol=0.1)

# %% tags=["solution"]
# 3 · it runs, but it has only met columns 0 and 1: the digit stays where it learnt to stand, the rest is guesswork
broad = torch.randn(1, 3, 16, 24, generator=torch.Generator().manual_seed(2))
broad, _ = denoise(torch.tensor([8]), broad)
assert broad.shape == (1, 3, 16, 24)
alt = "A red 8 at the left; to the right of it, columns never seen in training, coloured noise."
image_grid([broad[0] / 2 + 0.5], ["red 8, 16×24"], size=1.6, alt=alt)

# %% [markdown] lang="zh"
# ## 小结
#
# - 分块只搬不算；行列对调、块内顺序，两种错都不改形状。
# - 位置由两个正弦嵌入拼成，任意长方形都行；与 diffusers 一致（误差小于 $10^{-5}$）。
# - 最后一层从零开始，刚出生的网络回答 $v = 0$。
# - 参数和运算量有公式，与计数器一个不差；图块减半，参数不变，运算翻几倍。
# - 六章的零件合成四行循环，从噪声里画出了数字。
#
# 阅读卡片：DiT（[`papers/03_dit`](../../papers/03_dit.zh.md)）；笔记：[`notes/05_dit_shapes`](../../notes/05_dit_shapes.zh.md)。下一章：07。

# %% [markdown] lang="en" twin="9f8006ae"
# ## Recap
#
# - Patchify moves and never computes; a swapped grid and a swapped inner order keep every shape.
# - Two sinusoids make a position, on any rectangle; equal to diffusers' (within $10^{-5}$).
# - The final layer starts at zero; a new-born network answers $v = 0$.
# - Parameters and FLOPs have formulas that equal the counters; halve the patch and the work multiplies, not the parameters.
# - The parts of six chapters make a loop of four lines, and it drew digits out of noise.
#
# Reading card: DiT ([`papers/03_dit`](../../papers/03_dit.en.md)); note: [`notes/05_dit_shapes`](../../notes/05_dit_shapes.en.md). Next: chapter 07.
