# Generated from notebooks/source/A3_paged_kv.py by `course export`.
# Do not edit: change the chapter and export again.

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Generator, Tensor

from minivllm.kv_cache import Sampling, sample
from minivllm.qwen3 import NoPast, Qwen3, attend


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
