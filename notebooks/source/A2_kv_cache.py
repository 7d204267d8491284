# ---
# jupyter:
#   course:
#     minutes: 50
#     module: minivllm/kv_cache
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown] lang="zh"
# # A2 · KV 缓存（KV cache）
#
# 读完这一章，每写一个词元只算一个词元：过去的键和值留在一块事先分好的内存里，结果和整段重算一致。你还会给语言模型装上温度、top-k 和 top-p。
#
# | 你会做出 | 你需要 | 时间 | 模块 |
# | --- | --- | --- | --- |
# | 连续的 KV 缓存、分块预填充、采样、生成循环 | 附录 A1 的 Qwen3 和它的记忆接口 | 50 分钟 | `minivllm/kv_cache.py` |

# %% [markdown] lang="en" twin="06c7f186"
# # A2 · The KV cache
#
# After this chapter one new token costs the work of one token: past keys and values stay in memory that was set aside beforehand, and the result is that of reading everything again. You also give the language model temperature, top-k and top-p.
#
# | You build | You need | Time | Module |
# | --- | --- | --- | --- |
# | a contiguous KV cache, prefill in chunks, sampling, the writing loop | Qwen3 and its interface to a memory from A1 | 50 minutes | `minivllm/kv_cache.py` |

# %% [markdown] lang="zh"
# **先想一想**：写第 100 个词元和写第 101 个时，网络里有多少数是一模一样的？凭什么保证它们不会变？再想：如果有一天它们会变，缓存会怎样骗你？先写下你的答案。

# %% [markdown] lang="en" twin="19cf3c53"
# **Think first:** how many numbers inside the network are the same when it writes token 100 and token 101? What guarantees that they cannot change? And if one day they did, how would a cache deceive you? Write your answer down.

# %% tags=["export"]
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from minivllm.qwen3 import NoPast, Qwen3, attend

# %% [markdown] lang="zh"
# ## 过去不会变
#
# A1 的网络通过一个接口看过去，正好可以装个窃听器：记下每层的键。把同一段文字读到第 8 个和第 9 个词元，比一比前 8 个的键。因果掩码下，第 $n$ 个词元只听 $0 \dots n$，后来的词元改不了它。

# %% [markdown] lang="en" twin="6b6c76c9"
# ## The past does not change
#
# A1's network sees the past through an interface, the right place for a wiretap: note each layer's keys. Read the same text up to its 8th and its 9th token and compare the first eight keys. Under the causal mask token $n$ hears $0 \dots n$ only; what comes later cannot touch it.


# %%
from minivllm.qwen3 import Qwen3Config


class Wiretap(NoPast):
    def attend(self, layer, q, k, v):
        self.keys = getattr(self, "keys", []) + [k]
        return super().attend(layer, q, k, v)


torch.manual_seed(0)
toy = Qwen3(Qwen3Config(512, 64, 96, 3, 6, 2, head_dim=16, max_position_embeddings=1024)).eval().requires_grad_(False)
ids, early, late = torch.randint(512, (2, 520)), Wiretap(), Wiretap()
toy(ids[:, :8], early), toy(ids[:, :9], late)
[f"{(a - b[:, :8]).abs().max():.0e}" for a, b in zip(early.keys, late.keys)]  # layer by layer

# %% tags=["hide"]
from course.figures import plt, show

fig, axes = plt.subplots(1, 2, figsize=(6.4, 2.7), sharey=True)
step, token = torch.meshgrid(torch.arange(12), torch.arange(12), indexing="ij")
for ax, work, title in [
    (axes[0], 1.0 * (token <= step), "Read again: 78 tokens computed"),
    (axes[1], 1.0 * (token == step) + 0.35 * (token < step), "Remember: 12 computed"),
]:
    ax.imshow(work, cmap="Blues", vmin=0, vmax=1.2)
    ax.set(title=title, xlabel="token", xticks=[0, 5, 11])
axes[0].set(ylabel="step", yticks=[0, 5, 11])
show(fig, alt="Left a full triangle of computed tokens; right only its diagonal is computed, the rest is remembered")

# %% tags=["check"]
assert all(torch.allclose(a, b[:, :8], atol=1e-5) for a, b in zip(early.keys, late.keys))
other = torch.where(torch.arange(9) == 0, (ids[:, :9] + 1) % 512, ids[:, :9])
changed = Wiretap()
toy(other, changed)
assert (changed.keys[2] - late.keys[2])[:, 1:].abs().amax(
    dim=(2, 3)
).min() > 1e-4  # but the first reaches all later ones

# %% [markdown] lang="zh"
# ## 一块内存，一次分好
#
# 每写一个词元就 `torch.cat` 一次，等于每次把过去整个抄一遍。不如一开始就分好。一个词元在每层留下 $K$ 组键和值，所以：
#
# $$\text{bytes} = 2 \cdot L \cdot B \cdot N \cdot K \cdot D_h \cdot s$$
#
# | 记号 | 含义 |
# | --- | --- |
# | $L,\ K,\ D_h$ | 层数、键值头数、每头的宽度 |
# | $B,\ N$ | 同时写几段文字，每段最多几个词元 |
# | $s$ | 一个数的字节数 |

# %% [markdown] lang="en" twin="aeca137d"
# ## One piece of memory, set aside once
#
# A `torch.cat` for every token copies the whole past every time. Better to set memory aside at the start. In each layer a token leaves $K$ keys and values, so:
#
# $$\text{bytes} = 2 \cdot L \cdot B \cdot N \cdot K \cdot D_h \cdot s$$
#
# | Symbol | Meaning |
# | --- | --- |
# | $L,\ K,\ D_h$ | layers, key heads, width of a head |
# | $B,\ N$ | texts at a time, most tokens of each |
# | $s$ | bytes of a number |


# %% tags=["export"]
class KVStore:
    """Keys and values of B texts of one length, allocated once: (L, B, capacity, K, Dh) each.

    Args:
        model: gives sizes, dtype and device. batch: B. capacity: most tokens of a text.

    Attributes:
        length: tokens that each text has so far.

    Raises:
        ValueError: no texts, or a capacity outside 1 … max_position_embeddings.
    """

    def __init__(self, model: Qwen3, batch: int, capacity: int):
        c, weight = model.config, model.norm.weight
        if batch < 1:
            raise ValueError(f"batch {batch} is no positive number of texts; try 1")
        if not 1 <= capacity <= c.max_position_embeddings:
            near = min(max(capacity, 1), c.max_position_embeddings)
            raise ValueError(f"capacity {capacity} is outside 1 … {c.max_position_embeddings}; try {near}")
        shape = (c.num_hidden_layers, batch, capacity, c.num_key_value_heads, c.head_dim)
        self.k, self.v = (torch.zeros(shape, dtype=weight.dtype, device=weight.device) for _ in range(2))
        self.length = 0

    @property
    def nbytes(self) -> int:
        """2 · L · B · capacity · K · Dh · bytes of a number."""
        return self.k.nbytes + self.v.nbytes

    def read(self, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """A copy of one layer's keys and values of tokens start … stop − 1, (B, stop − start, K, Dh) each.

        Raises:
            ValueError: a layer or tokens that do not exist, or no token; negative numbers do not count from the end.
        """
        if not 0 <= layer < len(self.k):
            raise ValueError(
                f"layer {layer} is outside 0 … {len(self.k) - 1}; try {min(max(layer, 0), len(self.k) - 1)}"
            )
        if not 0 <= start < stop <= self.length:
            raise ValueError(
                f"tokens {start} … {stop} are not one or more of the {self.length} here; try 0 … {self.length}"
            )
        return self.k[layer, :, start:stop].clone(), self.v[layer, :, start:stop].clone()

    def reset(self) -> None:
        """Begin new texts in the same memory.

        Raises:
            ValueError: nothing is stored: the store is new, or was reset already.
        """
        if not self.length:
            raise ValueError("the cache is empty: it is new, or was reset already; nothing to reset")
        self.length = 0


# %% tags=["check"]
store, half = KVStore(toy, batch=2, capacity=520), Qwen3(toy.config).bfloat16()
assert store.nbytes == 2 * 3 * 2 * 520 * 2 * 16 * 4 and KVStore(half, 2, 520).nbytes == store.nbytes // 2
real = 2 * 28 * 32_768 * 8 * 128 * 2  # Qwen3-0.6B, one text of 32,768 tokens, bf16
print(f"{real / 1e9:.1f} GB of cache next to {596_049_920 * 2 / 1e9:.1f} GB of weights")
assert real == 3_758_096_384

# %% [markdown] lang="zh"
# ## 接上网络
#
# 缓存就是 A1 接口的第二个实现：`begin` 从已有的长度往后排位置；`attend` 把新的键值写在旧的后面，再问全部；`end` 才把长度加上去。一步算到一半出了错，长度没动，缓存就和没碰过一样。旁边放着最笨的版本：边写边接。

# %% [markdown] lang="en" twin="a2850ae9"
# ## Connected to the network
#
# The cache is a second answer to A1's interface: `begin` counts places on from the length, `attend` writes the new keys and values behind the old and asks them all, and only `end` adds to the length. If a step fails half-way the length has not moved, and the cache is as if untouched. The plainest version, which grows as it goes, comes first.


# %%
class GrowingCache(NoPast):
    def __init__(self):
        self.kv, self.length = {}, 0

    def begin(self, ids):
        self.length += ids.shape[1]
        return torch.arange(self.length - ids.shape[1], self.length)

    def attend(self, layer, q, k, v):
        if layer in self.kv:
            k, v = (torch.cat(pair, dim=1) for pair in zip(self.kv[layer], (k, v)))  # copies the whole past
        self.kv[layer] = k, v
        return attend(q, k, v, causal=q.shape[1] > 1)


# %% tags=["export"]
def offset_mask(start: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """Which of start + count keys each of count new tokens may see, bool (count, start + count): row n sees 0 … start + n."""
    keys = torch.arange(start + count, device=device)
    return keys <= keys[start:, None]


class KVCache(KVStore, NoPast):
    """A `KVStore` as the network's memory: ``model(ids, past=cache)``. The new tokens count once the step is over.

    Raises:
        ValueError: at the call, another batch, or more tokens than fit; the cache is as it was before.
    """

    new = 0  # tokens of the step that is under way

    def begin(self, ids: Tensor) -> Tensor:
        """Positions of new tokens ids (B, N), counted on from the length: (N,)."""
        (batch, count), (have, capacity) = ids.shape, self.k.shape[1:3]
        if batch != have:
            raise ValueError(f"{batch} texts for a cache of {have}; make one with batch={batch}")
        if self.length + count > capacity:
            room = f"{capacity - self.length} more would fit"
            raise ValueError(f"{count} tokens after {self.length} exceed the capacity {capacity}; {room}")
        self.new = count
        return torch.arange(self.length, self.length + count, device=ids.device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write the new k and v (B, N, K, Dh) behind the old ones; ask all of them."""
        start, end = self.length, self.length + self.new
        keys, values = self.k[layer, :, :end], self.v[layer, :, :end]
        keys[:, start:], values[:, start:] = k, v
        if self.new == 1 or not start:
            return attend(q, keys, values, causal=self.new > 1)
        return attend(q, keys, values, offset_mask(start, self.new, q.device))

    def end(self) -> None:
        """Count the new tokens, once for all layers."""
        self.length, self.new = self.length + self.new, 0


# %% tags=["check"]
for length in (1, 8, 64, 512):
    cache, growing = KVCache(toy, 2, length + 2), GrowingCache()
    for piece in (ids[:, :length], ids[:, length : length + 1], ids[:, length + 1 : length + 2]):
        cached, grown = toy(piece, cache), toy(piece, growing)
    whole = toy(ids[:, : length + 2])[:, -1:]
    assert torch.allclose(cached, whole, atol=1e-5, rtol=1e-4) and torch.allclose(grown, whole, atol=1e-5, rtol=1e-4)
    assert cache.length == length + 2  # counted once, not once a layer

# %% tags=["check"]
k, v = cache.read(2, 0, 9)
assert torch.allclose(k, late.keys[2], atol=1e-5) and not torch.allclose(k, v, atol=0.1)  # what the wiretap heard
k.zero_()
assert torch.allclose(cache.read(2, 8, 9)[0], late.keys[2][:, 8:9], atol=1e-5)  # a copy: nobody can spoil the cache

# %% [markdown] lang="zh"
# ## 该拒绝的，当场拒绝
#
# 审计给旧缓存列了九种错误：越界、负数、空读、重复清空、批不对……Python 的切片对它们都不吭声，只会悄悄给出别的东西。这里每一种都说清楚，而且缓存分毫未动。

# %% [markdown] lang="en" twin="6554c5b0"
# ## Refuse what must be refused
#
# The audit listed nine errors for the old cache: out of bounds, negative, empty reads, a second reset, a wrong batch … Python's slices keep silent about them all and hand out something else. Here each is named, and the cache is left exactly as it was.

# %%
before = cache.k.clone(), cache.v.clone(), cache.length
refused = {
    "beyond the end": lambda: cache.read(0, 510, 515),
    "negative": lambda: cache.read(0, -3, 2),
    "empty": lambda: cache.read(0, 5, 5),
    "backwards": lambda: cache.read(0, 5, 3),
    "no such layer": lambda: cache.read(-1, 0, 5),
    "another batch": lambda: toy(ids[:1, :1], cache),
    "full": lambda: toy(ids[:, :1], cache),
    "too large": lambda: KVCache(toy, 2, 2000),
    "nothing to reset": lambda: KVCache(toy, 2, 8).reset(),
}

# %% tags=["check"]
for name, attempt in refused.items():
    try:
        attempt()
    except ValueError as error:
        print(f"{name}: {error}")
    else:
        raise AssertionError(f"{name} was accepted")
assert torch.equal(cache.k, before[0]) and torch.equal(cache.v, before[1]) and cache.length == before[2]
cache.reset()
assert torch.allclose(toy(ids[:, 100:140], cache), toy(ids[:, 100:140]), atol=1e-5)  # a new text hears no old one

# %% [markdown] lang="zh"
# ## 分块预填充：掩码要错开
#
# 读提示词叫预填充（prefill）。太长就分几块读，省激活的内存。新来的 $N$ 个查询面对 $S + N$ 个键，第 $n$ 个能看 $0 \dots S + n$。现成的 `is_causal=True` 把三角形靠左上角放：新词元看不见自己，却以为一切正常。
#
# $$\text{mask}_{n,m} = [\, m \le S + n \,]$$

# %% [markdown] lang="en" twin="75e0e97e"
# ## Prefill in chunks: the mask must be offset
#
# Reading the prompt is called prefill. A long one is read in chunks, to save memory for activations. Then $N$ new queries face $S + N$ keys, and number $n$ may see $0 \dots S + n$. The ready-made `is_causal=True` puts its triangle at the top left: the new tokens do not see themselves, and nothing complains.
#
# $$\text{mask}_{n,m} = [\, m \le S + n \,]$$


# %% tags=["export"]
@torch.inference_mode()
def prefill(model: Qwen3, ids: Tensor, past: NoPast, chunk: int | None = None) -> Tensor:
    """Read texts ids (B, N) into a memory; logits (B, V) of the token after them.

    Args:
        chunk: most tokens at a time: the same numbers, less memory for activations; None reads all at once.

    Raises:
        ValueError: ``chunk`` is no positive number; what the memory refuses.
    """
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk {chunk} is no positive number of tokens; try 64 or None")
    for piece in ids.split(chunk or ids.shape[1], dim=1):
        logits = model(piece, past, last=True)
    return logits[:, -1]


# %%
offset_mask(2, 3).int()  # three new tokens after two

# %% tags=["check"]
truth = toy(ids[:, :100])[:, -1]
for chunk in (None, 1, 7, 64, 100, 1000):
    cache = KVCache(toy, 2, 100)
    assert torch.allclose(prefill(toy, ids[:, :100], cache, chunk), truth, atol=1e-5, rtol=1e-4)
mask = offset_mask(5, 3)
assert mask.sum(dim=1).tolist() == [6, 7, 8] and mask[:, 5:].equal(torch.ones(3, 3, dtype=torch.bool).tril())

# %% tags=["hide"]
fig, axes = plt.subplots(1, 2, figsize=(6.4, 1.9))
top_left = torch.ones(4, 10, dtype=torch.bool).tril()
for ax, seen, title in zip(
    axes, (offset_mask(6, 4), top_left), ("Offset: all the past and oneself", "Top left: blind")
):
    ax.pcolormesh(seen.float(), cmap="Blues", vmin=0, vmax=1.3, edgecolors="white", lw=1)
    ax.axvline(6, color="#c53030", lw=1.5)
    ax.set(title=title, xlabel="keys: 6 old | 4 new", xticks=[], yticks=[], aspect="equal")
    ax.invert_yaxis()
axes[0].set_ylabel("4 new queries")
show(
    fig,
    alt="Two masks of four queries over ten keys: the offset one reaches the diagonal of the new keys, the other stops short",
)

# %% [markdown] lang="zh"
# ## 下一个词元怎么挑
#
# 总取最可能的（贪心，greedy），同一句话永远同一个结尾。想有变化就按概率抽：温度（temperature）$\tau$ 把分布变尖或变平，top-k 只留前 $k$ 个，top-p 只留凑够概率 $p$ 的前几个。每段文字有自己的种子，和邻座无关。
#
# $$p_i \propto \exp(\ell_i / \tau)$$

# %% [markdown] lang="en" twin="535b1e6f"
# ## Choosing the next token
#
# Always the most likely one (greedy), and the same beginning ends the same way for ever. For variety, draw by probability: the temperature $\tau$ makes the distribution sharper or flatter, top-k keeps the first $k$, top-p the first few that together reach $p$. Every text has its own seed, whoever its neighbours are.
#
# $$p_i \propto \exp(\ell_i / \tau)$$


# %% tags=["export"]
@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Args:
        temperature: divides the logits; 0 takes the most likely token, always.
        top_k: only the k most likely tokens; 0 is all.
        top_p: only the most likely tokens that together reach this probability; 1 is all.
        seed: of the text's own generator.

    Raises:
        ValueError: a number outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature {self.temperature} is no finite number from 0 on; try 1.0")
        if self.top_k < 0:
            raise ValueError(f"top_k {self.top_k} is negative; try 0 (all) or 50")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p} is not above 0 and at most 1; try 0.9")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed {self.seed} is outside 0 … 2**32 − 1; try 0")


# %% tags=["export"]
def filtered(logits: Tensor, sampling: Sampling) -> Tensor:
    """logits / temperature, −∞ where top-k and then top-p leave a token out; (…, V) fp32. The temperature is not 0.

    Source: Fan et al. 2018 (top-k); Holtzman et al. 2019 (top-p); the order of transformers and vLLM.
    """
    logits = logits.float() / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[..., -1:], float("-inf"))
    if sampling.top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        p = ordered.softmax(dim=-1)
        late = p.cumsum(dim=-1) - p >= sampling.top_p  # what stands before it is enough already
        logits = logits.masked_fill(late.scatter(-1, order, late), float("-inf"))
    return logits


# %% tags=["export"]
def sample(logits: Tensor, samplings: Sequence[Sampling], generators: Sequence[Generator]) -> Tensor:
    """The next token of every row of logits (B, V), as its own `Sampling` says, from its own generator: (B,)."""
    ids = logits.argmax(dim=-1)
    for row, (sampling, generator) in enumerate(zip(samplings, generators)):
        if sampling.temperature:
            p = filtered(logits[row], sampling).softmax(dim=-1)
            ids[row] = torch.multinomial(p.cpu(), 1, generator=generator)[0]
    return ids


# %% tags=["check"]
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

scores = 3 * torch.randn(50, 200)
for tau, top_k, top_p in [(0.7, 0, 1.0), (1.3, 20, 1.0), (1.0, 0, 0.8), (0.5, 7, 0.6), (2.0, 1, 0.01)]:
    theirs = TemperatureLogitsWarper(tau)(None, scores)
    theirs = TopKLogitsWarper(top_k)(None, theirs) if top_k else theirs
    theirs = TopPLogitsWarper(top_p)(None, theirs) if top_p < 1 else theirs
    assert torch.allclose(filtered(scores, Sampling(tau, top_k, top_p)), theirs)

# %% tags=["check"]
logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(3000, 3)
drawn = sample(logits, [Sampling(1.0)] * 3000, [torch.Generator().manual_seed(0)] * 3000).bincount() / 3000
assert (drawn - logits[0].exp()).abs().max() < 0.04  # what is drawn follows the distribution
seeds = [torch.Generator().manual_seed(i) for i in (3, 4)], [torch.Generator().manual_seed(i) for i in (9, 3)]
pair = [
    sample(scores[:2], [Sampling(1.0)] * 2, one) for one in ([seeds[0][0], seeds[0][1]], [seeds[1][1], seeds[1][0]])
]
assert pair[0][0] == pair[1][0]  # a text's draw depends on its own seed alone
assert sample(scores, [Sampling()] * 50, [torch.Generator()] * 50).equal(scores.argmax(dim=-1))  # τ = 0 is greedy

# %% [markdown] lang="zh"
# ## 生成循环
#
# 读一遍提示词，然后一个词元一个词元往下写，直到每行都遇到结束词元。先写完的行用结束词元填到最后：它们占着位置，白白陪跑。A3 会让它们先走。

# %% [markdown] lang="en" twin="d99de77a"
# ## The writing loop
#
# Read the prompt once, then write token after token until every row has met an end token. Rows that end early are filled up with it: they keep their place and run along for nothing. In A3 they may leave.


# %% tags=["export"]
@torch.inference_mode()
def generate(
    model: Qwen3, ids: Tensor, max_new_tokens: int, sampling: Sampling = Sampling(), cache: KVCache | None = None
) -> Tensor:
    """Continue texts ids (B, N) until each has met an end token or has max_new_tokens more: (B, N + T), T ≤ max_new_tokens.

    Args:
        sampling: row i draws with ``seed + i``. cache: one with room; None makes one.

    Raises:
        ValueError: no new tokens, or what the cache refuses. Rows that end early are filled with the end token.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens {max_new_tokens} is no positive number; try 1")
    batch, length = ids.shape
    cache = cache or KVCache(model, batch, length + max_new_tokens)
    generators = [Generator().manual_seed(sampling.seed + row) for row in range(batch)]
    ends = torch.tensor(model.config.eos_token_id, dtype=ids.dtype, device=ids.device)
    out = torch.cat([ids, ids.new_zeros(batch, max_new_tokens)], dim=1)
    done = torch.zeros(batch, dtype=torch.bool, device=ids.device)
    logits = prefill(model, ids, cache)
    for place in range(length, length + max_new_tokens):
        token = sample(logits, [sampling] * batch, generators)
        if len(ends):
            token = torch.where(done, ends[0], token)
            done |= torch.isin(token, ends)
        out[:, place] = token
        if done.all() or place + 1 == out.shape[1]:
            return out[:, : place + 1]
        logits = model(token[:, None], cache)[:, -1]


# %%
from tokenizers import Tokenizer

from minivllm.shipped import ASSETS

tokenizer, captions = Tokenizer.from_file(str(ASSETS / "tokenizer.json")), Qwen3.from_pretrained(ASSETS)


def write(text: str, count: int = 1, **options) -> list[str]:
    rows = torch.tensor([tokenizer.encode(text).ids] * count)
    return [tokenizer.decode(row.tolist()) for row in generate(captions, rows, 32, Sampling(**options))]


write("red", 6, temperature=1.0), write("红", 6, temperature=1.0)

# %% tags=["hide"]
after_red = prefill(captions, torch.tensor([tokenizer.encode("red").ids]), NoPast())[0]
top = after_red.topk(8).indices
names = [tokenizer.decode([i]).strip() or "(space)" for i in top.tolist()]
fig, axes = plt.subplots(1, 4, figsize=(6.4, 2.5), sharey=True)
for ax, options in zip(axes, [dict(temperature=0.5), dict(temperature=1.0), dict(top_k=4), dict(top_p=0.6)]):
    p = filtered(after_red, Sampling(**{"temperature": 1.0} | options)).softmax(dim=-1)[top]
    ax.barh(names, p, color=["#2b6cb0" if x > 0 else "#cbd5e0" for x in p])
    ax.set(title=", ".join(f"{name} {value}" for name, value in options.items()), xlim=(0, 0.6))
axes[0].invert_yaxis()
fig.suptitle("After “red”: sharper, as learned, the first four, the first 60 %", fontsize=11, x=0.01, ha="left")
show(fig, alt="Four bar charts of the next token after red under temperature one half, one, top-k four and top-p 0.6")

# %% tags=["check"]
import transformers

theirs = transformers.Qwen3ForCausalLM.from_pretrained(ASSETS, dtype=torch.float32).eval()
rows = torch.tensor([tokenizer.encode(text).ids[:3] for text in ("red apple", "blue heart", "green heart")])
ours = generate(captions, rows, 20)
assert ours.equal(theirs.generate(rows, max_new_tokens=20, do_sample=False, pad_token_id=0))  # greedy: their tokens

# %% tags=["check"]
alone = generate(captions, rows[:1], 20)[0]
assert alone.equal(ours[0, : len(alone)]) and not ours[0, len(alone) :].any()  # whoever is done gets end tokens
apart = [write("red", temperature=1.0, seed=seed)[0] for seed in (5, 6, 7, 8)]
assert write("red", 4, temperature=1.0, seed=5) == apart  # row i: seed + i

# %% [markdown] lang="zh"
# ## 省了多少
#
# 数一数运算：有 512 个词元的过去，写下一个。重算要 513 份，缓存只要一份，再加上读缓存。计时也量一下；它随机器变，不拿来比对。

# %% [markdown] lang="en" twin="4468a883"
# ## What it saves
#
# Count operations: write the next token after 512. Reading again costs 513 shares, the cache one, and reading it. Measure the time too; it depends on the machine and is compared with nothing.

# %%
import time

from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


def flops(run) -> int:
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        run()
    return counter.get_total_flops()


cache = KVCache(toy, 2, 520)
prefill(toy, ids[:, :512], cache)
again, one = flops(lambda: toy(ids[:, :513], last=True)), flops(lambda: toy(ids[:, 512:513], cache))
print(f"{again / 1e6:.0f} MFLOP to read again, {one / 1e6:.2f} MFLOP with the cache")


# %%
def seconds(run) -> float:
    found = []
    for _ in range(6):
        begun = time.perf_counter()
        run()
        found.append(time.perf_counter() - begun)
    return min(found)


cache.length = 512
cached = seconds(lambda: toy(ids[:, 512:513], cache))
print(f"{seconds(lambda: toy(ids[:, :513], last=True)) / cached:.0f} times faster on this machine")

# %% tags=["check"]
assert 300 < again / one < 600  # the network once instead of 513 times; attention still asks all 513 keys

# %% [markdown] lang="zh"
# **到了这里**，写一个词元只算一个词元。可是这块内存有个毛病：每段文字都按最长的分，短的也占满；一批必须一样长，先写完的还不能走。下一章把内存切成小块，谁要谁拿，用完就还。
#
# ## 三个问题
#
# 1. 预测：`end` 写进 `attend` 里，每层加一次长度，哪条检查先红？
# 2. 修改：预填充时忘了错开掩码，用靠左上角的三角形，结果差多少？
# 3. 动手：写一个「倒带」：忘掉最后几个词元，从中间换一句话接着写，和重新读一遍一样。

# %% [markdown] lang="en" twin="75f06352"
# **Where we stand.** Writing a token costs one token's work. But this memory has a flaw: every text gets room for the longest, short ones too; a batch must be of one length, and who is done may not leave. The next chapter cuts memory into small blocks: taken when needed, given back when done.
#
# ## Three questions
#
# 1. Predict: put `end` into `attend`, so that every layer adds to the length. Which check turns red first?
# 2. Modify: forget the offset in chunked prefill and take the triangle at the top left. How far off is the result?
# 3. Build: write a rewind that forgets the last tokens and goes on differently from the middle, as if everything were read anew.


# %% tags=["solution"]
# 1 · the comparison at length 1: layer 1 would write its keys one place further on than layer 0, and ask empty places
class Impatient(KVCache):
    def attend(self, *inputs):
        out = super().attend(*inputs)
        self.length += self.new  # as if every layer were a step
        return out


assert not torch.allclose(toy(ids[:, :4], Impatient(toy, 2, 30)), toy(ids[:, :4]), atol=1e-3)


# %% tags=["solution"]
# 2 · far: the new tokens see the first keys only, not even themselves
class TopLeft(KVCache):
    def attend(self, layer, q, k, v):
        out = super().attend(layer, q, k, v)  # writes
        end = self.length + self.new
        triangle = torch.ones(self.new, end, dtype=torch.bool).tril()
        return attend(q, self.k[layer, :, :end], self.v[layer, :, :end], triangle) if self.length else out


blind = TopLeft(toy, 2, 100)
assert (prefill(toy, ids[:, :100], blind, chunk=50) - truth).abs().max() > 0.01


# %% tags=["solution"]
# 3
def rewind(cache: KVCache, length: int) -> None:
    cache.length = length  # what lies behind it is written over by the next step


cache = KVCache(toy, 2, 60)
prefill(toy, ids[:, :50], cache)
rewind(cache, 30)
elsewhere = torch.cat([ids[:, :30], ids[:, 200:210]], dim=1)
assert torch.allclose(prefill(toy, ids[:, 200:210], cache), toy(elsewhere)[:, -1], atol=1e-5)

# %% [markdown] lang="zh"
# ## 小结
#
# - 因果掩码保证过去不变，所以键和值可以留着；这是 KV 缓存的全部依据。
# - 内存一次分好，$2 L B N K D_h s$ 字节；一步走完才加长度。
# - 分块预填充的掩码要错开 $S$。
# - 越界、负数、空读、重复清空、批不对：都当场拒绝，缓存不动。
# - 贪心与 `transformers` 逐词元一致；温度、top-k、top-p 的 logits 也一致。
#
# 下一章：A3，分页 KV。

# %% [markdown] lang="en" twin="d799df1c"
# ## Recap
#
# - The causal mask keeps the past unchanged, so keys and values may stay: that is all a KV cache stands on.
# - Memory is set aside once, $2 L B N K D_h s$ bytes; the length grows when a step is over.
# - In chunked prefill the mask is offset by $S$.
# - Out of bounds, negative, empty, a second reset, a wrong batch: refused on the spot, the cache untouched.
# - Greedy tokens are those of `transformers`; so are the logits under temperature, top-k and top-p.
#
# Next: A3, paged KV.
