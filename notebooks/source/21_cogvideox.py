# ---
# jupyter:
#   course:
#     minutes: 35
#     module: reference/cogvideox
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown] lang="zh"
# # 21 · CogVideoX：一份权重，两套旋钮
#
# 读完这一章，CogVideoX 的网络由你的零件搭成，和 diffusers 的输出对得上。它学的不是我们的速度：怎样用它来走，第 23 章讲。
#
# | 你会做出 | 你需要 | 时间 | 模块 |
# | --- | --- | --- | --- |
# | 两种三维位置、共用权重的块、CogVideoX 的对照表与网络 | 第 05 章的旋钮，第 14 章的三维图块，第 15 章的 `load` | 35 分钟 | `diffusion_engine/reference/cogvideox.py` |

# %% [markdown] lang="en" twin="f0e2ba7e"
# # 21 · CogVideoX: one set of weights, two of knobs
#
# After this chapter the network of CogVideoX stands on your parts, and its output agrees with diffusers'. What it learned is not our velocity: how to walk with it is chapter 23's matter.
#
# | You build | You need | Time | Module |
# | --- | --- | --- | --- |
# | two kinds of 3-D positions, a block with shared weights, CogVideoX's key map and network | the knobs of chapter 05, the 3-D patches of chapter 14, `load` of chapter 15 | 35 minutes | `diffusion_engine/reference/cogvideox.py` |

# %% [markdown] lang="zh"
# **先想一想**：在 SD3 里，文字和图各有一份权重；在 Wan 里，文字站在一旁。CogVideoX 把文字和视频排成一行，共用一份权重。可它们的数值大小差得远，怎样才合得来？先写下你的办法。

# %% [markdown] lang="en" twin="5f1cb7d0"
# **Think first:** in SD3 text and picture have weights of their own; in Wan the text stands aside. CogVideoX puts text and video into one row and shares one set of weights. Yet their numbers differ much in size. How can that go well? Write your idea down.

# %% tags=["export"]
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffusion_engine.attention import Rope, SelfAttention, axial_rope, grid_positions, joint_mask, pad_rope
from diffusion_engine.dit import Conditions
from diffusion_engine.reference.checkpoint import KeyMap, flatten_patches, require
from diffusion_engine.reference.sd3 import at_each_step
from diffusion_engine.timestep_embedding import TimestepEmbedder, timestep_embedding
from diffusion_engine.transformer_block import FeedForward, Mod, split_mods
from diffusion_engine.video import video_grid, video_patchify, video_unpatchify


# %% [markdown] lang="zh"
# ## 哪里不同
#
# | | 我们的视频 DiT | CogVideoX 2B | CogVideoX 5B | 1.5 5B |
# | --- | --- | --- | --- | --- |
# | 图块 | 1×4×4 | 1×2×2 | 1×2×2 | 2×2×2 |
# | 文字 | 交叉注意力 | 与视频排成一行，文字在前 | 同左 | 同左 |
# | 权重 | – | 文字和视频共用 | 同左 | 同左 |
# | 旋钮 | 时间加文字 | 只听时间，两种词元各一套 | 同左 | 同左 |
# | 位置 | 旋转 | 正余弦，相加 | 旋转，居中拉伸 | 旋转，从零数起 |
# | 归一化 | 不带权重 | 带权重，$\epsilon = 10^{-5}$ | 同左 | 同左 |
# | 输出 | 速度 | v-prediction | 同左 | 同左 |

# %% [markdown] lang="en" twin="c1cecb5b"
# ## What differs
#
# | | Our video DiT | CogVideoX 2B | CogVideoX 5B | 1.5 5B |
# | --- | --- | --- | --- | --- |
# | patch | 1×4×4 | 1×2×2 | 1×2×2 | 2×2×2 |
# | text | cross-attention | in one row with the video, text first | the same | the same |
# | weights | – | shared by text and video | the same | the same |
# | knobs | time and text | time alone, a set for each kind of token | the same | the same |
# | positions | rotation | sine-cosine, added | rotation, stretched about the centre | rotation, counted from zero |
# | norms | without weights | with weights, $\epsilon = 10^{-5}$ | the same | the same |
# | output | velocity | v-prediction | the same | the same |


# %% tags=["export"]
@dataclass(frozen=True)
class CogVideoXConfig:
    """``config.json`` of diffusers' ``CogVideoXTransformer3DModel``: its names, its defaults.

    Raises:
        ValueError: the image-to-video models' entries, another activation, or sizes that the positions cannot share out.
    """

    num_attention_heads: int = 30
    attention_head_dim: int = 64
    in_channels: int = 16
    out_channels: int | None = 16
    flip_sin_to_cos: bool = True
    freq_shift: int = 0
    time_embed_dim: int = 512
    ofs_embed_dim: int | None = None
    text_embed_dim: int = 4096
    num_layers: int = 30
    dropout: float = 0.0
    attention_bias: bool = True
    sample_width: int = 90
    sample_height: int = 60
    sample_frames: int = 49
    patch_size: int = 2
    patch_size_t: int | None = None
    temporal_compression_ratio: int = 4
    max_text_seq_length: int = 226
    activation_fn: str = "gelu-approximate"
    timestep_activation_fn: str = "silu"
    norm_elementwise_affine: bool = True
    norm_eps: float = 1e-5
    spatial_interpolation_scale: float = 1.875
    temporal_interpolation_scale: float = 1.0
    use_rotary_positional_embeddings: bool = False
    use_learned_positional_embeddings: bool = False
    patch_bias: bool = True

    @property
    def width(self) -> int:
        """D = heads · head_dim."""
        return self.num_attention_heads * self.attention_head_dim

    def __post_init__(self):
        require(self, flip_sin_to_cos=True, freq_shift=0, activation_fn="gelu-approximate", ofs_embed_dim=None)
        require(self, timestep_activation_fn="silu", use_learned_positional_embeddings=False)
        name = "attention_head_dim" if self.use_rotary_positional_embeddings else "width"
        if (size := getattr(self, name)) % 16:
            raise ValueError(f"{name} {size} is not a multiple of 16, for three axes; try {max(1, size // 16) * 16}")


# %% [markdown] lang="zh"
# ## 2B 的位置：三轴的正余弦
#
# 宽度 $D$ 的四分之一给时间，其余平分给列和行，每段先正弦后余弦。$e$ 就是第 03 章的时钟。空间的步子缩小 1.875 倍：模型先在小图上学，放大后位置不出格。
#
# $$p(t, r, c) = \big[e_{D/4}(t),\; e_{3D/8}(c / 1.875),\; e_{3D/8}(r / 1.875)\big]$$

# %% [markdown] lang="en" twin="fe9e3a6b"
# ## 2B's positions: sines and cosines along three axes
#
# A quarter of the width $D$ goes to time, the rest in equal parts to column and row, each with its sines first; $e$ is the clock of chapter 03. Steps in space shrink by 1.875: the model learned on smaller pictures, and larger ones stay within the same range.
#
# $$p(t, r, c) = \big[e_{D/4}(t),\; e_{3D/8}(c / 1.875),\; e_{3D/8}(r / 1.875)\big]$$


# %% tags=["export"]
def sincos_3d(grid: tuple[int, int, int], width: int, space: float = 1.0, time: float = 1.0, device=None) -> Tensor:
    """Fixed positions (f · h · w, width), fp32: e(t / time), e(column / space), e(row / space), each sines first.

    Args:
        grid: (f, h, w). width: D, a multiple of 16: D/4 for time, 3D/8 for column and for row.
        space, time: how many tokens make one unit of position.

    Source: diffusers' ``get_3d_sincos_pos_embed``; Yang et al. 2024 (CogVideoX).
    """
    t, row, column = grid_positions(*grid).to(device).float().unbind(-1)
    axes = ((t / time, width // 4), (column / space, 3 * width // 8), (row / space, 3 * width // 8))
    cosines_first = [timestep_embedding(position, dim).chunk(2, dim=-1) for position, dim in axes]
    return torch.cat([half for cos, sin in cosines_first for half in (sin, cos)], dim=-1)


# %% tags=["check"]
from diffusers.models.embeddings import get_3d_sincos_pos_embed

for f, h, w in ((3, 4, 6), (1, 5, 2)):
    theirs = get_3d_sincos_pos_embed(64, (w, h), f, 1.875, 0.5, output_type="pt").flatten(0, 1)
    places = sincos_3d((f, h, w), 64, space=1.875, time=0.5)
    assert torch.allclose(places, theirs.float(), atol=1e-5)  # diffusers wants (width, height)

# %%
five = CogVideoXConfig(num_attention_heads=48, num_layers=42, use_rotary_positional_embeddings=True)  # 5B
for name, config in {"2B": CogVideoXConfig(), "5B": five}.items():
    print(f"{name}: {config.num_layers} blocks, width {config.width}, {config.num_attention_heads} heads of 64")

# %% [markdown] lang="zh"
# ## 5B 的位置：居中拉伸的旋转
#
# 5B 用旋转，但位置不一定是整数。训练时的网格是 30×45；别的形状先在网格正中放一个最大的同形长方形，再把行和列均匀铺上去。于是位置总在训练见过的范围里，只是变密或变疏。

# %% [markdown] lang="en" twin="58b3d5d6"
# ## 5B's positions: rotation, stretched about the centre
#
# 5B rotates, yet its positions need not be whole numbers. It was trained on a grid of 30×45; another shape gets the largest rectangle of its proportions in the middle of that grid, and rows and columns are spread over it. So positions stay within what training saw, only denser or sparser.


# %% tags=["export"]
def centred_positions(grid: tuple[int, int, int], base: tuple[int, int]) -> Tensor:
    """Positions (f · h · w, 3), float64: frames 0, 1, 2, …; n rows in even steps from top to (top + height) · (n − 1) / n.

    Columns alike; top and height are those of the largest centred rectangle of shape h : w in ``base``, the grid (rows,
    columns) that was trained on.

    Source: diffusers' ``get_resize_crop_region_for_grid`` and ``get_3d_rotary_pos_embed``.
    """
    scale = min(base[0] / grid[1], base[1] / grid[2])
    lines = [torch.arange(grid[0], dtype=torch.float64)]
    for n, whole in zip(grid[1:], base):
        first = round((whole - round(scale * n)) / 2)
        lines.append(torch.linspace(first, (first + round(scale * n)) * (n - 1) / n, n, dtype=torch.float64))
    return torch.stack(torch.meshgrid(*lines, indexing="ij"), dim=-1).flatten(0, -2)


def video_positions(c: CogVideoXConfig, grid: tuple[int, int, int], like: Tensor) -> Rope | Tensor:
    """Where the video tokens of ``grid`` stand, on the device of ``like``: what is added to them (N, D), or their turns.

    2B adds `sincos_3d`, in the dtype of ``like``; 5B turns by `centred_positions`, 1.5 by whole numbers from 0.

    Raises:
        ValueError: a grid without an axis of time.
    """
    if len(grid) != 3:
        raise ValueError(f"grid {grid} is not (f, h, w); latents are expected as (B, C, F, H, W)")
    if not c.use_rotary_positional_embeddings:
        scales = c.spatial_interpolation_scale, c.temporal_interpolation_scale
        return sincos_3d(grid, c.width, *scales, device=like.device).to(like)
    base, head = (c.sample_height // c.patch_size, c.sample_width // c.patch_size), c.attention_head_dim
    positions = centred_positions(grid, base) if c.patch_size_t is None else grid_positions(*grid)
    return axial_rope(positions.to(like.device), (head // 4, 3 * head // 8, 3 * head // 8))


# %% tags=["check"]
from types import SimpleNamespace as Stand

from diffusers import CogVideoXPipeline

ask = CogVideoXPipeline._prepare_rotary_positional_embeddings  # pixels → cosines and sines
stand_in = Stand(vae_scale_factor_spatial=8, transformer=Stand(config=five))
for f, h, w in ((3, 30, 45), (2, 16, 16), (1, 12, 40), (2, 45, 20), (4, 7, 1)):
    for ours, theirs in zip(video_positions(five, (f, h, w), places), ask(stand_in, 16 * h, 16 * w, f, "cpu")):
        assert torch.allclose(ours, theirs[:, ::2], atol=1e-5)  # diffusers stores each number twice

# %% tags=["hide"]
import matplotlib.pyplot as plt

from course.figures import COLORS, show

fig, axes = plt.subplots(1, 3, figsize=(6.6, 2.2), sharey=True)
for ax, (h, w), color in zip(axes, ((30, 45), (20, 20), (12, 40)), COLORS):
    places = centred_positions((1, h, w), (30, 45))
    ax.add_patch(plt.Rectangle((0, 0), 45, 30, color="#eef1f5"))
    ax.plot(places[:, 2], places[:, 1], ".", color=color, markersize=2)
    ax.set(title=f"{16 * w}×{16 * h} pixels", xlim=(-1, 46), ylim=(31, -1), xlabel="column", aspect="equal")
axes[0].set_ylabel("row")
fig.suptitle("Every clip is laid over the middle of the grid of training", x=0.01, ha="left", fontsize=11)
show(
    fig,
    alt="Three grids of token positions over the training grid of 30 by 45: the full size fills it, a square sits in its middle, a wide strip crosses it.",
)

# %% [markdown] lang="zh"
# ## 块：一份权重，两套旋钮
#
# 文字和视频排成一行，一起过同一个注意力、同一个前馈网络。两种词元的数值大小差得远，所以归一化之后各拧各的旋钮，门控也各用各的：
#
# $$h_m = (1 + \gamma_m) \odot \mathrm{LN}(x_m) + \beta_m, \qquad m \in \{\text{video}, \text{text}\}$$

# %% [markdown] lang="en" twin="6ba5bae7"
# ## The block: one set of weights, two of knobs
#
# Text and video form one row and go through the same attention and the same feed-forward network. Their numbers differ much in size, so behind the norm each kind has its own knobs, and its own gate:
#
# $$h_m = (1 + \gamma_m) \odot \mathrm{LN}(x_m) + \beta_m, \qquad m \in \{\text{video}, \text{text}\}$$


# %% tags=["export"]
def steer(x: Tensor, mod: Mod) -> Tensor:
    """(1 + γ) · x + β: `modulate` for tokens (B, N, D) that were normalised already."""
    return torch.addcmul(mod.shift, x, 1 + mod.scale)


# %% tags=["export"]
class ExpertNorm(nn.Module):
    """One LayerNorm with weights for both kinds of token, then a shift, a scale and a gate for each.

    forward(x (B, N, D), text (B, M, D), cond (B, Dc), or the `knobs` of it) → both normalised and steered, and their gates
    (B, 1, D), video first.

    Source: Yang et al. 2024 (CogVideoX), "expert adaptive LayerNorm"; diffusers' ``CogVideoXLayerNormZero``.
    """

    def __init__(self, c: CogVideoXConfig):
        super().__init__()
        self.linear = nn.Linear(c.time_embed_dim, 6 * c.width)
        self.norm = nn.LayerNorm(c.width, c.norm_eps, c.norm_elementwise_affine)

    def knobs(self, cond: Tensor | list[Mod]) -> list[Mod]:
        """Of video and text, from cond (B, Dc); those made ahead pass unchanged."""
        return cond if isinstance(cond, list) else split_mods(self.linear(F.silu(cond)), 2)

    def forward(self, x: Tensor, text: Tensor, cond: Tensor | list[Mod]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        for_video, for_text = self.knobs(cond)
        return steer(self.norm(x), for_video), steer(self.norm(text), for_text), for_video.gate, for_text.gate


# %% tags=["export"]
class CogVideoXBlock(nn.Module):
    """Attention, then a feed-forward network, each over text and video in one row with shared weights.

    forward(x (B, N, D), text (B, M, D), cond (B, Dc), or the `knobs` of it, mask and rope over M + N tokens, text first) →
    x and text anew.
    """

    def __init__(self, c: CogVideoXConfig):
        super().__init__()
        heads = {"bias": c.attention_bias, "head_dim": c.attention_head_dim, "eps": 1e-6}
        self.norm1, self.norm2 = ExpertNorm(c), ExpertNorm(c)
        self.attn = SelfAttention(c.width, c.num_attention_heads, "layer", **heads)
        self.ff = FeedForward(c.width)

    def knobs(self, cond: Tensor) -> tuple[list[Mod], list[Mod]]:
        """Of both norms, from cond (B, Dc)."""
        return self.norm1.knobs(cond), self.norm2.knobs(cond)

    def forward(self, x, text, cond, mask=None, rope: Rope | None = None) -> tuple[Tensor, Tensor]:
        attend, m = partial(self.attn, mask=mask, rope=rope), text.shape[1]
        for_attn, for_ff = cond if isinstance(cond, tuple) else (cond, cond)
        for norm, layer, knobs in ((self.norm1, attend, for_attn), (self.norm2, self.ff, for_ff)):
            h, h_text, gate, text_gate = norm(x, text, knobs)
            both = layer(torch.cat([h_text, h], dim=1))  # (B, M + N, D)
            x, text = torch.addcmul(x, gate, both[:, m:]), torch.addcmul(text, text_gate, both[:, :m])
        return x, text


# %% tags=["hide"]
def redraw(module: nn.Module) -> nn.Module:
    """Every weight anew, so that no norm is one and no bias zero: outputs of order one."""
    for weight in module.requires_grad_(False).parameters():
        weight.copy_(torch.randn(weight.shape, generator=rng) / (weight[0].numel() if weight.ndim > 1 else 4) ** 0.5)
    return module.eval()


rng = torch.Generator().manual_seed(0)
SIZES = dict(num_attention_heads=2, attention_head_dim=32, in_channels=4, out_channels=4, time_embed_dim=24)
SIZES |= dict(text_embed_dim=20, num_layers=2, sample_width=12, sample_height=8, sample_frames=9, max_text_seq_length=7)
VARIANTS = {"2B": {}, "5B": {"use_rotary_positional_embeddings": True}}
VARIANTS["1.5"] = VARIANTS["5B"] | {"patch_size_t": 2, "patch_bias": False}
block = redraw(CogVideoXBlock(CogVideoXConfig(**SIZES)))
row, cond = torch.randn(2, 17, 64, generator=rng), torch.randn(2, 24, generator=rng)
latents, start = torch.randn(2, 2, 4, 4, 6, 10, generator=rng)
text, t = torch.randn(2, 7, 20, generator=rng), torch.tensor([987, 3])

# %% tags=["check"]
outs = [torch.cat(block(row[:, m:], row[:, :m], cond)[::-1], dim=1) for m in (5, 9)]
assert (outs[0] - outs[1]).abs().mean() > 0.05  # two sets of knobs: the cut shows
for norm in (block.norm1, block.norm2):
    for knobs in norm.linear.parameters():
        knobs[3 * 64 :] = knobs[: 3 * 64]  # the text's are the last three of six
outs = [torch.cat(block(row[:, m:], row[:, :m], cond)[::-1], dim=1) for m in (5, 9)]
assert torch.allclose(*outs, atol=1e-5)  # one set of knobs: text and video share every weight

# %% [markdown] lang="zh"
# ## 对照表与网络
#
# 名字大多一一对应，要改的只有两头：diffusers 输出的每个图块通道在前，我们在后，所以重排最后一层的行；1.5 的入口则重排它的列。网络收尾有两个带权重的 LayerNorm，紧挨着，都要。`forward` 收 $(B, C, T, H, W)$；diffusers 的流水线帧在前，`as_diffusers` 转一下轴，旋转表用它给的。

# %% [markdown] lang="en" twin="c3f12b11"
# ## The key map and the network
#
# Most names have one counterpart; only the two ends change. diffusers' output patches have channels first, ours last, so the last layer's rows change places; at 1.5's entrance the columns do. The network ends in two LayerNorms with weights, one behind the other; both count. `forward` takes $(B, C, T, H, W)$; diffusers' pipeline puts frames first, so `as_diffusers` turns the axes, and uses the rotations it is given.


# %% tags=["export"]
def channels_last(rows: Tensor, channels: int) -> Tensor:
    """Rows in the order (c, pt, ph, pw) as rows in the order (pt, ph, pw, c); other counts of rows stay as they are."""
    if len(rows) % channels:
        return rows  # the check of shapes will name it
    return rows.unflatten(0, (channels, -1)).transpose(0, 1).flatten(0, 1)


# %% tags=["check"]
rows = torch.arange(12).unsqueeze(1)  # three channels of four places: 0 … 3, 4 … 7, 8 … 11
assert channels_last(rows, 3).flatten().tolist() == [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11]

# %% tags=["export"]
BLOCK = {"attn.stream.qkv": "attn1.{to_q,to_k,to_v}", "attn.stream.out": "attn1.to_out.0"}
BLOCK |= {"ff.0": "ff.net.0.proj", "ff.2": "ff.net.2"}
BLOCK |= {f"attn.stream.norm_{a}": f"attn1.norm_{a}" for a in "qk"}
BLOCK |= {f"norm{i}.{part}": f"norm{i}.{part}" for i in (1, 2) for part in ("linear", "norm")}


def cogvideox_keys(config: CogVideoXConfig) -> KeyMap:
    """Where each tensor of `CogVideoX` lies in diffusers' checkpoint."""
    names = {"video_in": "patch_embed.proj", "text_in": "patch_embed.text_proj"}
    names |= {f"time_in.mlp.{2 * i}": f"time_embedding.linear_{i + 1}" for i in (0, 1)}
    names |= {f"blocks.*.{ours}": f"transformer_blocks.*.{theirs}" for ours, theirs in BLOCK.items()}
    names |= {"final_norms.0": "norm_final", "final_norms.1": "norm_out.norm", "final_knobs": "norm_out.linear"}
    changes = {"out": partial(channels_last, channels=config.out_channels or config.in_channels)}
    changes["video_in.weight"] = flatten_patches
    if config.patch_size_t is not None:  # 1.5: a linear layer already
        changes["video_in.weight"] = lambda weight: channels_last(weight.mT, config.in_channels).mT
    return KeyMap(names | {"out": "proj_out"}, changes)


# %% tags=["export"]
class CogVideoX(nn.Module):
    """CogVideoX from text (2B, 5B, 1.5): v-prediction of video latents; the order of arguments is that of `DiT`.

    Its output is **not** a velocity; chapter 23 makes one of it. Source: Yang et al. 2024; diffusers
    ``cogvideox_transformer_3d.py``.
    """

    Config, key_map = CogVideoXConfig, staticmethod(cogvideox_keys)

    def __init__(self, config: CogVideoXConfig):
        super().__init__()
        self.config, c, width = config, config, config.width
        pt, ph, pw = self.patch = (c.patch_size_t or 1, c.patch_size, c.patch_size)
        self.min_multiple = c.patch_size  # latent height and width must be multiples of this; frames of patch[0]
        self.video_in = nn.Linear(pt * ph * pw * c.in_channels, width, bias=c.patch_bias or c.patch_size_t is not None)
        self.text_in, self.time_in = nn.Linear(c.text_embed_dim, width), TimestepEmbedder(c.time_embed_dim, width)
        self.blocks = nn.ModuleList(CogVideoXBlock(c) for _ in range(c.num_layers))
        norms = (nn.LayerNorm(width, c.norm_eps, c.norm_elementwise_affine) for _ in range(2))
        self.final_norms, self.final_knobs = nn.Sequential(*norms), nn.Linear(c.time_embed_dim, 2 * width)
        self.out = nn.Linear(width, pt * ph * pw * (c.out_channels or c.in_channels))

    def forward(self, latents, t, text, text_mask=None, pooled=None, rope: Rope | None = None) -> Tensor:
        """v = √ᾱ · ε − √(1 − ᾱ) · x0, (B, C, T, H, W), at t = 0 … 999, (B,), under text (B, M, 4096).

        Args:
            text_mask: (B, M) bool; the family was trained without, padding is seen. pooled: unused.
            rope: of the video tokens, where another than `video_positions` makes is wanted.
        """
        return self.velocity(latents, self.conditions(latents.shape[1:], t, text, text_mask, pooled, rope))

    def conditions(self, shape, t, text, text_mask=None, pooled=None, rope: Rope | None = None) -> Conditions:
        """All that `velocity` reads besides latents of ``shape`` (C, T, h, w); the rest as in `forward`."""
        text = self.text_in(text)
        places = rope or video_positions(self.config, video_grid(shape[1:], self.patch), text)
        if isinstance(places, Rope):
            places = pad_rope(places, before=text.shape[1])
        return Conditions(text, text_mask, places, [self.time_in(t)] * (self.config.num_layers + 1))

    def velocity(self, latents: Tensor, given: Conditions) -> Tensor:
        """The rest of `forward`: v of the latents under given conditions."""
        x, (text, mask, rope, conds) = self.video_in(video_patchify(latents, self.patch)), given
        del given  # a table of places ends with its reader
        if not isinstance(rope, Rope):
            x, rope = x + rope, None
        mask = joint_mask(mask, x.shape[1], text_first=True)
        for block, cond in zip(self.blocks, conds):
            x, text = block(x, text, cond, mask, rope)
        x = self.out(steer(self.final_norms(x), *self.end(conds[-1])))
        return video_unpatchify(x, self.patch, video_grid(latents.shape[2:], self.patch))

    def end(self, cond: Tensor | list[Mod]) -> list[Mod]:
        """Shift and scale before the last layer, one `Mod`, of cond (B, Dc); one made ahead passes unchanged."""
        return cond if isinstance(cond, list) else split_mods(self.final_knobs(F.silu(cond)), 1, gate=False)

    def hoist(self, shape, times, text, text_mask=None, pooled=None, rope: Rope | None = None) -> list[Conditions]:
        """`conditions` for all training steps ``times`` (S,), one product a layer; S · B · (all knobs) numbers."""
        given = self.conditions(shape, times.repeat_interleave(len(text)), text, text_mask, pooled, rope)
        knobs = [block.knobs(cond) for block, cond in zip(self.blocks, given.cond)] + [self.end(given.cond[-1])]
        return at_each_step(given, knobs, len(times))

    def as_diffusers(self, hidden_states, encoder_hidden_states, timestep, image_rotary_emb=None) -> Tensor:
        """The same under diffusers' names: latents (B, T, C, H, W), rotations (N, head_dim) with each number twice."""
        rope = None if image_rotary_emb is None else Rope(*(table[:, ::2] for table in image_rotary_emb))
        return self(hidden_states.transpose(1, 2), timestep.float(), encoder_hidden_states, rope=rope).transpose(1, 2)


# %% [markdown] lang="zh"
# ## 对一对
#
# 三个很小的检查点：2B、5B、1.5。画面不是正方形，四帧，两个样本，各有各的时间；5B 的旋转表来自 diffusers 自己的流水线。

# %% [markdown] lang="en" twin="dbcf07bf"
# ## Against diffusers
#
# Three very small checkpoints: 2B, 5B and 1.5. The picture is no square, there are four frames and two samples, each with its own time; 5B's rotations come from diffusers' own pipeline.

# %% tags=["check"]
import tempfile
from pathlib import Path

from diffusers import CogVideoXTransformer3DModel

from diffusion_engine.reference.checkpoint import DropIn, load

theirs, ours, calls, room = {}, {}, {}, tempfile.TemporaryDirectory()
for name, extra in VARIANTS.items():
    theirs[name] = redraw(CogVideoXTransformer3DModel(**SIZES, **extra))
    theirs[name].save_pretrained(Path(room.name) / name)
    ours[name] = load(CogVideoX, Path(room.name) / name)
    stand_in.transformer = theirs[name]
    turns = ask(stand_in, 48, 80, 4, "cpu") if extra else None
    calls[name] = dict(encoder_hidden_states=text, timestep=t, image_rotary_emb=turns)
    expected = theirs[name](latents.transpose(1, 2), **calls[name]).sample.transpose(1, 2)
    assert (ours[name](latents, t, text) - expected).abs().max() < 1e-5
    print(f"{name}: outputs of size {expected.std():.1f} differ by less than 1e-5")

# %% tags=["check"]
for name, call in calls.items():
    mine = DropIn(load(CogVideoX, Path(room.name) / name, dtype=torch.bfloat16))
    half = CogVideoXTransformer3DModel.from_pretrained(Path(room.name) / name, torch_dtype=torch.bfloat16)
    truth = theirs[name](latents.transpose(1, 2), **call).sample
    call, x = call | {"encoder_hidden_states": text.bfloat16()}, latents.transpose(1, 2).bfloat16()
    errors = [(network(x, **call).sample - truth).square().mean().sqrt() for network in (mine, half)]
    assert errors[0] < 1.1 * errors[1]  # in bf16 no further from the fp32 truth than diffusers itself

# %% [markdown] lang="zh"
# ## 与潜变量无关的
#
# 旋钮只听时间，位置只看形状，文字的入口只看文字：走第一步之前，所有时刻的旋钮一次算好（第 13 章）。文字的键和值不行：文字和视频同在一行，每个块都改写它。

# %% [markdown] lang="en" twin="4d2e519d"
# ## What no latent changes
#
# Knobs listen to time alone, positions to the shape, the text's way in to the text: before the first step the knobs of all times are made at once (chapter 13). Keys and values of the text are not: text stands in one row with the video, and every block rewrites it.

# %% tags=["check"]
import re

road, real = torch.tensor([987.0, 500.0, 3.0]), torch.arange(7) < torch.tensor([[7], [4]])
for net in ours.values():
    ahead = net.hoist(latents.shape[1:], road, text, real)
    for when, given in zip(road, ahead):
        assert torch.allclose(net.velocity(latents, given), net(latents, when.expand(2), text, real), atol=1e-5)

# %%
weights = dict(net.requires_grad_(True).named_parameters())
arrived = torch.autograd.grad(net.velocity(latents, given).sum(), weights.values(), allow_unused=True)
unread = {re.sub(r"\d+", "*", name) for name, gradient in zip(weights, arrived) if gradient is None}
net.requires_grad_(False)
with torch.device("meta"):
    sizes = {name: w.numel() for name, w in CogVideoX(CogVideoXConfig()).named_parameters()}
once = sum(size for name, size in sizes.items() if re.sub(r"\d+", "*", name) in unread)
print(f"2B: {once / 1e9:.2f} of {sum(sizes.values()) / 1e9:.2f} billion weights are read only ahead")

# %% [markdown] lang="zh"
# ## 输出不是速度
#
# 前面每一家走直线：$x = (1 - s)\,x_0 + s\,\varepsilon$，网络猜 $\varepsilon - x_0$。CogVideoX 走圆弧：$x = \cos\varphi\,x_0 + \sin\varphi\,\varepsilon$，网络猜弧的切线：
#
# $$v = \frac{dx}{d\varphi} = \cos\varphi\,\varepsilon - \sin\varphi\,x_0$$
#
# 形状一样，数也差不多大，所以当成速度来用不会报错，只会画错。它听的时间也不是 $1000\,s$，而是训练步 $t = 0, \dots, 999$。

# %% [markdown] lang="en" twin="5df5649e"
# ## The output is no velocity
#
# Every family so far walks a line, $x = (1 - s)\,x_0 + s\,\varepsilon$, and the network guesses $\varepsilon - x_0$. CogVideoX walks an arc, $x = \cos\varphi\,x_0 + \sin\varphi\,\varepsilon$, and its network guesses the arc's tangent:
#
# $$v = \frac{dx}{d\varphi} = \cos\varphi\,\varepsilon - \sin\varphi\,x_0$$
#
# The shape is the same and so is the size; taken for a velocity it raises no error, it only draws wrongly. Its time is not $1000\,s$ either, but a step of training $t = 0, \dots, 999$.

# %% tags=["hide"]
fig, ax = plt.subplots(figsize=(3.6, 3.2))
phi = torch.linspace(0, torch.pi / 2, 90)
ax.plot(phi.cos(), phi.sin(), color=COLORS[1], label="arc: CogVideoX")
ax.plot([0, 1], [1, 0], color=COLORS[0], label="line: the others")
for a in (0.25, 0.8, 1.3):
    here = torch.tensor([a]).cos().item(), torch.tensor([a]).sin().item()
    ax.annotate("", (here[0] - 0.28 * here[1], here[1] + 0.28 * here[0]), here, arrowprops={"arrowstyle": "->"})
ax.annotate("", (0.3, 0.7), (0.5, 0.5), arrowprops={"arrowstyle": "->"})
ax.set(xlabel="share of data", ylabel="share of noise", aspect="equal", xlim=(-0.05, 1.2), ylim=(-0.05, 1.2))
ax.set(xticks=(0, 0.5, 1), yticks=(0, 0.5, 1), title="v turns with the arc")
ax.legend(loc="lower left", fontsize=8)
show(fig, alt="A quarter circle and its chord from data to noise; arrows along the arc turn, the chord's do not.")

# %% [markdown] lang="zh"
# ## 在 diffusers 的流水线里
#
# 采样器先用 diffusers 自己的 DDIM：把它流水线里的变换器换成我们的，四步走完，潜变量不变。

# %% [markdown] lang="en" twin="ca72fa7f"
# ## In diffusers' pipeline
#
# For now the sampler is diffusers' own DDIM: put our transformer into its pipeline, walk four steps, and the latents stay as they are.

# %% tags=["check"]
from diffusers import AutoencoderKLCogVideoX, CogVideoXDDIMScheduler

layers = {f"{way}_block_types": (f"CogVideoX{way.title()}Block3D",) * 4 for way in ("down", "up")}
vae = AutoencoderKLCogVideoX(**layers, block_out_channels=(8,) * 4, latent_channels=4, norm_num_groups=2)
entries = dict(prediction_type="v_prediction", rescale_betas_zero_snr=True, timestep_spacing="trailing")
order = dict(prompt_embeds=text[:1], negative_prompt_embeds=text[1:], guidance_scale=6.0)
order |= dict(height=48, width=80, num_frames=9, num_inference_steps=4, output_type="latent")
for name in ("2B", "5B"):
    pipe, runs = CogVideoXPipeline(None, None, vae, theirs[name], CogVideoXDDIMScheduler(**entries)), []
    pipe.set_progress_bar_config(disable=True)
    for pipe.transformer in (theirs[name], DropIn(ours[name])):
        runs.append(pipe(**order, generator=torch.Generator().manual_seed(7)).frames)
    assert (runs[0] - runs[1]).abs().max() < 1e-4  # at home in diffusers' pipeline

# %% [markdown] lang="zh"
# ## 在 diffusers 里，这些在哪儿
#
# | 我们 | diffusers |
# | --- | --- |
# | `sincos_3d` | `embeddings.py`，`get_3d_sincos_pos_embed`，由 `CogVideoXPatchEmbed` 相加 |
# | `centred_positions` | `pipeline_cogvideox.py`，`get_resize_crop_region_for_grid` |
# | `video_positions` | `embeddings.py`，`get_3d_rotary_pos_embed` |
# | `ExpertNorm` | `normalization.py`，`CogVideoXLayerNormZero` |
# | `CogVideoXBlock` | `cogvideox_transformer_3d.py`，同名；注意力在 `CogVideoXAttnProcessor2_0` |
# | `final_norms`、`final_knobs` | `norm_final` 与 `AdaLayerNorm` |
#
# **还缺什么**：它的走法（第 23 章）；图生视频的模型（学来的位置表、`ofs`）会被拒绝。
#
# ## 三个问题
#
# 1. 预测：480×720、49 帧，一行有多少个词元？其中文字占多少？
# 2. 修改：5B 画 960×1440，长宽都翻倍，最远的词元站在哪里？
# 3. 动手：由 $x$、$v$、$\varphi$ 求出 $x_0$ 和 $\varepsilon$。

# %% [markdown] lang="en" twin="1311105e"
# ## Where this lives in diffusers
#
# | Ours | diffusers |
# | --- | --- |
# | `sincos_3d` | `embeddings.py`, `get_3d_sincos_pos_embed`, added by `CogVideoXPatchEmbed` |
# | `centred_positions` | `pipeline_cogvideox.py`, `get_resize_crop_region_for_grid` |
# | `video_positions` | `embeddings.py`, `get_3d_rotary_pos_embed` |
# | `ExpertNorm` | `normalization.py`, `CogVideoXLayerNormZero` |
# | `CogVideoXBlock` | `cogvideox_transformer_3d.py`, the same name; its attention in `CogVideoXAttnProcessor2_0` |
# | `final_norms`, `final_knobs` | `norm_final` and `AdaLayerNorm` |
#
# **What is missing:** its way of walking (chapter 23); image-to-video models (a learned position table, `ofs`) are refused.
#
# ## Three questions
#
# 1. Predict: 480×720, 49 frames: how many tokens stand in the row, and how many of them are text?
# 2. Modify: let 5B draw 960×1440, both sides doubled. Where does the farthest token stand?
# 3. Build: from $x$, $v$ and $\varphi$ find $x_0$ and $\varepsilon$.

# %% tags=["solution"]
# 1 · 13 latent frames of 30×45 patches and 226 of text: one token in eighty is text
video = ((49 - 1) // five.temporal_compression_ratio + 1) * (480 // 16) * (720 // 16)
print(video + five.max_text_seq_length, "tokens,", five.max_text_seq_length, "of them text")
assert video + five.max_text_seq_length == 17_776

# %% tags=["solution"]
# 2 · still inside the grid of training: steps of one half, and the last half a step short of the edge
large = centred_positions((1, 60, 90), (30, 45))
assert large[:, 1:].amax(0).tolist() == [29.5, 44.5]
assert torch.allclose(large[1] - large[0], torch.tensor([0.0, 0.0, 0.5], dtype=torch.float64))


# %% tags=["solution"]
# 3 · a turn by φ: (x, v) are (x0, ε) turned, so turn them back
def ends_of(x: Tensor, v: Tensor, phi: float) -> tuple[Tensor, Tensor]:
    turn = torch.tensor(phi)
    return turn.cos() * x - turn.sin() * v, turn.sin() * x + turn.cos() * v


data, noise, turn = start, latents, torch.tensor(0.9)
x, v = turn.cos() * data + turn.sin() * noise, turn.cos() * noise - turn.sin() * data
assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ends_of(x, v, 0.9), (data, noise)))

# %% [markdown] lang="zh"
# ## 小结
#
# - 文字和视频排成一行，一份权重，两套旋钮；旋钮只听时间。
# - 2B 把正余弦加上去；5B 转动视频词元，位置居中拉伸到训练的网格里。
# - 网络收尾有两个带权重的归一化，输出的图块通道在前。
# - 输出是弧的切线 $v$，不是速度；时间是训练步。
# - 与 diffusers 相比，输出相差不到 $10^{-5}$，放进它的流水线，潜变量不到 $10^{-4}$。
#
# 阅读卡片：CogVideoX（[`papers/08_cogvideox`](../../papers/08_cogvideox.zh.md)）。下一章：22。

# %% [markdown] lang="en" twin="fc564c7c"
# ## Recap
#
# - Text and video form one row with one set of weights and two of knobs; the knobs listen to time alone.
# - 2B adds sines and cosines; 5B turns the video's tokens, at positions stretched over the middle of the training grid.
# - The network ends in two norms with weights, and its patches have channels first.
# - The output is the arc's tangent $v$, no velocity; its time is a step of training.
# - Against diffusers the output is within $10^{-5}$, and in its pipeline the latents are within $10^{-4}$.
#
# Reading card: CogVideoX ([`papers/08_cogvideox`](../../papers/08_cogvideox.en.md)). Next: chapter 22.
