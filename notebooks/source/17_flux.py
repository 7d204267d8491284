# ---
# jupyter:
#   course:
#     minutes: 40
#     module: reference/flux
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown] lang="zh"
# # 17 · FLUX.1（dev 与 schnell）
#
# 读完这一章，FLUX.1 的网络就由你的双流块和并行块搭成：文字排在前面，位置靠三根轴旋转，引导强度像时间一样喂进去。
#
# | 你会做出 | 你需要 | 时间 | 模块 |
# | --- | --- | --- | --- |
# | 打包、三轴位置、引导嵌入、FLUX 的对照表与网络 | 第 04 章的旋转，第 05 章的两种块，第 15 章的 `load` | 40 分钟 | `diffusion_engine/reference/flux.py` |

# %% [markdown] lang="en" twin="932d3e7b"
# # 17 · FLUX.1 (dev and schnell)
#
# After this chapter FLUX.1's network stands on your joint and parallel blocks: the text comes first, positions turn about three axes, and the guidance scale is fed in as time is.
#
# | You build | You need | Time | Module |
# | --- | --- | --- | --- |
# | packing, three-axis positions, embedded guidance, FLUX's key map and network | the rotation of chapter 04, two blocks of chapter 05, `load` of chapter 15 | 40 minutes | `diffusion_engine/reference/flux.py` |

# %% [markdown] lang="zh"
# **先想一想**：FLUX 给每个文字词元的位置都是 $(0, 0, 0)$。那么「红猫追蓝狗」和「蓝狗追红猫」，它还分得清吗？如果分得清，先后是从哪里知道的？写下你的猜测。

# %% [markdown] lang="en" twin="8b7cf8b5"
# **Think first:** FLUX gives every text token the same position, $(0, 0, 0)$. Can it still tell "a red cat chases a blue dog" from "a blue dog chases a red cat"? And if so, where does the order come from? Write down your guess.

# %% tags=["export"]
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from diffusion_engine.attention import axial_rope, grid_positions, joint_mask
from diffusion_engine.dit import Conditions, FinalLayer, patch_grid, patchify, unpatchify
from diffusion_engine.reference.checkpoint import KeyMap, swap_halves
from diffusion_engine.reference.sd3 import JOINT, at_each_step
from diffusion_engine.timestep_embedding import TimestepEmbedder
from diffusion_engine.transformer_block import JointBlock, ParallelBlock

# %% [markdown] lang="zh"
# ## 哪里不同
#
# | | 我们的 DiT | FLUX.1 |
# | --- | --- | --- |
# | 块 | 2 双流，5 并行 | 19 双流，38 并行，宽 3072 |
# | 次序 | 图像在前 | 文字在前 |
# | 图块里的次序 | $(p, p, C)$ | $(C, p, p)$，$p = 2$ |
# | 位置 | 加上一张表 | 每块里旋转 $q, k$，三根轴 |
# | 条件 | $t$，汇总向量 | $t$，汇总向量，dev 还有引导强度 |

# %% [markdown] lang="en" twin="ed02b7d0"
# ## What differs
#
# | | Our DiT | FLUX.1 |
# | --- | --- | --- |
# | blocks | 2 joint, 5 parallel | 19 joint, 38 parallel, width 3072 |
# | order | image first | text first |
# | order inside a patch | $(p, p, C)$ | $(C, p, p)$ with $p = 2$ |
# | positions | a table, added | turns of $q, k$ in every block, three axes |
# | condition | $t$, pooled text | $t$, pooled text, and in dev the guidance scale |


# %% tags=["export"]
@dataclass(frozen=True)
class FluxConfig:
    """``config.json`` of diffusers' ``FluxTransformer2DModel``: its names, its defaults.

    Raises:
        ValueError: axes that do not add up to a head, or another packing.
    """

    patch_size: int = 1  # of packed latents, which are 2×2 patches already
    in_channels: int = 64
    out_channels: int | None = None
    num_layers: int = 19
    num_single_layers: int = 38
    attention_head_dim: int = 128
    num_attention_heads: int = 24
    joint_attention_dim: int = 4096
    pooled_projection_dim: int = 768
    guidance_embeds: bool = False
    axes_dims_rope: tuple[int, ...] = (16, 56, 56)

    def __post_init__(self):
        if sum(self.axes_dims_rope) != self.attention_head_dim:
            raise ValueError(f"axes_dims_rope {self.axes_dims_rope} must add up to a head's {self.attention_head_dim}")
        if self.patch_size != 1 or self.in_channels % 4:
            raise ValueError(f"patch_size {self.patch_size}, in_channels {self.in_channels}: expected 1 and 4 · C")


# %% [markdown] lang="zh"
# ## 打包
#
# FLUX 的潜变量有 16 个通道，每 2×2 格打成一个 64 维的词元，这一步在流水线里做。数字的次序是通道在前，第 06 章的 `patchify` 早就留好了开关：
#
# $$(B, 16, H, W) \rightarrow \big(B, \tfrac{H}{2} \cdot \tfrac{W}{2}, 64\big)$$

# %% [markdown] lang="en" twin="48a8c522"
# ## Packing
#
# FLUX's latents have 16 channels, and every 2×2 square becomes one token of 64 numbers; its pipeline does that. Channels come first inside a token, and `patchify` of chapter 06 has a switch for it:
#
# $$(B, 16, H, W) \rightarrow \big(B, \tfrac{H}{2} \cdot \tfrac{W}{2}, 64\big)$$

# %% tags=["check"]
from diffusers import FluxPipeline

rng = torch.Generator().manual_seed(0)
latents = torch.randn(2, 4, 6, 10, generator=rng)
packed = FluxPipeline._pack_latents(latents, 2, 4, 6, 10)
assert torch.equal(patchify(latents, 2, channels_first=True), packed)
assert not torch.equal(patchify(latents, 2), packed)  # the same numbers and shape, in another order
assert torch.equal(unpatchify(packed, 2, (3, 5), channels_first=True), latents)

# %% [markdown] lang="zh"
# ## 位置：三根轴
#
# 每个词元有三个坐标：第一根轴图像里恒为零（给将来的多图留着），后两根是行和列。一个头的 128 个数里，16、56、56 个分别跟着三根轴转（第 04 章）。所有文字都在原点：
#
# $$\text{text}: (0, 0, 0), \qquad \text{image}: (0, \text{row}, \text{column})$$

# %% [markdown] lang="en" twin="75311678"
# ## Positions: three axes
#
# Every token has three coordinates: the first is zero throughout an image (kept for several images to come), then row and column. Of a head's 128 numbers, 16, 56 and 56 turn with the three axes (chapter 04). All text sits at the origin:
#
# $$\text{text}: (0, 0, 0), \qquad \text{image}: (0, \text{row}, \text{column})$$


# %% tags=["export"]
def flux_positions(text_tokens: int, grid: tuple[int, int]) -> Tensor:
    """Coordinates (M + h · w, 3) of text and image in FLUX's order: M zeros, then (0, row, column)."""
    return torch.cat([torch.zeros(text_tokens, 3), grid_positions(1, *grid).float()])


# %% tags=["check"]
from diffusers.models.transformers.transformer_flux import FluxPosEmbed

ids = torch.cat([torch.zeros(7, 3), FluxPipeline._prepare_latent_image_ids(1, 3, 5, "cpu", torch.float32)])
assert torch.equal(flux_positions(7, (3, 5)), ids)
cos, sin = FluxPosEmbed(10_000, [16, 56, 56])(ids)  # every angle stands there twice, once for each of its pair
rope = axial_rope(flux_positions(7, (3, 5)), (16, 56, 56))
assert torch.allclose(rope.cos, cos[:, ::2], atol=1e-6) and torch.allclose(rope.sin, sin[:, ::2], atol=1e-6)

# %% tags=["hide"]
import matplotlib.pyplot as plt

from course.figures import show

wide = axial_rope(flux_positions(1, (33, 49)), (16, 56, 56))
angle = torch.atan2(wide.sin, wide.cos)[1:].unflatten(0, (33, 49))
fig, axes = plt.subplots(1, 2, figsize=(6.6, 2.7))
for ax, (row, column), title in zip(axes, ((16, 24), (0, 0)), ("A patch in the middle", "Text sits at the corner")):
    alike = (angle - angle[row, column]).cos().mean(-1)
    drawn = ax.imshow(alike, cmap="viridis", vmin=0, vmax=1)
    ax.plot(column, row, "o", color="white", markersize=4)
    ax.set(title=title, xlabel="column", ylabel="row")
fig.colorbar(drawn, ax=axes, shrink=0.8, label="mean cos of the angle between")
show(
    fig,
    alt="Two maps: turns agree best with near patches; seen from the text, at the origin, the upper left corner is near.",
)

# %% [markdown] lang="zh"
# ## 引导强度也是一种条件
#
# dev 是蒸馏出来的：老师要跑两遍网络（第 08 章），学生一遍就学会老师在强度 $w$ 下的答案。于是 $w$ 变成输入，和时间一样先乘一千、再走正弦和两层 MLP；schnell 没有这一路。条件向量是三者之和：
#
# $$c = \mathrm{MLP}_t(e(1000\,\sigma)) + \mathrm{MLP}_w(e(1000\,w)) + \mathrm{MLP}_p(\text{pooled})$$

# %% [markdown] lang="en" twin="82360cdb"
# ## Guidance is one more condition
#
# dev is distilled: its teacher ran the network twice (chapter 08), the pupil learned in one run what the teacher answers at scale $w$. So $w$ became an input: times a thousand, through the sinusoid and two layers, just like time; schnell has no such path. The condition is a sum of three:
#
# $$c = \mathrm{MLP}_t(e(1000\,\sigma)) + \mathrm{MLP}_w(e(1000\,w)) + \mathrm{MLP}_p(\text{pooled})$$


# %% tags=["export"]
class ConditionEmbedder(nn.Module):
    """c = MLP(e(t)) + MLP(e(1000 · w)) + MLP(pooled): t (B,), pooled (B, Dp), guidance w (B,) → (B, width).

    Args:
        width: D. pooled_width: Dp. guidance: whether there is a way in for w (dev), or none (schnell).

    forward(t, pooled, guidance, unit): ``unit`` is what w is multiplied by, 1 for a w that comes as 1000 · w.

    Raises:
        ValueError: at the call: w without a way in, or a way in without w.
    """

    def __init__(self, width: int, pooled_width: int, guidance: bool):
        super().__init__()
        self.time_in, self.guidance_in = TimestepEmbedder(width), TimestepEmbedder(width) if guidance else None
        self.pooled_in = nn.Sequential(nn.Linear(pooled_width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, t: Tensor, pooled: Tensor, guidance: Tensor | None = None, unit: float = 1000) -> Tensor:
        if (guidance is None) != (self.guidance_in is None):
            wants = "a scale such as 3.5 per sample" if guidance is None else "None: it has no embedder for it"
            raise ValueError(f"guidance is {'missing' if guidance is None else 'given'}; this checkpoint wants {wants}")
        cond = self.time_in(t) + self.pooled_in(pooled)
        return cond if guidance is None else cond + self.guidance_in(unit * guidance.float())


# %%
def redraw(module: nn.Module) -> nn.Module:
    """Every weight anew, so that no gate is shut and no norm is one: outputs of order one."""
    for weight in module.requires_grad_(False).parameters():
        weight.copy_(torch.randn(weight.shape, generator=rng) / (weight[0].numel() if weight.ndim > 1 else 4) ** 0.5)
    return module.eval()


pooled, t, w = torch.randn(2, 24, generator=rng), torch.tensor([987.6, 3.2]), torch.tensor([3.5, 1.0])

# %% tags=["check"]
from diffusers.models.embeddings import CombinedTimestepGuidanceTextProjEmbeddings

real, mine = redraw(CombinedTimestepGuidanceTextProjEmbeddings(64, 24)), ConditionEmbedder(64, 24, guidance=True)
names = {"time_in.mlp": "timestep_embedder", "guidance_in.mlp": "guidance_embedder", "pooled_in": "text_embedder"}
for part, name in names.items():
    for place, layer in ((0, "linear_1"), (2, "linear_2")):
        mine.get_submodule(f"{part}.{place}").load_state_dict(real.get_submodule(f"{name}.{layer}").state_dict())
assert torch.allclose(mine(t, pooled, w), real(t, 1000 * w, pooled), atol=1e-5)  # the real part

# %% [markdown] lang="zh"
# ## 对照表
#
# 双流块和 SD3 的同名，表就用第 16 章的 `JOINT`；并行块更短。原版 FLUX 把并行块的 $q, k, v$ 和 MLP 存成一个大矩阵，diffusers 把它们拆开了；我们叠回一部分。没有分块卷积，要动手脚的只剩收尾层。

# %% [markdown] lang="en" twin="c6d5b32e"
# ## The key map
#
# Joint blocks carry SD3's names, so the table is chapter 16's `JOINT`; parallel blocks are shorter. The original FLUX keeps $q, k, v$ and the MLP of a parallel block in one large matrix; diffusers split them, and we stack some again. There is no patch convolution, so only the final layer changes on the way.


# %% tags=["export"]
EMBEDDERS = {"time_in.mlp": "timestep_embedder", "pooled_in": "text_embedder", "guidance_in.mlp": "guidance_embedder"}
CONDITION = {f"{ours}.{2 * i}": f"{theirs}.linear_{i + 1}" for ours, theirs in EMBEDDERS.items() for i in (0, 1)}
PARALLEL = {"modulation.linear": "norm.linear", "stream.qkv": "attn.{to_q,to_k,to_v}", "ff_in": "proj_mlp"}
PARALLEL |= {"stream.norm_q": "attn.norm_q", "stream.norm_k": "attn.norm_k", "out": "proj_out"}


# %% tags=["export"]
def flux_keys(config: FluxConfig) -> KeyMap:
    """Where each tensor of `Flux` lies in diffusers' checkpoint."""
    names = {"image_in": "x_embedder", "text_in": "context_embedder"}
    names |= {f"cond_in.{ours}": f"time_text_embed.{theirs}" for ours, theirs in CONDITION.items()}
    names |= {f"joint_blocks.*.{ours}": f"transformer_blocks.*.{theirs}" for ours, theirs in JOINT.items()}
    names |= {f"parallel_blocks.*.{ours}": f"single_transformer_blocks.*.{theirs}" for ours, theirs in PARALLEL.items()}
    names |= {"final.modulation": "norm_out.linear", "final.linear": "proj_out"}
    return KeyMap(names, changes={"final.modulation": swap_halves})


# %% [markdown] lang="zh"
# ## 网络
#
# 先只看词元。`run` 走过所有的块：双流块里文字和图像各走各的，接成一串进并行块，最后只留图像。条件已经备好，装在第 06 章的 `Conditions` 里。

# %% [markdown] lang="en" twin="12221198"
# ## The network
#
# Tokens first. `run` walks through all blocks: text and image go side by side through the joint ones, in one row through the parallel ones, and only the image leaves. The conditions are ready, in chapter 06's `Conditions`.


# %% tags=["export"]
class FluxTokens(nn.Module):
    """What FLUX.1 does with tokens: the parts and the walk through them, latents packed, conditions given.

    Source: Black Forest Labs, flux ``model.py``; diffusers ``transformer_flux.py``.
    """

    def __init__(self, config: FluxConfig):
        super().__init__()
        self.config, c, heads = config, config, config.num_attention_heads
        width = heads * c.attention_head_dim
        self.image_in, self.text_in = nn.Linear(c.in_channels, width), nn.Linear(c.joint_attention_dim, width)
        self.cond_in = ConditionEmbedder(width, c.pooled_projection_dim, c.guidance_embeds)
        self.joint_blocks = nn.ModuleList(JointBlock(width, heads, text_first=True) for _ in range(c.num_layers))
        self.parallel_blocks = nn.ModuleList(ParallelBlock(width, heads) for _ in range(c.num_single_layers))
        self.final = FinalLayer(width, c.out_channels or c.in_channels)

    def run(self, tokens: Tensor, given: Conditions) -> Tensor:
        """Packed latents (B, N, 4 · C) → velocity, as packed; ``given.positions`` are the turns of all M + N tokens."""
        x, text, rope, cond = self.image_in(tokens), given.text, given.positions, iter(given.cond)
        for block in self.joint_blocks:
            x, text = block(x, text, next(cond), given.text_mask, rope)
        m, n = text.shape[1], x.shape[1]
        x, mask = torch.cat([text, x], dim=1), joint_mask(given.text_mask, n, text_first=True)
        for block in self.parallel_blocks:
            x = block(x, next(cond), mask, rope)
        return self.final(x[:, m:], next(cond))


# %% [markdown] lang="zh"
# 外面一层是你熟悉的样子：`conditions` 收集一切不看潜变量的，`velocity` 打包、走词元、拆包。diffusers 自己已经打包好，也带来了位置，所以 `as_diffusers` 直接调 `run`。`hoist` 后面再讲。

# %% [markdown] lang="en" twin="1fbd9838"
# The outside looks as you know it: `conditions` gathers all that sees no latent, `velocity` packs, walks over the tokens and unpacks. diffusers has packed already and brings its positions, so `as_diffusers` calls `run` itself. `hoist` is for later.


# %% tags=["export"]
class Flux(FluxTokens):
    """Velocity network of FLUX.1; the arguments are those of chapter 06's `DiT`, and ``guidance`` for dev."""

    Config, key_map = FluxConfig, staticmethod(flux_keys)
    min_multiple = 2  # latent height and width must be multiples of this

    def forward(self, latents, t, text, text_mask=None, pooled=None, guidance=None) -> Tensor:
        """Velocity (B, C, H, W) at t = 1000 · σ, (B,), under text (B, M, 4096), pooled (B, 768), guidance w, (B,)."""
        return self.velocity(latents, self.conditions(latents.shape[1:], t, text, text_mask, pooled, guidance))

    def conditions(self, shape, t, text, text_mask=None, pooled=None, guidance=None, positions=None) -> Conditions:
        """All of a forward that looks at no latent, for latents of ``shape`` (C, H, W), or tokens at positions (M + N, 3)."""
        if positions is None:
            positions = flux_positions(text.shape[1], patch_grid(*shape[-2:], 2)).to(text.device)
        c, rope = self.config, axial_rope(positions, self.config.axes_dims_rope)
        cond = [self.cond_in(t, pooled, guidance)] * (c.num_layers + c.num_single_layers + 1)
        return Conditions(self.text_in(text), text_mask, rope, cond)

    def velocity(self, latents, given: Conditions) -> Tensor:
        """The rest of `forward`: velocity (B, C, H, W) of the latents under given conditions."""
        tokens = self.run(patchify(latents, 2, channels_first=True), given)
        return unpatchify(tokens, 2, patch_grid(*latents.shape[-2:], 2), channels_first=True)

    def hoist(self, shape, times, text, text_mask=None, pooled=None, guidance=None) -> list[Conditions]:
        """`conditions` at each of the times (S,) for the B prompts of one forward, with every knob made: S × `Conditions`.

        One product a layer serves all S · B conditions, step after step; text and turns are shared by all.
        """
        steps, t = len(times), times.repeat_interleave(len(text))
        guidance = None if guidance is None else guidance.repeat(steps)
        given = self.conditions(shape, t, text, text_mask, pooled.repeat(steps, 1), guidance)
        cond = given.cond[-1]  # (S · B, D)
        knobs = [(block.image_modulation(cond), block.text_modulation(cond)) for block in self.joint_blocks]
        knobs += [block.modulation(cond) for block in self.parallel_blocks]
        return at_each_step(given, [*knobs, self.final.knobs(cond)], steps)

    def as_diffusers(
        self, hidden_states, encoder_hidden_states, pooled_projections, timestep, img_ids, txt_ids, guidance=None
    ) -> Tensor:
        """The same under diffusers' names; its ``timestep`` is σ."""
        t, positions = 1000 * timestep.float(), torch.cat([txt_ids, img_ids]).float()
        given = self.conditions(None, t, encoder_hidden_states, None, pooled_projections, guidance, positions)
        return self.run(hidden_states, given)


# %%
import tempfile
from pathlib import Path

from diffusion_engine.reference.checkpoint import DropIn, load

SIZES = dict(num_layers=2, num_single_layers=2, num_attention_heads=4, attention_head_dim=16, in_channels=16)
SIZES |= dict(joint_attention_dim=32, pooled_projection_dim=24, axes_dims_rope=(4, 6, 6))
room, text = tempfile.TemporaryDirectory(), torch.randn(2, 7, 32, generator=rng)

# %% [markdown] lang="zh"
# ## 对一对
#
# diffusers 写下两个很小的检查点：dev 带引导嵌入，schnell 不带。图是 6×10 的长方形，两个样本的时间和强度都不同。diffusers 收的时间是 $\sigma$，乘一千在网络里做；我们一律喂 $t = 1000\,\sigma$。

# %% [markdown] lang="en" twin="3727687f"
# ## Against diffusers
#
# diffusers writes two very small checkpoints: dev with embedded guidance, schnell without. The picture is a rectangle of 6×10, and the two samples differ in time and scale. diffusers takes $\sigma$ and multiplies by a thousand inside; we feed $t = 1000\,\sigma$ everywhere.

# %% tags=["check"]
from diffusers import FluxTransformer2DModel

theirs, ours, places = {}, {}, {"img_ids": ids[7:], "txt_ids": ids[:7]}
for name, scale in {"dev": w, "schnell": None}.items():
    theirs[name] = redraw(FluxTransformer2DModel(**SIZES, guidance_embeds=scale is not None))
    theirs[name].save_pretrained(Path(room.name) / name)
    ours[name] = load(Flux, Path(room.name) / name)
    expected = theirs[name](packed, text, pooled, t / 1000, **places, guidance=scale).sample
    velocity = ours[name](latents, t, text, None, pooled, scale)
    assert (velocity - unpatchify(expected, 2, (3, 5), channels_first=True)).abs().max() < 1e-5
    print(f"{name}: velocities of size {expected.std():.1f} differ by less than 1e-5")

# %% [markdown] lang="zh"
# ## 文字的先后
#
# 现在可以回答开头的问题了。文字词元的位置全一样，全注意力又不在乎次序，所以把词元打乱，速度一点不变。先后早被 T5 写进了每个词元的向量里；FLUX 只管读。

# %% [markdown] lang="en" twin="2fb2b436"
# ## The order of words
#
# Now the opening question has an answer. All text tokens share one place, and full attention does not care about order; so shuffle the tokens, and the velocity does not change. T5 has written the order into every token's vector; FLUX only reads it.

# %% tags=["check"]
velocity, dev = ours["dev"](latents, t, text, None, pooled, w), ours["dev"]
shuffled = text[:, torch.randperm(7, generator=rng)]
assert torch.allclose(dev(latents, t, shuffled, None, pooled, w), velocity, atol=1e-5)  # words in any order …
upside_down = dev(latents.flip(2), t, text, None, pooled, w).flip(2)
assert (upside_down - velocity).abs().mean() > 0.01  # … but patches have their places
stronger = dev(latents, t, text, None, pooled, 2 * w)
assert (stronger - velocity).abs().mean() > 0.001  # guidance is read

# %% tags=["check"]
for name, scale in (("dev", None), ("schnell", w)):
    try:
        ours[name](latents, t, text, None, pooled, scale)
    except ValueError as error:
        print(error)
    else:
        raise AssertionError(f"{name} took guidance {scale}")

# %% tags=["check"]
halves = [tensor.bfloat16() for tensor in (packed, text, pooled)]
truth = theirs["dev"](packed, text, pooled, t / 1000, **places, guidance=w).sample
mine = DropIn(load(Flux, Path(room.name) / "dev", dtype=torch.bfloat16))
half = FluxTransformer2DModel.from_pretrained(Path(room.name) / "dev", torch_dtype=torch.bfloat16)
errors = [(net(*halves, t / 1000, **places, guidance=w).sample - truth).square().mean().sqrt() for net in (mine, half)]
assert errors[0] < 1.25 * errors[1]  # in bf16 no further from the fp32 truth than diffusers itself

# %% [markdown] lang="zh"
# ## 与潜变量无关的
#
# 条件 $c$ 只看时间、汇总向量和引导强度，所以 `hoist` 在开跑前把 57 块、每一步的旋钮一次算完，旋转也只做一次。文字的键和值不行：双流块每步都在改文字，进了并行块，文字和图像更是一串。

# %% [markdown] lang="en" twin="969e851e"
# ## What no latent changes
#
# The condition $c$ sees only time, pooled text and the scale; so `hoist` makes the knobs of all 57 blocks at every step before the first, and the turns once. Not so keys and values of the text: joint blocks change the text at every step, and in parallel blocks it runs in one row with the image.

# %% tags=["check"]
times, real = torch.tensor([1000.0, 640.5, 3.25]), torch.arange(7) < torch.tensor([[7], [4]])
padded = torch.where(real[..., None], text, 100.0)  # whatever stands in the padding
for name, scale in {"schnell": None, "dev": w}.items():
    ahead = ours[name].hoist(latents.shape[1:], times, padded, real, pooled, scale)
    for time, given in zip(times, ahead, strict=True):
        expected = ours[name](latents, time.expand(2), text, real, pooled, scale)
        assert torch.allclose(ours[name].velocity(latents, given), expected, atol=1e-5)  # ahead, or block by block
assert ahead[0].text is ahead[2].text and ahead[0].positions is ahead[2].positions  # made once, shared by all steps
assert dev.hoist(latents.shape[1:], times, text, real | True, pooled, w)[0].text_mask is None  # nothing to hide

# %% [markdown] lang="zh"
# 做旋钮的权重，开跑以后没人再读，可以离开内存。数一数占多少，再像第 16 章那样让梯度核对：从 `velocity` 往回走，只有它们收不到梯度。

# %% [markdown] lang="en" twin="db0a1bb7"
# Once the walk begins, nobody reads the weights that made the knobs; they could leave memory. Count them, and let the gradient confirm it as in chapter 16: going back from `velocity`, they alone receive none.


# %%
def read_ahead_only(name: str) -> bool:
    return "modulation" in name or name.startswith(("text_in", "cond_in"))


with torch.device("meta"):
    sizes = {name: weight.numel() for name, weight in Flux(FluxConfig(guidance_embeds=True)).named_parameters()}
idle = sum(size for name, size in sizes.items() if read_ahead_only(name))
print(f"dev: {idle / 1e9:.2f} of {sum(sizes.values()) / 1e9:.2f} billion weights are read by hoist alone")

# %% tags=["check"]
dev.requires_grad_(True).velocity(latents, ahead[0]).sum().backward()
dev.requires_grad_(False)
for name, weight in dev.named_parameters():
    assert (weight.grad is None) == read_ahead_only(name), name  # no gradient reaches what made the knobs

# %% [markdown] lang="zh"
# ## 时间别用半精度
#
# diffusers 的流水线先把时间换成潜变量的精度，再除以一千。bf16 在 512 到 1000 之间每格是 4，于是不少相邻的时间变成同一个。我们让时间一路保持 fp32，直到正弦之后（第 03 章）：

# %% [markdown] lang="en" twin="8469b9d5"
# ## No time in half precision
#
# diffusers' pipeline casts time to the latents' precision, then divides by a thousand. Between 512 and 1000 bf16 has one number in four, so neighbouring times become one. We keep time in fp32 to the end of the sinusoid (chapter 03):

# %% tags=["hide"]
times = torch.linspace(700, 760, 241)
fig, ax = plt.subplots(figsize=(5.6, 2.5))
ax.plot(times, times, color="#718096", linewidth=1, label="fp32")
ax.plot(times, times.bfloat16().float(), label="bf16")
ax.set(title="In bf16 time moves in steps of four", xlabel="the scheduler's time", ylabel="what the network gets")
ax.legend()
show(fig, alt="A straight line and a staircase around it: bf16 rounds times between 700 and 760 to multiples of four.")

# %% tags=["check"]
steps = torch.arange(512.0, 1001.0)
assert steps.bfloat16().unique().numel() == 123 and steps.float().unique().numel() == 489

# %% [markdown] lang="zh"
# ## 住进 FluxPipeline
#
# 流水线照跑，只换 `transformer`。FLUX 的流水线会先声明 `cache_context("cond")`，替身接得住。

# %% [markdown] lang="en" twin="dc0966ab"
# ## Inside FluxPipeline
#
# The pipeline runs as it is, with another `transformer`. FLUX's pipeline announces `cache_context("cond")` first, and the drop-in takes it.

# %% tags=["check"]
from diffusers import FlowMatchEulerDiscreteScheduler

absent = dict.fromkeys(("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
pipe = FluxPipeline(FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True), **absent, transformer=theirs["dev"])
pipe.set_progress_bar_config(disable=True)
ask = dict(prompt_embeds=text, pooled_prompt_embeds=pooled, height=48, width=80, num_inference_steps=4)
expected = pipe(**ask, output_type="latent", generator=torch.Generator().manual_seed(7)).images
pipe.transformer = DropIn(ours["dev"])
found = pipe(**ask, output_type="latent", generator=torch.Generator().manual_seed(7)).images
assert (found - expected).abs().max() < 1e-4

# %%
for name, embedded in {"dev": True, "schnell": False}.items():
    with torch.device("meta"):
        count = sum(weight.numel() for weight in Flux(FluxConfig(guidance_embeds=embedded)).parameters())
    print(f"FLUX.1 {name}: {count / 1e9:.2f} billion weights, {2 * count / 1e9:.1f} GB in bf16")

# %% [markdown] lang="zh"
# ## 在 diffusers 里，这些在哪儿
#
# | 我们 | diffusers |
# | --- | --- |
# | `patchify(…, channels_first=True)` | `pipeline_flux.py`，`_pack_latents` |
# | `flux_positions` | 同上，`_prepare_latent_image_ids` |
# | `axial_rope` | `transformer_flux.py`，`FluxPosEmbed` |
# | `JointBlock(text_first=True)` | `FluxTransformerBlock`，`FluxAttnProcessor` |
# | `ParallelBlock` | `FluxSingleTransformerBlock` |
# | `ConditionEmbedder` | `CombinedTimestepGuidanceTextProjEmbeddings` |
#
# **还缺什么**：fp16 下 diffusers 会截断过大的数，我们建议用 bf16；多图的第一根轴没有用上。全注意力的代价随词元数平方增长：第 18 章的 Sana 把它换成线性的。
#
# ## 三个问题
#
# 1. 预测：把图像的坐标整体平移 $(0, 5, 5)$，速度会变吗？
# 2. 修改：让文字站到 $(0, h, w)$，图像右下角外面，速度会变吗？
# 3. 动手：给文字加掩码，让补位的词元不起作用；FLUX 自己为什么不用？

# %% [markdown] lang="en" twin="990793fd"
# ## Where this lives in diffusers
#
# | Ours | diffusers |
# | --- | --- |
# | `patchify(…, channels_first=True)` | `pipeline_flux.py`, `_pack_latents` |
# | `flux_positions` | the same, `_prepare_latent_image_ids` |
# | `axial_rope` | `transformer_flux.py`, `FluxPosEmbed` |
# | `JointBlock(text_first=True)` | `FluxTransformerBlock`, `FluxAttnProcessor` |
# | `ParallelBlock` | `FluxSingleTransformerBlock` |
# | `ConditionEmbedder` | `CombinedTimestepGuidanceTextProjEmbeddings` |
#
# **What is missing:** in fp16 diffusers clips numbers that grow too large, we advise bf16; the first axis, for several images, is unused. Full attention costs the square of the tokens: Sana, in chapter 18, makes it linear.
#
# ## Three questions
#
# 1. Predict: shift the image's coordinates by $(0, 5, 5)$. Does the velocity change?
# 2. Modify: let the text stand at $(0, h, w)$, beyond the lower right corner. Does the velocity change?
# 3. Build: mask the text, so that padding has no say. Why does FLUX itself not do so?


# %% tags=["solution"]
# 1 · yes: among themselves the patches keep their distances, but the text at the origin is further away now
def standing(positions: Tensor) -> Tensor:
    return dev.run(packed, dev.conditions(None, t, text, None, pooled, w, positions))


moved = ids + torch.tensor([0.0, 5.0, 5.0]) * (torch.arange(len(ids)) >= 7)[:, None]
tokens = standing(ids)
assert (standing(moved) - tokens).abs().mean() > 1e-4
assert torch.allclose(standing(ids + 5.0), tokens, atol=1e-5)  # all together: nothing changes

# %% tags=["solution"]
# 2 · yes, and no weight notices: positions are not learned, yet the weights were trained with one choice of them
elsewhere = ids.clone()
elsewhere[:7] = torch.tensor([0.0, 3.0, 5.0])
assert (standing(elsewhere) - tokens).abs().mean() > 1e-4

# %% tags=["solution"]
# 3 · a mask does it; FLUX was trained with padding in view, so hiding it gives numbers that training never saw
hidden = dev(latents, t, torch.where(real[..., None], text, 100.0), real, pooled, w)
assert torch.allclose(hidden, dev(latents, t, text, real, pooled, w), atol=1e-5)
assert not torch.allclose(hidden[1], velocity[1], atol=1e-3)

# %% [markdown] lang="zh"
# ## 小结
#
# - FLUX 先用双流块，再把文字和图像接成一串走并行块：两种块你在第 05 章就有了。
# - 潜变量先打包，通道在前；位置是三根轴的旋转，文字全在原点。
# - 文字词元可以随意打乱：先后写在 T5 的向量里。
# - dev 把引导强度当作条件，一遍代替两遍；schnell 没有这一路。
# - fp32 下速度与 diffusers 相差不到 $10^{-5}$，流水线的潜变量不到 $10^{-4}$。
#
# 阅读卡片：FLUX.1（[`papers/06_flux`](../../papers/06_flux.zh.md)）。下一章：18。

# %% [markdown] lang="en" twin="c4dbe681"
# ## Recap
#
# - FLUX begins with joint blocks, then sends text and image in one row through parallel ones: both kinds are yours since chapter 05.
# - Latents are packed first, channels first; positions turn about three axes, with all text at the origin.
# - Text tokens may be shuffled: their order is in T5's vectors.
# - dev takes the guidance scale as a condition, one run in place of two; schnell has no such path.
# - In fp32 the velocity is within $10^{-5}$ of diffusers', the pipeline's latents within $10^{-4}$.
#
# Reading card: FLUX.1 ([`papers/06_flux`](../../papers/06_flux.en.md)). Next: chapter 18.
