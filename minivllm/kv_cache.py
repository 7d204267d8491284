# Generated from notebooks/source/A2_kv_cache.py by `course export`.
# Do not edit: change the chapter and export again.

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from minivllm.qwen3 import NoPast, Qwen3, attend


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


def sample(logits: Tensor, samplings: Sequence[Sampling], generators: Sequence[Generator]) -> Tensor:
    """The next token of every row of logits (B, V), as its own `Sampling` says, from its own generator: (B,)."""
    ids = logits.argmax(dim=-1)
    for row, (sampling, generator) in enumerate(zip(samplings, generators)):
        if sampling.temperature:
            p = filtered(logits[row], sampling).softmax(dim=-1)
            ids[row] = torch.multinomial(p.cpu(), 1, generator=generator)[0]
    return ids


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
