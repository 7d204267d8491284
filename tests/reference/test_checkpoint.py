"""Chapter 15 under harder conditions: damaged files, foreign files, wrong indices, the cache, one tensor at a time."""

import json
import os
import pickle
import shutil
import subprocess
import sys
import time
import weakref
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from reference_tiny import TINY, save
from safetensors.torch import load_file, save_file
from torch import nn

from diffusion_engine import reference
from diffusion_engine.reference import checkpoint
from diffusion_engine.reference.checkpoint import (
    WEIGHTS,
    DropIn,
    KeyMap,
    Source,
    check_tensors,
    fill,
    find_folder,
    list_tensors,
    load,
    match,
    read_config,
    their_names,
)
from diffusion_engine.reference.sd3 import SD3

SINGLE = f"{WEIGHTS}.safetensors"
INDEX = f"{SINGLE}.index.json"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> dict[str, Path]:
    """An SD3.5 checkpoint in one file and in shards."""
    home = tmp_path_factory.mktemp("sd3")
    one, many = (
        save(TINY["sd3.5-medium"], home / "one"),
        save(TINY["sd3.5-medium"], home / "many", max_shard_size="90KB"),
    )
    return {"one": one / "transformer", "many": many / "transformer"}


@pytest.fixture
def one(pristine, tmp_path) -> Path:
    return Path(shutil.copytree(pristine["one"], tmp_path / "one"))


@pytest.fixture
def many(pristine, tmp_path) -> Path:
    return Path(shutil.copytree(pristine["many"], tmp_path / "many"))


def rewrite(folder: Path, change) -> None:
    """Change the tensors of a folder with one file."""
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE)


def reset(folder: Path, **entries) -> None:
    """Change entries of config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


# --- the same numbers, however they lie ------------------------------------------------------------------------------


def test_shards_and_one_file_give_the_same_model(pristine):
    whole, parts = (reference.from_pretrained(folder).state_dict() for folder in pristine.values())
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_dtype_is_what_was_asked_for(one, dtype):
    rewrite(one, lambda tensors: tensors.update({name: t.half() for name, t in tensors.items()}))
    assert {t.dtype for t in reference.from_pretrained(one).state_dict().values()} == {torch.float16}  # the file's
    assert {t.dtype for t in reference.from_pretrained(one, dtype=dtype).state_dict().values()} == {dtype}


def test_a_variant_is_read_where_there_is_nothing_else(one):
    (one / SINGLE).rename(one / f"{WEIGHTS}.fp16.safetensors")
    assert isinstance(reference.from_pretrained(one), SD3)


def test_the_folder_may_be_the_pipelines_or_the_transformers(pristine):
    inner = pristine["one"]
    assert find_folder(inner) == find_folder(inner.parent) == find_folder(str(inner.parent)) == inner


def test_one_tensor_of_the_checkpoint_lives_at_a_time(pristine, monkeypatch):
    alive, most = weakref.WeakSet(), [0]

    class Watched:
        def __init__(self, file, framework):
            self.file = checkpoint_open(file, framework)

        def __enter__(self):
            self.file.__enter__()
            return self

        def __exit__(self, *error):
            return self.file.__exit__(*error)

        def get_tensor(self, name):
            tensor = self.file.get_tensor(name)
            alive.add(tensor)
            most[0] = max(most[0], len(alive))
            return tensor

    checkpoint_open = checkpoint.safe_open
    monkeypatch.setattr(checkpoint, "safe_open", Watched)
    reference.from_pretrained(pristine["many"])
    assert most[0] <= 2  # the one that arrives, while a name still holds the last


def test_weights_do_not_follow_the_file(one):
    """What was loaded is a copy: a file that is overwritten later changes nothing."""
    model = reference.from_pretrained(one)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    data = bytearray((one / SINGLE).read_bytes())
    with (one / SINGLE).open("r+b") as file:
        file.seek(len(data) // 2)
        file.write(b"\x7f" * (len(data) // 4))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


# --- what is refused, and what it says -------------------------------------------------------------------------------


def refused(folder: Path, *needles: str) -> None:
    with pytest.raises(ValueError) as caught:
        reference.from_pretrained(folder)
    for needle in needles:
        assert needle in str(caught.value)
    assert "\n" not in str(caught.value)


def test_truncated(one, many):
    file = one / SINGLE
    file.write_bytes(file.read_bytes()[:-1])
    refused(one, "truncated", SINGLE)
    shard = sorted(many.glob("*-of-*"))[1]
    shard.write_bytes(shard.read_bytes()[:50])
    refused(many, "truncated", shard.name)


def test_a_pickle_is_never_opened(one, tmp_path):
    class Bomb:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "exploded"),))

    (one / SINGLE).unlink()
    (one / f"{WEIGHTS}.bin").write_bytes(pickle.dumps(Bomb()))
    refused(one, "pickle")
    (one / SINGLE).write_bytes(pickle.dumps(Bomb()))
    refused(one, "pickle")
    assert not (tmp_path / "exploded").exists()


def test_a_missing_shard_and_a_wrong_index(many):
    index = json.loads((many / INDEX).read_text())
    first, *_ = sorted(set(index["weight_map"].values()))
    name = next(key for key, place in index["weight_map"].items() if place != first)
    (many / INDEX).write_text(json.dumps({"weight_map": index["weight_map"] | {name: first}}))
    refused(many, name, first)
    (many / INDEX).write_text(json.dumps({"weight_map": index["weight_map"] | {name: "../../elsewhere.safetensors"}}))
    refused(many, "elsewhere.safetensors", "missing")
    (many / INDEX).write_text("{}")
    refused(many, INDEX, "weight_map")
    (many / INDEX).write_text("not json")
    refused(many, INDEX, "not JSON")


def test_the_first_differing_key_or_shape_is_named(one):
    key = "transformer_blocks.1.attn.norm_added_q.weight"
    kept = load_file(one / SINGLE)
    rewrite(one, lambda tensors: tensors.pop(key))
    refused(one, f"lacks {key}", "blocks.1.attn.text.norm_q.weight")
    save_file(kept | {key: torch.zeros(17)}, one / SINGLE)
    refused(one, f"{key} [17]", "[16]")
    save_file(kept | {"transformer_blocks.0.extra": torch.zeros(1)}, one / SINGLE)
    refused(one, "transformer_blocks.0.extra", "1 tensors")
    save_file(kept | {key: torch.zeros(16, dtype=torch.int64)}, one / SINGLE)
    refused(one, key, "I64")


def test_a_configuration_that_does_not_fit(one):
    for entries, needle in (
        ({"qk_norm": None}, "without a place"),
        ({"num_layers": 4}, "transformer_blocks.2"),
        ({"num_attention_heads": 5}, "caption_projection_dim"),
        ({"pooled_projection_dim": 23}, "time_text_embed.text_embedder.linear_1.weight"),
        ({"use_new_trick": True}, "use_new_trick"),
        ({"num_layers": "three"}, "cannot become SD3"),
    ):
        before = (one / "config.json").read_text()
        reset(one, **entries)
        refused(one, needle)
        (one / "config.json").write_text(before)
    assert reference.from_pretrained(one)


def test_another_family_is_named(one):
    reset(one, _class_name="UNet2DConditionModel")
    refused(one, "UNet2DConditionModel", "FluxTransformer2DModel")
    reset(one, _class_name=None)
    refused(one, "families")
    (one / "config.json").unlink()
    refused(one, "config.json")


def test_entries_that_are_off_are_no_reason_to_refuse():
    @dataclass(frozen=True)
    class Sizes:
        depth: int = 3
        axes: tuple[int, ...] = ()

    off = {"_class_name": "X", "idea": None, "other": False, "third": [], "fourth": 0}
    assert read_config(Sizes, off | {"axes": [1, 2]}) == Sizes(axes=(1, 2))
    for on in (True, 1, 0.5, "yes", [0]):
        with pytest.raises(ValueError, match="idea"):
            read_config(Sizes, {"idea": on})


# --- key maps --------------------------------------------------------------------------------------------------------


def test_patterns_match_whole_names():
    assert match("a.*", "a.10.weight") == ("10", ".weight")
    for name in ("xa.1.weight", "a.1.weights", "a..weight", "a.b.weight", "a.1.weight.bias"):
        assert match("a.*", name) is None
    with pytest.raises(KeyError, match="silent on b"):
        their_names(KeyMap({"a": "x"}), "b.weight")


def test_every_key_of_every_map_is_wanted(pristine):
    """Turn any two tensors of one shape around in the file, and the model's weights change: nothing is read twice."""
    folder = pristine["one"]
    tensors = list_tensors(folder)
    config = read_config(SD3.Config, json.loads((folder / "config.json").read_text()))
    with torch.device("meta"):
        model = SD3(config)
    keys = [key for name in model.state_dict() for key in their_names(SD3.key_map(config), name)]
    assert sorted(keys) == sorted(tensors)


def test_rows_of_unequal_height_are_stacked(tmp_path):
    parts = {"a.weight": torch.randn(2, 3), "b.weight": torch.randn(5, 3)}
    save_file(parts, tmp_path / "x.safetensors")
    sources = {name: Source(tmp_path / "x.safetensors", shape=tuple(t.shape), dtype="F32") for name, t in parts.items()}
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 7, bias=False))
    key_map = KeyMap({"0": "{a,b}"})
    check_tensors(model, sources, key_map)
    fill(model, sources, key_map)
    assert torch.equal(model[0].weight, torch.cat([*parts.values()]))


# --- the hub ---------------------------------------------------------------------------------------------------------


def test_names_that_are_neither(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    for name in ("nothing here", "./missing/folder", "a/b/c", "", "../x"):
        with pytest.raises(ValueError, match="neither a folder nor a hub id|config.json"):
            find_folder(name)
    with pytest.raises(ValueError, match="not in the cache .*--download"):
        find_folder("acme/none")


def test_the_cache_is_found_where_the_hubs_tools_put_it(monkeypatch, pristine, tmp_path):
    home = tmp_path / "hf" / "hub" / "models--acme--tiny"
    shutil.copytree(pristine["many"], home / "snapshots" / "abc" / "transformer")
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("abc\n")
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    assert isinstance(reference.from_pretrained("acme/tiny"), SD3)
    with pytest.raises(ValueError, match="transformer_2"):
        find_folder("acme/tiny", "transformer_2")


FETCH = "from diffusion_engine import reference; reference.from_pretrained('acme/none', download=True)"


@pytest.mark.parametrize("surroundings", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}])
def test_fetching_without_a_connection_ends_at_once(surroundings, tmp_path):
    begun = time.monotonic()
    keep = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment = keep | {"HF_HOME": str(tmp_path)} | surroundings
    done = subprocess.run([sys.executable, "-c", FETCH], env=environment, capture_output=True, text=True, timeout=120)
    assert "ValueError: model acme/none cannot be fetched" in done.stderr, done.stderr
    assert time.monotonic() - begun < 100


def test_gated_and_absent_models_are_told_apart(monkeypatch):
    import huggingface_hub

    for kind, needle in (("GatedRepoError", "licence"), ("RepositoryNotFoundError", "no such model")):
        error = type(kind, (OSError,), {})

        def answer(*_, error=error, **__):
            raise error("401")

        monkeypatch.setattr(huggingface_hub, "snapshot_download", answer)
        with pytest.raises(ValueError, match=needle):
            find_folder("acme/none", download=True)


# --- the drop-in -----------------------------------------------------------------------------------------------------


class Echo(nn.Module):
    """A model that shows what it was called with."""

    def __init__(self):
        super().__init__()
        self.config, self.weight = None, nn.Parameter(torch.zeros(1))
        self.small = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))

    def as_diffusers(self, hidden_states, timestep, guidance=None):
        return hidden_states, timestep, guidance


def test_the_drop_in_passes_on_what_is_given():
    stand_in = DropIn(Echo())
    assert stand_in(1, 2, attention_kwargs={}, other=None).sample == (1, 2, None)
    assert stand_in(1, timestep=2, guidance=3, return_dict=False) == ((1, 2, 3),)
    assert stand_in.dtype == torch.bfloat16  # the weights' own, not the few that stay fp32
    with pytest.raises(ValueError, match="skip_layers is unknown"):
        stand_in(1, 2, skip_layers=[1])
    with stand_in.cache_context("cond"):
        assert stand_in(1, 2)[0] == (1, 2, None)


def test_load_names_the_folder(tmp_path):
    with pytest.raises(ValueError, match="cannot become SD3"):
        load(SD3, tmp_path / "nowhere")
