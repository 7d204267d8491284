"""SD3 beyond the tests that all families share: what is made ahead, the table of positions, what is refused."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_tiny import TINY, draw, save

from diffusion_engine import reference
from diffusion_engine.memory_manager import LiveBytes
from diffusion_engine.reference.sd3 import SD3Config, middle_of

NAMES = [name for name, tiny in TINY.items() if tiny.module == "sd3"]
TIMES = torch.tensor([1000.0, 640.5, 640.5, 3.25, 0.0])
SHAPE = (4, 10, 6)


@pytest.fixture(scope="module")
def networks(tmp_path_factory) -> dict:
    home = tmp_path_factory.mktemp("sd3")
    return {name: reference.from_pretrained(save(TINY[name], home / name)) for name in NAMES}


def prompts(batch: int, tokens: int = 7, masked: bool = True) -> tuple:
    """text, text_mask, pooled; the last prompt ends in padding."""
    rng = torch.Generator().manual_seed(3)
    mask = (torch.arange(tokens) < torch.tensor([[tokens]] * (batch - 1) + [[2]])) if masked else None
    return draw(rng, batch, tokens, 32), mask, draw(rng, batch, 24)


def latents(batch: int, shape: tuple = SHAPE) -> torch.Tensor:
    return draw(torch.Generator().manual_seed(4), batch, *shape)


def readers(network) -> list:
    """The modules that look at no latent."""
    made = [m for name, m in network.named_modules() if name.endswith("modulation.linear")]
    return [*made, network.final.modulation, network.time_in, network.pooled_in, network.text_in]


# --- what no latent changes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_hoisted_is_forward_at_every_time(name, batch, masked, networks):
    network, words, x = networks[name], prompts(batch, masked=masked), latents(batch)
    ahead = network.hoist(SHAPE, TIMES, *words)
    for time, conditions in zip(TIMES, ahead, strict=True):
        assert torch.allclose(network.velocity(x, conditions), network(x, time.expand(batch), *words), atol=1e-5)
    assert all(a.text is ahead[0].text and a.positions is ahead[0].positions for a in ahead)


@pytest.mark.parametrize("name", NAMES)
def test_conditions_and_velocity_are_forward_to_the_bit(name, networks):
    network, words, x, t = networks[name], prompts(2), latents(2), torch.tensor([987.6, 3.2])
    assert torch.equal(network.velocity(x, network.conditions(SHAPE, t, *words)), network(x, t, *words))


@settings(max_examples=10, deadline=None)
@given(h=st.integers(1, 12), w=st.integers(1, 12), tokens=st.integers(2, 9), t=st.floats(0, 1000, width=32))
def test_any_rectangle(networks, h, w, tokens, t):
    network, words, shape, times = networks["sd3.5-medium"], prompts(2, tokens), (4, 2 * h, 2 * w), torch.tensor([t])
    (conditions,) = network.hoist(shape, times, *words)
    x = latents(2, shape)
    assert torch.allclose(network.velocity(x, conditions), network(x, times.expand(2), *words), atol=1e-5)


def test_every_sample_hears_its_own_prompt_alone(networks):
    """Prompts of one forward, hoisted together or each by itself: the same knobs."""
    network, (text, mask, pooled) = networks["sd3.5-medium"], prompts(3)
    together = network.hoist(SHAPE, TIMES, text, mask, pooled)
    for i in range(3):
        alone = network.hoist(SHAPE, TIMES, *(side[i : i + 1] for side in (text, mask, pooled)))
        for a, b in zip(together, alone):
            assert torch.allclose(a.cond[0][0][2].gate[i], b.cond[0][0][2].gate[0], atol=1e-5)
            assert torch.allclose(a.cond[-1][1][i], b.cond[-1][1][0], atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_one_product_a_layer_and_none_in_a_step(name, networks):
    network, words, rows = networks[name], prompts(2), []
    hooks = [m.register_forward_hook(lambda m, args, out: rows.append(len(out))) for m in readers(network)]
    ahead = network.hoist(SHAPE, TIMES, *words)
    assert sorted(rows) == [2] + [10] * (len(rows) - 1) and len(rows) == len(readers(network))  # text_in: B alone
    rows.clear()
    network.velocity(latents(2), ahead[1])
    assert not rows
    network.conditions(SHAPE, TIMES[:2], *words)
    assert len(rows) == 3  # time, pooled, text: knobs stay the blocks' own business
    for hook in hooks:
        hook.remove()


def test_knobs_cost_what_they_hold(networks):
    network, words = networks["sd3"], prompts(2, masked=False)
    with LiveBytes() as live:
        ahead = network.hoist(SHAPE, TIMES, *words)
    knobs = 4 * 2 * len(ahead) * sum(m.out_features for m in readers(network) if isinstance(m, torch.nn.Linear))
    assert knobs < live.now < 1.3 * knobs


def test_half_precision_stays_half(networks, tmp_path):
    half = reference.from_pretrained(save(TINY["sd3.5-medium"], tmp_path), dtype=torch.bfloat16)
    text, mask, pooled = prompts(2)
    words, x = (text.bfloat16(), mask, pooled.bfloat16()), latents(2).bfloat16()
    for time, conditions in zip(TIMES, half.hoist(SHAPE, TIMES, *words)):
        found = half.velocity(x, conditions)
        assert found.dtype == conditions.text.dtype == conditions.cond[0][0][0].gate.dtype == torch.bfloat16
        exact = networks["sd3.5-medium"](x.float(), time.expand(2), text, mask, pooled)
        assert (found - exact).abs().mean() < 1.2 * (half(x, time.expand(2), *words) - exact).abs().mean() + 1e-3


# --- positions and refusals ------------------------------------------------------------------------------------------


@given(size=st.integers(1, 9), data=st.data())
def test_the_middle_keeps_its_centre(size, data):
    table = torch.arange(size * size).reshape(1, -1, 1)
    h, w = data.draw(st.integers(1, size)), data.draw(st.integers(1, size))
    square = middle_of(table, (h, w)).reshape(h, w)
    top, left = divmod(square[0, 0].item(), size)
    assert (top, left) == ((size - h) // 2, (size - w) // 2)
    assert torch.equal(square, table.reshape(size, size)[top : top + h, left : left + w])


@pytest.mark.parametrize(
    ("shape", "needle"), [((4, 26, 4), "larger than the table of 12×12; try 12"), ((4, 7, 4), "height 7.*try 6 or 8")]
)
def test_sizes_that_do_not_fit(shape, needle, networks):
    network, words, t = networks["sd3"], prompts(1), torch.tensor([5.0])
    for call in (lambda: network(latents(1, shape), t, *words), lambda: network.hoist(shape, t, *words)):
        with pytest.raises(ValueError, match=needle):
            call()


@pytest.mark.parametrize(
    ("entries", "needle"),
    [
        ({"caption_projection_dim": 60}, "try 64"),
        ({"qk_norm": "layer_norm"}, "try 'rms_norm' or None"),
        ({"ada_zero": True}, "ada_zero"),
        ({"dual_attention_layers": [0, 1, 2]}, "blocks.2.image_modulation"),
    ],
)
def test_configurations_that_are_not_built(entries, needle, tmp_path):
    config = save(TINY["sd3.5-medium"], tmp_path) / "transformer" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | entries))
    with pytest.raises(ValueError, match=needle):
        reference.from_pretrained(tmp_path)


def test_smallest_step_of_a_side(networks):
    assert networks["sd3"].min_multiple == 2 and SD3Config().width == 1152
