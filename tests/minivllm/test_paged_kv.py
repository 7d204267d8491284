"""Appendix A3 pressed harder: conservation under any use, equality with the contiguous cache, exhaustion, preemption."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from minivllm.kv_cache import KVCache, Sampling, generate, prefill
from minivllm.paged_kv import (
    BlockManager,
    BlockTable,
    Engine,
    OutOfBlocks,
    PagedBatch,
    PagedKVCache,
    Progress,
    common_prefix,
    run,
    slots,
)

close = dict(atol=1e-5, rtol=1e-4)


class Conservation(RuleBasedStateMachine):
    """Whatever is taken, shared and given back: every block is free once, or has exactly the owners that hold it."""

    def __init__(self):
        super().__init__()
        self.manager, self.held = BlockManager(7), []

    @rule(count=st.integers(0, 9))
    def take(self, count):
        free = len(self.manager.free)
        if count > free:
            with pytest.raises(OutOfBlocks, match=f"{count} blocks are needed, {free} of 7 are free"):
                self.manager.allocate(count)
        else:
            self.held.append(self.manager.allocate(count))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data):
        blocks = data.draw(st.sampled_from(self.held))
        self.manager.share(blocks)
        self.held.append(list(blocks))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data):
        self.manager.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule(block=st.integers(-2, 9))
    def give_back_what_nobody_holds(self, block):
        if not any(block in blocks for blocks in self.held):
            with pytest.raises(ValueError, match="no such owner"):
                self.manager.release([block])

    @invariant()
    def nothing_is_lost(self):
        holders = [sum(blocks.count(block) for blocks in self.held) for block in range(7)]
        assert self.manager.owners == holders
        assert sorted(self.manager.free) == [block for block in range(7) if not holders[block]]


TestConservation = Conservation.TestCase
TestConservation.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


@settings(max_examples=60, deadline=None)
@given(length=st.integers(0, 100), count=st.integers(0, 40), size=st.integers(1, 33))
def test_missing_blocks(length, count, size):
    have = -(-length // size)
    table = BlockTable(size, list(range(have)), length)
    assert 0 <= table.empty < size
    grown = have + table.missing(count)
    assert (grown - 1) * size < length + count <= grown * size or length + count == 0 == grown or grown == have


@settings(max_examples=40, deadline=None)
@given(blocks=st.permutations(range(6)), size=st.integers(1, 9))
def test_slots_are_the_loop(blocks, size):
    by_hand = [blocks[p // size] * size + p % size for p in range(6 * size)]
    assert slots(torch.tensor([blocks, blocks[::-1]]), size)[0].tolist() == by_hand
    assert sorted(by_hand) == list(range(6 * size))  # no two tokens in one slot


@pytest.mark.parametrize("size", [1, 16, 32])
@pytest.mark.parametrize("chunk", [None, 5])
def test_interleaved_texts_are_contiguous_ones(toy, ids, size, chunk):
    """Three texts of other lengths, prefilled in turn, then written together and apart, in scattered blocks."""
    cache, lengths = PagedKVCache(toy, 400 // size + 8, size), (3, 50, 17)
    texts = [ids[0, 100 * i : 100 * i + length + 12][None] for i, length in enumerate(lengths)]
    tables = [BlockTable(size) for _ in texts]
    for text, table, length in zip(texts, tables, lengths):
        logits = prefill(toy, text[:, :length], PagedBatch(cache, [table]), chunk)
        assert torch.allclose(logits, toy(text[:, :length])[:, -1], **close)
    for step in range(12):
        chosen = [i for i in range(3) if step % (i + 2)]  # texts pause in turn
        fed = [texts[i][:, tables[i].length, None] for i in chosen]
        if not chosen:
            continue
        logits = toy(torch.cat(fed), PagedBatch(cache, [tables[i] for i in chosen]))[:, -1]
        for i, row in zip(chosen, logits):
            assert torch.allclose(row, toy(texts[i][:, : tables[i].length])[0, -1], **close)
    for text, table in zip(texts, tables):
        alone = KVCache(toy, 1, 80)
        prefill(toy, text[:, : table.length], alone)
        rows = slots(torch.tensor([table.blocks]), size)[0, : table.length]
        for layer in range(3):
            for part, truth in enumerate(alone.read(layer, 0, table.length)):
                assert torch.allclose(cache.kv[layer, rows, part], truth[0], **close)
        assert table.empty < size
        cache.release(table)
    assert len(cache.manager.free) == len(cache.manager.owners)


def test_several_tokens_of_several_lengths_at_once(toy, ids):
    cache, tables = PagedKVCache(toy, 30, 4), [BlockTable(4), BlockTable(4)]
    for row, table, length in zip(ids, tables, (9, 2)):
        prefill(toy, row[None, :length], PagedBatch(cache, [table]))
    fed = torch.stack([ids[0, 9:14], ids[1, 2:7]])
    logits = toy(fed, PagedBatch(cache, tables))
    assert torch.allclose(logits[0], toy(ids[:1, :14])[0, -5:], **close)
    assert torch.allclose(logits[1], toy(ids[1:, :7])[0, -5:], **close)


def test_exhaustion_loses_nothing(toy, ids):
    cache, tables = PagedKVCache(toy, 5, 4), [BlockTable(4), BlockTable(4)]
    for row, table in zip(ids, tables):
        prefill(toy, row[None, :8], PagedBatch(cache, [table]))
    before = cache.kv.clone(), [list(t.blocks) for t in tables], list(cache.manager.owners)
    with pytest.raises(OutOfBlocks, match="2 blocks are needed, 1 of 5 are free"):
        toy(ids[:, 8:9], PagedBatch(cache, tables))
    assert torch.equal(cache.kv, before[0]) and [t.blocks for t in tables] == before[1]
    assert cache.manager.owners == before[2] and [t.length for t in tables] == [8, 8]
    one = toy(ids[:1, 8:9], PagedBatch(cache, tables[:1]))  # one of them still fits
    assert torch.allclose(one[0, -1], toy(ids[:1, :9])[0, -1], **close)


@settings(max_examples=15, deadline=None)
@given(fork_at=st.integers(0, 20), forks=st.integers(1, 4), size=st.sampled_from([1, 4, 16]), steps=st.integers(1, 6))
def test_forks_never_hear_each_other(toy, ids, fork_at, forks, size, steps):
    cache, first = PagedKVCache(toy, 200 // size, size), BlockTable(size)
    prefill(toy, ids[:1, :20], PagedBatch(cache, [first]))
    tables = [first, *(cache.fork(first, fork_at) for _ in range(forks))]
    written = [ids[0, : t.length].tolist() for t in tables]
    for step in range(steps):
        fed = torch.tensor([[(31 * row + step) % 500] for row in range(forks + 1)])
        needed, free = cache.needed(tables, 1), len(cache.manager.free)
        logits = toy(fed, PagedBatch(cache, tables))[:, -1]
        assert free - len(cache.manager.free) == needed  # what was foreseen was taken, no more
        for row, text in enumerate(written):
            text.append(int(fed[row]))
            assert torch.allclose(logits[row], toy(torch.tensor([text]))[0, -1], **close)
    for table in tables:
        cache.release(table)
    assert len(cache.manager.free) == len(cache.manager.owners)


# --- the engine --------------------------------------------------------------------------------------------------------


def alone(toy, prompt: list[int], count: int, sampling: Sampling) -> list[int]:
    return generate(toy, torch.tensor([prompt]), count, sampling)[0, len(prompt) :].tolist()


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    size=st.sampled_from([1, 4, 16]),
    room=st.integers(0, 30),
    most=st.integers(1, 5),
    share=st.booleans(),
    heat=st.sampled_from([0.0, 1.0]),
)
def test_whoever_else_is_served_every_text_is_its_own(toy, ids, lengths, size, room, most, share, heat):
    """Any pool in which the largest fits alone: preempted or not, shared or not, the tokens are those of `generate`."""
    num_blocks = -(-(max(lengths) + 8 + room) // size)
    engine = Engine(toy, num_blocks, size, max_running=most, share=share)
    prompts = [ids[i % 2, :length].tolist() for i, length in enumerate(lengths)]  # many begin alike
    asked = [engine.add(p, 8 - i % 3, Sampling(heat, seed=i)) for i, p in enumerate(prompts)]
    log: list[Progress] = []
    done = run(engine, log.append)
    assert sorted(map(id, done)) == sorted(map(id, asked)) and engine.finished == []
    for request in asked:
        assert request.output == alone(toy, request.prompt, request.max_new_tokens, request.sampling)
        assert request.status == "finished" and request.table.blocks == []
    assert len(engine.cache.manager.free) == num_blocks and max(p.running for p in log) <= most
    assert log[-1] == Progress(len(log), 0, 0, len(asked), sum(len(r.output) for r in asked), num_blocks)


def test_preemption_happens_and_resumes(toy, ids):
    engine = Engine(toy, 9, 4, share=False)
    asked = [engine.add(ids[0, 10 * i : 10 * i + 5].tolist(), 20, Sampling(1.0, seed=i)) for i in range(4)]
    run(engine)
    assert sum(request.preempted for request in asked) >= 2
    assert [r.output for r in asked] == [alone(toy, r.prompt, 20, r.sampling) for r in asked]


def test_sharing_saves_blocks(toy, ids):
    prompt, least = ids[0, :40].tolist(), {}
    for share in (False, True):
        engine, log = Engine(toy, 64, 4, share=share), []
        for seed in range(4):
            engine.add(prompt, 6, Sampling(1.0, seed=seed))
        run(engine, log.append)
        least[share] = min(p.free_blocks for p in log)
    assert least[True] >= least[False] + 2 * 9  # at least two of the four live on another's nine full blocks


def test_texts_may_join_between_steps(toy, ids):
    engine = Engine(toy, 64, 4)
    first = engine.add(ids[0, :5].tolist(), 10)
    for _ in range(3):
        engine.step()
    late = engine.add(ids[1, :9].tolist(), 4)
    run(engine)
    for request in (first, late):
        assert request.output == alone(toy, request.prompt, request.max_new_tokens, request.sampling)


def test_an_end_token_ends(toy, ids):
    prompt, sampling = ids[0, :6].tolist(), Sampling(1.0, seed=1)
    free = alone(toy, prompt, 9, sampling)
    end = next(place for place in range(2, 9) if free[place] not in free[:place])
    ends = type(toy)(type(toy.config)(**{**toy.config.__dict__, "eos_token_id": (free[end],)}))
    ends.load_state_dict(toy.state_dict())
    engine = Engine(ends, 16, 4)
    request = engine.add(prompt, 9, sampling)
    run(engine)
    assert request.output == free[: end + 1]


@pytest.mark.parametrize(
    ("prompt", "count", "message"),
    [
        ([], 3, "one or more ids"),
        ([500], 3, "0 … 499"),
        ([-1], 3, "0 … 499"),
        ([1], 0, "outside 1 … 63"),
        ([1] * 60, 5, "1 … 4"),
    ],
)
def test_bad_requests_are_refused(toy, prompt, count, message):
    engine = Engine(toy, 16, 4)
    with pytest.raises(ValueError, match=message):
        engine.add(prompt, count)
    assert not engine.waiting


def test_other_refusals(toy, ids):
    for attempt in (
        lambda: PagedKVCache(toy, 0),
        lambda: PagedKVCache(toy, 4, 0),
        lambda: Engine(toy, 4, max_running=0),
    ):
        with pytest.raises(ValueError, match="try"):
            attempt()
    cache = PagedKVCache(toy, 4)
    with pytest.raises(ValueError, match="2 texts for 1 tables"):
        toy(ids[:, :1], PagedBatch(cache, [BlockTable(16)]))
    with pytest.raises(ValueError, match="try 0"):
        cache.fork(BlockTable(16), 1)
    assert len(cache.manager.free) == 4


def test_the_last_token_is_never_shared(toy, ids):
    engine = Engine(toy, 16, 4)
    a, b = (engine.add(ids[0, :8].tolist(), 4) for _ in range(2))
    a.table = BlockTable(4, [0, 1], 8)
    assert common_prefix(b, a) == 7
