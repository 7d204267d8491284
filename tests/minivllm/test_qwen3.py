"""Appendix A1 pressed harder: parity with transformers on random shapes, damaged checkpoints, isolation, and the shipped model."""

import ast
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from small_qwen3 import shuffled

from minivllm.qwen3 import NoPast, Qwen3, Qwen3Config, RMSNorm, attend, fuse, read_config, rope_table, rotate
from minivllm.shipped import ASSETS

ROOT = Path(__file__).resolve().parents[2]
SIZES = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "head_dim": 8}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def pair(folder: Path, theta: float = 1e6, **sizes) -> tuple[Qwen3, torch.nn.Module]:
    """The same weights, read by us and by transformers."""
    from transformers import Qwen3Config as TheirConfig
    from transformers import Qwen3ForCausalLM

    rope = {"rope_type": "default", "rope_theta": theta}
    theirs = shuffled(Qwen3ForCausalLM(TheirConfig(**SIZES | sizes, rope_parameters=rope)))
    theirs.save_pretrained(folder, **({"max_shard_size": "20KB"} if sizes.get("tie_word_embeddings") else {}))
    return Qwen3.from_pretrained(folder), theirs


@settings(max_examples=12, deadline=None)
@given(
    keys=st.integers(1, 3),
    groups=st.integers(1, 4),
    half=st.integers(2, 12),
    width=st.integers(8, 40),
    layers=st.integers(1, 3),
    theta=st.sampled_from([100.0, 1e4, 1e6]),
    tied=st.booleans(),
    length=st.integers(1, 30),
)
def test_logits_are_transformers(keys, groups, half, width, layers, theta, tied, length):
    torch.manual_seed(keys + 10 * groups + width)
    sizes = {"num_key_value_heads": keys, "num_attention_heads": keys * groups, "head_dim": 2 * half}
    sizes |= {"hidden_size": width, "num_hidden_layers": layers, "tie_word_embeddings": tied}
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = pair(Path(folder), theta, **sizes)
    ids = torch.randint(60, (2, length))
    with torch.no_grad():
        a, b = ours(ids), theirs(ids).logits
    assert (a - b).abs().max() < 1e-4
    assert torch.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0) > 0.999999


def test_two_layers_of_the_real_shape(tmp_path):
    """0.6B: width 1024, 16 heads on 8 of 128, feed-forward 3072, θ = 10⁶, tied; two of its 28 layers, a fifth of its words."""
    torch.manual_seed(0)
    sizes = dict(zip(SIZES, (30_000, 1024, 3072, 2, 128, 16, 8)))
    ours, theirs = pair(tmp_path, tie_word_embeddings=True, **sizes)
    ids = torch.randint(30_000, (1, 12))
    with torch.no_grad():
        a, b = ours(ids), theirs(ids).logits
    assert (a - b).abs().max() < 1e-4
    assert torch.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0) > 0.999999


def test_the_shipped_folder_is_transformers_too():
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(ASSETS, dtype=torch.float32).eval()
    ids = torch.tensor([[0, 300, 400, 500, 600]])
    with torch.no_grad():
        assert (Qwen3.from_pretrained(ASSETS)(ids) - theirs(ids).logits).abs().max() < 1e-4
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(ASSETS / "tokenizer.json"))
    assert tokenizer("red apple")["input_ids"][0] == 0


def test_half_precision_stays_near(toy, ids):
    half = Qwen3(toy.config).bfloat16()
    half.load_state_dict(toy.state_dict())
    with torch.no_grad():
        a, b = half(ids[:, :50]), toy(ids[:, :50])
    assert a.dtype == torch.bfloat16 and torch.cosine_similarity(a.float().flatten(), b.flatten(), dim=0) > 0.999


@settings(max_examples=30, deadline=None)
@given(shift=st.integers(0, 900), length=st.integers(1, 20), half=st.integers(1, 8))
def test_only_distances_count(shift, length, half):
    x = torch.randn(1, length, 2, 2 * half, generator=torch.Generator().manual_seed(length))
    here, there = (rotate(x, rope_table(torch.arange(length) + s, 2 * half, 1e4)) for s in (0, shift))
    scores = [torch.einsum("bnhd,bmhd->bhnm", y, y) for y in (here, there)]
    assert torch.allclose(*scores, atol=2e-3) and torch.allclose(here.norm(dim=-1), x.norm(dim=-1), atol=1e-4)


def test_a_masked_key_is_absent():
    q, k, v = torch.randn(2, 3, 4, 8), torch.randn(2, 9, 2, 8), torch.randn(2, 9, 2, 8)
    mask = torch.arange(9) < 5
    assert torch.allclose(attend(q, k, v, mask.expand(2, 1, 3, 9)), attend(q, k[:, :5], v[:, :5]), atol=1e-6)
    one = attend(q[:, :1], k, v, mask.expand(2, 1, 1, 9))
    assert torch.allclose(one, attend(q[:, :1], k[:, :5], v[:, :5]), atol=1e-6)


# --- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen2"}, "model_type 'qwen2'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"use_sliding_window": True}, "use_sliding_window True"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2}}, "rope_type 'linear'"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_type 'yarn'"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"num_key_value_heads": 3}, "try 2 key heads"),
        ({"head_dim": 7}, "try 8"),
        ({"num_hidden_layers": 0}, "try 1"),
    ],
)
def test_what_is_not_built_is_refused(change, message):
    assert read_config(SIZES).head_dim == 8
    with pytest.raises(ValueError, match=message):
        read_config(SIZES | change)


@pytest.mark.parametrize("shape", [(5,), (1, 0), (1, 2, 3), (0, 3)])
def test_ids_of_another_shape_are_refused(toy, shape):
    with pytest.raises(ValueError, match="expected whole numbers"):
        toy(torch.zeros(shape, dtype=torch.long))


def test_ids_that_are_no_whole_numbers_or_too_many_are_refused(toy):
    with pytest.raises(ValueError, match="expected whole numbers"):
        toy(torch.zeros(1, 3))
    with pytest.raises(ValueError, match="1025 tokens are too many; try 1024"):
        toy(torch.zeros(1, 1025, dtype=torch.long))


def test_damaged_checkpoints_are_named(tmp_path):
    with pytest.raises(ValueError, match="holds no config.json"):
        Qwen3.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((ASSETS / "config.json").read_text(encoding="utf-8"), encoding="utf-8")
    weights = load_file(ASSETS / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    damages = {
        "missing": {n: w for n, w in weights.items() if n != name},
        "left over": weights | {"model.extra.weight": torch.zeros(2)},
        "misshapen": weights | {name: weights[name][:-1]},
        "embedding": {n: w for n, w in weights.items() if "embed" not in n},
    }
    for damage in damages.values():
        save_file(damage, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match="missing, left over or misshapen"):
            Qwen3.from_pretrained(tmp_path)


def test_fusing_keeps_the_order_of_heads():
    parts = {f"model.layers.0.self_attn.{n}_proj.weight": torch.full((2, 3), i) for i, n in enumerate("qkv")}
    assert fuse(parts)["layers.0.self_attn.qkv_proj.weight"][:, 0].tolist() == [0, 0, 1, 1, 2, 2]
    del parts["model.layers.0.self_attn.k_proj.weight"]
    assert "layers.0.self_attn.qkv_proj.weight" not in fuse(parts)  # reported as missing, not fused wrongly


# --- apart, and shipped ------------------------------------------------------------------------------------------------


def test_it_stands_alone():
    """Importing all of it loads nothing of the diffusion engine, the course or the reference libraries."""
    code = "import sys, minivllm.paged_kv, minivllm.shipped; print(*sorted({n.split('.')[0] for n in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"diffusion_engine", "course", "recipes", "transformers", "diffusers"} & set(done.stdout.split())


def gates(folder: Path) -> list[str]:
    """The text of every ``class SiluAndMul`` below a folder."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.py"))]
    return [
        ast.unparse(n) for tree in trees for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "SiluAndMul"
    ]


def test_copies_of_the_gate_are_equal(tmp_path):
    """Where a real family needs the same gate it is copied, not imported, and both texts are the same."""
    (ours,) = gates(ROOT / "minivllm")
    assert all(copy == ours for copy in gates(ROOT / "diffusion_engine"))
    (tmp_path / "other.py").write_text(ours.replace("silu(a) * b", "silu(b) * a"), encoding="utf-8")
    assert gates(tmp_path) and gates(tmp_path) != [ours]  # a changed copy would be seen


def test_the_shipped_model_is_small_and_is_what_its_config_says():
    import hashlib

    assert sum(path.stat().st_size for path in ASSETS.iterdir()) <= 3e6
    assert {path.name for path in ASSETS.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}
    config = json.loads((ASSETS / "config.json").read_text(encoding="utf-8"))
    assert hashlib.sha256((ASSETS / "model.safetensors").read_bytes()).hexdigest() == config["sha256"]
    assert {weight.dtype for weight in load_file(ASSETS / "model.safetensors").values()} == {torch.float16}


def test_it_knows_most_captions():
    """Every eleventh English caption, translated greedily: most come out right."""
    from tokenizers import Tokenizer

    from minivllm.kv_cache import generate
    from recipes.emoji_data import load_emoji

    model, tokenizer = Qwen3.from_pretrained(ASSETS), Tokenizer.from_file(str(ASSETS / "tokenizer.json"))
    right, some = 0, [record for record in load_emoji().records if record.kind == "other"][::40]
    for record in some:
        ids = torch.tensor([tokenizer.encode(f"{record.label_en} =").ids])
        right += tokenizer.decode(generate(model, ids, 24)[0].tolist()) == f"{record.label_en} = {record.label_zh}"
    assert right > 0.6 * len(some), f"{right} of {len(some)}"


def speak(*arguments: str):
    from typer.testing import CliRunner

    from minivllm.__main__ import app

    return CliRunner().invoke(app, list(arguments))


def test_the_command_speaks():
    command = [sys.executable, "-m", "minivllm", "red", "火箭", "--count", "2", "--seed", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) == 4, done.stderr
    assert all(line.startswith(start) and "=" in line for line, start in zip(lines, ["red", "red", "火箭", "火箭"]))
    assert speak("red", "火箭", "--count", "2", "--seed", "3").stdout == done.stdout  # a seed is a text
    assert speak("red apple", "--temperature", "0").stdout == "red apple = 红苹果\n"


@pytest.mark.parametrize("arguments", [("--top-p", "2"), ("--model", "nowhere"), ("--tokens", "400"), ("--seed", "-1")])
def test_the_command_refuses_in_one_line(arguments):
    refused = speak("red", *arguments)
    assert refused.exit_code == 2 and refused.stderr.startswith("error: ") and len(refused.stderr.splitlines()) == 1


def test_no_past_is_a_fresh_text(toy, ids):
    with torch.no_grad():
        assert torch.equal(toy(ids[:, :9], NoPast()), toy(ids[:, :9]))


def test_config_is_frozen():
    with pytest.raises(AttributeError):
        Qwen3Config(**SIZES).hidden_size = 3


def test_a_norm_that_has_only_read_can_still_learn():
    """Its numbers are kept from call to call, and the first call may stand in inference mode; at zero the slope is finite."""
    norm, x = RMSNorm(24, 3e-5), torch.zeros(2, 24, requires_grad=True)
    with torch.inference_mode():
        norm(x)
    norm(x).sum().backward()
    assert x.grad.isfinite().all() and norm.weight.grad.abs().sum() == 0
    y = torch.randn(3, 24, dtype=torch.float64, requires_grad=True)
    expected = (y / (y.square().mean(-1, keepdim=True) + 3e-5).sqrt()).sum()
    assert torch.allclose(*(torch.autograd.grad(f, y)[0] for f in (norm(y).sum(), expected)), atol=1e-5)
