"""FLUX beyond the tests that all families share: what is made ahead, packing and places, what is refused."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_tiny import TINY, draw, save, their_model

from diffusion_engine import reference
from diffusion_engine.attention import Rope
from diffusion_engine.reference.flux import ConditionEmbedder, Flux, FluxConfig, flux_positions

NAMES = ("flux-dev", "flux-schnell")
TIMES = torch.tensor([1000.0, 640.5, 640.5, 3.25, 0.0])
SHAPE = (4, 10, 6)


@pytest.fixture(scope="module")
def networks(tmp_path_factory) -> dict:
    home = tmp_path_factory.mktemp("flux")
    return {name: reference.from_pretrained(save(TINY[name], home / name)) for name in NAMES}


def prompts(name: str, batch: int, tokens: int = 7, masked: bool = True) -> tuple:
    """text, text_mask, pooled, guidance; the last prompt ends in padding, every sample has its own scale."""
    rng = torch.Generator().manual_seed(3)
    mask = (torch.arange(tokens) < torch.tensor([[tokens]] * (batch - 1) + [[2]])) if masked else None
    guidance = torch.linspace(1.0, 7.0, batch) if name == "flux-dev" else None
    return draw(rng, batch, tokens, 32), mask, draw(rng, batch, 24), guidance


def latents(batch: int, shape: tuple = SHAPE) -> torch.Tensor:
    return draw(torch.Generator().manual_seed(4), batch, *shape)


def readers(network: Flux) -> list:
    """The layers that look at no latent, after ``text_in``."""
    made = [m for name, m in network.named_modules() if name.endswith("modulation.linear")]
    return [network.text_in, network.cond_in, network.final.modulation, *made]


# --- what no latent changes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_hoisted_is_forward_at_every_time(name, batch, masked, networks):
    network, words, x = networks[name], prompts(name, batch, masked=masked), latents(batch)
    ahead = network.hoist(SHAPE, TIMES, *words)
    for time, conditions in zip(TIMES, ahead, strict=True):
        assert torch.allclose(network.velocity(x, conditions), network(x, time.expand(batch), *words), atol=1e-5)
    assert all(a.text is ahead[0].text and a.positions is ahead[0].positions for a in ahead)
    assert isinstance(ahead[0].positions, Rope)


@pytest.mark.parametrize("name", NAMES)
def test_conditions_and_velocity_are_forward_to_the_bit(name, networks):
    network, words, x, t = networks[name], prompts(name, 2), latents(2), torch.tensor([987.6, 3.2])
    assert torch.equal(network.velocity(x, network.conditions(SHAPE, t, *words)), network(x, t, *words))


@settings(max_examples=10, deadline=None)
@given(h=st.integers(1, 9), w=st.integers(1, 9), tokens=st.integers(2, 9), t=st.floats(0, 1000, width=32))
def test_any_rectangle(networks, h, w, tokens, t):
    network, words = networks["flux-dev"], prompts("flux-dev", 2, tokens)
    shape, times = (4, 2 * h, 2 * w), torch.tensor([t])
    (conditions,) = network.hoist(shape, times, *words)
    x = latents(2, shape)
    assert torch.allclose(network.velocity(x, conditions), network(x, times.expand(2), *words), atol=1e-5)


def test_every_sample_hears_its_own_prompt_and_scale_alone(networks):
    network, words = networks["flux-dev"], prompts("flux-dev", 3)
    together = network.hoist(SHAPE, TIMES, *words)
    for i in range(3):
        for a, b in zip(together, network.hoist(SHAPE, TIMES, *(side[i : i + 1] for side in words))):
            assert torch.allclose(a.cond[0][1][0].gate[i], b.cond[0][1][0].gate[0], atol=1e-5)  # text of a joint block
            assert torch.allclose(a.cond[-2][0].shift[i], b.cond[-2][0].shift[0], atol=1e-5)  # the last parallel block
            assert torch.allclose(a.cond[-1][0][i], b.cond[-1][0][0], atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_one_product_a_layer_and_none_in_a_step(name, networks):
    network, words, rows = networks[name], prompts(name, 2), []
    hooks = [m.register_forward_hook(lambda m, args, out: rows.append(len(out))) for m in readers(network)]
    ahead = network.hoist(SHAPE, TIMES, *words)
    assert sorted(rows) == [2] + [10] * (len(rows) - 1) and len(rows) == len(readers(network))  # text_in: B alone
    rows.clear()
    network.velocity(latents(2), ahead[1])
    assert not rows
    network.conditions(SHAPE, TIMES[:2], *words)
    assert len(rows) == 2  # text and condition: knobs stay the blocks' own business
    for hook in hooks:
        hook.remove()


def test_half_precision_stays_half(networks, tmp_path):
    half = reference.from_pretrained(save(TINY["flux-dev"], tmp_path), dtype=torch.bfloat16)
    text, mask, pooled, scale = prompts("flux-dev", 2)
    words, x = (text.bfloat16(), mask, pooled.bfloat16(), scale), latents(2).bfloat16()
    for time, conditions in zip(TIMES, half.hoist(SHAPE, TIMES, *words)):
        found = half.velocity(x, conditions)
        assert found.dtype == conditions.text.dtype == conditions.cond[0][0][0].gate.dtype == torch.bfloat16
        exact = networks["flux-dev"](x.float(), time.expand(2), text, mask, pooled, scale)
        assert (found - exact).abs().mean() < 1.2 * (half(x, time.expand(2), *words) - exact).abs().mean() + 1e-3


# --- places ----------------------------------------------------------------------------------------------------------


@given(tokens=st.integers(0, 9), h=st.integers(1, 6), w=st.integers(1, 6))
def test_places(tokens, h, w):
    positions = flux_positions(tokens, (h, w))
    assert not positions[:tokens].any() and not positions[:, 0].any()
    assert positions[tokens:, 1:].tolist() == [[r, c] for r in range(h) for c in range(w)]


def test_positions_of_the_callers_choice(networks):
    """diffusers' pipelines bring their own: with another picture on the first axis, as Kontext has it, too."""
    theirs, ours = their_model(TINY["flux-dev"]), networks["flux-dev"]
    call = TINY["flux-dev"].calls(torch.Generator().manual_seed(1))[0]
    call["img_ids"] = call["img_ids"] + torch.tensor([1.0, 0.0, 2.5])
    with torch.no_grad():
        assert (ours.as_diffusers(**call) - theirs(**call).sample).abs().max() < 1e-5
        assert (
            ours.as_diffusers(**call | {"img_ids": call["img_ids"] - 1}) - ours.as_diffusers(**call)
        ).abs().max() > 1e-4


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "scale"), [("flux-dev", None), ("flux-schnell", torch.tensor([3.5]))])
def test_guidance_where_it_does_not_belong(name, scale, networks):
    network, words, t = networks[name], (*prompts(name, 1)[:3], scale), torch.tensor([5.0])
    calls = (lambda: network(latents(1), t, *words), lambda: network.hoist(SHAPE, t, *words))
    for call in (*calls, lambda: network.conditions(SHAPE, t, *words)):
        with pytest.raises(ValueError, match="wants a scale such as 3.5 per sample" if scale is None else "wants None"):
            call()


def test_guidance_and_time_have_ways_in_of_their_own():
    torch.manual_seed(0)
    embed, pooled, t = ConditionEmbedder(16, 8, guidance=True), torch.randn(2, 8), torch.tensor([900.0, 3.0])
    same = embed(t, pooled, t / 1000)
    embed.time_in, embed.guidance_in = embed.guidance_in, embed.time_in
    assert torch.allclose(embed(t, pooled, t / 1000), same, atol=1e-6)  # 1000 · w counts as t does
    assert not torch.allclose(embed(t, pooled, t.flip(0) / 1000), same, atol=0.01)


@pytest.mark.parametrize("shape", [(4, 7, 4), (4, 4, 5)])
def test_sizes_that_do_not_fit(shape, networks):
    network, words, t = networks["flux-schnell"], prompts("flux-schnell", 1), torch.tensor([5.0])
    for call in (lambda: network(latents(1, shape), t, *words), lambda: network.hoist(shape, t, *words)):
        with pytest.raises(ValueError, match="is not a multiple of patch 2; try"):
            call()


@pytest.mark.parametrize(
    ("entries", "needle"),
    [
        ({"axes_dims_rope": [4, 4, 6]}, "add up to a head's 16"),
        ({"patch_size": 2}, "expected 1 and 4"),
        ({"in_channels": 18}, "expected 1 and 4"),
        ({"guidance_embeds": False}, "guidance_embedder"),
        ({"pooled_projection_dim": 30}, "text_embedder"),
    ],
)
def test_configurations_that_are_not_built(entries, needle, tmp_path):
    config = save(TINY["flux-dev"], tmp_path) / "transformer" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | entries))
    with pytest.raises(ValueError, match=needle):
        reference.from_pretrained(tmp_path)


def test_the_released_one_is_the_default():
    assert FluxConfig().num_attention_heads * FluxConfig().attention_head_dim == 3072 and Flux.min_multiple == 2
