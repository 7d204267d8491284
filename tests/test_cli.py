"""The command line: what it draws, and one line, exit code 2 and no file for everything that is wrong."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

from diffusion_engine import __version__, files, model_folder
from diffusion_engine.cli import main
from diffusion_engine.request import Switches

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder to work in."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def run(here, tiny_model, capsys):
    """run(*args) → (exit code, stdout, stderr), in this process, on the tiny model."""

    def call(*args, model=tiny_model):
        capsys.readouterr()
        extra = ["--model", str(model)] if args and args[0] in ("generate", "info") else []
        code = main([*map(str, args), *extra])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def process(*args, cwd, code="from diffusion_engine.__main__ import main; sys.exit(main())", **settings):
    """The command in a process of its own."""
    command = [sys.executable, "-c", f"import sys; {code}", *map(str, args)]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"PYTHONPATH": paths}
    if os.name == "posix":  # a shell's background job ignores SIGINT, and its children inherit that; here it must count
        settings["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)
    return subprocess.Popen(
        command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **settings
    )


# Drawing


def test_a_picture_its_record_and_its_repetition(run, here):
    code, out, err = run("generate", "red apple", "-o", "apple.png", "--steps", 3, "--seed", 5, "--negative", "模糊")
    assert (code, out) == (0, "apple.png\n") and "3 steps" in err and "denoise" in err
    code, out, _ = run("show", "apple.png")
    assert code == 0 and all(text in out for text in ("red apple", "模糊", "seed       5", "steps      3", "--like"))
    code, out, err = run("generate", "--like", "apple.png", "-o", "again.png")
    assert code == 0 and "every pixel" in err
    assert (here / "again.png").read_bytes() == (here / "apple.png").read_bytes()


def test_one_of_several_is_drawn_again_from_its_batch(run, here):
    code, out, _ = run("generate", "火箭", "-o", "r.png", "--steps", 2, "--count", 3, "--solver", "multistep")
    assert code == 0 and out.split() == ["r_0.png", "r_1.png", "r_2.png"]
    code, _, err = run("generate", "--like", "r_2.png", "-o", "again.png")
    assert code == 0 and "every pixel" in err
    assert (here / "again.png").read_bytes() == (here / "r_2.png").read_bytes()
    assert len({path.read_bytes() for path in here.glob("r_*.png")}) == 3


def test_every_option_counts_in_the_record(run, here):
    options = {
        "--height": 48,
        "--width": 80,
        "--guidance": 2.5,
        "--shift": 2,
        "--solver": "heun",
        "--dtype": "bfloat16",
    }
    flat = [text for pair in options.items() for text in pair]
    assert run("generate", "red apple", "-o", "a.png", "--steps", 2, "--device", "cpu", *flat)[0] == 0
    record = files.read_record(here / "a.png")
    request = record["request"]
    assert (request["height"], request["width"], request["guidance_scale"], request["shift"]) == (48, 80, 2.5, 2)
    assert (request["solver"], record["dtype"], record["device"]) == ("heun", "bfloat16", "cpu")
    assert Image.open(here / "a.png").size == (80, 48)
    assert run("generate", "--like", "a.png", "-o", "b.png")[0] == 0
    assert (here / "a.png").read_bytes() == (here / "b.png").read_bytes()


SWITCHES = {
    "exact": ["--hoist", "--no-batched-cfg", "--attention-chunk", 5, "--latent-buffer", "--no-prompt-cache"],
    "tiles": ["--vae-tile", 8, "--vae-overlap", 3, "--vae-batch", 1],
    "cache": ["--step-cache", 0.4],
    "guidance": ["--guidance-interval", "0.1,0.9", "--guidance-rescale", 0.5, "--cfg-zero-star", "--zero-steps", 1],
    "budget": ["--memory-budget", "1 MB"],
}


@pytest.mark.parametrize("kind", SWITCHES)
def test_switches_are_kept_in_the_record_and_repeated(run, here, kind):
    flags = ["--steps", 6, "--count", 2, *SWITCHES[kind]]
    code, _, err = run("generate", "red apple", "-o", "a.png", *flags)
    assert code == 0 and ("plan: " in err) == (kind == "budget"), err
    record = files.read_record(here / "a_1.png")
    changed = files.request_of(record).switches.changed
    assert changed if kind != "budget" else True
    code, out, _ = run("show", "a_1.png")
    assert code == 0 and all(f"{name} " in out for name in changed)
    code, _, err = run("generate", "--like", "a_1.png", "-o", "b.png")
    assert code == 0 and "every pixel" in err
    assert (here / "a_1.png").read_bytes() == (here / "b.png").read_bytes()


def test_every_switch_is_an_option_of_the_same_name(run):
    from dataclasses import fields

    from diffusion_engine.cli import SWITCH_OPTIONS

    assert list(SWITCH_OPTIONS) == [field.name for field in fields(Switches)]


def test_profile_tells_bytes(run, here):
    code, out, err = run("generate", "red apple", "-o", "a.png", "--steps", 2, "--profile")
    assert (code, out) == (0, "a.png\n") and "memory: weights" in err and "decode" in err and "bytes, not time" in err
    run("generate", "red apple", "-o", "b.png", "--steps", 2)
    assert (here / "a.png").read_bytes() == (here / "b.png").read_bytes()


def test_the_trace_has_a_frame_a_step_and_the_picture(run, here):
    code, out, _ = run("generate", "red apple", "-o", "a.png", "--steps", 5, "--count", 2, "--trace", "t.gif")
    assert code == 0 and out.split() == ["a_0.png", "a_1.png", "t.gif"]
    with Image.open(here / "t.gif") as trace:
        assert trace.size == (512, 256) and trace.n_frames in (5, 6)  # GIF drops a repeated frame


def test_the_trace_changes_nothing(run, here):
    run("generate", "red apple", "-o", "a.png", "--steps", 3)
    run("generate", "red apple", "-o", "b.png", "--steps", 3, "--trace", "t.gif")
    assert (here / "a.png").read_bytes() == (here / "b.png").read_bytes()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["a red apple under a blue sky with seven small clouds and a rocket far away"], "rocket far away"),
        (["red apple", "--negative", "blue", "--guidance", "1"], "does nothing"),
        (["red apple", "--negative", "blue", "--guidance", "0.5"], "does nothing"),
    ],
)
def test_two_cases_warn_and_draw(run, here, options, says):
    code, out, err = run("generate", *options, "-o", "a.png", "--steps", 2)
    warned = [line for line in err.splitlines() if line.startswith("warning: ")]
    assert code == 0 and len(warned) == 1 and says in warned[0] and (here / "a.png").exists()


def test_info_help_version_and_nothing(run):
    code, out, _ = run("info")
    assert code == 0 and all(text in out for text in ("parameters", "guidance 3", "32 to 128", "cpu", __version__))
    assert run("--version")[1].strip() == __version__
    for args in ((), ("--help",), ("generate", "--help")):
        code, out, err = run(*args) if args[:1] != ("generate",) else (main(list(args)), "--steps", "")
        assert code == 0 and err == ""


# What is wrong


BAD = {
    "zero steps": (["--steps", "0"], "try 1"),
    "negative steps": (["--steps", "-5"], "try 1"),
    "fractional steps": (["--steps", "2.5"], "try 2"),
    "absurd steps": (["--steps", "1001"], "try 1000"),
    "steps in words": (["--steps", "many"], "whole number"),
    "guidance NaN": (["--guidance", "nan"], "finite"),
    "guidance infinite": (["--guidance", "inf"], "finite"),
    "guidance overflowing": (["--guidance", "1e999"], "finite"),
    "guidance negative": (["--guidance", "-2"], "try 0"),
    "guidance in words": (["--guidance", "strong"], "not a number"),
    "seed too large": (["--seed", str(2**64)], "64-bit"),
    "seed negative": (["--seed", "-1"], "64-bit"),
    "seed fractional": (["--seed", "0.5"], "64-bit"),
    "seeds running out": (["--seed", str(2**64 - 1), "--count", "2"], "64-bit"),
    "solver": (["--solver", "dpm"], "euler, heun, multistep"),
    "device": (["--device", "tpu"], "auto, cpu, cuda, mps"),
    "device empty": (["--device", ""], "auto, cpu, cuda, mps"),
    "dtype empty": (["--dtype", ""], "float32, bfloat16, float16"),
    "dtype": (["--dtype", "int8"], "float32, bfloat16, float16"),
    "count zero": (["--count", "0"], "try 1"),
    "folder missing": (["-o", "missing/a.png"], "does not exist"),
    "folder read-only": (["-o", "/proc/a.png"], "cannot be written"),
    "output is a folder": (["-o", "."], "is a folder"),
    "suffix": (["-o", "a.jpg"], "try a.png"),
    "no suffix": (["-o", "a"], "try a.png"),
    "trace suffix": (["--trace", "t.mp4"], "try t.gif"),
    "trace folder": (["--trace", "missing/t.gif"], "does not exist"),
    "height": (["--height", "70"], "try 64 or 80"),
    "height small": (["--height", "16"], "try 32"),
    "width large": (["--width", "512"], "try 128"),
    "shift": (["--shift", "0"], "try 1"),
    "unknown option": (["--stepz", "3"], "No such option"),
    "chunk zero": (["--attention-chunk", "0"], "try 1"),
    "tile within its overlap": (["--vae-tile", "6"], "try overlap 1, or tile 9"),
    "threshold in words": (["--step-cache", "some"], "not a number; try 0.1"),
    "interval of one": (["--guidance-interval", "0.5"], "not two numbers; try 0.2,0.9"),
    "interval upside down": (["--guidance-interval", "0.9,0.1"], "is empty"),
    "rescale above one": (["--guidance-rescale", "1.5"], "try 1"),
    "budget in words": (["--memory-budget", "much"], "no size in bytes"),
    "budget too small": (["--memory-budget", "1 kB"], "cannot hold"),
    "like and switches": (["--like", "a.png", "--hoist"], "--like"),
    "option without value": (["--model"], "requires an argument"),
    "two prompts": (["red", "apple"], "unexpected extra argument"),
    "like and settings": (["--like", "a.png"], "--like"),
}


def one_line(err: str) -> bool:
    return err.startswith("error: ") and err.count("\n") == 1 and "Traceback" not in err


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_nothing_is_written(here, tiny_model, capsys, case):
    options, says = BAD[case]
    code = main(["generate", "red apple", "--model", str(tiny_model), *options])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "") and one_line(err) and says in err
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    "args", [["nope"], ["generate"], ["show"], ["show", "none.png"], ["show", "."], ["generate", "\udcff"]]
)
def test_other_bad_commands(here, capsys, args):
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert out == "" and one_line(err)


@pytest.mark.skipif(os.geteuid() == 0 if hasattr(os, "geteuid") else True, reason="the superuser may write anywhere")
def test_a_folder_without_permission(run, here):
    folder = here / "locked"
    folder.mkdir(mode=0o555)
    code, _, err = run("generate", "red apple", "-o", folder / "a.png")
    assert code == 2 and one_line(err) and "cannot be written" in err


@pytest.mark.parametrize("damage", ["missing", "truncated", "wrong shape", "pickle", "config", "altered"])
def test_a_damaged_model(run, here, tiny_model_folder, damage):
    import torch
    from safetensors.torch import load_file, save_file

    path = tiny_model_folder / "dit.safetensors"
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(data[:-1000])
    elif damage == "wrong shape":
        save_file(load_file(path) | {"image_in.bias": torch.zeros(3)}, path)
    elif damage == "pickle":
        torch.save({}, path)
    elif damage == "config":
        (tiny_model_folder / "config.json").write_text("{")
    else:
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    for command in (["generate", "red apple"], ["info"])[: 1 if damage in ("wrong shape", "altered") else 2]:
        code, out, err = run(*command, model=tiny_model_folder)
        assert code == 2 and one_line(err) and ("config.json" if damage == "config" else "dit.safetensors") in err
    assert list(here.iterdir()) == []


def test_like_needs_the_model_that_drew_it(run, here, tiny_model_folder, tiny_parts):
    run("generate", "red apple", "-o", "a.png", "--steps", 2)
    other = {**tiny_parts, "vae": type(tiny_parts["vae"])(tiny_parts["vae"].config)}
    model_folder.save_model(tiny_model_folder, **other, recommended={})
    code, _, err = run("generate", "--like", "a.png", "-o", "b.png", model=tiny_model_folder)
    assert code == 2 and one_line(err) and "was drawn by model" in err and not (here / "b.png").exists()


def test_like_of_given_latents_is_refused(run, here, engine):
    noise = engine("x", num_inference_steps=1).latents
    files.save_picture(engine("x", num_inference_steps=1, latents=noise).images[0], here / "a.png")
    code, _, err = run("generate", "--like", "a.png", "-o", "b.png")
    assert code == 2 and one_line(err) and "handed in" in err


def test_like_says_when_the_picture_is_another(run, here):
    run("generate", "red apple", "-o", "a.png", "--steps", 2)
    with Image.open(here / "a.png") as image:
        image.load()
        image.putpixel((0, 0), (1, 2, 3))
        (here / "a.png").write_bytes(files.png(image))
    for output in ("b.png", "a.png"):  # also when the output takes its place
        code, _, err = run("generate", "--like", "a.png", "-o", output)
        assert code == 0 and "warning: not every pixel" in err


def test_like_refuses_a_cut_picture_and_a_size_that_cannot_be_drawn(run, here):
    run("generate", "red apple", "-o", "a.png", "--steps", 1)
    data = (here / "a.png").read_bytes()
    (here / "cut.png").write_bytes(data[:-200])
    with Image.open(here / "a.png") as image:
        image.info[files.RECORD] = image.info[files.RECORD].replace('"height": 64', '"height": 66')
        (here / "odd.png").write_bytes(files.png(image))
    for name, says in (("cut.png", "not a whole picture"), ("odd.png", "height 66 is not a multiple of")):
        code, out, err = run("generate", "--like", name, "-o", "b.png")
        assert (code, out) == (2, "") and one_line(err) and says in err and not (here / "b.png").exists()


def test_a_nan_names_the_stage_and_writes_nothing(run, here, tiny_model_folder, tiny_parts):
    import copy

    dit = copy.deepcopy(tiny_parts["dit"])
    dit.final.linear.bias.fill_(float("nan"))
    model_folder.save_model(tiny_model_folder, **{**tiny_parts, "dit": dit}, recommended={})
    code, out, err = run("generate", "red apple", "--trace", "t.gif", model=tiny_model_folder)
    assert (code, out) == (2, "") and one_line(err) and "denoise, step 1 of 28" in err
    assert list(here.iterdir()) == []


def test_a_full_disk_leaves_nothing(run, here, monkeypatch):
    monkeypatch.setattr(files.os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    code, out, err = run("generate", "red apple", "-o", "a.png", "--steps", 1)
    assert (code, out) == (2, "") and "No space left" in err and "Traceback" not in err
    assert list(here.iterdir()) == []


def test_an_interrupt_anywhere_ends_with_130(here, tiny_model, capsys, monkeypatch):
    from diffusion_engine.engine import TextToImage

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    for owner, name in ((TextToImage, "from_pretrained"), (TextToImage, "draw"), (files.os, "fsync")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupt)
            assert main(["generate", "red apple", "--steps", "1", "--model", str(tiny_model)]) == 130
        out, err = capsys.readouterr()
        assert out == "" and "Traceback" not in err and "no file was left half-written" in err
        assert list(here.iterdir()) == []


# In a process of its own


def test_mistakes_are_named_before_torch_is_imported(here, tiny_model):
    code = (
        "from diffusion_engine.cli import main; "
        "codes = [main(['generate', 'x', '--steps', '0']), main(['generate', 'x', '--model', '/none']), main(['--help'])]; "
        "print(codes, 'torch' in sys.modules, 'numpy' in sys.modules)"
    )
    child = process(code=code, cwd=here)
    out, _ = child.communicate(timeout=120)
    assert out.splitlines()[-1] == "[2, 2, 0] False False"


def test_drawing_imports_neither_diffusers_nor_transformers(here, tiny_model):
    code = (
        "from diffusion_engine.__main__ import main; code = main(); "
        "print(code, [m for m in ('diffusers', 'transformers', 'matplotlib', 'IPython', 'course') if m in sys.modules])"
    )
    child = process("generate", "red apple", "--steps", 1, "--model", tiny_model, code=code, cwd=here)
    out, err = child.communicate(timeout=300)
    assert out.splitlines() == ["picture.png", "0 []"], err


@pytest.mark.skipif(sys.platform == "win32", reason="signals are sent as on POSIX")
def test_control_c_while_drawing(here, tiny_model):
    code = (
        "from diffusion_engine.engine import TextToImage; draw = TextToImage.draw; "
        "TextToImage.draw = lambda *a, **k: (print('drawing', file=sys.stderr, flush=True), draw(*a, **k))[1]; "
        "from diffusion_engine.__main__ import main; sys.exit(main())"
    )
    child = process("generate", "red apple", "--steps", 1000, "--model", tiny_model, code=code, cwd=here)
    assert child.stderr.readline() == "drawing\n"
    time.sleep(0.3)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=120)
    assert child.returncode == 130 and out == "" and "Traceback" not in err
    assert list(here.iterdir()) == []


def test_the_shipped_model_from_the_command_line(here, shipped_model, capsys):
    assert main(["generate", "红苹果", "-o", "a.png", "--steps", "4", "--device", "cpu"]) == 0
    assert main(["info"]) == 0
    assert json.loads(Image.open(here / "a.png").info[files.RECORD])["request"]["prompts"] == ["红苹果"]
    assert main(["generate", "--like", "a.png", "-o", "b.png"]) == 0
    assert (here / "a.png").read_bytes() == (here / "b.png").read_bytes()
