"""The measurements: committed report and document agree, sections keep to their form, comparisons compare equals."""

import json
from importlib import import_module
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from recipes.bench import SECTIONS
from recipes.bench.__main__ import NOTES, machine_line, main, markdown
from recipes.bench.tools import goal, kept, shown, table

REPORT = json.loads((NOTES / "bench.json").read_text(encoding="utf-8"))


def test_the_document_is_the_report():
    assert (NOTES / "bench.md").read_text(encoding="utf-8") == markdown(REPORT), "run `python -m recipes.bench`"


def test_every_section_is_there_with_its_machine():
    assert list(REPORT) == list(SECTIONS)
    for found in REPORT.values():
        line = machine_line(found["machine"])
        assert all(text in line for text in ("threads", "torch", "GFLOP/s", "GB/s"))


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_has_its_three_names(name):
    section = import_module(SECTIONS[name])
    assert section.TITLE and callable(section.measure) and callable(section.markdown)


def test_all_sections_together_stay_below_a_quarter_of_an_hour():
    assert sum(found["machine"]["minutes"] for found in REPORT.values()) <= 15


def test_an_unknown_section_is_named():
    import typer

    app = typer.Typer()
    app.command()(main)
    result = CliRunner().invoke(app, ["pictures"])
    assert isinstance(result.exception, ValueError) and "did you mean picture?" in str(result.exception)


def test_the_folder_is_there_before_anything_is_measured(monkeypatch, tmp_path):
    from types import SimpleNamespace

    import recipes.bench.tools
    from recipes.bench import picture

    folder, seen = tmp_path / "not" / "yet", []
    monkeypatch.setattr(recipes.bench.tools, "Bench", lambda bar: SimpleNamespace(machine=REPORT["picture"]["machine"]))
    monkeypatch.setattr(picture, "measure", lambda bench: seen.append(folder.is_dir()) or REPORT["picture"])
    main(["picture"], folder)
    assert seen == [True] and sorted(file.name for file in folder.iterdir()) == ["bench.json", "bench.md"]


def test_numbers_and_tables():
    from diffusion_engine.optimizations import Timing

    assert kept(Timing.of([0.123456, 0.2, 0.1])) == [0.1235, 0.1, 0.2]
    assert shown([0.5, 0.25, 1.0]) == "0.50 (0.25 … 1.00)" and shown([0.002, 0.001, 0.003], "s") == "2 ms (1 … 3)"
    assert table(["a", "b"], [[1, 2]]) == ["| a | b |", "| --- | ---: |", "| 1 | 2 |", ""]
    assert goal(False, "x").startswith("- **missed**") and goal(True, "x") == "- met: x"


def test_both_stacks_are_the_same_network(monkeypatch):
    from recipes.bench import blocks

    monkeypatch.setitem(blocks.STACKS, "float32", (32, 2, 2, 1e-4))
    inputs = torch.randn(2, 6, 32), torch.randn(2, 3, 32), torch.randn(2, 32)
    ours, theirs = (blocks.runner(stack, *inputs)() for stack in blocks.stacks("float32"))
    assert torch.allclose(ours, theirs, atol=1e-5) and not torch.allclose(ours[:, :6], inputs[0], atol=0.01)
    peaks = [blocks.peak(blocks.runner(stack, *inputs)) for stack in blocks.stacks("float32")]
    assert peaks[0] < peaks[1]


def test_peak_bytes_of_joint_blocks_are_four_fifths_of_diffusers():
    """Counted, so it holds on any machine."""
    from recipes.bench import blocks

    for tokens in blocks.TOKENS[:2]:
        inputs = torch.zeros(2, tokens, 256), torch.zeros(2, blocks.TEXT, 256), torch.zeros(2, 256)
        ours, theirs = (blocks.peak(blocks.runner(stack, *inputs)) for stack in blocks.stacks("float32"))
        assert ours <= 0.8 * theirs


def test_kinds_of_operators_add_up_to_the_whole():
    from recipes.bench.tools import kind_of, seconds_by_kind

    a = torch.randn(256, 256)
    spent = seconds_by_kind(lambda: torch.nn.functional.gelu(a @ a @ a @ a), repeats=3)
    assert max(spent, key=spent.get) == "matrix products" and spent["activations"] > 0 == spent["attention"]
    kinds = [kind_of(f"aten::{name}") for name in ("addcmul", "_fused_rms_norm", "gelu_", "transpose", "cat")]
    assert kinds == ["element by element", "norms", "activations", None, "moving data"]
    assert kind_of("aten::_scaled_dot_product_flash_attention_for_cpu") == "attention"


def test_what_is_saved_is_a_share_of_the_others_time():
    from recipes.bench.reference import attribution

    a = torch.randn(192, 192)
    saved = attribution(lambda: a @ a, lambda: [a @ a for _ in range(4)])
    assert 0.2 < saved["matrix products"] < 1 and saved["norms"] == 0


def test_packed_latents_go_back_to_their_grid():
    from diffusion_engine.dit import patchify
    from recipes.bench import reference

    for name in ("flux", "ltx"):
        latents, (text, _, _), _ = reference.own_arguments(name, "bfloat16")
        tokens = patchify(latents, 2, channels_first=True) if name == "flux" else latents.flatten(2).mT
        call = reference.arguments(name, "bfloat16")
        assert torch.equal(tokens, call["hidden_states"]) and torch.equal(text, call["encoder_hidden_states"])


def test_equal_time_lies_between_neighbours():
    from recipes.bench.optimizations import at_equal_time

    fewer = [{"speedup": 4.0, "psnr": 30.0}, {"speedup": 2.0, "psnr": 50.0}, {"speedup": 3.0, "psnr": 40.0}]
    assert at_equal_time(fewer, 2.5) == 45.0 and at_equal_time(fewer, 4.0) == 30.0
    assert at_equal_time(fewer, 1.9) is None and at_equal_time(fewer, 4.1) is None


def test_samples_of_a_guided_picture():
    from recipes.bench.optimizations import samples_of

    assert samples_of({}) == 56 and samples_of({"guidance_scale": 1.0}) == 28
    assert samples_of({"zero_steps": 1}) == 54
    assert 28 < samples_of({"guidance_interval": (0.3, 1.0)}) < 56


def test_the_bench_writes_nothing_outside_notes():
    assert NOTES == Path(__file__).resolve().parents[1] / "notes"
