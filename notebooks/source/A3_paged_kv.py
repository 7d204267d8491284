# ---
# jupyter:
#   course:
#     minutes: 60
#     module: minivllm/paged_kv
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown] lang="zh"
# # A3 · 分页 KV（paged KV）
#
# 读完这一章，KV 缓存像操作系统的内存一样分页：谁写到哪，就拿到哪；写完即还，开头相同的几段文字共用同样的块。许多段长短不一的文字，在一个循环里一起写完。
#
# | 你会做出 | 你需要 | 时间 | 模块 |
# | --- | --- | --- | --- |
# | 块管理、块表、分页缓存、连续批处理 | 附录 A1 的接口，A2 的采样与连续缓存 | 60 分钟 | `minivllm/paged_kv.py` |

# %% [markdown] lang="en" twin="779d765c"
# # A3 · Paged KV
#
# After this chapter the KV cache is paged like an operating system's memory: whoever writes takes a block when it needs one and gives it back when done, and texts that begin alike share the same blocks. Many texts of different lengths are written together in one loop.
#
# | You build | You need | Time | Module |
# | --- | --- | --- | --- |
# | block manager, block tables, paged cache, continuous batching | the interface of A1, sampling and the contiguous cache of A2 | 60 minutes | `minivllm/paged_kv.py` |

# %% [markdown] lang="zh"
# **先想一想**：八位客人同时来写信，谁也不知道自己要写几页。给每人备足最长的一沓纸，纸不够；只备一页，写到一半没处写。你会怎样发纸？先写下你的办法。

# %% [markdown] lang="en" twin="400489f5"
# **Think first:** eight guests sit down to write letters, and none knows how many pages it will take. Lay out the thickest pad for each, and paper runs short; lay out one page, and somebody is stuck half-way. How would you hand out paper? Write your plan down.

# %% tags=["export"]
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Generator, Tensor

from minivllm.kv_cache import Sampling, sample
from minivllm.qwen3 import NoPast, Qwen3, attend

# %% [markdown] lang="zh"
# ## 备足最长，浪费多少
#
# 先量一量。A2 的缓存给每段文字分同样的长度。取 48 个表情标题，按最长的分，数一数真正写了字的位置；再按每块 4 个词元分，写满一块才拿下一块。

# %% [markdown] lang="en" twin="00c97fbe"
# ## The longest for everyone: how much is wasted
#
# Measure first. The cache of A2 gives every text the same room. Take 48 emoji captions, give each the length of the longest, and count the places that are written. Then hand out blocks of 4 tokens, the next one only when the last is full.

# %%
from tokenizers import Tokenizer

from minivllm.shipped import ASSETS
from recipes.emoji_data import load_emoji

tokenizer, captions = Tokenizer.from_file(str(ASSETS / "tokenizer.json")), Qwen3.from_pretrained(ASSETS)
sizes = [len(tokenizer.encode(f"{r.label_en} = {r.label_zh}").ids) for r in load_emoji().records[::40]]
reserved, in_blocks = max(sizes) * len(sizes), sum(-(-n // 4) * 4 for n in sizes)
print(f"{sum(sizes)} tokens; {reserved} places in equal rows, {in_blocks} in blocks of 4")

# %% tags=["hide"]
from course.figures import plt, show


def refusal(attempt: Callable) -> str:
    try:
        attempt()
    except (OutOfBlocks, ValueError) as error:
        print(error)
        return str(error)
    return "accepted"


fig, axes = plt.subplots(1, 2, figsize=(6.4, 2.3), sharey=True)
places = range(len(sizes))
for ax, room, title in [
    (axes[0], [max(sizes)] * len(sizes), "Equal rows"),
    (axes[1], [-(-n // 4) * 4 for n in sizes], "Blocks of 4"),
]:
    ax.bar(places, room, width=1, color="#fed7aa", label="empty")
    ax.bar(places, sizes, width=1, color="#2b6cb0", label="tokens")
    ax.set(title=f"{title}: {1 - sum(sizes) / sum(room):.0%} empty", xticks=[], xlabel="48 captions")
axes[0].set_ylabel("places")
axes[1].legend(ncols=2)
show(fig, alt="Bars of caption lengths: in equal rows most of the area above them is empty, in blocks only a thin rim")

# %% tags=["check"]
waste = [-(-n // 4) * 4 - n for n in sizes]
assert max(waste) <= 3 and in_blocks - sum(sizes) == sum(waste)  # at most block − 1 empty places a text
assert reserved > 1.5 * in_blocks

# %% [markdown] lang="zh"
# ## 谁拥有哪一块
#
# 块管理者只有两样东西：空闲块的队列，和每块有几个主人（引用计数，reference count）。要么全给，要么一块不给；主人都走了，块才回到队列。不变量：空闲的加上有主的，永远等于全部。

# %% [markdown] lang="en" twin="d4575e27"
# ## Who owns which block
#
# The block manager holds two things: a queue of free blocks, and for each block the number of its owners (the reference count). It gives all that was asked for or nothing; a block returns to the queue when its last owner has left. The invariant: free and owned blocks always make up the whole.


# %% tags=["export"]
class OutOfBlocks(RuntimeError):
    """There are not enough free blocks; nothing was taken."""


class BlockManager:
    """Who owns which block of a pool: a queue of free ones, and for every block a count of its owners.

    Always: a block either stands in the queue once, or has owners.

    Raises:
        ValueError: no blocks.
    """

    def __init__(self, num_blocks: int):
        if num_blocks < 1:
            raise ValueError(f"num_blocks {num_blocks} is no positive number; try 64")
        self.free, self.owners = deque(range(num_blocks)), [0] * num_blocks

    def allocate(self, count: int) -> list[int]:
        """``count`` free blocks, each with one owner from now on: all of them, or none.

        Raises:
            OutOfBlocks: fewer are free.
        """
        if count > len(self.free):
            raise OutOfBlocks(
                f"{count} blocks are needed, {len(self.free)} of {len(self.owners)} are free; release some"
            )
        taken = [self.free.popleft() for _ in range(count)]
        self.share(taken)
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """One more owner for each block."""
        for block in blocks:
            self.owners[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One owner less for each block; without owners it is free again.

        Raises:
            ValueError: a block has no owner; nothing has changed then.
        """
        for block in blocks:
            if not 0 <= block < len(self.owners) or blocks.count(block) > self.owners[block]:
                raise ValueError(f"block {block} has no such owner; it is free, or there is none with this number")
        for block in blocks:
            self.owners[block] -= 1
            if not self.owners[block]:
                self.free.append(block)


# %% tags=["check"]
manager = BlockManager(6)
a, b = manager.allocate(2), manager.allocate(3)
manager.share(a), manager.release(a)
assert sorted(a + b) == [0, 1, 2, 3, 4] and len(manager.free) == 1  # a has an owner still
manager.release(a)
assert len(manager.free) == 3 and [manager.owners[block] for block in a + b] == [0, 0, 1, 1, 1]
assert len({*manager.allocate(3), *b}) == 6  # given back, given out anew, never twice at once

# %% tags=["check"]
before = list(manager.free), list(manager.owners)
assert "1 blocks are needed, 0 of 6 are free" in refusal(lambda: manager.allocate(1))
assert "no such owner" in refusal(lambda: manager.release([*b, b[0]]))  # twice the same: one owner too many
assert "try 64" in refusal(lambda: BlockManager(0))
assert (list(manager.free), list(manager.owners)) == before  # a refusal takes nothing and loses nothing

# %% [markdown] lang="zh"
# ## 块表：第几个词元在哪一行
#
# 每段文字有一张块表：按顺序记着自己的块号。词元 $p$ 在第 $\lfloor p/S \rfloor$ 个块里的第 $p \bmod S$ 格；整个池子摊平成行，就是：
#
# $$\text{slot}(p) = \text{blocks}\big[\lfloor p / S \rfloor\big] \cdot S + p \bmod S$$
#
# 块在池子里可以东一块西一块，顺序只写在表里。

# %% [markdown] lang="en" twin="cc9d219e"
# ## Block tables: which token lies in which row
#
# Every text has a table that lists its blocks in order. Token $p$ lies in block number $\lfloor p/S \rfloor$ of the table at place $p \bmod S$; with the pool laid out flat, in row:
#
# $$\text{slot}(p) = \text{blocks}\big[\lfloor p / S \rfloor\big] \cdot S + p \bmod S$$
#
# The blocks may lie anywhere in the pool; the order stands in the table alone.


# %% tags=["export"]
@dataclass
class BlockTable:
    """Where one text's tokens lie: token p in ``blocks[p // size]``, at place p mod size.

    Attributes:
        size: tokens a block holds. blocks: in the order of the text. length: tokens so far.
    """

    size: int
    blocks: list[int] = field(default_factory=list)
    length: int = 0

    @property
    def empty(self) -> int:
        """Places taken and not written; between two steps never more than size − 1."""
        return len(self.blocks) * self.size - self.length

    def missing(self, count: int) -> int:
        """Blocks to add for ``count`` more tokens."""
        return max(0, -(-(self.length + count) // self.size) - len(self.blocks))


def slots(blocks: Tensor, size: int) -> Tensor:
    """Rows of the pool in which texts lie, in order: token p in row blocks[p // size] · size + p mod size, (B, n · size).

    Args:
        blocks: the blocks of B texts (B, n). size: of a block.
    """
    return (blocks[..., None] * size + torch.arange(size, device=blocks.device)).flatten(1)


# %% tags=["check"]
table = BlockTable(size=4, blocks=[7, 2, 5], length=9)
by_hand = [table.blocks[p // 4] * 4 + p % 4 for p in range(9)]
assert slots(torch.tensor([table.blocks]), 4)[0, :9].tolist() == by_hand
assert by_hand[:5] == [28, 29, 30, 31, 8]  # the fifth token begins block 2
assert [table.missing(n) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2] and table.empty == 3
assert BlockTable(4).missing(1) == 1 and BlockTable(4).missing(8) == 2

# %% [markdown] lang="zh"
# ## 池子：拿、还、共用
#
# 池子一次分好。`reserve` 先算清这一步所有文字要几块，不够就一块也不动。`fork` 让新文字用旧文字的开头：块不抄，只多一个主人。谁要往共用的块里写，谁先抄一份（写时复制，copy-on-write）。

# %% [markdown] lang="en" twin="3a92f287"
# ## The pool: take, give back, share
#
# The pool is set aside once. `reserve` first counts what all texts of a step need; if that is too much, no block moves. `fork` lets a new text begin like an old one: no copy, one more owner. Whoever is about to write into a shared block copies it first (copy-on-write).


# %% tags=["export"]
class PagedKVCache:
    """Keys and values of many texts in one pool of blocks, allocated once; every text's `BlockTable` says which are its own.

    Args:
        model: gives sizes, dtype and device. num_blocks, block_size: the pool holds their product of tokens.

    Raises:
        ValueError: no blocks, or blocks without places.
    """

    def __init__(self, model: Qwen3, num_blocks: int, block_size: int = 16):
        if block_size < 1:
            raise ValueError(f"block_size {block_size} is no positive number of tokens; try 16")
        self.manager, self.block_size, c = BlockManager(num_blocks), block_size, model.config
        shape = (c.num_hidden_layers, num_blocks * block_size, 2, c.num_key_value_heads, c.head_dim)
        self.kv = model.norm.weight.new_zeros(shape)  # (L, slots, 2, K, Dh): a token's key and value side by side
        self.slots = slots(torch.arange(num_blocks, device=self.kv.device)[:, None], block_size)  # of every block

    def fork(self, table: BlockTable, length: int) -> BlockTable:
        """The first ``length`` tokens of a text once more, in the same blocks.

        Raises:
            ValueError: the text has fewer tokens.
        """
        if not 0 <= length <= table.length:
            raise ValueError(f"length {length} is not within the text's {table.length} tokens; try {table.length}")
        blocks = table.blocks[: -(-length // self.block_size)]
        self.manager.share(blocks)
        return BlockTable(self.block_size, blocks, length)

    def release(self, table: BlockTable) -> None:
        """Give a text's blocks back; the table is empty then."""
        self.manager.release(table.blocks)
        table.blocks, table.length = [], 0

    def needed(self, tables: Sequence[BlockTable], count: int) -> int:
        """Blocks that ``count`` more tokens of each text take: new ones, and copies of shared ones that are written to."""
        written = [table.blocks[table.length // self.block_size] for table in tables if table.empty]
        copies = sum(min(written.count(block), self.manager.owners[block] - 1) for block in set(written))
        return copies + sum(table.missing(count) for table in tables)

    def reserve(self, tables: Sequence[BlockTable], count: int) -> None:
        """Room for ``count`` more tokens in every table, all of them the tables' own.

        Raises:
            OutOfBlocks: not enough for all; no table has changed then.
        """
        spare = self.manager.allocate(self.needed(tables, count))
        for table in tables if spare else []:  # mostly none: there is room, and what is written to is not shared
            place = table.length // self.block_size
            if table.empty and self.manager.owners[table.blocks[place]] > 1:
                shared, table.blocks[place] = table.blocks[place], spare.pop()
                self.kv[:, self.slots[table.blocks[place]]] = self.kv[:, self.slots[shared]]
                self.manager.release([shared])
            table.blocks += [spare.pop() for _ in range(table.missing(count))]


# %% [markdown] lang="zh"
# ## 接上网络：按表收集
#
# A1 接口的第三个实现。一步里的文字长短不一：新的键值按槽位写进池子，每段的全部键值再按表收集成一行，短的补齐、用掩码遮住。真正的 vLLM 有专门的核函数，边读表边算；我们没有，所以多付一次搬运。

# %% [markdown] lang="en" twin="9d3c363b"
# ## Connected to the network: gather by the table
#
# A third answer to A1's interface. The texts of a step differ in length: new keys and values go into the pool by slot, then every text's keys are gathered by its table into one row, short rows padded and masked. The real vLLM has a kernel that reads the table as it computes; we have none, and pay for one more move of data.


# %% tags=["export"]
def plan(cache: PagedKVCache, tables: Sequence[BlockTable], count: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """What a step of ``count`` tokens a text needs to know, for all layers at once.

    Returns:
        Positions of the new tokens (B, N); the slots that they are written to (B, N); the slots of all keys (B, M), M of
        the longest text; and which keys a token sees, (B, 1, N, M), or None for all.
    """
    device, most, longest = cache.kv.device, max(len(t.blocks) for t in tables), max(t.length for t in tables)
    blocks = torch.tensor([table.blocks + [0] * (most - len(table.blocks)) for table in tables], device=device)
    places = torch.tensor([range(table.length, table.length + count) for table in tables], device=device)  # (B, N)
    rows = cache.slots[blocks].flatten(1)[:, : longest + count]  # (B, M)
    alike = count == 1 and all(table.length == longest for table in tables)
    mask = None if alike else (torch.arange(longest + count, device=device) <= places[..., None])[:, None]
    return places, rows.gather(1, places), rows, mask


# %% tags=["export"]
class PagedBatch(NoPast):
    """One step of some texts, of any lengths, each by the same number of tokens: ``model(ids, past=PagedBatch(…))``.

    Raises:
        ValueError: at the call, not one row a table. OutOfBlocks: see `PagedKVCache.reserve`.
    """

    def __init__(self, cache: PagedKVCache, tables: Sequence[BlockTable]):
        self.cache, self.tables = cache, list(tables)

    def begin(self, ids: Tensor) -> Tensor:
        """Take room for new tokens ids (B, N); their positions (B, N)."""
        if len(ids) != len(self.tables):
            raise ValueError(f"{len(ids)} texts for {len(self.tables)} tables; give one a text")
        self.cache.reserve(self.tables, ids.shape[1])
        places, self.write, rows, self.mask = plan(self.cache, self.tables, ids.shape[1])
        found = self.cache.kv.new_empty(*rows.shape, *self.cache.kv.shape[2:])  # of a layer, (B, M, 2, K, Dh)
        self.rows, self.found, self.keys, self.values = rows.flatten(), found.flatten(0, 1), *found.unbind(2)
        return places

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write new k and v (B, N, K, Dh) by slot, gather every text's keys and values by its table, ask them."""
        pool = self.cache.kv[layer]
        pool.index_copy_(0, self.write.flatten(), torch.stack([k, v], dim=2).flatten(0, 1))
        torch.index_select(pool, 0, self.rows, out=self.found)
        return attend(q, self.keys, self.values, self.mask)

    def end(self) -> None:
        """Count the new tokens."""
        for table in self.tables:
            table.length += self.write.shape[1]


# %%
from minivllm.kv_cache import KVCache, generate, prefill
from minivllm.qwen3 import Qwen3Config

torch.manual_seed(0)
toy = Qwen3(Qwen3Config(512, 64, 96, 3, 6, 2, head_dim=16)).eval().requires_grad_(False)
texts = [torch.randint(512, (1, n)) for n in (5, 40, 17)]


def interleaved(size: int, num_blocks: int = 24) -> tuple[PagedKVCache, list[BlockTable], Tensor]:
    cache, tables = PagedKVCache(toy, num_blocks, size), [BlockTable(size) for _ in texts]
    for text, table in zip(texts, tables):
        prefill(toy, text[:, :-4], PagedBatch(cache, [table]))
    for place in range(-4, 0):  # four steps together, each text at its own length
        logits = toy(torch.cat([text[:, place, None] for text in texts]), PagedBatch(cache, tables))[:, -1]
    return cache, tables, logits


# %% tags=["check"]
for size in (4, 16, 32):
    cache, tables, logits = interleaved(size)
    for text, table, row in zip(texts, tables, logits):
        alone, lies = KVCache(toy, 1, 40), slots(torch.tensor([table.blocks]), size)[0, : table.length]
        assert torch.allclose(row, prefill(toy, text, alone)[0], atol=1e-5, rtol=1e-4)  # contiguous, and alone
        written = alone.read(2, 0, table.length)[1][0]
        assert torch.allclose(cache.kv[2, lies, 1], written, atol=1e-5) and 0 <= table.empty < size


# %% tags=["hide"]
def draw_pool(ax, cache: PagedKVCache, tables: list[BlockTable]) -> None:
    size, shown = cache.block_size, torch.zeros(cache.block_size, len(cache.manager.owners))
    for number, table in enumerate(tables):
        for place, block in enumerate(table.blocks):
            filled = min(size, table.length - place * size)
            shown[:, block] = 2 * number + 1
            shown[:filled, block] = 2 * number + 2
    colors = ["#ffffff", "#bee3f8", "#2b6cb0", "#fed7aa", "#dd6b20", "#c6f6d5", "#2f855a", "#e9d8fd", "#6b46c1"]
    palette = plt.matplotlib.colors.ListedColormap(colors)
    ax.pcolormesh(shown, cmap=palette, vmin=0, vmax=len(colors), edgecolors="#cbd5e0", lw=0.6)
    ax.set(yticks=[], xlabel="blocks of the pool")
    ax.invert_yaxis()


cache, tables, _ = interleaved(4)
fig, ax = plt.subplots(figsize=(6.4, 1.6))
draw_pool(ax, cache, tables)
ax.set_title(f"Three texts, {sum(t.length for t in tables)} tokens, {sum(t.empty for t in tables)} empty places (pale)")
show(
    fig,
    alt="The pool as columns of four places: three texts' blocks lie scattered, only each last block is partly pale",
)

# %% [markdown] lang="zh"
# ## 用完了怎么办
#
# 池子满时，`reserve` 明确拒绝，谁的表都没动：还一些块，再来一遍，结果和从没被拒过一样。

# %% [markdown] lang="en" twin="ad747380"
# ## When there is nothing left
#
# When the pool is full, `reserve` refuses in plain words, and nobody's table has moved: give some blocks back, try again, and the result is as if there had been no refusal.

# %%
cache, tables, _ = interleaved(4, num_blocks=19)  # two blocks left
text, table = torch.randint(512, (1, 12)), BlockTable(4)
before = [list(t.blocks) for t in tables], cache.kv.clone()

# %% tags=["check"]
assert "3 blocks are needed, 2 of 19 are free" in refusal(lambda: prefill(toy, text, PagedBatch(cache, [table])))
assert [t.blocks for t in tables] == before[0] and torch.equal(cache.kv, before[1]) and table.blocks == []
cache.release(tables[0])
assert tables[0].blocks == [] and tables[0].length == 0
assert torch.allclose(prefill(toy, text, PagedBatch(cache, [table])), toy(text)[:, -1], atol=1e-5)  # in old blocks

# %% [markdown] lang="zh"
# ## 共用开头，写时复制
#
# 同一个提示词写四份，开头只存一份。第 10 个词元处分叉，块大小是 4：两个满块一直共用，半满的第三块谁写谁抄。忘了抄，两段文字会互相改写：形状全对，内容全错。

# %% [markdown] lang="en" twin="038de0e0"
# ## A common beginning, copied when written
#
# Four continuations of one prompt store its beginning once. Fork at the 10th token with blocks of 4: two full blocks stay shared, the third, half full, is copied by whoever writes. Forget the copy and the texts overwrite each other: every shape right, every word wrong.

# %%
cache, first = PagedKVCache(toy, 12, 4), BlockTable(4)
prefill(toy, texts[1][:, :10], PagedBatch(cache, [first]))
second = cache.fork(first, 10)
shared = list(first.blocks)
pair = prefill(toy, torch.tensor([[1], [2]]), PagedBatch(cache, [first, second]))  # each goes its own way
shared, first.blocks, second.blocks

# %% tags=["check"]
assert first.blocks[:2] == second.blocks[:2] == shared[:2] and first.blocks[2] != second.blocks[2]
assert [cache.manager.owners[b] for b in shared[:2]] == [2, 2] and len(cache.manager.free) == 12 - 4
for token, row in zip((1, 2), pair):
    whole = torch.cat([texts[1][:, :10], torch.tensor([[token]])], dim=1)
    assert torch.allclose(row, toy(whole)[0, -1], atol=1e-5)  # neither hears the other
third = cache.fork(second, 9)
assert cache.needed([third], 1) == 1 and cache.needed([second, third], 1) == 1  # the last owner need not copy
assert "try 11" in refusal(lambda: cache.fork(second, 12))
cache.release(first), cache.release(second), cache.release(third)
assert len(cache.manager.free) == 12  # whoever leaves last turns off the light

# %% [markdown] lang="zh"
# ## 连续批处理：随到随走
#
# 一个循环写许多段文字（continuous batching）：每一步，正在写的各走一个词元；写完的还块离开，等着的带着整个提示词加入。块不够时，最晚来的让位（抢占，preemption）：还掉全部块，回去排队，回来时把自己写过的重读一遍，结果不变。

# %% [markdown] lang="en" twin="c4014213"
# ## Continuous batching: come and go
#
# One loop writes many texts (continuous batching): at each step every running text goes on by one token; the finished give back their blocks and leave, those waiting join with their whole prompt. When blocks run short the latest arrival makes way (preemption): it gives all blocks back, queues again, and later reads what it had written, with the same result.


# %% tags=["export"]
@dataclass(eq=False)
class RequestState:
    """One text on its way: what was asked, what is written, where its keys and values lie."""

    prompt: list[int]
    max_new_tokens: int
    sampling: Sampling
    generator: Generator
    table: BlockTable
    output: list[int] = field(default_factory=list)
    status: str = "waiting"  # then "running", maybe "waiting" again, at last "finished"
    preempted: int = 0  # how many times

    @property
    def tokens(self) -> list[int]:
        """Prompt and output."""
        return self.prompt + self.output


def common_prefix(request: RequestState, donor: RequestState) -> int:
    """Tokens with which both begin and which the donor has in the cache; the request's last one is never among them."""
    most = min(len(request.tokens) - 1, donor.table.length)
    pairs = zip(request.tokens[:most], donor.tokens)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), most)


# %% tags=["export"]
class RequestQueue:
    """Texts that wait, run, and are finished, over one pool.

    Args:
        model: the network. num_blocks, block_size: of the pool.
        max_running: most texts in one step.
        share: whether a text begins in the blocks of a running one that starts alike.

    Raises:
        ValueError: ``max_running`` below 1; see `PagedKVCache`.
    """

    def __init__(self, model: Qwen3, num_blocks: int, block_size: int = 16, max_running: int = 8, share: bool = True):
        if max_running < 1:
            raise ValueError(f"max_running {max_running} is no positive number of texts; try 8")
        self.model, self.max_running, self.share = model, max_running, share
        self.cache = PagedKVCache(model, num_blocks, block_size)
        self.waiting, self.running, self.finished = deque(), [], []

    def add(self, prompt: Sequence[int], max_new_tokens: int, sampling: Sampling = Sampling()) -> RequestState:
        """Queue one text.

        Raises:
            ValueError: an empty prompt, ids outside the vocabulary, no new tokens, or more tokens in all than the model
                has places or the pool has room.
        """
        prompt, c, pool = list(prompt), self.model.config, self.cache.kv.shape[1]
        if not prompt or min(prompt) < 0 or max(prompt) >= c.vocab_size:
            raise ValueError(f"a prompt is one or more ids in 0 … {c.vocab_size - 1}; got {prompt[:8]}")
        room = min(c.max_position_embeddings, pool) - len(prompt)
        if not 1 <= max_new_tokens <= room:
            raise ValueError(f"max_new_tokens {max_new_tokens} is outside 1 … {room} after {len(prompt)} tokens")
        generator, table = Generator().manual_seed(sampling.seed), BlockTable(self.cache.block_size)
        request = RequestState(prompt, max_new_tokens, sampling, generator, table)
        self.waiting.append(request)
        return request


# %% tags=["export"]
class Engine(RequestQueue):
    """Continuous batching: `add` texts, then `run` them, or `step` by hand and add more in between."""

    @torch.inference_mode()
    def step(self) -> None:
        """One token for every running text; then those that wait join with all they have, as long as there is room."""
        free = self.cache.manager.free
        while self.cache.needed([r.table for r in self.running], 1) > len(free):
            youngest = self.running[-1]
            self._leave(youngest, "waiting")
            self.waiting.appendleft(youngest)
            youngest.preempted += 1
        if self.running:
            self._advance(list(self.running), [r.tokens[-1:] for r in self.running])
        while self.waiting and len(self.running) < self.max_running:
            spare = len(free) - self.waiting[0].table.missing(len(self.waiting[0].tokens))
            if self.running and spare <= len(self.running):  # every text may need one more block at the next step
                return
            self._join(self.waiting.popleft())

    def _join(self, request: RequestState) -> None:
        """Read all of a text's tokens, except those that a running one has in the cache already."""
        alike, donor = max(
            ((common_prefix(request, r), r) for r in self.running), key=lambda c: c[0], default=(0, None)
        )
        if self.share and alike:
            request.table = self.cache.fork(donor.table, alike)
        request.status = "running"
        self.running.append(request)
        self._advance([request], [request.tokens[request.table.length :]])

    def _advance(self, requests: list[RequestState], ids: list[list[int]]) -> None:
        """Feed every text its ids and draw its next token; who is done leaves."""
        past = PagedBatch(self.cache, [r.table for r in requests])
        logits = self.model(torch.tensor(ids, device=self.cache.kv.device), past, last=True)[:, -1]
        drawn = sample(logits, [r.sampling for r in requests], [r.generator for r in requests])
        for request, token in zip(requests, drawn.tolist()):
            request.output.append(token)
            if token in self.model.config.eos_token_id or len(request.output) == request.max_new_tokens:
                self._leave(request, "finished")
                self.finished.append(request)

    def _leave(self, request: RequestState, status: str) -> None:
        self.cache.release(request.table)
        self.running.remove(request)
        request.status = status


# %% tags=["export"]
@dataclass(frozen=True)
class Progress:
    """What a callback sees after every step."""

    step: int
    waiting: int
    running: int
    finished: int
    tokens: int  # written so far
    free_blocks: int


def run(engine: Engine, callback: Callable[[Progress], object] = lambda progress: None) -> list[RequestState]:
    """Step until no text waits or runs; the finished ones, in the order of finishing. The callback sees each `Progress`."""
    step = 0
    while engine.waiting or engine.running:
        engine.step()
        step += 1
        queues = engine.waiting, engine.running, engine.finished
        tokens = sum(len(request.output) for queue in queues for request in queue)
        callback(Progress(step, *map(len, queues), tokens, len(engine.cache.manager.free)))
    done, engine.finished = engine.finished, []
    return done


# %%
def serve(model: Qwen3, asked: list, num_blocks: int, callback=lambda now: None, **options) -> list[RequestState]:
    engine = Engine(model, num_blocks, block_size=4, **options)
    requests = [engine.add(ids, 24, sampling) for ids, sampling in asked]
    run(engine, callback)
    assert len(engine.cache.manager.free) == num_blocks and not engine.running  # every block came back
    return requests


prompts = ["red", "red", "red", "cat", "flag: ", "火箭", "戴帽子", "smiling face with"]
spoken = [(tokenizer.encode(text).ids, Sampling(0.8, top_p=0.95, seed=i)) for i, text in enumerate(prompts)]
roomy = serve(captions, spoken, num_blocks=80, max_running=5)
[tokenizer.decode(request.tokens) for request in roomy]

# %%
endless = [(torch.randint(512, (n,)).tolist(), Sampling(1.0, seed=n)) for n in (3, 9, 4, 6, 5, 8, 7, 2)]
log: list[Progress] = []
calm, tight = serve(toy, endless, 80), serve(toy, endless, 18, log.append)  # 24 tokens each: the toy never ends
[request.preempted for request in tight]

# %% tags=["check"]
alone = [generate(captions, torch.tensor([r.prompt]), 24, r.sampling)[0].tolist() for r in roomy]
assert [r.tokens for r in roomy] == alone and {r.status for r in roomy} == {"finished"}  # neighbours change nothing,
assert [r.output for r in serve(captions, spoken, 80, share=False)] == [r.output for r in roomy]  # sharing neither,
assert sum(r.preempted for r in tight) > 2 and [r.output for r in tight] == [r.output for r in calm]  # nor making way
assert log[-1].finished == 8 and log[-1].tokens == 8 * 24 and log[-1].free_blocks == 18
assert [p.step for p in log] == list(range(1, len(log) + 1)) and max(p.running for p in log) > 1

# %% tags=["check"]
donor, late = (RequestState(p, 8, Sampling(), Generator(), BlockTable(4, [0, 1], 6)) for p in ([0, 5, 6, 7], [0, 5, 6]))
donor.output = [8, 9, 3]
assert common_prefix(late, donor) == 2  # the last token is fed anyway, for its logits
late.output = [7, 8, 1]
assert common_prefix(late, donor) == 5  # what is written counts, too
late.prompt[1] = 4
assert common_prefix(late, donor) == 1

# %% tags=["hide"]
engine = Engine(toy, 18, block_size=4)
requests, rows = [engine.add(ids, 24, sampling) for ids, sampling in endless], []
while engine.waiting or engine.running:
    engine.step()
    rows.append([{"waiting": 0, "running": 2, "finished": 0}[r.status] + (r.status == "waiting") for r in requests])
fig, axes = plt.subplots(2, 1, figsize=(6.4, 3.6), sharex=True, height_ratios=[3, 2])
palette = plt.matplotlib.colors.ListedColormap(["#ffffff", "#fed7aa", "#2b6cb0"])
axes[0].pcolormesh(torch.tensor(rows).T, cmap=palette, vmin=0, vmax=2, edgecolors="white", lw=0.8)
axes[0].set_yticks([i + 0.5 for i in range(8)], [f"text {i}" for i in range(8)])
axes[0].set_title("Blue writes, orange waits: texts come, make way, return, and leave")
axes[0].invert_yaxis()
axes[1].step([p.step for p in log], [18 - p.free_blocks for p in log], where="pre", color="#dd6b20")
axes[1].set(xlabel="step", ylabel="blocks in use", ylim=(0, 19))
show(
    fig,
    alt="Timeline of eight texts over a pool of eighteen blocks: some stop and wait again; below, the blocks in use",
)

# %% [markdown] lang="zh"
# ## 分页要多花多少时间
#
# 多出来两样。`plan` 每步算一次槽位和掩码，各层共用：网络越小，这一份越显眼。每层又把全部键值多搬一次，搬进各层共用的一块地方：文字越长，搬得越多。八段文字，同样的权重，和 A2 的缓存比一步；数字随机器变，正式的比较在 `make bench`。

# %% [markdown] lang="en" twin="5f01bd4c"
# ## What paging costs in time
#
# Two things are extra. Once a step `plan` works out slots and mask, for all layers: the smaller the network, the more it shows. Every layer also moves all keys and values once more, into one buffer that the layers share: the longer the text, the more. Eight texts, the same weights, one step against A2's cache; numbers depend on the machine, the real comparison is in `make bench`.

# %%
import time


def step_seconds(length: int, paged: bool) -> float:
    ids, found = torch.zeros(8, length, dtype=torch.long), []
    pool, tables = PagedKVCache(captions, 8 * 16), [BlockTable(16) for _ in range(8)]
    past = PagedBatch(pool, tables) if paged else KVCache(captions, 8, 256)
    prefill(captions, ids, past)
    for _ in range(12):
        begun = time.perf_counter()
        prefill(captions, ids[:, :1], past)
        found.append(time.perf_counter() - begun)
    return min(found)


for length in (16, 64, 240):
    print(f"{length} tokens: paged {step_seconds(length, True) / step_seconds(length, False):.2f} × contiguous")

# %% [markdown] lang="zh"
# **到了这里**，旧引擎做到了它审计时只有空壳的部分：块表、分页、抢占、共用开头，全都验证过。还缺的：边读表边算的核函数，跨请求的前缀哈希，长提示词和解码混在一步里。下一章问最后一个问题：这一切，为什么帮不上扩散模型？
#
# ## 三个问题
#
# 1. 预测：块大小取 1 或 256，各有什么好处和坏处？
# 2. 修改：`release` 忘了减计数，哪条不变量先破？
# 3. 动手：写一个 `best_of`：同一提示词写 $n$ 份，取平均对数概率最高的一份；开头只算一次。

# %% [markdown] lang="en" twin="e3e50825"
# **Where we stand.** The old engine now does what its audit found as empty shells: block tables, paging, preemption, shared beginnings, all of it checked. Still missing: a kernel that reads tables as it computes, prefix hashes across requests, long prompts mixed into decoding steps. The next chapter asks the last question: why does none of this serve diffusion?
#
# ## Three questions
#
# 1. Predict: blocks of 1 token, or of 256: what is good and what is bad about each?
# 2. Modify: `release` forgets to lower the count. Which invariant breaks first?
# 3. Build: write a `best_of` that continues one prompt $n$ times and keeps the text of highest mean log-probability; read the prompt once.

# %% tags=["solution"]
# 1 · of 1: nothing is empty, but the table is as long as the text; of 256: a short table, and up to 255 empty places
tables = {size: BlockTable(size, list(range(-(-300 // size))), 300) for size in (1, 16, 256)}
assert [len(t.blocks) for t in tables.values()] == [300, 19, 2] and [t.empty for t in tables.values()] == [0, 4, 212]


# %% tags=["solution"]
# 2 · "every block either is free or has owners": the block has an owner for ever, the pool drains until nothing fits
class Forgetful(BlockManager):
    def release(self, blocks): ...


leaky = Forgetful(6)
for _ in range(6):
    leaky.release(leaky.allocate(1))
assert not leaky.free and sum(leaky.owners) == 6  # nobody holds a block, and none is left


# %% tags=["solution"]
# 3
def best_of(text: str, n: int) -> str:
    engine = Engine(captions, 64, max_running=n)
    requests = [engine.add(tokenizer.encode(text).ids, 24, Sampling(1.0, seed=i)) for i in range(n)]
    run(engine)  # from the second on, all but the prompt's last token is shared

    def score(request: RequestState) -> float:
        logp = captions(torch.tensor([request.tokens]))[0].log_softmax(dim=-1)
        return logp[:-1].gather(1, torch.tensor(request.tokens[1:])[:, None])[len(request.prompt) - 1 :].mean().item()

    return tokenizer.decode(max(requests, key=score).tokens)


assert best_of("red apple", 4) == "red apple = 红苹果"

# %% [markdown] lang="zh"
# ## 小结
#
# - 分页后，每段文字最多空 $S - 1$ 个位置；和连续缓存逐数一致。
# - 引用计数让开头共用；谁写谁抄。
# - 块不够就明确拒绝，什么也不丢。
# - 连续批处理随到随走；抢占后重读，写出的词一个不差。
# - 没有核函数，收集要多搬一次数据。
#
# 下一章：A4，为什么这些都帮不上扩散模型。

# %% [markdown] lang="en" twin="38adadc9"
# ## Recap
#
# - Paged, a text leaves at most $S - 1$ places empty, and every number is that of the contiguous cache.
# - Reference counts let beginnings be shared; whoever writes, copies.
# - When blocks run out, it is said plainly and nothing is lost.
# - Continuous batching lets texts come and go; after preemption a text is read again, and not a word differs.
# - Without a kernel, the gather moves data once more.
#
# Next: A4, why none of this serves diffusion.
