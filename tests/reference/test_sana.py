"""Sana beyond the tests that all families share: what is made ahead, linear attention, places, what is refused."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_tiny import TINY, draw, save

from diffusion_engine import reference
from diffusion_engine.reference.sana import ConvFeedForward, Sana, SanaConfig, linear_attention

NAMES = ("sana", "sana-sprint")
TIMES = torch.tensor([1000.0, 640.5, 640.5, 3.25, 0.0])
SHAPE = (4, 5, 3)


@pytest.fixture(scope="module")
def networks(tmp_path_factory) -> dict:
    home = tmp_path_factory.mktemp("sana")
    return {name: reference.from_pretrained(save(TINY[name], home / name)) for name in NAMES}


def prompts(name: str, batch: int, tokens: int = 7, masked: bool = True) -> tuple:
    """text, text_mask, no pooled, guidance; the last prompt ends in padding, every sample has its own scale."""
    mask = (torch.arange(tokens) < torch.tensor([[tokens]] * (batch - 1) + [[2]])) if masked else None
    guidance = torch.linspace(0.1, 0.7, batch) if name == "sana-sprint" else None
    return draw(torch.Generator().manual_seed(3), batch, tokens, 24), mask, None, guidance


def latents(batch: int, shape: tuple = SHAPE) -> torch.Tensor:
    return draw(torch.Generator().manual_seed(4), batch, *shape)


# --- what no latent changes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_hoisted_is_forward_at_every_time(name, batch, masked, networks):
    network, words, x = networks[name], prompts(name, batch, masked=masked), latents(batch)
    ahead = network.hoist(SHAPE, TIMES, *words)
    for time, conditions in zip(TIMES, ahead, strict=True):
        assert torch.allclose(network.velocity(x, conditions), network(x, time.expand(batch), *words), atol=1e-5)
    assert all(a.text is ahead[0].text for a in ahead) and ahead[0].positions is None
    assert (ahead[-1].text_mask is None) == (not masked)


@pytest.mark.parametrize("name", NAMES)
def test_conditions_and_velocity_are_forward_to_the_bit(name, networks):
    network, words, x, t = networks[name], prompts(name, 2), latents(2), torch.tensor([987.6, 3.2])
    plain = network.conditions(SHAPE, t, *words)
    assert torch.equal(network.velocity(x, plain), network(x, t, *words))
    assert all(text is plain.text[0] for text in plain.text)  # keys are made block by block


@settings(max_examples=10, deadline=None)
@given(h=st.integers(1, 9), w=st.integers(1, 9), tokens=st.integers(2, 9), t=st.floats(0, 1000, width=32))
def test_any_rectangle(networks, h, w, tokens, t):
    network, words = networks["sana-sprint"], prompts("sana-sprint", 2, tokens)
    shape, times = (4, h, w), torch.tensor([t])
    (conditions,) = network.hoist(shape, times, *words)
    x = latents(2, shape)
    assert torch.allclose(network.velocity(x, conditions), network(x, times.expand(2), *words), atol=1e-5)


def test_one_product_a_layer_and_none_in_a_step(networks):
    network, words, rows = networks["sana-sprint"], prompts("sana-sprint", 2), []
    once = [network.text_in, network.text_norm, *(m for b in network.blocks for m in (b.cross.kv, b.cross.norm_k))]
    every = [network.time_in, network.guidance_in, network.knobs]
    hooks = [m.register_forward_hook(lambda m, args, out: rows.append(len(out))) for m in once + every]
    ahead = network.hoist(SHAPE, TIMES, *words)
    assert sorted(rows) == [2] * len(once) + [10] * len(every)  # the text of B prompts, the condition of S · B
    rows.clear()
    network.velocity(latents(2), ahead[1])
    assert not rows
    network.conditions(SHAPE, TIMES[:2], *words)
    assert len(rows) == 2 + len(every)  # no keys
    for hook in hooks:
        hook.remove()


def test_the_shape_is_not_looked_at(networks):
    network, words = networks["sana"], prompts("sana", 2)
    x = latents(2, (4, 2, 9))
    (conditions,) = network.hoist(SHAPE, TIMES[1:2], *words)
    assert torch.allclose(network.velocity(x, conditions), network(x, TIMES[1].expand(2), *words), atol=1e-5)


def test_half_precision_stays_half(networks, tmp_path):
    half = reference.from_pretrained(save(TINY["sana-sprint"], tmp_path), dtype=torch.bfloat16)
    text, mask, _, scale = prompts("sana-sprint", 2)
    words, x = (text.bfloat16(), mask, None, scale), latents(2).bfloat16()
    for time, conditions in zip(TIMES, half.hoist(SHAPE, TIMES, *words)):
        found, (keys, values) = half.velocity(x, conditions), conditions.text[1]
        assert found.dtype == keys.dtype == values.dtype == conditions.cond[0][1].gate.dtype == torch.bfloat16
        exact = networks["sana-sprint"](x.float(), time.expand(2), text, mask, None, scale)
        assert (found - exact).abs().mean() < 1.2 * (half(x, time.expand(2), *words) - exact).abs().mean() + 1e-3


# --- linear attention and the convolution ----------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(n=st.integers(1, 30), dim=st.integers(1, 12), heads=st.integers(1, 3), seed=st.integers(0, 9))
def test_linear_attention_is_the_table_of_all_pairs(n, dim, heads, seed):
    q, k, v = draw(torch.Generator().manual_seed(seed), 3, 2, heads, n, dim).double().unbind()
    weights = q.relu() @ k.relu().mT
    total = weights.sum(-1, keepdim=True)
    expected = weights @ v / total.where(total > 0, torch.ones(()))
    sure = (total > 1e-3) | (total == 0)  # a sum next to zero is all rounding
    assert torch.allclose(linear_attention(q, k, v) * sure, (expected * sure).float(), atol=1e-4)
    assert linear_attention(q.half(), k.half(), v.half()).dtype == torch.float32


def test_large_sums_do_not_overflow():
    huge = torch.full((1, 1, 500, 8), 60_000.0, dtype=torch.float16)
    assert torch.allclose(linear_attention(huge, huge, huge), huge.float(), rtol=1e-5)


def test_the_grid_is_rows_then_columns():
    torch.manual_seed(0)
    ff, x = ConvFeedForward(6, 2.5).requires_grad_(False), torch.randn(2, 15, 6)
    turned = x.unflatten(1, (3, 5)).transpose(1, 2).flatten(1, 2)
    assert not torch.allclose(ff(x, (3, 5)), ff(x, (5, 3)), atol=1e-3)
    ff.depthwise.weight.copy_(ff.depthwise.weight + ff.depthwise.weight.mT)  # a kernel that rows and columns share
    assert torch.allclose(
        ff(turned, (5, 3)), ff(x, (3, 5)).unflatten(1, (3, 5)).transpose(1, 2).flatten(1, 2), atol=1e-5
    )


def test_the_convolution_spares_what_it_was_given():
    """SiLU works in place where no gradient needs the input; the caller's tokens stay."""
    ff, x = ConvFeedForward(6, 2.5), torch.randn(1, 4, 6)
    kept = x.clone()
    with torch.no_grad():
        quiet = ff(x, (2, 2))
    loud = ff(x.requires_grad_(), (2, 2))
    assert torch.equal(x, kept) and torch.allclose(quiet, loud, atol=1e-6)
    loud.sum().backward()
    assert x.grad.abs().sum() > 0


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entries", "needle"),
    [
        ({"interpolation_scale": 2}, "interpolation_scale 2 is not built here; try None"),
        ({"norm_elementwise_affine": True}, "norm_elementwise_affine True is not built here; try False"),
        ({"norm_eps": 1e-5}, "norm_eps 1e-05 is not built here; try 1e-06"),
        ({"qk_norm": "rms_norm"}, "try 'rms_norm_across_heads' or None"),
        ({"guidance_embeds": True}, "time_embed.timestep_embedder"),
        ({"patch_size": 2}, "patch_embed.proj.weight"),
    ],
)
def test_configurations_that_are_not_built(entries, needle, tmp_path):
    config = save(TINY["sana"], tmp_path) / "transformer" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | entries))
    with pytest.raises(ValueError, match=needle):
        reference.from_pretrained(tmp_path)


def test_patches_larger_than_one():
    torch.manual_seed(0)
    sizes = dict(num_attention_heads=2, attention_head_dim=8, num_cross_attention_heads=2, cross_attention_head_dim=8)
    sizes |= dict(in_channels=4, out_channels=4, cross_attention_dim=16, caption_channels=24, num_layers=1)
    network = Sana(SanaConfig(**sizes, patch_size=2)).requires_grad_(False)
    words, t = prompts("sana", 2), torch.tensor([700.0])
    x, (conditions,) = latents(2, (4, 6, 4)), network.hoist((4, 6, 4), t, *words)
    assert torch.allclose(network.velocity(x, conditions), network(x, t.expand(2), *words), atol=1e-5)
    assert network.min_multiple == 2
    with pytest.raises(ValueError, match="latent height 5 is not a multiple of patch 2; try 4 or 6"):
        network(latents(1, (4, 5, 4)), t, *prompts("sana", 1))
