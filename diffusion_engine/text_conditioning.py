# Generated from notebooks/source/07_text_conditioning.py by `course export`.
# Do not edit: change the chapter and export again.

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
