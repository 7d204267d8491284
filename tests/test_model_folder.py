"""A model folder, whole and damaged in every way."""

import json
import pickle
import re

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from diffusion_engine import files, model_folder, request
from diffusion_engine.model_folder import WEIGHTS, load_model
from diffusion_engine.request import Request


def rewrite(folder, name, change):
    """Change the tensors of a file and make its hash right again: only the content is wrong."""
    tensors = load_file(folder / name)
    change(tensors)
    save_file(tensors, folder / name)
    rehash(folder, name)


def rehash(folder, name):
    config = json.loads((folder / "config.json").read_text())
    config["sha256"][name] = files.sha256((folder / name).read_bytes())
    (folder / "config.json").write_text(json.dumps(config))


def test_fp16_files_become_fp32_modules_without_a_random_number(tiny_model, tiny_parts):
    before = torch.get_rng_state()
    model = load_model(tiny_model)
    assert torch.equal(torch.get_rng_state(), before)
    for part in ("dit", "vae", "text_encoder"):
        ours, theirs = getattr(model, part).state_dict(), tiny_parts[part].state_dict()
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            assert value.dtype == torch.float32 and torch.equal(value, theirs[name].half().float())


def test_an_untouched_copy_loads(tiny_model_folder, tiny_model):
    assert load_model(tiny_model_folder).fingerprint == load_model(tiny_model).fingerprint


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", *WEIGHTS.values()])
@pytest.mark.parametrize("damage", ["missing", "empty", "half", "one byte short", "one byte more", "folder", "garbage"])
def test_a_damaged_file_is_named(tiny_model_folder, name, damage):
    path = tiny_model_folder / name
    data = path.read_bytes()
    path.unlink()
    if damage == "folder":
        path.mkdir()
    elif damage != "missing":
        forms = {
            "empty": b"",
            "half": data[: len(data) // 2],
            "one byte short": data[:-1],
            "garbage": b"\x07" * len(data),
        }
        path.write_bytes(forms.get(damage, data + b"}"))
    if (name, damage) == ("config.json", "one byte short"):
        return  # the last byte is a newline
    with pytest.raises(ValueError, match=re.escape(name)) as caught:
        load_model(tiny_model_folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [*WEIGHTS.values(), "tokenizer.json"])
def test_one_flipped_bit_is_seen(tiny_model_folder, name):
    data = bytearray((tiny_model_folder / name).read_bytes())
    place = data.rindex(b"a") if name == "tokenizer.json" else len(data) - 100
    data[place] ^= 2
    (tiny_model_folder / name).write_bytes(data)
    with pytest.raises(ValueError, match=f"{re.escape(name)} was altered"):
        load_model(tiny_model_folder)


class Bomb:
    def __reduce__(self):
        return exec, ("raise SystemExit('a pickle was opened')",)


@pytest.mark.parametrize("protocol", [0, 2, 4, 5, "torch"])
def test_a_pickle_is_never_opened(tiny_model_folder, protocol):
    path = tiny_model_folder / "dit.safetensors"
    if protocol == "torch":
        torch.save({"weight": torch.ones(3)}, path)
    else:
        path.write_bytes(pickle.dumps([Bomb()] * 3, protocol=protocol))
    with pytest.raises(ValueError, match="dit.safetensors is (a pickle|not a safetensors file)"):
        load_model(tiny_model_folder)


def test_a_pickle_beside_a_missing_file_is_mentioned(tiny_model_folder):
    (tiny_model_folder / "vae.safetensors").rename(tiny_model_folder / "vae.pt")
    with pytest.raises(ValueError, match=r"vae\.safetensors is missing; vae\.pt is a pickle"):
        load_model(tiny_model_folder)


def test_a_wrong_shape_names_the_tensor_also_when_the_hash_is_right(tiny_model_folder):
    def change(tensors):
        tensors["image_in.weight"] = torch.zeros(3, 3)

    rewrite(tiny_model_folder, "dit.safetensors", change)
    with pytest.raises(
        ValueError, match=r"dit\.safetensors does not fit config\.json: image_in\.weight has shape \[3, 3\]"
    ):
        load_model(tiny_model_folder)


def test_a_wrong_shape_comes_before_a_wrong_hash(tiny_model_folder):
    (tiny_model_folder / "vae.safetensors").write_bytes(save({"shift": torch.zeros(4)}))
    with pytest.raises(ValueError, match=r"vae\.safetensors lacks"):
        load_model(tiny_model_folder)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("image_in.bias"), "lacks 1 of"),
        (lambda t: t.update(extra=torch.zeros(1)), "has 1 tensors that the model lacks, extra"),
        (lambda t: t.update({"image_in.bias": t["image_in.bias"].to(torch.int32)}), "holds I32"),
        (lambda t: t.clear(), "lacks"),
    ],
)
def test_foreign_tensors(tiny_model_folder, change, says):
    rewrite(tiny_model_folder, "dit.safetensors", change)
    with pytest.raises(ValueError, match=says):
        load_model(tiny_model_folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.pop("dit"),
        lambda c: c.update(dit=[]),
        lambda c: c["dit"].update(colour=3),
        lambda c: c["dit"].update(heads=0),
        lambda c: c["dit"].update(heads=5),
        lambda c: c["dit"].update(width="wide"),
        lambda c: c["vae"].update(width=-1),
        lambda c: c["text_encoder"].update(max_length=0),
        lambda c: c["text_encoder"].update(vocab_size=100),
        lambda c: c.pop("sha256"),
        lambda c: c["sha256"].pop("tokenizer.json"),
        lambda c: c["sha256"].update({"vae.safetensors": 7}),
        lambda c: c.update(sizes="large"),
        lambda c: c.update(sizes=[64, 32]),
        lambda c: c.update(recommended=[]),
        lambda c: c["recommended"].update(guidance_scale="strong"),
    ],
)
def test_a_wrong_configuration_is_named(tiny_model_folder, change):
    path = tiny_model_folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"config\.json|altered"):
        load_model(tiny_model_folder)


def test_no_folder():
    with pytest.raises(ValueError, match="does not exist"):
        load_model("/nowhere/at/all")


def test_looking_a_folder_over_finds_the_same_damage_without_loading(tiny_model_folder):
    assert model_folder.check_model_folder(tiny_model_folder)["recommended"]["guidance_scale"] == 3.0
    path = tiny_model_folder / "vae.safetensors"
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(ValueError, match=r"vae\.safetensors is truncated"):
        model_folder.check_model_folder(tiny_model_folder)


def test_the_shipped_model(shipped_model):
    model = load_model()
    count = sum(p.numel() for part in model[:3] for p in part.parameters())
    size = sum(path.stat().st_size for path in shipped_model.iterdir())
    assert count > 5e6 and size < 31e6
    assert model.tokenizer.vocab_size <= model.text_encoder.config.vocab_size
    assert Request(prompts=("red apple",), guidance_scale=request.recommended(model.config)["guidance_scale"])
