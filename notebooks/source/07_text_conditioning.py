# ---
# jupyter:
#   course:
#     minutes: 45
#     module: text_conditioning
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown] lang="zh"
# # 07 · 文本条件（text conditioning）
#
# 读完这一章，「红苹果」和 red apple 会变成网络读得懂的向量，而且彼此靠近；同一句话只编码一次。
#
# | 你会做出 | 你需要 | 时间 | 模块 |
# | --- | --- | --- | --- |
# | 分词器、文本编码器、提示词缓存 | 第 04 章的自注意力、第 05 章的前馈层 | 45 分钟 | `diffusion_engine/text_conditioning.py` |

# %% [markdown] lang="en" twin="a3cb74a5"
# # 07 · Text conditioning
#
# After this chapter "红苹果" and "red apple" become vectors that a network can read, close to each other, and no prompt is ever encoded twice.
#
# | You build | You need | Time | Module |
# | --- | --- | --- | --- |
# | tokenizer, text encoder, prompt cache | self-attention from chapter 04, the feed-forward layer from chapter 05 | 45 minutes | `diffusion_engine/text_conditioning.py` |

# %% [markdown] lang="zh"
# **先想一想**：网络只吃数字。给每个词编一个号，行不行？遇到没见过的词、不用空格的中文、打错的字，你的编号表会怎样？先写下你的答案。

# %% [markdown] lang="en" twin="56792d0a"
# **Think first:** a network eats only numbers. Would it do to give each word a number? What does your list do with a word it has never seen, with Chinese, which uses no spaces, with a typing error? Write your answer down.

# %% tags=["export"]
import json
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor, nn

from diffusion_engine.attention import SelfAttention
from diffusion_engine.transformer_block import FeedForward

# %% tags=["hide"]
import re
from collections import Counter
from itertools import pairwise

import matplotlib.pyplot as plt
from matplotlib.offsetbox import AnnotationBbox, OffsetImage

from course.figures import image_grid, show
from recipes.emoji_data import load_emoji

# %% [markdown] lang="zh"
# ## 词太多，字母太碎
#
# 整词编号，词表没有尽头；按字母编号，序列太长。折中办法像速记：从单个字符出发，每次把最常相邻的一对合成一个新符号。这就是字节对编码（byte-pair encoding，BPE）。先写最笨的版本。

# %% [markdown] lang="en" twin="0afd07df"
# ## Too many words, too many letters
#
# Number whole words and the list never ends; number letters and the sequence grows long. The middle way works like shorthand: start from characters and, again and again, fuse the pair that stands side by side most often. That is byte-pair encoding (BPE). The plainest version first.


# %%
def learn_merges(captions: list[str], count: int) -> tuple[list[tuple[str, str]], list[float]]:
    words = Counter(" ".join("▁" + word) for caption in captions for word in caption.lower().split())  # "▁ r e d"
    index = {piece: i for i, piece in enumerate(sorted(set("".join(words)) - {" "}))}
    merges, lengths = [], []
    for _ in range(count):
        pairs = Counter()
        for word, times in words.items():
            for pair in pairwise(word.split(" ")):
                pairs[pair] += times
        a, b = max(pairs, key=lambda pair: (pairs[pair], -index[pair[0]], -index[pair[1]]))
        index.setdefault(a + b, len(index))
        neighbours = re.compile(rf"(?<!\S){re.escape(a)} {re.escape(b)}(?!\S)")
        words = Counter({neighbours.sub(a + b, word): times for word, times in words.items()})
        merges.append((a, b))
        lengths.append(sum(times * len(word.split(" ")) for word, times in words.items()) / len(captions))
    return merges, lengths


# %%
images, records = load_emoji()
food = [record for record in records if record.group == "food-drink"]
captions = [caption for record in food for caption in (record.label_en, record.label_zh)]
merges, lengths = learn_merges(captions, 200)
merges[:6]  # ▁ marks the start of a word

# %% tags=["hide"]
fig, ax = plt.subplots(figsize=(6.4, 2.4))
ax.plot(range(1, 201), lengths)
ax.set(title="Every merge shortens the captions a little", xlabel="merges learned", ylabel="pieces a caption", ylim=0)
show(
    fig,
    alt="The mean number of pieces a caption falls steadily, from seven to under four, as 200 merges are learned.",
)

# %% [markdown] lang="zh"
# ## 进引擎的分词器
#
# 合并规则交给 Hugging Face 的 `tokenizers` 去学。我们只定规矩：全角转半角并统一写法（NFKC）、小写、压缩空格、标点独立。词表里还留着 256 个字节：没见过的字退回它的 UTF-8 字节，于是没有「未知」。

# %% [markdown] lang="en" twin="ed1e657d"
# ## The tokenizer that goes into the engine
#
# Learning the merges is left to Hugging Face's `tokenizers`. We only set the rules: one way to write each character (NFKC), lower case, single spaces, punctuation apart. The list also keeps all 256 bytes: an unseen character falls back to its UTF-8 bytes, so nothing is unknown.

# %% tags=["export"]
START, PAD = 0, 1  # ids of <s> and <pad>
RESERVED = ["<s>", "<pad>", *(f"<0x{byte:02X}>" for byte in range(256))]


def with_text_rules(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer with the rules for text: NFKC, lower case, single spaces; words and punctuation apart."""
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Lowercase(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation()])
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return tokenizer


# %% tags=["export"]
def train_tokenizer(texts: Iterable[str], vocab_size: int = 4000) -> Tokenizer:
    """Byte-pair encoding learned from texts; the same texts in the same order give the same tokenizer.

    Args:
        texts: what to learn from; a text given four times counts four times.
        vocab_size: number of ids V, the 258 reserved ones included: <s> is 0, <pad> is 1, then 256 bytes. Fewer come
            out where the texts have nothing left to merge.

    Raises:
        ValueError: ``vocab_size`` does not hold the reserved ids and every character of the texts.

    Source: Sennrich et al. 2016; byte fallback as in SentencePiece.
    """
    learned = with_text_rules(Tokenizer(models.BPE()))
    room = max(vocab_size - len(RESERVED), 0)
    learned.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=room, min_frequency=1, show_progress=False))
    model = json.loads(learned.to_str())["model"]
    pieces = RESERVED + sorted(model["vocab"], key=model["vocab"].get)
    if len(pieces) > vocab_size:
        raise ValueError(f"vocab_size {vocab_size} cannot hold the bytes and characters; try {len(pieces)} or more")
    vocab, merges = {piece: i for i, piece in enumerate(pieces)}, [tuple(merge) for merge in model["merges"]]
    return with_text_rules(Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True)))


# %%
labels = [label for record in records for label in (record.label_en, record.label_zh)]
tags = [tag for record in records for tag in record.tags_en + record.tags_zh]
bpe = train_tokenizer(4 * labels + tags)
for text in ("Red apple!", "红苹果", "𓀀", *records[0].tags_en[:3]):
    print(bpe.encode(text).tokens)

# %% tags=["check"]
plain = [caption for caption in captions if caption.replace(" ", "").isalnum()]  # the plain version keeps punctuation
library = json.loads(train_tokenizer(plain).to_str())["model"]["merges"]
assert [tuple(merge) for merge in library[:200]] == learn_merges(plain, 200)[0]  # the library learns what we learned

for text in ("red apple", "戴帽子的猫", "ﬁ ①  Ａ", "naïve 𓀀 🍎", "\x00\x7f", "<s> <pad> <0x41>"):
    ids = bpe.encode(text).ids
    assert bpe.decode(ids) == bpe.normalizer.normalize_str(text)
    assert START not in ids and PAD not in ids  # typed text never becomes a control token

# %% [markdown] lang="zh"
# ## 排成一排：起始、填充、截断
#
# 一批提示词长短不一。每行以 `<s>` 开头，短的用 `<pad>` 补齐，掩码（mask）记下哪些是真的。窗口只有 24 格，装不下的词整个留下，而且必须说出来：许多库在 77 格处默默剪断，用户以为模型不听话。

# %% [markdown] lang="en" twin="27bb5af8"
# ## In a row: start, padding, truncation
#
# Prompts of a batch differ in length. Every row begins with `<s>`, short ones are filled up with `<pad>`, and a mask notes which are real. The window has 24 places; a word that does not fit stays out whole, and must be told. Many libraries cut at 77 in silence, and users think that the model is not listening.


# %% tags=["export"]
class Tokens(NamedTuple):
    """What the text encoder reads: ids (B, M) int64, mask (B, M) bool, and of each prompt the text that did not fit."""

    ids: Tensor
    mask: Tensor
    dropped: list[str]


def pieces_that_fit(text: str, starts: list[int], room: int) -> int:
    """How many pieces to keep: room, or fewer where the cut would halve a Latin word that fits the window whole."""
    for cut in range(room, 0, -1):
        around = text[starts[cut] - 1 : starts[cut] + 1]
        if not (around.isascii() and around.isalnum()):
            return cut
    return room


class PromptTokenizer:
    """Prompts to `Tokens`: <s> first, at most max_length ids a row, padded to the longest row of the call.

    Args:
        tokenizer: what `train_tokenizer` returns, or the path of a tokenizer.json.
        max_length: the window, <s> included.

    Raises:
        ValueError: no room after <s>, a tokenizer with other reserved ids, no prompts, or a prompt that is not text.
    """

    def __init__(self, tokenizer: Tokenizer | str | Path, max_length: int = 24):
        if max_length < 2:
            raise ValueError(f"max_length {max_length} leaves no room after <s>; try 2 or more")
        self.tokenizer = tokenizer
        if not isinstance(tokenizer, Tokenizer):
            self.tokenizer = Tokenizer.from_str(Path(tokenizer).read_text(encoding="utf-8"))
        if [self.tokenizer.id_to_token(i) for i in (START, PAD)] != RESERVED[:2]:
            raise ValueError(
                f"the tokenizer's ids {START} and {PAD} are not <s> and <pad>; make it with train_tokenizer"
            )
        self.max_length, self.vocab_size = max_length, self.tokenizer.get_vocab_size()

    def __call__(self, prompts: str | list[str]) -> Tokens:
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        wrong = [p for p in prompts or [None] if not isinstance(p, str) or p != p.encode(errors="ignore").decode()]
        if wrong:
            raise ValueError(f"prompt {wrong[0]!r} is not text; the empty prompt is ''")
        rows, dropped, room = [], [], self.max_length - 1
        for prompt in prompts:
            encoding = self.tokenizer.encode(prompt)
            pieces, starts = encoding.ids, [start for start, _ in encoding.offsets]
            keep = len(pieces) if len(pieces) <= room else pieces_that_fit(prompt, starts, room)
            rows.append(torch.tensor([START, *pieces[:keep]]))
            dropped.append(prompt[starts[keep] :].strip(" \t\r\n") if keep < len(pieces) else "")
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)  # (B, M)
        return Tokens(ids, ids != PAD, dropped)


# %%
tokenizer = PromptTokenizer(bpe)
long = "a smiling cat with a red hat and a green scarf, sitting on the moon, next to a rocket, under a rainbow"
ids, mask, dropped = tokenizer(["red apple", "", long])
print(ids[:, :8])
dropped

# %% tags=["check"]
assert tokenizer("").ids.tolist() == tokenizer("  \n").ids.tolist() == [[START]]  # the empty prompt is one token
assert mask.sum(1).tolist() == [4, 1, 23] and (ids[:, 0] == START).all() and (ids[~mask] == PAD).all()

kept = bpe.decode(ids[2, 1:].tolist())
assert (kept + dropped[2]).replace(" ", "") == long.replace(" ", "")  # kept and dropped make the whole
assert dropped[:2] == ["", ""]

# %% [markdown] lang="zh"
# ## 从编号到意思
#
# 编号查表得到向量，加上位置；再经过几层编码块（encoder block）。和图像网络的块相比少了调制，因为这里没有时间。下面的检查抄过权重，与 PyTorch 自带的块对一对：
#
# $$x = E[\mathrm{ids}] + P, \qquad x \leftarrow x + \mathrm{attn}(\mathrm{LN}(x)), \qquad x \leftarrow x + \mathrm{ff}(\mathrm{LN}(x))$$
#
# | 记号 | 形状 | 含义 |
# | --- | --- | --- |
# | $E$ | $(V, D)$ | 词向量表，$V = 4000$ |
# | $P$ | $(24, D)$ | 位置向量，取前 $M$ 行 |
# | mask | $(B, M)$ | 真为真词元，假为填充 |
# | tokens | $(B, M, D)$ | 每个词元一个向量 |
# | pooled | $(B, D)$ | 整句一个向量：`<s>` 的输出 |

# %% [markdown] lang="en" twin="2f4857f9"
# ## From numbers to meaning
#
# Each id looks up a vector and adds its position; a few encoder blocks follow. Compared with the image network's block, modulation is missing: there is no time here. The check below copies weights into PyTorch's own block and compares:
#
# $$x = E[\mathrm{ids}] + P, \qquad x \leftarrow x + \mathrm{attn}(\mathrm{LN}(x)), \qquad x \leftarrow x + \mathrm{ff}(\mathrm{LN}(x))$$
#
# | Symbol | Shape | Meaning |
# | --- | --- | --- |
# | $E$ | $(V, D)$ | table of token vectors, $V = 4000$ |
# | $P$ | $(24, D)$ | position vectors, the first $M$ rows are used |
# | mask | $(B, M)$ | true for tokens, false for padding |
# | tokens | $(B, M, D)$ | one vector a token |
# | pooled | $(B, D)$ | one vector for the whole: the output of `<s>` |


# %% tags=["export"]
class EncoderBlock(nn.Module):
    """x ← x + attn(LN(x)); x ← x + ff(LN(x)): a pre-norm block without a condition. (B, M, D) → (B, M, D).

    Args:
        width: D. heads: H.
        qk_norm: RMS-normalise queries and keys per head.
    """

    def __init__(self, width: int, heads: int, qk_norm: bool = True):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.ff = SelfAttention(width, heads, qk_norm), FeedForward(width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.norm1(x), mask)
        return x + self.ff(self.norm2(x))


# %% tags=["check"]
ours = EncoderBlock(32, 4, qk_norm=False)
theirs = nn.TransformerEncoderLayer(32, 4, 128, 0.0, nn.GELU("tanh"), batch_first=True, norm_first=True)
weights = list(ours.state_dict().values())  # ours lists its two norms first, PyTorch last
theirs.load_state_dict(dict(zip(theirs.state_dict(), weights[4:] + weights[:4])))
x, seen = torch.randn(2, 6, 32), torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
difference = ours(x, seen[:, None, None]) - theirs(x, src_key_padding_mask=~seen)
assert difference[seen].abs().max() < 1e-5

# %% [markdown] lang="zh"
# ## 标题与正文
#
# 编码器交出两样东西，像新闻的标题与正文。池化向量（pooled）概括全句，和时间一起去调制每一层；逐词向量（tokens）留住细节，让图块在联合注意力里自己去查。

# %% [markdown] lang="en" twin="e87d14b7"
# ## Headline and article
#
# The encoder hands over two things, like the headline and the body of an article. The pooled vector sums up the prompt and, with time, modulates every layer; the token vectors keep the details, for patches to look up in joint attention.


# %% tags=["export"]
class PromptEmbeds(NamedTuple):
    """What the image network reads: tokens (B, M, D), mask (B, M) bool, pooled (B, D)."""

    tokens: Tensor
    mask: Tensor
    pooled: Tensor


@dataclass(frozen=True)
class TextEncoderConfig:
    """V ids, width D, H heads, number of blocks, and the window M_max."""

    vocab_size: int = 4000
    width: int = 256
    heads: int = 8
    depth: int = 2
    max_length: int = 24


class TextEncoder(nn.Module):
    """ids (B, M), mask (B, M) → `PromptEmbeds`; the output of the first token, <s>, is the pooled vector.

    Every token sees every token that the mask shows; attention is not causal, so that <s> can sum up what follows it.

    Raises:
        ValueError: more ids a row than ``config.max_length``.
    """

    def __init__(self, config: TextEncoderConfig = TextEncoderConfig()):
        super().__init__()
        self.config = c = config
        self.embedding = nn.Embedding(c.vocab_size, c.width)
        self.position = nn.Embedding(c.max_length, c.width)
        nn.init.normal_(self.embedding.weight, std=0.5)
        nn.init.normal_(self.position.weight, std=0.1)
        self.blocks = nn.ModuleList(EncoderBlock(c.width, c.heads) for _ in range(c.depth))
        self.norm = nn.LayerNorm(c.width)

    def forward(self, ids: Tensor, mask: Tensor) -> PromptEmbeds:
        if ids.shape[1] > self.config.max_length:
            raise ValueError(
                f"{ids.shape[1]} ids a row exceed max_length {self.config.max_length}; truncate them first"
            )
        x = self.embedding(ids) + self.position.weight[: ids.shape[1]]  # (B, M, D)
        for block in self.blocks:
            x = block(x, mask[:, None, None, :])
        x = self.norm(x)
        return PromptEmbeds(x, mask, x[:, 0])


# %% [markdown] lang="zh"
# 填充就像空椅子，不该投票。同一句话，右边补几把空椅子，结果都不变；忘了掩码，意思就随邻座的长短漂移，而形状一个也不变。

# %% [markdown] lang="en" twin="18a8b1bd"
# Padding is like empty chairs: it must not vote. Put any number of them to the right of a prompt, and nothing changes. Forget the mask, and its meaning drifts with the length of its neighbours, while every shape stays right.

# %%
torch.manual_seed(0)
encoder = TextEncoder(TextEncoderConfig(width=64, heads=4))
one, pair = tokenizer("red apple"), tokenizer(["red apple", long])
alone, beside = encoder(one.ids, one.mask), encoder(pair.ids, pair.mask)
unmasked = encoder(pair.ids, torch.ones_like(pair.mask))

# %% tags=["check"]
assert torch.allclose(beside.tokens[0, :4], alone.tokens[0], atol=1e-5)  # padding invariance
assert torch.allclose(beside.pooled[0], alone.pooled[0], atol=1e-5)
assert not torch.allclose(unmasked.pooled[0], alone.pooled[0], atol=1e-1)  # the fault that keeps all shapes

# %% [markdown] lang="zh"
# ## 意思从哪里来
#
# 现在的向量是随机的。给它一道题：只看池化向量，经一层线性层，猜出图片缩到 8×8 的样子。中英文标题要猜同一张图，于是只能靠近。随引擎发布的编码器也是这样训练，再冻结（frozen）的，只是图多、猜的是潜变量。

# %% [markdown] lang="en" twin="d18d62e4"
# ## Where meaning comes from
#
# So far the vectors are random. Give them a task: from the pooled vector alone, through one linear layer, guess the picture shrunk to 8×8. The English and the Chinese caption must guess the same picture, so they have to meet. The shipped encoder was trained this way and then frozen, with more pictures, guessing latents.

# %%
chosen = food[:32]  # fruit, vegetables, bread
first = records.index(chosen[0])
pictures = torch.from_numpy(images[first : first + 32]).permute(0, 3, 1, 2) / 255  # (32, 3, 64, 64)
thumbnails = F.adaptive_avg_pool2d(pictures, 8).flatten(1)  # (32, 192)
ids, mask, _ = tokenizer([r.label_en for r in chosen] + [r.label_zh for r in chosen])  # English first, then Chinese


def similarity(pooled: Tensor) -> Tensor:
    english, chinese = F.normalize(pooled - pooled.mean(0), dim=-1).chunk(2)
    return english @ chinese.T  # (32, 32) cosines: row = English caption, column = Chinese caption


before = encoder(ids, mask).pooled.detach()  # (64, 64)
guess = nn.Linear(64, 192)
optimizer = torch.optim.Adam([*encoder.parameters(), *guess.parameters()], lr=5e-3)
for _ in range(100):
    loss = F.mse_loss(guess(encoder(ids, mask).pooled), thumbnails.repeat(2, 1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
encoder.eval().requires_grad_(False)  # frozen
after = encoder(ids, mask).pooled

# %% tags=["check"]
nearest = similarity(before).argmax(1), similarity(after).argmax(1)
hits = [(found == torch.arange(32)).float().mean() for found in nearest]
assert (
    hits[0] < 0.2 and hits[1] > 0.9
)  # the nearest Chinese caption is the translation: first by chance, then by training

# %% tags=["hide"]
few = [0, 4, 6, 7, 9, 10, 13, 14, 17, 23]
fig, axes = plt.subplots(1, 2, figsize=(6.4, 3.4), sharey=True)
for ax, pooled, name in zip(axes, (before, after), ("Before training", "After: they meet")):
    ax.imshow(similarity(pooled)[few][:, few], vmin=-1, vmax=1, cmap="RdBu_r")
    ax.set(title=name, xticks=[], xlabel="Chinese caption of this picture")
    ax.xaxis.labelpad = 26
    ax.spines[:].set_visible(False)
    for column, i in enumerate(few):
        stamp = OffsetImage(pictures[i].permute(1, 2, 0).numpy(), zoom=0.24)
        ax.add_artist(AnnotationBbox(stamp, (column, 10.1), frameon=False, annotation_clip=False))
axes[0].set_yticks(range(10), [chosen[i].label_en for i in few])
show(
    fig,
    alt="Two heat maps of cosines between ten English and ten Chinese captions: noise before training, a bright diagonal after.",
)

# %% tags=["hide"]
english, chinese = guess(after).detach().chunk(2)
columns = [9, 10, 6, 7, 14, 23]
rows = torch.cat([part[columns] for part in (thumbnails, english, chinese)]).unflatten(1, (3, 8, 8))
names = [f"{kind}{chosen[i].label_en}" for kind in ("", "en: ", "zh: ") for i in columns]
title = "True thumbnails, and what one vector remembers of them, read in English and in Chinese"
alt = "Three rows of six 8×8 thumbnails: the pictures, then nearly the same guessed from English and from Chinese captions."
image_grid(rows, names, columns=6, title=title, alt=alt)

# %% [markdown] lang="zh"
# ## 一句一句地编码
#
# 浮点加法的次序随批的形状而变，邻座可能改动最后几位。所以引擎总是单独编码每一句（批为 1），再拼成一批。拼接时补零，由掩码遮住。

# %% [markdown] lang="en" twin="bc532843"
# ## One prompt at a time
#
# The order of floating-point sums depends on the shape of the batch, so neighbours may touch the last digits. The engine therefore encodes every prompt alone (batch 1) and stacks the results, padded with zeros that the mask hides.


# %% tags=["export"]
def encode_prompt(encoder: TextEncoder, tokenizer: PromptTokenizer, prompt: str) -> PromptEmbeds:
    """One prompt alone (B = 1), without gradients, so that its numbers never depend on its neighbours.

    Warns (UserWarning) when the prompt exceeds the tokenizer's window, and quotes what was dropped.
    """
    ids, mask, (dropped,) = tokenizer(prompt)
    if dropped:
        message = f"the prompt is longer than {tokenizer.max_length} tokens; dropped: {dropped!r}"
        warnings.warn(message, UserWarning, stacklevel=2)
    device = encoder.embedding.weight.device
    with torch.no_grad():
        return encoder(ids.to(device), mask.to(device))


def stack_prompts(prompts: list[PromptEmbeds]) -> PromptEmbeds:
    """Prompts as one batch, in order, padded to the longest with zeros that the mask hides.

    Raises:
        ValueError: no prompts, or prompts of different widths.
    """
    widths = {(p.tokens.shape[-1], p.pooled.shape[-1]) for p in prompts}
    if len(widths) != 1:
        raise ValueError(f"prompts have widths {sorted(widths)}; give one or more prompts, all of one encoder")
    longest = max(p.tokens.shape[1] for p in prompts)
    gaps = [longest - p.tokens.shape[1] for p in prompts]
    tokens = torch.cat([F.pad(p.tokens, (0, 0, 0, gap)) for p, gap in zip(prompts, gaps)])  # (B, M, D)
    mask = torch.cat([F.pad(p.mask, (0, gap), value=False) for p, gap in zip(prompts, gaps)])  # (B, M)
    return PromptEmbeds(tokens, mask, torch.cat([p.pooled for p in prompts]))


# %% tags=["check"]
alone = [encode_prompt(encoder, tokenizer, text) for text in ("red apple", "", "红苹果", "fork and knife")]
batch = stack_prompts(alone)
for one, tokens, mask, pooled in zip(alone, *batch):
    assert torch.equal(tokens[mask], one.tokens[0]) and torch.equal(pooled, one.pooled[0])  # bit for bit, in order
with warnings.catch_warnings(record=True, action="always") as heard:
    encode_prompt(encoder, tokenizer, long)
assert tokenizer(long).dropped[0] in str(heard[0].message)  # the warning quotes the dropped words

# %% [markdown] lang="zh"
# ## 同一句话只编码一次
#
# 提示词在去噪中从不改变，换种子重画时也不变。真实的 T5 有几十亿参数，值得记住结果。最省事的写法是一个字典，它有两个毛病：永远不还内存；交出去的是原件，谁都能改坏。

# %% [markdown] lang="en" twin="00e2f47e"
# ## Encode a prompt once
#
# A prompt never changes during denoising, nor when you draw again with another seed. A real T5 has billions of parameters: its result is worth keeping. The easiest way is a dictionary. It has two faults: it never gives memory back, and it hands out the original, for anyone to spoil.

# %%
calls = []


def encode(prompt: str) -> PromptEmbeds:
    calls.append(prompt)  # so that we can count
    return encode_prompt(encoder, tokenizer, prompt)


red_apple, naive = encode("red apple"), {"red apple": encode("red apple")}
naive["red apple"].tokens.mul_(2)  # someone scales "their" copy …
torch.equal(naive["red apple"].tokens, red_apple.tokens)  # … and every later picture is wrong

# %% [markdown] lang="zh"
# 好的缓存像一层限宽的书架：按字节算宽度，放不下时，最久没人碰的那本先走（LRU）。每次借出的都是副本。键（key）必须说全决定结果的一切：换了编码器，就换一个缓存。

# %% [markdown] lang="en" twin="09fbbe0b"
# A good cache is like one shelf of fixed width. Width is counted in bytes; when it is full, the book left untouched the longest goes first (LRU). Every loan is a copy. The key must name all that decides the result: another encoder, another cache.


# %% tags=["export"]
class PromptCache:
    """Prompt embeddings by key: exact, at most max_bytes in all, least recently used out first, safe between threads.

    Args:
        max_bytes: bytes of all entries together; what is larger alone is handed through and not kept.

    Raises:
        ValueError: ``max_bytes`` is negative.
    """

    def __init__(self, max_bytes: int = 64 * 2**20):
        if max_bytes < 0:
            raise ValueError(f"max_bytes {max_bytes} is negative; try 0 (keep nothing) or {64 * 2**20}")
        self.max_bytes, self.bytes, self.hits, self.misses = max_bytes, 0, 0, 0
        self._entries: OrderedDict[Hashable, PromptEmbeds] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, encode: Callable[[], PromptEmbeds]) -> PromptEmbeds:
        """A copy of the entry under key; where there is none, encode() is called once, whoever else is waiting."""
        with self._lock:
            if key in self._entries:
                self.hits += 1
                self._entries.move_to_end(key)
                return copied(self._entries[key])
            made = copied(encode())
            self.misses += 1
            if size_in_bytes(made) <= self.max_bytes:
                self._entries[key] = made
                self.bytes += size_in_bytes(made)
            while self.bytes > self.max_bytes:
                self.bytes -= size_in_bytes(self._entries.popitem(last=False)[1])
            return copied(made)

    def __len__(self) -> int:
        return len(self._entries)


def size_in_bytes(prompt: PromptEmbeds) -> int:
    """Bytes of the three tensors."""
    return sum(t.numel() * t.element_size() for t in prompt)


def copied(prompt: PromptEmbeds) -> PromptEmbeds:
    """The same numbers in tensors of their own, without gradients."""
    return PromptEmbeds(*(t.detach().clone() for t in prompt))


# %% tags=["check"]
calls.clear()
cache = PromptCache()
miss = cache.get("red apple", lambda: encode("red apple"))
miss.tokens.mul_(2)  # spoil the loan
for _ in range(3):
    hit = cache.get("red apple", lambda: encode("red apple"))
    assert all(torch.equal(a, b) for a, b in zip(hit, red_apple))  # bit-identical to a fresh encoding
    hit.tokens.mul_(2)  # spoil this one too
assert calls == ["red apple"] and (cache.hits, cache.misses) == (3, 1)

small = PromptCache(max_bytes=2 * size_in_bytes(encode("red apple")))
for prompt in ("apple", "lemon", "apple", "melon"):  # "lemon" has been idle longest when "melon" comes
    small.get(prompt, lambda: encode("red apple"))
    assert small.bytes <= small.max_bytes
calls.clear()
for prompt in ("apple", "lemon"):
    small.get(prompt, lambda: encode("red apple"))
assert len(calls) == 1 and len(small) == 2  # apple was still there, lemon was not

# %% [markdown] lang="zh"
# ## 真实的模型怎么做
#
# SD3 并用三个编码器，都是别人训练好、冻结着用的：两个 CLIP 给池化向量（768 + 1280）和 77 个词元，T5 再给 256 个；FLUX 只取 CLIP-L 的池化向量和 T5 的词元；Sana 与 Wan 不用池化向量。CLIP 是因果的：第一个词元看不到后文，所以它用最后一个词元来概括。我们不是因果的，用第一个就行。

# %% [markdown] lang="en" twin="dab45940"
# ## How real models do it
#
# SD3 uses three encoders, trained by others and kept frozen: two CLIPs give pooled vectors (768 + 1280) and 77 tokens, T5 adds 256. FLUX takes CLIP-L's pooled vector and T5's tokens; Sana and Wan use no pooled vector. CLIP is causal: its first token sees nothing, so its last one sums up. Ours is not, so the first will do.

# %% tags=["check"]
from transformers import CLIPTextConfig, CLIPTextModel

ends = {"bos_token_id": START, "pad_token_id": PAD, "eos_token_id": 2}
clip = CLIPTextModel(CLIPTextConfig(vocab_size=4000, hidden_size=32, num_attention_heads=4, **ends)).eval()
ids = tokenizer(["red apple", "red hat"]).ids[:, :3]
theirs, ours = clip(ids).last_hidden_state[:, 0], encoder(ids, ids != PAD).pooled
assert torch.allclose(theirs[0], theirs[1], atol=1e-5)  # causal: the first token cannot see the noun
assert not torch.allclose(ours[0], ours[1], atol=1e-1)  # ours can

clip_l, clip_g, t5 = torch.randn(1, 77, 768), torch.randn(1, 77, 1280), torch.randn(1, 256, 4096)
clip_both = F.pad(torch.cat([clip_l, clip_g], dim=-1), (0, 4096 - 2048))  # side by side, zeros up to T5's width
assert torch.cat([clip_both, t5], dim=1).shape == (1, 77 + 256, 4096)  # what SD3's joint attention reads

# %% [markdown] lang="zh"
# **到了这里**，引擎读得懂提示词，也记得住。它在第 10 章的流水线里排第一站。可是读懂不等于照做：网络只学会「大致符合」。下一章要问：怎样让它更听话，代价又是什么？
#
# ## 三个问题
#
# 1. 预测：把位置向量全设为零，「red apple」和「apple red」的池化向量有什么关系？
# 2. 修改：对全部位置（含填充）取平均来作池化，哪条性质会丢？
# 3. 动手：写出只对真词元取平均的池化，并证明它不受填充影响。

# %% [markdown] lang="en" twin="cafce2b5"
# **Where we stand.** The engine reads prompts and remembers them; in chapter 10's pipeline this is the first stop. But to read is not to obey: the network only learns to fit a prompt roughly. Next chapter: how do we make it listen harder, and what does that cost?
#
# ## Three questions
#
# 1. Predict: with all position vectors zero, how are the pooled vectors of "red apple" and "apple red" related?
# 2. Modify: pool by averaging over all places, padding included. Which property is lost?
# 3. Build: pool by averaging over real tokens only, and show that padding does not touch it.

# %% tags=["solution"]
# 1 · they are equal: without positions attention sees a set, not a sequence
flat = TextEncoder(encoder.config)
flat.load_state_dict(encoder.state_dict())
nn.init.zeros_(flat.position.weight)
orders = tokenizer(["red apple", "apple red"])[:2]
(a, b), (c, d) = flat(*orders).pooled, encoder(*orders).pooled
assert torch.allclose(a, b, atol=1e-5) and not torch.allclose(c, d, atol=1e-3)

# %% tags=["solution"]
# 2 · padding invariance: the average depends on how many empty chairs the longest neighbour brings
wide = encoder(*tokenizer(["red apple", long])[:2])
assert not torch.allclose(wide.tokens.mean(1)[0], red_apple.tokens.mean(1)[0], atol=1e-1)


# %% tags=["solution"]
# 3
def mean_pooled(prompt: PromptEmbeds) -> Tensor:
    weights = prompt.mask[..., None].float()  # (B, M, 1)
    return (prompt.tokens * weights).sum(1) / weights.sum(1)


assert torch.allclose(mean_pooled(wide)[0], mean_pooled(red_apple)[0], atol=1e-5)

# %% [markdown] lang="zh"
# ## 小结
#
# - BPE 从字符出发，反复合并最常相邻的一对；字节兜底，没有未知的字。
# - 每行以 `<s>` 开头；填充靠掩码隐身；截断会引述丢掉的词。
# - 池化向量是标题，逐词向量是正文。
# - 编码块与 PyTorch 的 `TransformerEncoderLayer` 数值一致（误差小于 $10^{-5}$）。
# - 缓存精确、按字节限量、借出副本。
#
# 阅读卡片：SD3（[`papers/05_sd3`](../../papers/05_sd3.zh.md)）。笔记：提示词缓存（[`notes/07_prompt_cache`](../../notes/07_prompt_cache.zh.md)）。下一章：08。

# %% [markdown] lang="en" twin="ef13206b"
# ## Recap
#
# - BPE starts from characters and keeps fusing the most frequent neighbours; with bytes to fall back on, nothing is unknown.
# - Every row begins with `<s>`; the mask hides padding; truncation quotes the words that it drops.
# - The pooled vector is the headline, the token vectors are the article.
# - The encoder block equals PyTorch's `TransformerEncoderLayer` (within $10^{-5}$).
# - The cache is exact, bounded in bytes, and lends copies.
#
# Reading card: SD3 ([`papers/05_sd3`](../../papers/05_sd3.en.md)). Note: the prompt cache ([`notes/07_prompt_cache`](../../notes/07_prompt_cache.en.md)). Next: chapter 08.
