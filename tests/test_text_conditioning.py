"""Harder checks of chapter 07: tokenizer, text encoder, prompt embeddings and their cache."""

import hashlib
import os
import subprocess
import sys
import threading
import warnings
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from torch import nn

from diffusion_engine.text_conditioning import (
    PAD,
    START,
    EncoderBlock,
    PromptCache,
    PromptEmbeds,
    PromptTokenizer,
    TextEncoder,
    TextEncoderConfig,
    encode_prompt,
    size_in_bytes,
    stack_prompts,
    train_tokenizer,
)
from recipes.emoji_data import load_emoji

ROOT = Path(__file__).resolve().parents[1]
TEXTS = ["red apple", "green apple", "red heart", "红苹果", "青苹果", "smiling cat", "cat with a hat", "戴帽子的猫"]
SMALL = TextEncoderConfig(vocab_size=400, width=32, heads=4, depth=2)
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@pytest.fixture(scope="module")
def bpe():
    return train_tokenizer(TEXTS, 400)


@pytest.fixture(scope="module")
def tokenizer(bpe):
    return PromptTokenizer(bpe)


@pytest.fixture(scope="module")
def encoder():
    torch.manual_seed(0)
    return TextEncoder(SMALL).eval()


# --- tokenizer -----------------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(text=ANY_TEXT)
def test_any_text_survives_and_never_becomes_a_control_token(bpe, text):
    ids = bpe.encode(text).ids
    assert not {START, PAD} & set(ids)
    if "▁" not in text:  # the word marker itself reads as a space
        assert bpe.decode(ids) == bpe.normalizer.normalize_str(text)


@pytest.mark.parametrize("data", [bytes(range(256)), b"\xff\xfe", b"\x00", "é🍎𓀀".encode()])
def test_any_bytes_survive(bpe, data):
    text = data.decode("utf-8", "replace")
    assert bpe.decode(bpe.encode(text).ids) == bpe.normalizer.normalize_str(text)


@settings(max_examples=200, deadline=None)
@given(text=ANY_TEXT, window=st.integers(2, 24))
def test_what_is_kept_and_what_is_dropped(bpe, text, window):
    ids, mask, (dropped,) = PromptTokenizer(bpe, window)(text)
    everything = bpe.encode(text).ids
    kept = ids[0, 1:].tolist()
    assert ids[0, 0] == START and mask.all() and len(kept) < window
    assert kept == everything[: len(kept)]
    assert bool(dropped) == (len(kept) < len(everything))
    assert text.rstrip(" \t\r\n").endswith(dropped)


@pytest.mark.parametrize("window", range(2, 24))
def test_no_latin_word_is_halved_unless_it_exceeds_the_window(bpe, window):
    words = "a cat with a strawberry near watermelon slices".split()
    ids, _, (dropped,) = PromptTokenizer(bpe, window)(" ".join(words))
    kept = bpe.decode(ids[0, 1:].tolist())
    whole = [*kept.split(), *dropped.split()] == words
    assert whole or len(kept.split()) == 1 and kept + dropped == " ".join(words)


def test_labels_average_few_tokens_and_training_is_deterministic():
    records = load_emoji().records
    labels = [label for record in records for label in (record.label_en, record.label_zh)]
    tags = [tag for record in records for tag in record.tags_en + record.tags_zh]
    bpe = train_tokenizer(4 * labels + tags)
    assert bpe.get_vocab_size() == 4000
    lengths = [len(bpe.encode(label).ids) + 1 for label in labels]
    assert max(lengths) <= 24
    for language in (0, 1):
        assert sum(lengths[language::2]) / len(records) <= 6
    assert train_tokenizer(4 * labels + tags).to_str() == bpe.to_str()


def test_training_is_the_same_in_another_process(bpe):
    code = (
        "import hashlib; from diffusion_engine.text_conditioning import train_tokenizer; "
        f"print(hashlib.sha256(train_tokenizer({TEXTS!r}, 400).to_str().encode()).hexdigest())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7", "RAYON_NUM_THREADS": "3", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, env=environment
    )
    assert done.stdout.strip() == hashlib.sha256(bpe.to_str().encode()).hexdigest()


def test_saved_and_loaded_is_the_same(bpe, tokenizer, tmp_path):
    bpe.save(str(tmp_path / "tokenizer.json"))
    for path in (tmp_path / "tokenizer.json", str(tmp_path / "tokenizer.json")):
        again = PromptTokenizer(path)
        assert again.vocab_size == tokenizer.vocab_size
        assert torch.equal(again(TEXTS).ids, tokenizer(TEXTS).ids)


def test_case_width_and_spaces_do_not_matter(tokenizer):
    assert torch.equal(tokenizer("  Red\n ＡPPLE ").ids, tokenizer("red apple").ids)


@pytest.mark.parametrize("prompts", [None, 7, b"cat", [], ["cat", None], "\ud800cat", [["cat"]]])
def test_what_is_no_text_is_refused(tokenizer, prompts):
    with pytest.raises((ValueError, TypeError)):
        tokenizer(prompts)


def test_bad_tokenizers_are_refused(bpe, tmp_path):
    with pytest.raises(ValueError, match="max_length 1"):
        PromptTokenizer(bpe, 1)
    with pytest.raises(ValueError, match="<s> and <pad>"):
        PromptTokenizer(Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[])))
    with pytest.raises(FileNotFoundError):
        PromptTokenizer(tmp_path / "none.json")
    with pytest.raises(ValueError, match="vocab_size 260"):
        train_tokenizer(TEXTS, 260)
    with pytest.raises(ValueError, match="vocab_size 0"):
        train_tokenizer(TEXTS, 0)


# --- encoder -------------------------------------------------------------------------------------------------------------


def test_names_and_sizes_of_the_weights_are_fixed():
    config = TextEncoderConfig()
    encoder = TextEncoder(config)
    block = ["norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"]
    block += [f"attn.stream.{n}" for n in ("qkv.weight", "qkv.bias", "norm_q.weight", "norm_k.weight")]
    block += [f"{n}.{kind}" for n in ("attn.stream.out", "ff.0", "ff.2") for kind in ("weight", "bias")]
    expected = {"embedding.weight", "position.weight", "norm.weight", "norm.bias"}
    assert set(encoder.state_dict()) == expected | {f"blocks.{i}.{n}" for i in range(2) for n in block}
    d = config.width
    per_block = 4 * d + (3 * d + 1) * d + 2 * d + 2 * d // 8 + (d + 1) * d + 8 * d * d + 5 * d
    total = (4000 + 24) * d + 2 * d + 2 * per_block
    assert abs(sum(p.numel() for p in encoder.parameters()) - total) <= 4 * d


@settings(max_examples=25, deadline=None)
@given(prompts=st.lists(st.sampled_from([*TEXTS, "", "cat " * 30]), min_size=1, max_size=5))
def test_neighbours_never_change_a_prompt(encoder, tokenizer, prompts):
    with torch.no_grad():
        batch = encoder(*tokenizer(prompts)[:2])
        for i, prompt in enumerate(prompts):
            alone = encoder(*tokenizer(prompt)[:2])
            assert torch.allclose(batch.tokens[i][batch.mask[i]], alone.tokens[0], atol=1e-5)
            assert torch.allclose(batch.pooled[i], alone.pooled[0], atol=1e-5)


def test_the_ids_behind_the_mask_are_never_read(encoder, tokenizer):
    ids, mask, _ = tokenizer(["red apple", "cat with a hat and a cat with a hat"])
    other = torch.where(mask, ids, 300)
    a, b = encoder(ids, mask), encoder(other, mask)
    assert torch.allclose(a.pooled, b.pooled, atol=1e-5)
    assert torch.allclose(a.tokens[mask], b.tokens[mask], atol=1e-5)


def test_every_token_reaches_the_pooled_vector(encoder, tokenizer):
    ids, mask, _ = tokenizer("cat with a hat")
    first = encoder(ids, mask).pooled
    for place in range(1, ids.shape[1]):
        other = ids.clone()
        other[0, place] = 300
        assert (encoder(other, mask).pooled - first).abs().max() > 1e-3


def test_two_blocks_equal_pytorch_and_clip():
    from transformers import CLIPTextConfig
    from transformers.models.clip.modeling_clip import CLIPEncoderLayer

    torch.manual_seed(1)
    ours = nn.ModuleList(EncoderBlock(32, 4, qk_norm=False) for _ in range(2))
    layer = nn.TransformerEncoderLayer(32, 4, 128, 0.0, nn.GELU("tanh"), batch_first=True, norm_first=True)
    theirs = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    config = CLIPTextConfig(
        hidden_size=32,
        intermediate_size=128,
        num_attention_heads=4,
        hidden_act="gelu_pytorch_tanh",
        layer_norm_eps=1e-5,
    )
    config._attn_implementation = "sdpa"
    clip = nn.ModuleList(CLIPEncoderLayer(config) for _ in range(2)).eval()
    for a, b, c in zip(ours, theirs.layers, clip):
        weights = list(a.state_dict().values())
        b.load_state_dict(dict(zip(b.state_dict(), weights[4:] + weights[:4])))
        q, k, v = (part.state_dict() for part in _split_qkv(a.attn.stream.qkv))
        for part, state in (("q_proj", q), ("k_proj", k), ("v_proj", v), ("out_proj", a.attn.stream.out.state_dict())):
            getattr(c.self_attn, part).load_state_dict(state)
        for part, source in (
            (c.mlp.fc1, a.ff[0]),
            (c.mlp.fc2, a.ff[2]),
            (c.layer_norm1, a.norm1),
            (c.layer_norm2, a.norm2),
        ):
            part.load_state_dict(source.state_dict())
    x, mask = torch.randn(2, 7, 32), torch.tensor([[True] * 7, [True] * 3 + [False] * 4])
    y, z = x, x
    for a, c in zip(ours, clip):
        y = a(y, mask[:, None, None])
        z = c(z, mask[:, None, None].expand(2, 1, 7, 7))
        z = z[0] if isinstance(z, tuple) else z
    assert torch.allclose(y[mask], theirs(x, src_key_padding_mask=~mask)[mask], atol=1e-5)
    assert torch.allclose(y[mask], z[mask], atol=1e-5)


def _split_qkv(qkv):
    """The fused projection as three linear layers."""
    parts = []
    for weight, bias in zip(qkv.weight.chunk(3), qkv.bias.chunk(3)):
        linear = nn.Linear(weight.shape[1], weight.shape[0])
        linear.load_state_dict({"weight": weight, "bias": bias})
        parts.append(linear)
    return parts


def test_too_many_ids_are_refused(encoder):
    ids = torch.full((1, 25), 5)
    with pytest.raises(ValueError, match="25 ids .* 24"):
        encoder(ids, torch.ones_like(ids, dtype=torch.bool))


# --- one prompt, many prompts --------------------------------------------------------------------------------------------


def test_encode_prompt_keeps_no_graph_and_warns_at_the_caller(encoder, tokenizer):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        embeds = encode_prompt(encoder, tokenizer, "red apple")
    assert not embeds.tokens.requires_grad and not embeds.pooled.requires_grad
    with pytest.warns(UserWarning, match=r"longer than 24 tokens; dropped: '.*zebra'") as heard:
        encode_prompt(encoder, tokenizer, "cat " * 40 + "zebra")
    assert heard[0].filename == __file__


def test_stacking_keeps_bits_order_and_batches(encoder, tokenizer):
    alone = [encode_prompt(encoder, tokenizer, p) for p in ("", "red apple", "cat with a hat", "红苹果")]
    batch = stack_prompts(alone)
    assert batch.tokens.shape[:2] == batch.mask.shape
    for i, one in enumerate(alone):
        m = one.tokens.shape[1]
        assert torch.equal(batch.tokens[i, :m], one.tokens[0]) and not batch.tokens[i, m:].any()
        assert batch.mask[i].tolist() == [True] * m + [False] * (batch.mask.shape[1] - m)
    again = stack_prompts([stack_prompts(alone[:2]), stack_prompts(alone[2:])])
    assert all(torch.equal(a, b) for a, b in zip(batch, again))


def test_stacking_refuses_nothing_and_strangers():
    one = PromptEmbeds(torch.zeros(1, 2, 8), torch.ones(1, 2, dtype=torch.bool), torch.zeros(1, 8))
    other = PromptEmbeds(torch.zeros(1, 2, 4), torch.ones(1, 2, dtype=torch.bool), torch.zeros(1, 4))
    for prompts in ([], [one, other]):
        with pytest.raises(ValueError, match="widths"):
            stack_prompts(prompts)


# --- cache ---------------------------------------------------------------------------------------------------------------


def entry(value: float, tokens: int = 4) -> PromptEmbeds:
    return PromptEmbeds(
        torch.full((1, tokens, 8), value), torch.ones(1, tokens, dtype=torch.bool), torch.full((1, 8), value)
    )


@settings(max_examples=100, deadline=None)
@given(requests=st.lists(st.integers(0, 6), max_size=40), room=st.integers(0, 800))
def test_the_cache_behaves_like_a_plain_list_of_recent_uses(requests, room):
    cache, model, used = PromptCache(room), OrderedDict(), 0
    for key in requests:
        made = entry(float(key), 1 + key)
        calls = []
        got = cache.get(key, lambda made=made, calls=calls: calls.append(1) or made)
        assert all(torch.equal(a, b) for a, b in zip(got, made))
        assert len(calls) == (key not in model)
        if key in model:
            model.move_to_end(key)
        elif size_in_bytes(made) <= room:
            model[key] = size_in_bytes(made)
            used += model[key]
            while used > room:
                used -= model.popitem(last=False)[1]
        assert (cache.bytes, len(cache)) == (used, len(model)) and used <= room
    assert cache.hits + cache.misses == len(requests)


def test_nobody_can_spoil_an_entry():
    cache, made = PromptCache(), entry(1.0)
    first = cache.get("a", lambda: made)
    for spoil in (made, first, cache.get("a", lambda: made)):
        for tensor in spoil:
            tensor.zero_()
    assert all(torch.equal(a, b) for a, b in zip(cache.get("a", lambda: made), entry(1.0)))


def test_an_entry_keeps_no_graph_alive():
    weight = torch.ones(1, requires_grad=True)
    made = PromptEmbeds(*(t * weight if t.is_floating_point() else t for t in entry(1.0)))
    assert not any(t.requires_grad for t in PromptCache().get("a", lambda: made))


def test_a_failed_encoding_leaves_the_cache_usable():
    cache = PromptCache()
    with pytest.raises(ZeroDivisionError):
        cache.get("a", lambda: 1 / 0)
    assert (len(cache), cache.bytes, cache.misses) == (0, 0, 0)
    assert torch.equal(cache.get("a", lambda: entry(2.0)).pooled, entry(2.0).pooled)


def test_what_is_too_large_passes_through_and_drives_nobody_out():
    cache = PromptCache(size_in_bytes(entry(0.0)))
    cache.get("small", lambda: entry(1.0))
    assert torch.equal(cache.get("large", lambda: entry(2.0, 50)).pooled, entry(2.0).pooled)
    assert len(cache) == 1
    cache.get("small", lambda: pytest.fail("small was driven out"))


def test_many_threads_encode_once():
    cache, calls, results, gate = PromptCache(), [], [], threading.Barrier(8)

    def encode():
        calls.append(1)
        return entry(3.0)

    def work():
        gate.wait()
        for _ in range(20):
            results.append(cache.get("a", encode))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1 and len(results) == 160 and (cache.hits, cache.misses) == (159, 1)
    assert len({r.tokens.data_ptr() for r in results}) == 160


def test_a_negative_bound_is_refused():
    with pytest.raises(ValueError, match="max_bytes -1"):
        PromptCache(-1)
