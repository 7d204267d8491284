"""Appendix A2 pressed harder: any cutting of a text, refusals that leave no trace, sampling against transformers'."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator

from minivllm.kv_cache import KVCache, KVStore, Sampling, filtered, generate, offset_mask, prefill, sample
from minivllm.qwen3 import Qwen3
from minivllm.shipped import ASSETS

close = dict(atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("length", [1, 8, 64, 512])
def test_prefill_and_decode_are_full_recompute(toy, ids, length):
    cache = KVCache(toy, 2, length + 4)
    found = [prefill(toy, ids[:, :length], cache)]
    found += [toy(ids[:, place : place + 1], cache)[:, -1] for place in range(length, length + 3)]
    whole = toy(ids[:, : length + 3])[:, length - 1 :]
    assert torch.allclose(torch.stack(found, dim=1), whole, **close)
    assert cache.length == length + 3


@settings(max_examples=25, deadline=None)
@given(cuts=st.lists(st.integers(1, 30), min_size=1, max_size=6))
def test_any_cutting_gives_the_same_logits(toy, ids, cuts):
    cache, start, found = KVCache(toy, 2, sum(cuts)), 0, []
    for cut in cuts:
        found.append(toy(ids[:, start : start + cut], cache))
        start += cut
    assert torch.allclose(torch.cat(found, dim=1), toy(ids[:, :start]), **close)


@settings(max_examples=25, deadline=None)
@given(start=st.integers(0, 20), count=st.integers(1, 20))
def test_the_mask_is_the_bottom_of_a_triangle(start, count):
    triangle = torch.ones(start + count, start + count, dtype=torch.bool).tril()
    assert offset_mask(start, count).equal(triangle[start:])


def test_texts_of_a_batch_do_not_hear_each_other(toy, ids):
    both, alone = KVCache(toy, 2, 40), KVCache(toy, 1, 40)
    assert torch.allclose(prefill(toy, ids[:, :40], both)[1], prefill(toy, ids[1:, :40], alone)[0], **close)


def test_memory_is_allocated_once(toy, ids):
    cache = KVCache(toy, 2, 64)
    before = cache.k.data_ptr(), cache.v.data_ptr()
    prefill(toy, ids[:, :30], cache, chunk=7)
    cache.reset()
    prefill(toy, ids[:, 30:94], cache)
    assert (cache.k.data_ptr(), cache.v.data_ptr()) == before
    assert cache.nbytes == 2 * 3 * 2 * 64 * 2 * 16 * 4
    assert KVCache(Qwen3(toy.config).bfloat16(), 2, 64).k.dtype == torch.bfloat16


# --- what is refused ---------------------------------------------------------------------------------------------------


@pytest.fixture
def filled(toy, ids):
    cache = KVCache(toy, 2, 12)
    prefill(toy, ids[:, :10], cache)
    return cache


@pytest.mark.parametrize(
    ("layer", "start", "stop", "message"),
    [
        (0, 5, 11, "0 … 10"),
        (0, 10, 11, "0 … 10"),
        (0, -1, 5, "tokens -1 … 5"),
        (0, -5, -1, "tokens -5"),
        (0, 4, 4, "one or more"),
        (0, 6, 4, "one or more"),
        (3, 0, 5, "try 2"),
        (-1, 0, 5, "try 0"),
    ],
)
def test_bad_reads_are_refused(filled, layer, start, stop, message):
    before = filled.k.clone(), filled.v.clone()
    with pytest.raises(ValueError, match=message):
        filled.read(layer, start, stop)
    assert torch.equal(filled.k, before[0]) and torch.equal(filled.v, before[1]) and filled.length == 10


@pytest.mark.parametrize(("rows", "count", "message"), [(1, 1, "1 texts for a cache of 2"), (2, 3, "2 more would fit")])
def test_a_refused_step_leaves_no_trace(toy, ids, filled, rows, count, message):
    before = filled.k.clone(), filled.v.clone()
    with pytest.raises(ValueError, match=message):
        toy(ids[:rows, :count], filled)
    assert torch.equal(filled.k, before[0]) and torch.equal(filled.v, before[1]) and filled.length == 10
    assert torch.allclose(toy(ids[:, 10:12], filled), toy(ids[:, :12])[:, 10:], **close)  # and the cache still works


def test_a_step_that_fails_half_way_does_not_count(toy, ids, filled):
    class Broken(RuntimeError):
        pass

    def fail(*_):
        raise Broken

    hook = toy.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(Broken):
        toy(ids[:, 300:301], filled)
    hook.remove()
    assert filled.length == 10
    assert torch.allclose(toy(ids[:, 10:11], filled), toy(ids[:, :11])[:, 10:], **close)


def test_resets(toy, filled):
    filled.reset()
    for cache in (filled, KVStore(toy, 1, 4)):
        with pytest.raises(ValueError, match="empty"):
            cache.reset()


@pytest.mark.parametrize(
    ("batch", "capacity", "advice"), [(0, 4, "try 1"), (1, 0, "try 1"), (1, 1025, "try 1024"), (1, -3, "try 1")]
)
def test_bad_sizes_are_refused(toy, batch, capacity, advice):
    with pytest.raises(ValueError, match=advice):
        KVCache(toy, batch, capacity)


def test_other_bad_numbers(toy, ids):
    with pytest.raises(ValueError, match="chunk 0"):
        prefill(toy, ids, KVCache(toy, 2, 520), 0)
    with pytest.raises(ValueError, match="max_new_tokens 0"):
        generate(toy, ids, 0)
    for bad in (
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0},
        {"top_p": 1.1},
        {"seed": -1},
    ):
        with pytest.raises(ValueError, match="try"):
            Sampling(**bad)


# --- sampling ----------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    tau=st.floats(0.1, 5),
    top_k=st.integers(0, 60),
    top_p=st.floats(0.01, 1),
    seed=st.integers(0, 99),
    spread=st.floats(0.1, 9),
)
def test_logits_are_transformers(tau, top_k, top_p, seed, spread):
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    scores = spread * torch.randn(4, 50, generator=Generator().manual_seed(seed))
    theirs = TemperatureLogitsWarper(tau)(None, scores)
    theirs = TopKLogitsWarper(min(top_k, 50))(None, theirs) if top_k else theirs
    theirs = TopPLogitsWarper(top_p)(None, theirs) if top_p < 1 else theirs
    ours = filtered(scores, Sampling(tau, top_k, top_p))
    kept = ours.isfinite()
    assert (kept == theirs.isfinite()).float().mean() > 0.99  # a sum may round the other way at p itself
    assert torch.allclose(ours[kept & theirs.isfinite()], theirs[kept & theirs.isfinite()])
    assert kept.any(dim=-1).all() and kept.gather(1, scores.argmax(dim=-1, keepdim=True)).all()


def test_draws_follow_the_filtered_distribution():
    logits, sampling = torch.tensor([2.0, 1.0, 0.5, -1.0, 1.5]), Sampling(0.8, top_k=4, top_p=0.9)
    p, generator = filtered(logits, sampling).softmax(dim=-1), Generator().manual_seed(1)
    drawn = sample(logits.expand(4000, 5), [sampling] * 4000, [generator] * 4000).bincount(minlength=5) / 4000
    assert (drawn - p).abs().max() < 4 * (0.25 / 4000) ** 0.5
    assert drawn[p == 0].sum() == 0


def test_rows_draw_from_their_own_generator():
    logits = torch.randn(3, 40, generator=Generator().manual_seed(0))
    settings = [Sampling(1.0), Sampling(), Sampling(1.5, top_k=10)]
    seeds = lambda order: [Generator().manual_seed(i) for i in order]  # noqa: E731
    whole = sample(logits, settings, seeds((5, 6, 7)))
    for row in range(3):
        assert sample(logits[row : row + 1], settings[row : row + 1], seeds((5 + row,)))[0] == whole[row]
    before = torch.get_rng_state()
    sample(logits, settings, seeds((5, 6, 7)))
    assert torch.equal(torch.get_rng_state(), before)  # nobody else's random numbers moved


# --- writing -----------------------------------------------------------------------------------------------------------


def test_greedy_tokens_are_transformers():
    from tokenizers import Tokenizer
    from transformers import Qwen3ForCausalLM

    ours, theirs = Qwen3.from_pretrained(ASSETS), Qwen3ForCausalLM.from_pretrained(ASSETS, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(ASSETS / "tokenizer.json"))
    for text in ("red", "火箭", "flag:", "smiling face with", ""):
        ids = torch.tensor([tokenizer.encode(text).ids])
        mask = torch.ones_like(ids)
        expected = theirs.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False, pad_token_id=0)
        assert generate(ours, ids, 24).equal(expected)


def test_a_cache_of_ones_own_may_be_handed_in(toy, ids):
    cache = KVCache(toy, 2, 40)
    assert generate(toy, ids[:, :20], 10, cache=cache).equal(generate(toy, ids[:, :20], 10))
    assert cache.length == 29  # the last token was never fed
    with pytest.raises(ValueError, match="exceed the capacity"):
        generate(toy, ids[:, :20], 10, cache=cache)
    assert cache.length == 29


def test_the_last_place_of_the_model_can_be_written(toy, ids):
    long = torch.cat([ids, ids[:, :500]], dim=1)
    assert generate(toy, long, 4).shape[1] == 1024
    with pytest.raises(ValueError, match="try 1024"):
        generate(toy, long, 5)
