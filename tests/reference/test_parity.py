"""Every family against diffusers: the same tiny weights, read from the files that diffusers wrote."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from reference_tiny import TINY, save, their_model

from diffusion_engine import reference

VARIANTS = [name for name, tiny in TINY.items() if find_spec(f"diffusion_engine.reference.{tiny.module}")]


def rng(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict:
    """One checkpoint a variant, in shards."""
    home = tmp_path_factory.mktemp("checkpoints")
    return {name: save(TINY[name], home / name, max_shard_size="150KB") for name in VARIANTS}


@pytest.mark.parametrize("name", VARIANTS)
def test_velocity(name, folders):
    theirs, ours = their_model(TINY[name]), reference.drop_in(folders[name])
    with torch.no_grad():
        for call in TINY[name].calls(rng()):
            expected = theirs(**call).sample
            assert 0.3 < expected.std() < 10  # large enough for 1e-5 to mean something
            assert (ours(**call).sample - expected).abs().max() < 1e-5
            assert torch.equal(ours(**call, return_dict=False)[0], ours(**call)[0])


@pytest.mark.parametrize("name", VARIANTS)
def test_bf16_is_no_worse_than_theirs(name, folders):
    """Root mean square error against fp32, all calls together."""
    from diffusers import AutoModel

    exact = their_model(TINY[name])
    theirs = AutoModel.from_pretrained(str(folders[name]), subfolder="transformer", torch_dtype=torch.bfloat16)
    ours, errors = reference.drop_in(folders[name], dtype=torch.bfloat16), []
    assert ours.dtype == theirs.dtype == torch.bfloat16
    with torch.no_grad():
        for call in TINY[name].calls(rng()):
            truth = exact(**call).sample
            halves = {
                key: value.bfloat16() if ("states" in key or "pooled" in key) and value.is_floating_point() else value
                for key, value in call.items()
            }
            errors.append([(model(**halves).sample.float() - truth).square().sum() for model in (ours, theirs)])
    mine, diffusers = torch.tensor(errors).sum(0).sqrt()
    assert mine <= 1.1 * diffusers


BLOCKED = """
import sys
for name in ("diffusers", "transformers", "accelerate", "huggingface_hub"):
    sys.modules[name] = None  # importing it raises ImportError
import torch
from diffusion_engine import reference
for folder, file in zip(sys.argv[1::2], sys.argv[2::2]):
    call, expected = torch.load(file)
    found = reference.drop_in(folder)(**call).sample
    assert (found - expected).abs().max() < 1e-5, folder
assert not [name for name, module in sys.modules.items() if name.startswith("diffusers") and module]
"""


def test_without_diffusers(folders, tmp_path):
    """No family needs diffusers to load and to run."""
    arguments = []
    for name, folder in folders.items():
        (call, *_) = TINY[name].calls(rng())
        torch.save((call, their_model(TINY[name])(**call).sample), tmp_path / f"{name}.pt")
        arguments += [str(folder), str(tmp_path / f"{name}.pt")]
    done = subprocess.run([sys.executable, "-c", BLOCKED, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", VARIANTS)
def test_what_config_says_is_what_the_drop_in_says(name, folders):
    written = json.loads((folders[name] / "transformer" / "config.json").read_text())
    config = reference.drop_in(folders[name]).config
    for key, value in written.items():
        if not key.startswith("_"):
            found = getattr(config, key)
            assert (list(found) if isinstance(found, tuple) else found) == value, key


@pytest.mark.parametrize("name", VARIANTS)
def test_loading_draws_no_random_numbers_and_leaves_nothing_on_meta(name, folders):
    state = torch.get_rng_state()
    model = reference.from_pretrained(folders[name])
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.training
    for tensor in (*model.parameters(), *model.buffers()):
        assert not tensor.is_meta and not tensor.requires_grad
