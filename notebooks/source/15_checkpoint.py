# ---
# jupyter:
#   course:
#     minutes: 45
#     module: reference/checkpoint
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown] lang="zh"
# # 15 · 检查点：把真实的权重搬进来（checkpoint）
#
# 读完这一章，SD3、FLUX、Wan 的权重就能一个张量一个张量地搬进你自己的零件里；搬错一样，它当场说出名字。
#
# | 你会做出 | 你需要 | 时间 | 模块 |
# | --- | --- | --- | --- |
# | 键名对照表、逐个读取、核对、缓存查找、替身 | 第 04–06 章的零件，safetensors 文件 | 45 分钟 | `diffusion_engine/reference/checkpoint.py` |

# %% [markdown] lang="en" twin="fb0a392b"
# # 15 · Checkpoints: moving real weights in
#
# After this chapter the weights of SD3, FLUX or Wan move into parts that you built, one tensor at a time; and whatever does not fit is named on the spot.
#
# | You build | You need | Time | Module |
# | --- | --- | --- | --- |
# | a key map, reading tensor by tensor, checking, the cache, the drop-in | the parts of chapters 04–06, safetensors files | 45 minutes | `diffusion_engine/reference/checkpoint.py` |

# %% [markdown] lang="zh"
# **先想一想**：文件夹里有三个文件，共 24 GB，里面的名字像 `transformer_blocks.7.attn.to_q.weight`。你的模型里却叫 `joint_blocks.7.attn.image.qkv.weight`。搬家时有哪些错误不会报错，只会让画面变坏？写下三个。

# %% [markdown] lang="en" twin="db095f92"
# **Think first:** a folder holds three files, 24 GB, with names such as `transformer_blocks.7.attn.to_q.weight`. Your model says `joint_blocks.7.attn.image.qkv.weight`. Which mistakes on the way raise no error and only spoil the picture? Write down three.

# %% tags=["export"]
import difflib
import inspect
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn

from diffusion_engine.files import read_header

WEIGHTS = "diffusion_pytorch_model"  # the stem of diffusers' weight files
FLOATS = ("F64", "F32", "F16", "BF16")

# %% [markdown] lang="zh"
# ## 文件里有什么
#
# safetensors 简单到可以手写：8 个字节说清目录有多长，接着是 JSON 目录，然后是数字。pickle 文件打开时会运行代码，这里没有一行能运行。
#
# 整章用一个小世界：别人的网络有一个分块卷积和十二块注意力，$q, k, v$ 各是一个矩阵；我们的把三个叠成一个。真实模型只是更大。

# %% [markdown] lang="en" twin="c733a912"
# ## What is in the file
#
# A safetensors file is simple enough to write by hand: 8 bytes tell the length of the table of contents, a JSON table follows, then the numbers. A pickle runs code when opened; here nothing can run.
#
# One small world serves the chapter: their network has a patch convolution and twelve attention blocks, with a matrix each for $q$, $k$, $v$; ours stacks the three. Real models are only larger.


# %%
from safetensors.torch import save

rng = torch.Generator().manual_seed(0)
SHAPES = {"patch.proj.weight": (8, 3, 2, 2), "patch.proj.bias": (8,), "positions": (1, 4, 8)}
SHAPES |= {f"layers.{i}.to_{a}.weight": (8, 8) for i in range(12) for a in ("q", "k", "v", "out")}
SHAPES |= {f"layers.{i}.to_out.bias": (8,) for i in range(12)}
theirs = {name: torch.randn(shape, generator=rng) for name, shape in SHAPES.items()}
print(save({"positions": theirs["positions"]})[:88])  # 8 bytes, then the table of contents

# %% tags=["hide"]
import matplotlib.pyplot as plt

from course.figures import COLORS, show

raw = save(theirs)
length = 8 + int.from_bytes(raw[:8], "little")
fig, ax = plt.subplots(figsize=(6.4, 2.0))
ax.broken_barh([(0, length)], (0, 1), color=COLORS[5], label="table of contents (JSON)")
kinds = {"patch": COLORS[0], "to_q": COLORS[1], "to_k": COLORS[2], "to_v": COLORS[3], "to_out": COLORS[4]}
for kind, color in kinds.items():
    spans = [e["data_offsets"] for name, e in json.loads(raw[8:length]).items() if kind in name]
    ax.broken_barh([(length + a, b - a) for a, b in spans], (0, 1), color=color, label=kind)
ax.set(
    xlabel="byte", yticks=[], xlim=(0, len(raw)), title="One file: first the table, then the numbers, block after block"
)
fig.legend(ncols=6, loc="outside lower center", fontsize=8)
show(
    fig,
    alt="A strip: about a third is the table of contents, then coloured stripes of q, k, v and output matrices, block after block.",
)

# %% [markdown] lang="zh"
# ## 没有权重的模型
#
# 先建模型、随机初始化、再整个覆盖，等于把每个权重写两遍。PyTorch 的 meta 设备只记形状：不占内存，也不消耗随机数。FLUX 那么大的网络，一眨眼就搭好了骨架。

# %% [markdown] lang="en" twin="bc748a20"
# ## A model without weights
#
# To build a model, initialise it at random and overwrite all of it is to write every weight twice. PyTorch's meta device keeps shapes only: no memory, no random numbers. A network as large as FLUX stands there, as a skeleton, in the blink of an eye.

# %% tags=["check"]
from diffusion_engine.dit import DiT, DiTConfig, parameter_count

state, sizes = torch.get_rng_state(), DiTConfig(16, 2, 3072, 24, 19, 38, 4096)  # the width and depth of FLUX
with torch.device("meta"):
    skeleton = DiT(sizes)
assert torch.equal(torch.get_rng_state(), state)  # no random number was drawn
assert (count := sum(p.numel() for p in skeleton.parameters() if p.is_meta)) == parameter_count(sizes)
print(f"{count / 1e9:.1f} billion weights, {2 * count / 1e9:.0f} GB in bf16: not one of them here")

# %% [markdown] lang="zh"
# ## 名字对不上
#
# 最直白的办法：把全部权重读进字典，改名、叠放、转置，再 `load_state_dict`。它管用，但有两处痛：内存里同时躺着两份；规则散在循环里，看不出漏了谁、多了谁。

# %% [markdown] lang="en" twin="3dd79b65"
# ## Names that differ
#
# The plain way: read everything into a dictionary, rename, stack, transpose, then `load_state_dict`. It works, and hurts twice: two copies lie in memory at once; and the rules hide in a loop, so that nobody sees what was left out.


# %%
def pour(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The plain way: our state dict from theirs, all at once."""
    weight = theirs["patch.proj.weight"].permute(0, 2, 3, 1).reshape(8, 12)
    ours = {"image_in.weight": weight, "image_in.bias": theirs["patch.proj.bias"]}
    for i in range(12):
        ours[f"blocks.{i}.stream.qkv.weight"] = torch.cat([theirs[f"layers.{i}.to_{a}.weight"] for a in "qkv"])
        ours |= {f"blocks.{i}.stream.out.{leaf}": theirs[f"layers.{i}.to_out.{leaf}"] for leaf in ("weight", "bias")}
    return ours


# %% [markdown] lang="zh"
# 反过来问：**我们的**每个张量，由他们的哪几个做成？这样一张对照表从我们这边出发：星号代表块的编号，花括号里的几个按行叠起来，`.weight` 和 `.bias` 自动跟随。模型要什么就去取什么，剩下没人要的也一目了然。

# %% [markdown] lang="en" twin="0c4d4070"
# Ask it the other way round: each of **our** tensors, which of theirs make it? Such a key map starts from our side: a star is a block's number, names in braces are stacked along the rows, `.weight` and `.bias` follow. The model asks for what it needs, and what nobody wants stands out.


# %% tags=["export"]
@dataclass(frozen=True)
class KeyMap:
    """How a checkpoint's tensors become ours.

    Args:
        names: our module or tensor → theirs; ``.weight`` and ``.bias`` follow by themselves. ``*`` is a block's number;
            ``{to_q,to_k,to_v}`` are several of theirs, stacked along the rows into one of ours.
        changes: our module or tensor → what happens to each of theirs on the way.
        unused: theirs that we compute ourselves.
        fp32: ours that stay fp32 whatever dtype is asked for.
    """

    names: dict[str, str]
    changes: dict[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    fp32: tuple[str, ...] = ()


def match(pattern: str, name: str) -> tuple[str, ...] | None:
    """What each ``*`` stands for, then the leaf (``.weight``, ``.bias`` or nothing); None where ``name`` does not fit."""
    found = re.fullmatch(re.escape(pattern).replace(r"\*", r"(\d+)") + r"(\.weight|\.bias|)", name)
    return found and found.groups()


def their_names(key_map: KeyMap, name: str) -> list[str]:
    """The checkpoint's tensors that make our ``name``, in the order of their rows.

    Raises:
        KeyError: the map is silent on ``name``: a mistake of the map, not of the checkpoint.
    """
    for ours, theirs in key_map.names.items():
        if groups := match(ours, name):
            for number in groups[:-1]:
                theirs = theirs.replace("*", number, 1)
            before, _, rest = theirs.partition("{")
            inside, _, after = rest.partition("}")
            return [f"{before}{part}{after}{groups[-1]}" for part in inside.split(",")]
    raise KeyError(f"the key map is silent on {name}")


# %% tags=["check"]
SMALL = KeyMap({"image_in": "patch.proj", "blocks.*.stream.qkv": "layers.*.{to_q,to_k,to_v}"})
SMALL.names["blocks.*.stream.out"] = "layers.*.to_out"
assert their_names(SMALL, "image_in.bias") == ["patch.proj.bias"]
assert their_names(SMALL, "blocks.11.stream.qkv.weight") == [f"layers.11.to_{a}.weight" for a in "qkv"]  # rows in order
assert their_names(KeyMap({"up.*.down.*": "a.*.b.*"}), "up.3.down.14") == ["a.3.b.14"]  # stars from left to right
assert match("a.*.out", "a.1x.out.bias") is match("a.b", "a_b") is None  # a star is digits, a dot is a dot

# %% [markdown] lang="zh"
# ## 形状相同，内容不同
#
# 有三种张量不能原样照抄。分块卷积的权重是 $(D, C, p, p)$，我们的线性层读的图块按 $(p, p, C)$ 排：通道要挪到最后。AdaLN 的收尾层先存缩放、后存偏移，我们相反。第三种是 $q, k, v$ 的顺序，已经写在表里。
#
# $$W_{\mathrm{ours}}[d,\ (i, j, c)] = W_{\mathrm{conv}}[d, c, i, j]$$

# %% [markdown] lang="en" twin="5976ec57"
# ## Same shape, other content
#
# Three kinds of tensors must not be copied as they are. A patch convolution has weights $(D, C, p, p)$, while our linear layer reads patches as $(p, p, C)$: channels move to the end. AdaLN's last layer stores scale before shift, ours shift first. The third is the order of $q, k, v$, which the map holds.
#
# $$W_{\mathrm{ours}}[d,\ (i, j, c)] = W_{\mathrm{conv}}[d, c, i, j]$$


# %% tags=["export"]
def flatten_patches(weight: Tensor) -> Tensor:
    """A patch convolution (D, C, ph, pw) or (D, C, pt, ph, pw) as a linear layer (D, pt · ph · pw · C), channels last."""
    return weight.movedim(1, -1).flatten(1)


def swap_halves(tensor: Tensor) -> Tensor:
    """(scale, shift) ↔ (shift, scale) along the rows: diffusers' ``AdaLayerNormContinuous`` stores the scale first."""
    return torch.cat(tensor.chunk(2)[::-1])


def change_of(key_map: KeyMap, name: str) -> Callable[[Tensor], Tensor]:
    """What happens to each tensor that makes our ``name``; to most, nothing."""
    return next((change for ours, change in key_map.changes.items() if match(ours, name)), lambda tensor: tensor)


# %% tags=["check"]
from diffusion_engine.dit import patchify

image, weight = torch.randn(2, 3, 4, 6, generator=rng), theirs["patch.proj.weight"]
conv = nn.functional.conv2d(image, weight, stride=2).flatten(2).mT
assert torch.allclose(patchify(image, 2) @ flatten_patches(weight).T, conv, atol=1e-5)  # the convolution is linear
assert swap_halves(torch.tensor([1, 2, 3, 4, 5, 6])).tolist() == [4, 5, 6, 1, 2, 3]  # halves, not neighbours
SMALL.changes["image_in.weight"] = flatten_patches
assert [change_of(SMALL, f"image_in.{leaf}")(weight).shape[1] for leaf in ("weight", "bias")] == [12, 3]

# %% [markdown] lang="zh"
# ## 先看目录，再开箱
#
# 大模型切成几片（shard），由一个索引文件说明每个张量在哪片。只读各文件开头的目录，几毫秒就知道整个检查点的内容；文件断了、少了一片、索引说错了，都在搬之前发现。

# %% [markdown] lang="en" twin="c0d75cfb"
# ## Read the table first
#
# Large models come in shards, with an index that says where each tensor lies. Reading only the tables at the head of the files takes milliseconds and tells all that a checkpoint holds; a truncated file, a missing shard or a wrong index is found before anything moves.


# %% tags=["export"]
class Source(NamedTuple):
    """A tensor on disk as its file's header tells it; not read yet."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def read_json(file: Path) -> dict:
    """A JSON object.

    Raises:
        ValueError: the file is missing, or holds something else.
    """
    if not file.is_file():
        raise ValueError(f"model file {file} is missing; give a folder that diffusers' save_pretrained wrote")
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"model file {file} is damaged: it is not JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"model file {file} is damaged: it is not a JSON object")
    return content


def list_tensors(folder: Path) -> dict[str, Source]:
    """Every tensor of a checkpoint folder, in one safetensors file or in the shards that an index names.

    Raises:
        ValueError: no weights or only pickles, a damaged or truncated file, a missing shard, an index that is wrong.
    """
    plain, index = folder / f"{WEIGHTS}.safetensors", folder / f"{WEIGHTS}.safetensors.index.json"
    if index.is_file() and not plain.is_file():
        places = read_json(index).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
            raise ValueError(f"model file {index} is damaged: it has no weight_map from tensors to files")
    else:
        variants = [path for path in sorted(folder.glob(f"{WEIGHTS}.*.safetensors")) if "-of-" not in path.name]
        file = variants[0] if variants and not plain.is_file() else plain  # a variant is the same in fp16 or bf16
        places = dict.fromkeys(read_header(file), file.name)
    files = {place: folder / Path(place).name for place in sorted(set(places.values()))}
    headers = {place: read_header(file) for place, file in files.items()}
    for name, place in places.items():
        if name not in headers[place]:
            raise ValueError(f"model file {files[place]} lacks {name}, which {index.name} places there")
    return {name: Source(files[place], **headers[place][name]) for name, place in places.items()}


# %% tags=["hide"]
import tempfile

from safetensors.torch import save_file

from diffusion_engine.attention import SelfAttention


class Small(nn.Module):
    """Our side of the small world."""

    def __init__(self, depth: int = 12):
        super().__init__()
        self.image_in = nn.Linear(12, 8)
        self.blocks = nn.ModuleList(SelfAttention(8, 2, qk_norm=None, bias=False) for _ in range(depth))


room = tempfile.TemporaryDirectory()
home = Path(room.name)


def write(name: str, tensors: dict[str, Tensor], shards: int = 1) -> Path:
    """A checkpoint folder, in one file or in shards with an index."""
    folder = home / name
    folder.mkdir()
    files = [f"{WEIGHTS}{f'-{i:05}-of-{shards:05}' * (shards > 1)}.safetensors" for i in range(1, shards + 1)]
    places = {key: files[i % shards] for i, key in enumerate(tensors)}
    for file in files:
        save_file({key: tensors[key] for key in places if places[key] == file}, folder / file)
    if shards > 1:
        (folder / f"{WEIGHTS}.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def refusal(function: Callable, *arguments) -> str:
    """The message of the ValueError that a call must end in, without this machine's folders."""
    try:
        function(*arguments)
    except ValueError as error:
        return str(error).replace(str(home), "…")
    raise AssertionError("nothing was refused")


# %% tags=["check"]
one, three, broken = write("one", theirs), write("three", theirs, shards=3), write("broken", theirs, shards=3)
found, sharded = list_tensors(one), list_tensors(three)
assert {key: source.shape for key, source in found.items()} == {key: tuple(t.shape) for key, t in theirs.items()}
assert sharded.keys() == found.keys() and all(key in read_header(source.file) for key, source in sharded.items())
last = sorted(broken.glob("*-of-*"))[2]
last.write_bytes(last.read_bytes()[:-1])  # the last byte never arrived
print(refusal(list_tensors, broken))

# %% [markdown] lang="zh"
# ## 全部核对，再动手
#
# 搬之前，拿骨架的每个张量去对目录：少了谁，形状差在哪，谁没人要，都报出第一个名字。改动函数在 meta 张量上先跑一遍，就知道改完的形状，一个数字也不用读。没人要的也要拒绝：它常常说明配置读错了，比如漏掉一层 QK 归一化。

# %% [markdown] lang="en" twin="d81188a6"
# ## Check all, then move
#
# Before anything moves, every tensor of the skeleton is compared with the table: what is missing, which shape differs, what nobody wants, the first of each by name. Changes run on meta tensors first, so their shapes are known without reading a number. Leftovers are refused, too: they often mean a misread configuration, a QK norm forgotten, say.


# %% tags=["export"]
def check_tensors(model: nn.Module, tensors: dict[str, Source], key_map: KeyMap) -> None:
    """Compare all names, types and shapes before anything is read.

    Raises:
        ValueError: names the first tensor that is missing, has another type or shape, or has no place in the model.
    """
    wanted = set()
    for name, ours in model.state_dict().items():
        keys, change = their_names(key_map, name), change_of(key_map, name)
        for key in keys:
            if key not in tensors:
                near = "".join(f"; it has {other}" for other in difflib.get_close_matches(key, tensors, n=1))
                raise ValueError(f"the checkpoint lacks {key}, which makes {name}{near}")
            if tensors[key].dtype not in FLOATS:
                raise ValueError(f"the checkpoint holds {tensors[key].dtype} in {key}; expected {', '.join(FLOATS)}")
        shapes = [list(change(torch.empty(tensors[key].shape, device="meta")).shape) for key in keys]
        rows = sum(shape[0] for shape in shapes)
        if any([rows, *shape[1:]] != [*ours.shape] for shape in shapes):
            found = " and ".join(f"{key} {[*tensors[key].shape]}" for key in keys)
            raise ValueError(f"{found} in the checkpoint do not make {name} {[*ours.shape]}")
        wanted.update(keys)
    left = [key for key in tensors if key not in wanted and not any(match(p, key) for p in key_map.unused)]
    if left:
        raise ValueError(f"the checkpoint has {len(left)} tensors without a place in the model, {left[0]} first")


# %% tags=["check"]
MAP = KeyMap(SMALL.names, SMALL.changes, unused=("positions",))
check_tensors(Small(), found, MAP)  # not a word: everything fits
lacking = {key: source for key, source in found.items() if key != "layers.3.to_k.weight"}
assert "layers.3.to_k.weight" in refusal(check_tensors, Small(), lacking, MAP)
assert "5 tensors" in refusal(check_tensors, Small(11), found, MAP)  # the twelfth block has no place
wider = found | {"patch.proj.weight": found["patch.proj.weight"]._replace(shape=(8, 3, 2, 4))}
print(refusal(check_tensors, Small(), wider, MAP))  # shapes are compared after the change

# %% [markdown] lang="zh"
# ## 一次只搬一个
#
# 设各张量大小为 $w_i$，模型共 $W = \sum_i w_i$。直白的办法最多同时占 $2W$ 以上；一个一个搬，每个读出来就放进它的位置、换好精度，立刻放手：
#
# $$M_{\mathrm{plain}} \ge 2W, \qquad M_{\mathrm{stream}} = W + \max_i w_i$$
#
# 叠放的张量也不用先拼：先按最终大小开好，再一段一段填进去。

# %% [markdown] lang="en" twin="1e09a8e2"
# ## One at a time
#
# Let the tensors have sizes $w_i$, the model $W = \sum_i w_i$. The plain way holds $2W$ and more at its peak. One at a time, each tensor is read, put into its place in its final precision, and let go at once:
#
# $$M_{\mathrm{plain}} \ge 2W, \qquad M_{\mathrm{stream}} = W + \max_i w_i$$
#
# Stacked ones need no concatenation either: the final tensor is made first, then filled row by row.


# %% tags=["export"]
def fill(
    model: nn.Module, tensors: dict[str, Source], key_map: KeyMap, device="cpu", dtype: torch.dtype | None = None
) -> None:
    """Give a model on the meta device its weights, one tensor of the checkpoint at a time, each straight into its place.

    Args:
        tensors: what `list_tensors` found and `check_tensors` passed.
        device: where the weights go. dtype: what they are converted to; None keeps the checkpoint's.
    """
    with ExitStack() as stack:
        files = {file: stack.enter_context(safe_open(file, "pt")) for file in {t.file for t in tensors.values()}}
        for name, empty in model.state_dict().items():
            ours, row = None, 0
            for key in their_names(key_map, name):
                part = change_of(key_map, name)(files[tensors[key].file].get_tensor(key))
                if ours is None:
                    kept = torch.float32 if any(match(p, name) for p in key_map.fp32) else dtype or part.dtype
                    ours = torch.empty(empty.shape, dtype=kept, device=device)
                ours[row : row + len(part)] = part
                row += len(part)
            owner, _, leaf = name.rpartition(".")
            place = model.get_submodule(owner)
            setattr(place, leaf, nn.Parameter(ours, requires_grad=False) if leaf in place._parameters else ours)


# %% tags=["check"]
with torch.device("meta"):
    model, mixed = Small(), Small()
fill(model, sharded, MAP)
fill(mixed, found, KeyMap(MAP.names, MAP.changes, fp32=("blocks.*.stream.out",)), dtype=torch.bfloat16)
for name, tensor in pour(theirs).items():
    assert torch.equal(model.state_dict()[name], tensor)  # bit for bit the plain way's, out of three shards
    assert torch.equal(mixed.state_dict()[name], tensor.to(torch.float32 if "out" in name else torch.bfloat16))

# %% tags=["hide"]
gigabytes = [2 * tensor.numel() / 1e9 for tensor in skeleton.state_dict().values()]  # bf16
arrived = torch.tensor(gigabytes).cumsum(0)
moving = arrived + torch.tensor(gigabytes)  # the model so far, and the tensor on its way
everything = torch.cat([arrived, arrived[-1] + arrived])  # a dictionary of all, then the model beside it
fig, ax = plt.subplots(figsize=(6.4, 2.7))
steps = torch.linspace(0, 1, len(everything))
ax.plot(steps, everything, color=COLORS[3], label=f"read all, then copy: peak {everything.max():.0f} GB")
ax.plot(steps[::2], moving, color=COLORS[0], label=f"one at a time: peak {moving.max():.1f} GB")
ax.axhline(arrived[-1], color=COLORS[5], linewidth=0.8, linestyle="--")
ax.set(
    title="The size of FLUX: one at a time costs hardly more than the model",
    xlabel="share of the loading done",
    ylabel="GB in memory",
)
ax.legend(loc="upper left")
show(
    fig,
    alt="Two rising lines: reading everything first ends at twice the size of the model, one tensor at a time ends at its size.",
)

# %% [markdown] lang="zh"
# ## 从文件夹到模型
#
# 剩下的是接线：配置 → 骨架 → 目录 → 核对 → 填充。配置里若有我们不认识又没关掉的开关，也要拒绝：忽略它，数字就会悄悄不同。认识、却只造了一种取值的，由 `require` 把关。

# %% [markdown] lang="en" twin="2d482956"
# ## From folder to model
#
# What remains is wiring: configuration → skeleton → table → check → fill. A switch in the configuration that we do not know, and that is not off, is refused as well: to ignore it is to differ in silence. Where an entry is known but built for one value only, `require` stands guard.


# %% tags=["export"]
def require(config, **built) -> None:
    """Raise ValueError where an entry of a configuration is not the one value that is built here; names both."""
    for name, value in built.items():
        if getattr(config, name) != value:
            raise ValueError(f"{name} {getattr(config, name)!r} is not built here; try {value!r}")


def read_config(kind: type, values: dict) -> Any:
    """A model's sizes from ``config.json``: the dataclass ``kind`` has diffusers' names and defaults.

    Raises:
        ValueError: an entry that ``kind`` does not know and that is not off.
    """
    known = {f.name for f in fields(kind)}
    for name, value in values.items():
        if name not in known and not name.startswith("_") and value not in (None, False, 0, "", [], {}):
            raise ValueError(f"config.json sets {name} to {value!r}, which is unknown here; the numbers would differ")
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k in known})


def load(kind: type, folder: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> Any:
    """A model of class ``kind`` from a folder with ``config.json`` and safetensors, in evaluation mode.

    ``kind.Config`` is a dataclass as `read_config` takes it, ``kind.key_map(config)`` a `KeyMap`, ``kind(config)`` the model.

    Args:
        device: where the weights go. dtype: what they are converted to; None keeps the checkpoint's.

    Raises:
        ValueError: a missing, damaged or truncated file, a configuration or a tensor that does not fit; names it.
    """
    folder = Path(folder)
    try:
        config = read_config(kind.Config, read_json(folder / "config.json"))
        with torch.device("meta"):
            model = kind(config)
        tensors, key_map = list_tensors(folder), kind.key_map(config)
        check_tensors(model, tensors, key_map)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder} cannot become {kind.__name__}: {error}") from None
    fill(model, tensors, key_map, device, dtype)
    return model.eval()


# %% [markdown] lang="zh"
# ## 第 06 章的网络就是 SD3
#
# 现在拿真家伙试：diffusers 写一个很小的、随机的 SD3（带 QK 归一化，切成几片），我们用**第 06 章的 `DiT`** 去读。对照表十几行，网络一行不改。唯一的差别是位置表，所以先让 diffusers 用我们的表；第 16 章再用它自己的。

# %% [markdown] lang="en" twin="b2b96e61"
# ## The network of chapter 06 is SD3
#
# Now the real thing: diffusers writes a very small, random SD3 (with QK norms, in shards), and **the `DiT` of chapter 06** reads it. The map takes some twenty lines, the network not one. Only the position table differs, so let diffusers use ours for now; chapter 16 takes theirs.


# %%
from diffusion_engine.dit import sincos_2d

NAMES = {"image_in": "pos_embed.proj", "text_in": "context_embedder", "final.linear": "proj_out"}
NAMES |= {"time_in.mlp.0": "time_text_embed.timestep_embedder.linear_1", "final.modulation": "norm_out.linear"}
NAMES |= {"time_in.mlp.2": "time_text_embed.timestep_embedder.linear_2"}
NAMES |= {f"pooled_in.{2 * i}": f"time_text_embed.text_embedder.linear_{i + 1}" for i in (0, 1)}
BLOCK = {"image_modulation.linear": "norm1.linear", "text_modulation.linear": "norm1_context.linear"}
BLOCK |= {"attn.image.qkv": "attn.{to_q,to_k,to_v}", "attn.image.out": "attn.to_out.0"}
BLOCK |= {"attn.text.qkv": "attn.{add_q_proj,add_k_proj,add_v_proj}", "attn.text.out": "attn.to_add_out"}
BLOCK |= {f"attn.image.norm_{a}": f"attn.norm_{a}" for a in "qk"} | {"image_ff.0": "ff.net.0.proj"}
BLOCK |= {f"attn.text.norm_{a}": f"attn.norm_added_{a}" for a in "qk"} | {"image_ff.2": "ff.net.2"}
BLOCK |= {"text_ff.0": "ff_context.net.0.proj", "text_ff.2": "ff_context.net.2"}
NAMES |= {f"joint_blocks.*.{ours}": f"transformer_blocks.*.{name}" for ours, name in BLOCK.items()}

# %%
from dataclasses import make_dataclass

SIZES = "num_layers num_attention_heads attention_head_dim in_channels out_channels patch_size sample_size qk_norm"
SIZES += " joint_attention_dim pooled_projection_dim caption_projection_dim pos_embed_max_size dual_attention_layers"


class PlainSD3(DiT):
    """Chapter 06's `DiT` with SD3's sizes; everything else is as it was."""

    Config = make_dataclass("PlainConfig", SIZES.split(), frozen=True)

    def __init__(self, c):
        heads, width = c.num_attention_heads, c.num_attention_heads * c.attention_head_dim
        super().__init__(DiTConfig(c.in_channels, c.patch_size, width, heads, c.num_layers, 0, c.joint_attention_dim))

    @staticmethod
    def key_map(config) -> KeyMap:
        last = f"joint_blocks.{config.num_layers - 1}.text_modulation.linear"
        changes = {"image_in.weight": flatten_patches, "final.modulation": swap_halves, last: swap_halves}
        return KeyMap(NAMES, changes, unused=("pos_embed.pos_embed",))

    def as_diffusers(self, hidden_states, encoder_hidden_states, pooled_projections, timestep) -> Tensor:
        return self(hidden_states, timestep.float(), encoder_hidden_states, None, pooled_projections)


# %% tags=["check"]
from diffusers import SD3Transformer2DModel

numbers = dict(
    num_layers=3, num_attention_heads=4, attention_head_dim=16, in_channels=4, out_channels=4, sample_size=12
)
numbers |= dict(joint_attention_dim=32, pooled_projection_dim=32, caption_projection_dim=64, qk_norm="rms_norm")
real = SD3Transformer2DModel(**numbers, pos_embed_max_size=6).eval().requires_grad_(False)
for weight in real.parameters():  # a fresh model hides faults behind ones and zeros
    weight.copy_(torch.randn(weight.shape, generator=rng) / weight[0].numel() ** 0.5)
real.pos_embed.pos_embed.copy_(sincos_2d((6, 6), 64))  # our table; theirs comes in chapter 16
real.save_pretrained(home / "sd3", max_shard_size="200KB")
latents, text, pooled = (torch.randn(shape, generator=rng) for shape in ((2, 4, 12, 12), (2, 7, 32), (2, 32)))
t, ours = torch.tensor([987.6, 3.2]), load(PlainSD3, home / "sd3")
error = (ours(latents, t, text, None, pooled) - real(latents, text, pooled, t).sample).abs().max()
assert error < 1e-5  # every weight of an SD3 in the network of chapter 06
print(len(list((home / "sd3").glob("*.safetensors"))), "shards; the velocities differ by less than 1e-5")
newer = json.loads((home / "sd3" / "config.json").read_text()) | {"new_idea": 2}
assert "new_idea" in refusal(read_config, PlainSD3.Config, newer)
require(ours.config, latent_channels=4, patch=2)  # as built: not a word
assert refusal(lambda: require(ours.config, patch=4)) == "patch 2 is not built here; try 4"

# %% [markdown] lang="zh"
# ## 权重从哪里来
#
# 名字写成 `owner/name`，就是在模型仓库里的编号。下载过的东西在本机缓存里：`models--owner--name/snapshots/版本`。我们只查缓存，查不到立刻说明白；要下载，得明说。绝不悄悄联网，也绝不卡住。

# %% [markdown] lang="en" twin="a165b201"
# ## Where weights come from
#
# A name such as `owner/name` is an id on the hub. What was fetched once lies in this machine's cache: `models--owner--name/snapshots/version`. We look there and nowhere else, and say at once when it is not there; fetching must be asked for. Nothing goes online in silence, nothing hangs.


# %% tags=["export"]
def hub_cache() -> Path:
    """Where the hub's tools keep what they fetched: $HF_HUB_CACHE, else $HF_HOME/hub, else ~/.cache/huggingface/hub."""
    return Path(
        os.environ.get("HF_HUB_CACHE") or f"{os.environ.get('HF_HOME', '~/.cache/huggingface')}/hub"
    ).expanduser()


def find_folder(model: str | Path, subfolder: str = "transformer", download: bool = False) -> Path:
    """The folder with ``config.json``: ``model/subfolder``, or ``model`` itself, or the same in a hub id's snapshot.

    Args:
        model: a folder, or ``owner/name`` on the hub: looked up in the local cache, never fetched unasked.
        download: fetch it from the hub; what is in the cache is not fetched again.

    Raises:
        ValueError: neither a folder nor in the cache; with ``download``: absent, gated, or no connection.
    """
    folder = Path(model)
    if not folder.is_dir():
        if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(model)):
            raise ValueError(f"model {str(model)!r} is neither a folder nor a hub id such as owner/name")
        if download:
            fetch(str(model), subfolder)
        home = hub_cache() / ("models--" + str(model).replace("/", "--"))
        version = home / "refs" / "main"
        folder = home / "snapshots" / (version.read_text().strip() if version.is_file() else "none")
    for place in (folder / subfolder, folder):
        if (place / "config.json").is_file():
            return place
    where = "has no config.json" if Path(model).is_dir() else f"is no folder and not in the cache {hub_cache()}"
    raise ValueError(f"model {model} ({subfolder}) {where}; --download fetches what a hub id names")


# %% tags=["export"]
def fetch(model: str, subfolder: str) -> None:
    """Fetch one part of a model from the hub into the cache: configuration and safetensors, nothing that can run.

    Raises:
        ValueError: the model is absent or gated, or the hub cannot be reached.
    """
    from huggingface_hub import snapshot_download

    names = ["config.json", f"{WEIGHTS}.safetensors", f"{WEIGHTS}.safetensors.index.json", f"{WEIGHTS}-*.safetensors"]
    reasons = {"GatedRepoError": f"it is gated: accept its licence at huggingface.co/{model}, then `hf auth login`"}
    reasons["RepositoryNotFoundError"] = "the hub has no such model, or it is private"
    try:
        snapshot_download(model, cache_dir=hub_cache(), allow_patterns=[f"{subfolder}/{name}" for name in names])
    except OSError as error:  # every failure of the hub's own client is one
        reason = reasons.get(type(error).__name__, str(error).partition("\n")[0])
        raise ValueError(f"model {model} cannot be fetched: {reason}") from None


# %% tags=["check"]
os.environ["HF_HUB_CACHE"] = str(home / "hub")
kept = hub_cache() / "models--acme--tiny"
for file, content in {"refs/main": "abc", "snapshots/abc/transformer/config.json": "{}"}.items():
    (kept / file).parent.mkdir(parents=True)
    (kept / file).write_text(content)
assert find_folder("acme/tiny") == find_folder(kept / "snapshots" / "abc") == kept / "snapshots/abc/transformer"
print(*[refusal(look, "acme/none", "transformer") for look in (find_folder, fetch)], sep="\n")  # at once

# %% [markdown] lang="zh"
# ## 住进别人的流水线
#
# 反过来也行：让我们的网络顶替 diffusers 流水线里的那一个，`pipe.transformer = …`。流水线只看几样东西：`config` 的条目、`dtype`、`device`、`cache_context`，以及返回值是 `.sample` 还是元组。给它这几样，其余由模型的 `as_diffusers` 换算。没听过的参数一律拒绝，不装作照办。

# %% [markdown] lang="en" twin="6520cab1"
# ## Living in someone else's pipeline
#
# It works the other way round, too: our network in place of the one in a diffusers pipeline, `pipe.transformer = …`. A pipeline looks at a few things only: entries of `config`, `dtype`, `device`, `cache_context`, and whether `.sample` or a tuple comes back. The model's `as_diffusers` translates the rest. An unknown argument is refused, never ignored.


# %% tags=["export"]
class Output(NamedTuple):
    """What diffusers' pipelines take from a transformer: ``out.sample`` or ``out[0]``."""

    sample: Tensor


class DropIn(nn.Module):
    """One of our models behind diffusers' call, for ``pipe.transformer = …``.

    Args:
        model: has ``config``, a dataclass of diffusers' names, and ``as_diffusers``, whose arguments are named as theirs.

    Raises:
        ValueError: at the call, an argument that ``as_diffusers`` does not take and that is not empty.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model, self.config = model, model.config
        self.takes = list(inspect.signature(model.as_diffusers).parameters)

    @property
    def dtype(self) -> torch.dtype:
        """Of most weights: a few may be kept in fp32."""
        return min((weight.dtype for weight in self.parameters()), key=lambda dtype: dtype.itemsize)

    @property
    def device(self) -> torch.device:
        """Of the weights."""
        return next(self.parameters()).device

    @contextmanager
    def cache_context(self, name: str) -> Iterator[None]:
        """Pipelines announce "cond" and "uncond" here, for step caches; there is none."""
        yield

    def forward(self, *args, return_dict: bool = True, **kwargs) -> Output | tuple[Tensor]:
        given = dict(zip(self.takes, args)) | {name: value for name, value in kwargs.items() if not _empty(value)}
        if unknown := [name for name in given if name not in self.takes]:
            raise ValueError(f"{unknown[0]} is unknown to the drop-in; it takes {', '.join(self.takes)}")
        sample = self.model.as_diffusers(**given)
        return Output(sample) if return_dict else (sample,)


def _empty(value: Any) -> bool:
    """None, or a container with nothing in it."""
    return value is None or isinstance(value, (dict, list, tuple)) and not value


# %% tags=["check"]
stand_in, call = DropIn(ours), dict(encoder_hidden_states=text, pooled_projections=pooled, timestep=t)
with stand_in.cache_context("cond"):
    (first,) = stand_in(latents, **call, return_dict=False, joint_attention_kwargs={}, skip_layers=None)
assert torch.equal(stand_in(latents, text, pooled, t).sample, first)  # by place, as in diffusers' own call
assert (first - real(latents, **call).sample).abs().max() < 1e-5
assert stand_in.dtype == torch.float32 and stand_in.device.type == "cpu"
print(refusal(lambda: stand_in(latents, **call, skip_layers=[1])))

# %% [markdown] lang="zh"
# ## 在 diffusers 里，这些在哪儿
#
# | 我们 | diffusers 与 huggingface_hub |
# | --- | --- |
# | `load` | `modeling_utils.py`，`ModelMixin.from_pretrained` |
# | meta 骨架 | accelerate 的 `init_empty_weights` |
# | `list_tensors` | `model_loading_utils.py`，`_fetch_index_file` |
# | `fill` | 同一文件，`load_model_dict_into_meta`；整片读入，再逐个放好 |
# | `KeyMap.fp32` | `_keep_in_fp32_modules` |
# | `find_folder`、`fetch` | `hub_utils.py`，`_get_model_file` |
#
# **还缺什么**：量化的权重（fp8、GGUF）和 LoRA。有了搬家的本事，第 16 章从最像我们的一家开始：SD3 和我们的 DiT 到底差在哪？
#
# ## 三个问题
#
# 1. 预测：把表里的 `{to_q,to_k,to_v}` 写成 `{to_k,to_q,to_v}`，哪一步会报错？
# 2. 修改：给 `fill` 传 `dtype=torch.float16`，偏置里的 70000 会变成什么？
# 3. 动手：为随包附带的 DiT 写一张对照表，读它自己的 safetensors 文件。

# %% [markdown] lang="en" twin="aee523e4"
# ## Where this lives in diffusers
#
# | Ours | diffusers and huggingface_hub |
# | --- | --- |
# | `load` | `modeling_utils.py`, `ModelMixin.from_pretrained` |
# | the meta skeleton | accelerate's `init_empty_weights` |
# | `list_tensors` | `model_loading_utils.py`, `_fetch_index_file` |
# | `fill` | the same file, `load_model_dict_into_meta`; reads a whole shard, then places tensor by tensor |
# | `KeyMap.fp32` | `_keep_in_fp32_modules` |
# | `find_folder`, `fetch` | `hub_utils.py`, `_get_model_file` |
#
# **What is missing:** quantised weights (fp8, GGUF) and LoRA. Able to move in, chapter 16 begins with the family most like ours: what exactly separates SD3 from our DiT?
#
# ## Three questions
#
# 1. Predict: write `{to_k,to_q,to_v}` for `{to_q,to_k,to_v}` in the map. Which step complains?
# 2. Modify: hand `fill` `dtype=torch.float16`. What becomes of a bias of 70000?
# 3. Build: a key map for the DiT that ships with this package, to read its own safetensors file.

# %% tags=["solution"]
# 1 · none: all shapes fit, every check of this module passes; only the comparison of velocities turns red
wrong = {name: keys.replace("{to_q,to_k,", "{to_k,to_q,") for name, keys in MAP.names.items()}
check_tensors(Small(), found, KeyMap(wrong, MAP.changes, MAP.unused))
with torch.device("meta"):
    confused = Small()
fill(confused, found, KeyMap(wrong, MAP.changes, MAP.unused))
assert not torch.equal(confused.blocks[0].stream.qkv.weight, model.blocks[0].stream.qkv.weight)

# %% tags=["solution"]
# 2 · infinity: fp16 ends at 65504, and the conversion says nothing; bf16 reaches as far as fp32, with fewer digits
loud = write("loud", theirs | {"patch.proj.bias": torch.full((8,), 70_000.0)})
for dtype, finite in ((torch.float16, False), (torch.bfloat16, True)):
    with torch.device("meta"):
        narrow = Small()
    fill(narrow, list_tensors(loud), MAP, dtype=dtype)
    assert bool(narrow.image_in.bias.isfinite().all()) == finite

# %% tags=["solution"]
# 3 · the names are ours already, so each stands for itself
from diffusion_engine.model_folder import SHIPPED_MODEL

file = SHIPPED_MODEL / "dit.safetensors"
own, contents = DiT(), {name: Source(file, **entry) for name, entry in read_header(file).items()}
check_tensors(own, contents, KeyMap({name: name for name in contents}))
fill(own, contents, KeyMap({name: name for name in contents}))
assert own.final.linear.weight.any() and own.final.linear.weight.dtype == torch.float16  # as they lie in the file

# %% [markdown] lang="zh"
# ## 小结
#
# - 骨架建在 meta 设备上：不占内存，不动随机数，十亿参数也只要一瞬。
# - 对照表从我们这边出发：缺的、多的、形状不符的，都报出名字。
# - 通道挪到最后、缩放与偏移对调、$q,k,v$ 的顺序：这三样形状不变，只有数值对照看得见。
# - 逐个搬运，峰值是模型加一个张量：$W + \max_i w_i$。
# - 第 06 章的 DiT 读进一个 SD3，速度与 diffusers 相差不到 $10^{-5}$。
#
# 阅读卡片：SD3（[`papers/05_sd3`](../../papers/05_sd3.zh.md)）。下一章：16。

# %% [markdown] lang="en" twin="aa29dd20"
# ## Recap
#
# - The skeleton stands on the meta device: no memory, no random numbers, a moment for billions of weights.
# - The key map starts from our side: what is missing, left over or misshapen is named.
# - Channels to the end, scale and shift swapped, the order of $q,k,v$: shapes stay, and only comparing numbers sees them.
# - One at a time, the peak is the model and one tensor: $W + \max_i w_i$.
# - The DiT of chapter 06 read an SD3, and its velocity is within $10^{-5}$ of diffusers'.
#
# Reading card: SD3 ([`papers/05_sd3`](../../papers/05_sd3.en.md)). Next: chapter 16.
