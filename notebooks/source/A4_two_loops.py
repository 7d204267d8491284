# ---
# jupyter:
#   course:
#     minutes: 45
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown] lang="zh"
# # A4 · 两个循环：旧引擎为什么帮不上忙（two loops）
#
# 读完这一章，你能用数字说清：写字的循环靠「过去不变」省下几百倍，去噪的循环没有过去；还会亲手把键值缓存塞进 DiT，看着图坏掉。
#
# | 你会做出 | 你需要 | 时间 | 模块 |
# | --- | --- | --- | --- |
# | 一份算出来的审计、两张测出来的账单、一个必然失败的实验 | 附录 A1–A3，第 04–13 章 | 45 分钟 | 无 |

# %% [markdown] lang="en" twin="d630ecb8"
# # A4 · Two loops: why the old engine cannot help
#
# After this chapter you can say it in numbers: the loop that writes lives on a past that does not change and saves hundreds of times by it; the loop that denoises has no past. And you put a KV cache into the DiT yourself, and watch the picture break.
#
# | You build | You need | Time | Module |
# | --- | --- | --- | --- |
# | an audit that is computed, two bills that are measured, an experiment that must fail | appendix A1–A3, chapters 04–13 | 45 minutes | none |

# %% [markdown] lang="zh"
# **先想一想**：A2 的缓存把写一个词元的活减到几百分之一。扩散模型也是变换器，28 步里每步都重算所有键和值。把它们存下来，能省多少？图会怎样？先写下你的猜测。

# %% [markdown] lang="en" twin="0712b2f7"
# **Think first:** the cache of A2 cut the work for a token to a few hundredths. A diffusion model is a transformer too, and computes all its keys and values anew at each of 28 steps. Keep them instead: how much would it save, and what becomes of the picture? Write your guess down.

# %% [markdown] lang="zh"
# ## 审计：当时找到了什么
#
# 旧引擎约 900 行。它的主人逐个模块问三件事：有没有，扩散要不要，能不能搬。下表左边是当时的发现；右边由代码现在数出来：修好之后几行，扩散引擎里同一角色又是几行。

# %% [markdown] lang="en" twin="f9bd01db"
# ## The audit: what was found
#
# The old engine had about 900 lines. Its owner asked three things of each module: is it there, does diffusion need it, can it be moved. On the left of the table is what was found then; the right is counted by code now: lines as rebuilt, and lines in the same role in the diffusion engine.

# %% tags=["hide"]
import ast
from collections import Counter
from pathlib import Path

import diffusion_engine.attention
import minivllm.qwen3
from course.rules_source import code_lines

HOMES = [Path(module.__file__).parent for module in (minivllm.qwen3, diffusion_engine.attention)]
AUDIT = """
tensor abstraction  | no      | partly | plain torch.Tensor            |                                         |
model loader        | partial | yes    | bound to one family           | read_config fuse load_weights           | model_folder.load_model
transformer block   | yes     | yes    | pre-norm, residual: reference | Block                                   | transformer_block.
attention           | yes     | yes    | causal, grouped, RoPE         | attend Attention NoPast                 | attention.
MLP                 | partial | yes    | SiluAndMul reusable           | SiluAndMul MLP                          | transformer_block.FeedForward
norm                | yes     | yes    | rewritten as AdaLN            | RMSNorm                                 | transformer_block.Modulation transformer_block.modulate
RoPE                | yes     | no     | 2-D sin-cos there (it moved)  | Rope rope_frequencies rope_table rotate | dit.sincos_2d attention.axial_rope attention.apply_rope
timestep embedding  | no      | yes    | from zero                     |                                         | timestep_embedding.
scheduler           | no      | yes    | noise levels, not requests    | RequestQueue Engine                     | scheduler.
sampling loop       | partial | yes    | tokens against denoising      | Sampling filtered sample generate       | pipeline.denoise
memory manager      | no      | partly | activations, not blocks       | BlockManager BlockTable                 | memory_manager.
KV cache            | yes     | no     | every step refreshes all      | KVStore KVCache prefill                 |
paged attention     | no      | no     | the same                      | slots plan PagedKVCache PagedBatch      |
config              | partial | yes    | dataclass style only          | Qwen3Config                             | dit.DiTConfig
"""
rows = [[cell.strip() for cell in line.split("|")] for line in AUDIT.strip().splitlines()]


# %%
def definitions(folder: Path) -> dict[str, dict[str, ast.AST]]:
    """Module → name → its definition, docstrings aside."""
    trees = {path.stem: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.py"))}
    return {
        stem: {n.name: n for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef)}
        for stem, tree in trees.items()
    }


old, new = (definitions(home) for home in HOMES)
old_names = {name: node for module in old.values() for name, node in module.items()}


def lines_of(nodes) -> int:
    return sum(code_lines(ast.unparse(node)) for node in nodes)


# %%
def counterpart(names: str) -> list[ast.AST]:
    pairs = [name.split(".") for name in names.split()]
    return [node for module, name in pairs for node in ([new[module][name]] if name else new[module].values())]


print(f"{'module':19} {'found':8} {'needed':7} {'verdict':30} {'rebuilt':>8} {'diffusion':>9}")
for module, found, needed, verdict, ours, theirs in rows:
    counts = lines_of(old_names[name] for name in ours.split()), lines_of(counterpart(theirs))
    print(f"{module:19} {found:8} {needed:7} {verdict:30} {counts[0] or '–':>8} {counts[1] or '–':>9}")

# %% tags=["check"]
states = Counter(row[1] for row in rows)
assert len(rows) == 14 and states == {"yes": 5, "partial": 4, "no": 5}
rebuilt = [row[0] for row in rows if row[4]]
assert len(rebuilt) == 12 and {row[0] for row in rows} - set(rebuilt) == {"tensor abstraction", "timestep embedding"}
named = {name for row in rows for name in row[4].split()}
assert named <= set(old_names)  # the table names nothing that is not there

# %% [markdown] lang="zh"
# 原审计的总数写的是「5 有、3 半、6 无」，表上数出来却是 5、4、5：有一个「半」被算成了「无」。数字该由代码来数，这就是一例。修好之后，十四项里有十二项能跑；缺的两项，写字用不着。

# %% [markdown] lang="en" twin="cda80093"
# The audit's own totals say 5 there, 3 in part, 6 not; its table counts 5, 4, 5: one "in part" was taken for "not". Numbers should be counted by code, and here is why. As rebuilt, twelve of the fourteen run; the two that are missing are of no use to writing.

# %% [markdown] lang="zh"
# ## 决定：什么也不搬
#
# 当时有三条路：甲，大量复用（否决）；乙，只搬 `SiluAndMul` 和写法；丙，全部另起炉灶，两个引擎在文件、依赖和概念上都分开。选了丙：搬来的每一行都假设「过去不变」。现在可以查：两个包里，逐字相同的定义有几个？

# %% [markdown] lang="en" twin="300bafbd"
# ## The decision: move nothing
#
# Three ways were weighed: A, reuse much (rejected); B, `SiluAndMul` and style only; C, begin anew, with the two engines apart in files, dependencies and concepts. C was taken: every line that could be moved assumes a past that does not change. Now it can be checked: how many definitions are the same, word for word, in both packages?


# %%
def spoken(node: ast.AST) -> str:
    """A definition without its docstrings, as text."""
    node = ast.parse(ast.unparse(node))
    for part in ast.walk(node):
        if isinstance(part, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(part) is not None:
            part.body = part.body[1:] or [ast.Pass()]
    return ast.unparse(node)


texts = {name: spoken(node) for name, node in old_names.items()}
same = {name for module in new.values() for name, node in module.items() if texts.get(name) == spoken(node)}
print(f"{len(texts)} definitions there, the same here: {', '.join(sorted(same)) or 'none'}")

# %% tags=["check"]
from course.fingerprint import imports

assert same <= {"SiluAndMul"}  # at most the one copy that the audit allows
for home, other in zip(HOMES, reversed(HOMES)):
    for path in home.rglob("*.py"):
        assert not any(module.split(".")[0] == other.name for module, _ in imports(path.read_text("utf-8")))

# %% [markdown] lang="zh"
# ## 第一个区别：过去变不变
#
# 量一量。写字的循环：第 $n$ 步和第 $n+1$ 步之间，旧词元的键动了多少？去噪的循环：相邻两步之间，图块的键动了多少？都用相对变化：
#
# $$\delta = \frac{\lVert k_{\text{now}} - k_{\text{before}} \rVert}{\lVert k_{\text{before}} \rVert}$$

# %% [markdown] lang="en" twin="049781f7"
# ## The first difference: does the past change?
#
# Measure. In the loop that writes: how far do the keys of old tokens move from step $n$ to step $n+1$? In the loop that denoises: how far do the keys of patches move from one step to the next? Relative change, in both:
#
# $$\delta = \frac{\lVert k_{\text{now}} - k_{\text{before}} \rVert}{\lVert k_{\text{before}} \rVert}$$

# %%
import torch
from tokenizers import Tokenizer

from diffusion_engine.engine import TextToImage
from minivllm.qwen3 import NoPast, Qwen3, Qwen3Config
from minivllm.shipped import ASSETS

painter, writer = TextToImage.from_pretrained(device="cpu"), Qwen3.from_pretrained(ASSETS)
tokenizer = Tokenizer.from_file(str(ASSETS / "tokenizer.json"))
ids = tokenizer.encode("smiling face with heart-eyes = 花痴").ids
projections = [layer for name, layer in painter.dit.named_modules() if name.endswith("qkv") and "text" not in name]


def change(now: torch.Tensor, before: torch.Tensor) -> float:
    return ((now - before).norm() / before.norm()).item()


# %%
class Wiretap(NoPast):
    def __init__(self):
        self.keys = []

    def attend(self, layer, q, k, v):
        self.keys.append(k)
        return super().attend(layer, q, k, v)


taps = [Wiretap() for _ in range(2, len(ids))]
for length, tap in enumerate(taps, 2):
    writer(torch.tensor([ids[:length]]), tap)
written = [[change(b[:, : a.shape[1]], a) for a, b in zip(x.keys, y.keys)] for x, y in zip(taps, taps[1:])]

# %%
STEPS, WORDS, seen = 12, ["pizza", "eyes", "red apple"], []
hooks = [
    layer.register_forward_hook(lambda layer, inputs, out: seen.append(out) if inputs[1] == 1 else None)  # keys
    for layer in projections
]
exact = painter(WORDS, num_inference_steps=STEPS, seed=3)
for hook in hooks:
    hook.remove()
by_step = [seen[i : i + len(projections)] for i in range(0, len(seen), len(projections))]
denoised = [[change(b, a) for a, b in zip(x, y)] for x, y in zip(by_step, by_step[1:])]

# %% tags=["hide"]
from course.figures import image_grid, plt, show

fig, ax = plt.subplots(figsize=(6.4, 2.7))
for number in range(len(projections)):
    ax.plot(
        [row[number] for row in denoised], color="#dd6b20", lw=1, label="patches, denoising" if not number else None
    )
ax.plot([max(row) for row in written], "o-", color="#2b6cb0", ms=4, label="old tokens, writing")
ax.set(
    title="Old tokens stand still, patches move in every layer",
    xlabel="step",
    ylabel="change of the keys",
    ylim=(-0.03, None),
)
ax.legend()
show(
    fig,
    alt="Relative change of keys from step to step: zero for old tokens while writing, well above zero for every DiT layer",
)

# %% tags=["check"]
assert len(by_step) == STEPS and len(projections) == 7
assert max(map(max, written)) < 1e-5  # causal: nothing that comes later reaches an old token
assert min(map(min, denoised)) > 1e-3  # full attention on noisy latents: every layer, every step

# %% [markdown] lang="zh"
# ## 第二个区别：账单
#
# 数两笔：做多少次运算，搬多少字节。两者之比叫算术强度（arithmetic intensity）。写一个词元，每个权重读一遍只用两次；去噪一步，每个权重读一遍，所有图块都来用。
#
# $$I = \frac{\text{FLOPs}}{\text{bytes}} \approx \frac{2 \cdot \text{tokens in the step}}{s}$$
#
# 屋顶线（roofline）：机器能跑多快，由 $\min(\text{peak},\ I \cdot \text{bandwidth})$ 封顶。

# %% [markdown] lang="en" twin="0ddc1996"
# ## The second difference: the bill
#
# Count twice: the operations, and the bytes that are moved. Their ratio is the arithmetic intensity. To write one token, each weight is read and used twice; in a denoising step each weight is read once, and all patches use it.
#
# $$I = \frac{\text{FLOPs}}{\text{bytes}} \approx \frac{2 \cdot \text{tokens in the step}}{s}$$
#
# The roofline: how fast a machine can go is capped by $\min(\text{peak},\ I \cdot \text{bandwidth})$.

# %%
from diffusion_engine.guidance import both_velocities
from diffusion_engine.text_conditioning import encode_prompt
from minivllm.kv_cache import KVCache, prefill

torch.manual_seed(0)
layers = Qwen3(Qwen3Config(4096, 1024, 3072, 2, 16, 8, max_position_embeddings=1024)).eval()  # two layers of the 0.6B
layers.requires_grad_(False)
prompt, empty = (encode_prompt(painter.text_encoder, painter.tokenizer, text) for text in ("red apple", ""))


def network(x, t, embeds):
    return painter.dit(x, t, embeds.tokens, embeds.mask, embeds.pooled)


def decode_step(batch: int, past: int):
    cache = KVCache(layers, batch, past + 64)
    prefill(layers, torch.zeros(batch, past, dtype=torch.long), cache)
    return lambda: (setattr(cache, "length", past), layers(torch.zeros(batch, 1, dtype=torch.long), cache))


latents = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(0))
works = {  # name → a run, the weights it reads, bytes of keys and values that it reads
    "write 1 token": (decode_step(1, 64), layers, 2 * 2 * 64 * 8 * 128 * 4),
    "write 8 texts": (decode_step(8, 64), layers, 8 * 2 * 2 * 64 * 8 * 128 * 4),
    "read 64 tokens": (lambda: layers(torch.zeros(1, 64, dtype=torch.long), last=True), layers, 0),
    "denoise 1 step": (lambda: both_velocities(network, latents, torch.tensor([500.0]), empty, prompt), painter.dit, 0),
}

# %%
import time

from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


def flops_of(run) -> int:
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        run()
    return counter.get_total_flops()


def bytes_of(model, cached: int) -> int:
    tables = sum(m.weight.nbytes for m in model.modules() if isinstance(m, torch.nn.Embedding))  # a few rows are read
    return sum(w.nbytes for w in model.parameters()) - tables + cached


bills = {name: (flops_of(run), bytes_of(model, cached)) for name, (run, model, cached) in works.items()}
intensity = {name: flops / moved for name, (flops, moved) in bills.items()}
for name, (flops, moved) in bills.items():
    print(f"{name:16} {flops / 1e6:9.1f} MFLOP {moved / 1e6:7.1f} MB, {intensity[name]:6.1f} FLOP a byte")

# %% tags=["check"]
assert 0.4 < intensity["write 1 token"] < 0.6  # two operations a weight of four bytes
assert 2 < intensity["write 8 texts"] < 4.5  # eight texts share the weights, not the cache
assert intensity["denoise 1 step"] > 10 * intensity["write 1 token"]
assert intensity["read 64 tokens"] > 50 * intensity["write 1 token"]  # reading a prompt is like denoising


# %% tags=["hide"]
@torch.inference_mode()
def seconds(run, repeats: int = 4) -> float:
    found = []
    for _ in range(repeats):
        begun = time.perf_counter()
        run()
        found.append(time.perf_counter() - begun)
    return min(found)


a, big = torch.randn(768, 768), torch.ones(2**24)
peak, bandwidth = 2 * 768**3 / seconds(lambda: a @ a), big.nbytes / seconds(big.sum)  # FLOP/s; bytes/s read
speeds = {name: bills[name][0] / seconds(run) for name, (run, _, _) in works.items()}
fig, ax = plt.subplots(figsize=(6.4, 3.0))
axis = torch.logspace(-1.3, 3, 100)
ax.loglog(axis, (axis * bandwidth).clamp(max=peak) / 1e9, color="#718096", label="roof of this machine")
for number, (name, speed) in enumerate(speeds.items()):
    ax.plot(intensity[name], speed / 1e9, "o", color=f"C{number}", label=name)
ax.set(title="Writing waits for memory, denoising for arithmetic", xlabel="FLOP a byte", ylabel="GFLOP/s")
ax.legend(loc="lower right")
show(
    fig,
    alt="Roofline, log-log: writing one token lies far left on the slope of the bandwidth, denoising right under the flat roof",
)

# %% [markdown] lang="zh"
# ## 第三个区别：缓存能省什么
#
# 写字：512 个旧词元不必再算，省几百倍。去噪：就算旧的键值还能用，每步的查询和输出也都是新的，能省的只有「算键和值」这一小份。先数出这个上限，再看代价。

# %% [markdown] lang="en" twin="9cff8992"
# ## The third difference: what a cache could save
#
# Writing: 512 old tokens need not be computed again, a gain of hundreds. Denoising: even if old keys and values were good, every query and every output of a step is new; all that could be saved is the small share that computes keys and values. First count that bound, then look at the price.

# %%
from dataclasses import replace

from diffusion_engine.dit import flop_count

words = len(prompt.mask[0])
tokens, config = 16 + words, painter.dit.config  # 16 patches and the prompt's words
per_layer = 2 * tokens * config.width * 2 * config.width  # two products of D × D for every token
share = 7 * per_layer / flop_count(config, (4, 4), words)
small, text = Qwen3(replace(writer.config, max_position_embeddings=1024)), torch.zeros(1, 513, dtype=torch.long)
cache = KVCache(small, 1, 513)
prefill(small, text[:, :512], cache)
again = flops_of(lambda: small(text, last=True))
gain = again / flops_of(lambda: small(text[:, :1], cache))
print(f"writing: {gain:.0f} times less work; denoising: at most {share:.0%} of a step")

# %% tags=["check"]
assert gain > 200 and 0.08 < share < 0.2

# %% [markdown] lang="zh"
# ## 每个扩散读者都会问的实验
#
# 那就真的存：在每个 `qkv` 投影后挂一个钩子，隔几步才更新键和值，中间用旧的，查询照常。旁边放一个同样省法的对手：干脆少走两步。

# %% [markdown] lang="en" twin="38c07d45"
# ## The experiment that every diffusion reader asks for
#
# Then do keep them: hang a hook on each `qkv` projection that refreshes keys and values only every few steps and uses the old ones in between, with fresh queries. Beside it a rival that saves as much: simply take two steps fewer.


# %%
class KeepKV:
    def __init__(self, every: int, part: slice = slice(None)):
        self.every, self.part, self.calls, self.kept = every, part, Counter(), {}

    def __call__(self, layer, inputs, out):
        place = layer, inputs[1]  # 0, 1, 2: queries, keys, values, (B, N, D) each
        if inputs[1] == 0:
            return out
        if self.calls[place] % self.every == 0:
            self.kept[place] = out[:, self.part].clone()
        self.calls[place] += 1
        kept = out.clone()
        kept[:, self.part] = self.kept[place]
        return kept


def draw(keep: KeepKV, layers: list):
    hooks = [layer.register_forward_hook(keep) for layer in layers]
    result = painter(WORDS, num_inference_steps=STEPS, seed=3)
    for hook in hooks:
        hook.remove()
    return result


# %%
layers_of_all = projections + [block.attn.text.qkv for block in painter.dit.joint_blocks]
kept = {every: draw(KeepKV(every), layers_of_all) for every in (1, 2, 4, STEPS)}
fewer = painter(WORDS, num_inference_steps=STEPS - 2, seed=3)
drift = {every: round(change(result.latents, exact.latents), 3) for every, result in kept.items()}
drift, round(change(fewer.latents, exact.latents), 3)

# %% tags=["hide"]
shown = {
    f"{STEPS} steps": exact,
    f"{STEPS - 2} steps": fewer,
    "K, V every 4th": kept[4],
    "K, V of the first": kept[STEPS],
}
image_grid(
    [result.images[i] for i in range(len(WORDS)) for result in shown.values()],
    list(shown) * len(WORDS),
    columns=4,
    size=1.3,
    alt="A pizza, eyes and an apple: intact with two steps fewer, blotched or smeared with keys and values of the first step",
    title="Old keys and values spoil the picture, fewer steps do not",
)

# %% tags=["check"]
assert torch.equal(kept[1].latents, exact.latents)  # the hook itself changes no bit
assert 0 < drift[2] < drift[4] < drift[STEPS] and drift[STEPS] > 0.25  # the older, the worse
assert change(fewer.latents, exact.latents) < drift[4]  # fewer steps save as much and cost far less

# %% [markdown] lang="zh"
# 老实读这张图：眼睛花了，披萨和苹果只是起了斑。这个小模型把图背了下来，提示词和时间管住了大半；需要互相看着画的地方，先坏。可是不管坏多少，省下的只有那一小份，少走两步省得一样多，图却完好。

# %% [markdown] lang="en" twin="6c1097cc"
# Read the picture honestly: the eyes are smeared, pizza and apple are merely blotched. This small model knows its pictures by heart, so prompt and time settle most of them; what breaks first is where patches must look at each other. And however much breaks, all it saves is that small share: two steps fewer save as much and leave the picture whole.

# %% [markdown] lang="zh"
# ## 可以留的：交叉注意力里的文字
#
# 文字不随 $\sigma$ 变，那文字的键值呢？看它进场的路。交叉注意力里文字只作答，键值只取决于提示词：算一次，每步照用，一位不差（第 04 章的 `keys_values`、`attend`）。联合注意力里文字也被时间调制、也听图像，于是每步都变。

# %% [markdown] lang="en" twin="ec8e6fc6"
# ## What may be kept: text in cross-attention
#
# The text does not change with $\sigma$; do its keys and values? That depends on its way in. In cross-attention text only answers, and its keys and values depend on the prompt alone: computed once, used at every step, not a bit differs (`keys_values` and `attend` of chapter 04). In joint attention text is modulated by time and listens to the image, so they change at every step.

# %%
from diffusion_engine.attention import CrossAttention

cross = CrossAttention(256, heads=8)
latent_tokens = [torch.randn(1, 16, 256, generator=torch.Generator().manual_seed(i)) for i in range(STEPS)]
with torch.no_grad():
    k, v = cross.keys_values(prompt.tokens)  # once
    once = [cross.attend(x, k, v, prompt.mask) for x in latent_tokens]
    each = [cross(x, prompt.tokens, prompt.mask) for x in latent_tokens]

text_projections = [block.attn.text.qkv for block in painter.dit.joint_blocks]
joint = change(draw(KeepKV(STEPS), text_projections).latents, exact.latents)
print(f"cross-attention: the same bits; joint attention, the text's kept from the first step: {joint:.2f} off")

# %% tags=["check"]
assert all(torch.equal(a, b) for a, b in zip(once, each))  # exact, at every step
assert joint > 1e-3  # in joint attention the text's keys are no constant

# %% [markdown] lang="zh"
# ## 线后来移到了哪里
#
# 审计的结论没有变，但有两条线移动了：
#
# - 相邻两步很像（上面那张图在中段最低），于是有人近似地跳过：DeepCache、PAB、TeaCache 隔几步复用特征。那是拿误差换时间，要给误差定预算（第 13 章的步缓存），和「精确」的 KV 缓存是两回事。
# - 审计说扩散用二维正弦表，不要 RoPE；后来 FLUX、Wan、HunyuanVideo 都用了按轴的 RoPE，QK 归一化也搬了过来。搬的是想法，代码仍要重写：转的是行、列和帧。

# %% [markdown] lang="en" twin="48d1a7e4"
# ## Where the line moved later
#
# The audit's conclusion stands, but two of its lines have moved:
#
# - Neighbouring steps are alike (the figure above is lowest in the middle), so some skip approximately: DeepCache, PAB, TeaCache reuse features for a few steps. That trades error for time and needs an error budget (the step cache of chapter 13); an exact KV cache is another thing.
# - The audit said that diffusion uses a 2-D sine table and no RoPE; later FLUX, Wan and HunyuanVideo took up axial RoPE, and QK-norm came along. The idea moved, the code had to be written anew: what turns is rows, columns and frames.

# %%
middle = [sum(row) / len(row) for row in denoised]
print(
    f"the keys change by {middle[0]:.2f} after the first step, {min(middle):.2f} at least, {middle[-1]:.2f} before the last"
)

# %% [markdown] lang="zh"
# ## 两个循环，逐行对照
#
# | | 写字 | 去噪 |
# | --- | --- | --- |
# | 序列 | 一步长一个词元 | 长度不变，内容全变 |
# | 过去的键和值 | 永远有效 | 下一步就作废 |
# | 注意力 | 因果 | 全 |
# | 一步的运算 | $O(L)$，有缓存 | $O(P^2)$，每步一遍 |
# | 卡在哪 | 内存带宽 | 算力 |
# | 省法 | KV 缓存、分页、连续批处理 | 一次前向做引导、少走几步、分片解码、激活检查点、编译 |
# | 结束 | 遇到结束词元 | 走完所有步 |

# %% [markdown] lang="en" twin="02aa8d92"
# ## The two loops, line by line
#
# | | Writing | Denoising |
# | --- | --- | --- |
# | sequence | grows by a token a step | fixed in length, all of it changes |
# | past keys and values | valid for ever | void at the next step |
# | attention | causal | full |
# | operations of a step | $O(L)$ with a cache | $O(P^2)$, every step |
# | waits for | memory bandwidth | arithmetic |
# | saved by | KV cache, paging, continuous batching | guidance in one forward, fewer steps, tiled decoding, activation checkpointing, compiling |
# | ends | at an end token | after all steps |

# %% [markdown] lang="zh"
# **到了这里**，附录说完了：一个能跑的旧引擎，和它不被复用的理由。两个循环共享的是变换器这个词，不是省钱的办法。
#
# ## 三个问题
#
# 1. 预测：一次写 64 段文字，算术强度能到多少？什么拖住了它？
# 2. 修改：只留最后四步的键值（前面照常更新），图还坏吗？
# 3. 动手：跳着算：相邻两步的键变化小于阈值才复用。阈值为 0 时应当一位不差。

# %% [markdown] lang="en" twin="c1eda555"
# **Where we stand.** The appendix ends here: an old engine that runs, and the reasons why it is not reused. What the two loops share is the word transformer, not the way to save.
#
# ## Three questions
#
# 1. Predict: writing 64 texts at once, what arithmetic intensity can be reached? What holds it back?
# 2. Modify: keep keys and values in the last four steps only (refresh before that). Does the picture still break?
# 3. Build: skip by looking: reuse keys and values only where they would change by less than a threshold. At 0 not a bit may differ.

# %% tags=["solution"]
# 1 · the weights are shared, the caches are not: with 64 tokens of past each it stays below 2 · 64 / 4 = 32
many = 64 * bills["write 1 token"][0] / bytes_of(layers, 64 * 2 * 2 * 64 * 8 * 128 * 4)
assert intensity["write 8 texts"] < many < 25


# %% tags=["solution"]
# 2 · hardly: late steps change the picture little, and so the keys
class KeepLast(KeepKV):
    def __call__(self, layer, inputs, out):
        self.every = 1 if self.calls[layer] <= STEPS - 4 else 10**6
        return super().__call__(layer, inputs, out)


late = change(draw(KeepLast(1), layers_of_all).latents, exact.latents)
assert late < drift[4]


# %% tags=["solution"]
# 3
class KeepAlike(KeepKV):
    def __init__(self, threshold: float):
        super().__init__(1)
        self.threshold, self.reused = threshold, 0

    def __call__(self, layer, inputs, out):
        place = layer, inputs[1]
        reuse = place in self.kept and change(out, self.kept[place]) < self.threshold
        self.every, self.reused = 10**6 if reuse else 1, self.reused + reuse
        return super().__call__(layer, inputs, out)


strict, loose = KeepAlike(0.0), KeepAlike(0.1)
assert torch.equal(draw(strict, layers_of_all).latents, exact.latents) and strict.reused == 0
assert 0 < change(draw(loose, layers_of_all).latents, exact.latents) < drift[STEPS] and loose.reused > 0

# %% [markdown] lang="zh"
# ## 小结
#
# - 审计十四项：5 有、4 半、5 无；修好后十二项能跑，没有一项该搬。
# - 写字时旧词元的键纹丝不动；去噪时每层每步都在动。
# - 写字卡在带宽，去噪卡在算力：算术强度差一个数量级以上。
# - 把键值跨步留下，图就坏；省下的本来也只有一小份，不如少走两步。
# - 交叉注意力的文字键值可以留，一位不差；近似的特征缓存要付误差。
#
# 回到第 12、13 章：扩散引擎真正省在哪里。

# %% [markdown] lang="en" twin="c58d6004"
# ## Recap
#
# - Fourteen modules audited: 5 there, 4 in part, 5 not; as rebuilt twelve run, and none should be moved.
# - While writing, the keys of old tokens stand still; while denoising, every layer's move at every step.
# - Writing waits for bandwidth, denoising for arithmetic: their intensities are more than tenfold apart.
# - Keep keys and values across steps and the picture breaks; the gain was small anyway, and two steps fewer save as much.
# - Text keys in cross-attention may be kept, to the bit; approximate feature caches pay in error.
#
# Back to chapters 12 and 13: where the diffusion engine really saves.
