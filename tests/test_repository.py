"""The repository as a stranger meets it: pins, commands, licences, the wheel, the font, the contracts."""

import ast
import importlib.metadata
import json
import os
import re
import stat
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
ASSETS = ROOT / "diffusion_engine" / "assets"
READMES = {"en": ROOT / "README.md", "zh": ROOT / "README.zh.md"}
OURS = {"diffusion_engine", "minivllm", "course", "recipes", "tests"}


def text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def pins() -> dict[str, Requirement]:
    lines = [line.split("#")[0].strip() for line in text("requirements.txt").splitlines()]
    return {canonical(r.name): r for r in map(Requirement, filter(None, lines))}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", MAKEFILE, re.MULTILINE))


# --- versions --------------------------------------------------------------------------------------------------------


def test_requirements_are_exact_pins():
    for requirement in pins().values():
        (specifier,) = requirement.specifier
        assert specifier.operator == "==" and "*" not in specifier.version, requirement


def test_pins_lie_in_the_engines_ranges():
    for requirement in map(Requirement, PYPROJECT["project"]["dependencies"]):
        (pin,) = pins()[canonical(requirement.name)].specifier
        assert requirement.specifier.contains(pin.version), f"{requirement} excludes the pin {pin.version}"


def test_this_environment_has_the_pinned_versions():
    for name, requirement in pins().items():
        found = Version(importlib.metadata.version(name)).public  # 2.13.0+cpu is 2.13.0
        assert requirement.specifier.contains(found), (
            f"{name} is {found}, requirements.txt says {requirement.specifier}"
        )


def test_conda_users_get_the_same():
    environment = yaml.safe_load(text("environment.yml"))
    plain = [entry for entry in environment["dependencies"] if isinstance(entry, str)]
    (pip,) = [entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict)]
    assert "python=3.11" in plain and "pip" in plain
    assert len(plain) == 2, f"{plain}: every other version belongs into requirements.txt"
    assert pip == ["-r requirements.txt", "-e ."]


def third_party(path: Path) -> set[str]:
    """Top-level names that a file imports and that are neither ours nor Python's."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module.split(".")[0])
    neighbours = {other.stem for other in path.parent.glob("*.py")}
    return found - OURS - neighbours - set(sys.stdlib_module_names)


@pytest.mark.parametrize("folder", ["diffusion_engine", "minivllm", "course", "recipes", "tests", "notebooks/source"])
def test_everything_imported_is_pinned(folder):
    homes = importlib.metadata.packages_distributions()
    unpinned = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        for name in third_party(path):
            if not any(canonical(home) in pins() for home in homes.get(name, [name])):
                unpinned.setdefault(name, path.relative_to(ROOT).as_posix())
    assert not unpinned, f"imported but not in requirements.txt: {unpinned}"


def test_one_version():
    from diffusion_engine import __version__

    assert yaml.safe_load(text("CITATION.cff"))["version"] == __version__
    assert f"## {__version__}" in text("CHANGELOG.md")


# --- commands --------------------------------------------------------------------------------------------------------


def documents() -> list[Path]:
    return [*READMES.values(), ROOT / "CONTRIBUTING.md"]


def test_make_commands_exist():
    for path in documents():
        for target in re.findall(r"\bmake ([a-z]+)", " ".join(code_of(path))):
            assert target in targets(), f"{path.name} tells of make {target}; the Makefile has {sorted(targets())}"


def code_of(path: Path) -> list[str]:
    """All code in a Markdown file: fenced blocks and inline pieces."""
    content = path.read_text(encoding="utf-8")
    fenced = re.findall(r"^```\w*\n(.*?)^```", content, re.DOTALL | re.MULTILINE)
    return fenced + re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", content, flags=re.DOTALL | re.MULTILINE))


def test_documented_subcommands_exist():
    from course.cli import app
    from diffusion_engine.cli import commands

    known = {
        "course": {c.name or c.callback.__name__ for c in app.registered_commands},
        "diffusion-engine": {c.name or c.callback.__name__ for c in commands.registered_commands},
    }
    for path in documents():
        for code in code_of(path):
            for program, command in re.findall(
                r"^(?:\.venv/bin/)?(course|diffusion-engine) ([a-z]+)", code, re.MULTILINE
            ):
                assert command in known[program], (
                    f"{path.name}: {program} has no {command}, only {sorted(known[program])}"
                )


def test_every_target_sets_up_by_itself():
    assert re.search(r"^\$\(STAMP\): requirements\.txt pyproject\.toml", MAKEFILE, re.MULTILINE)
    for target in targets() - {"help"}:
        assert re.search(rf"^{target}: \$\(STAMP\)", MAKEFILE, re.MULTILINE), f"make {target} does not need .venv"
    assert {"demo", "test", "lab", "bench", "quality"} <= targets()


def test_ci_calls_the_readmes_test_command():
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & stat.S_IXUSR
    assert re.search(r"^make test$", script.read_text(encoding="utf-8"), re.MULTILINE)
    workflow = yaml.safe_load(text(".github/workflows/ci.yml"))
    steps = {name: " ".join(step.get("run", "") for step in job["steps"]) for name, job in workflow["jobs"].items()}
    assert ".ci/run" in steps["test"] and "--wheel" in steps["wheel"]
    assert "apt" not in MAKEFILE.replace("apte", "")  # system packages are .ci/run's affair alone


def test_make_test_runs_all_four_parts():
    body = MAKEFILE.split("\ntest:")[1].split("\n\n")[0]
    for part in ("course check", "lint-imports", "pytest -q", "--nbval-lax --nbval-cell-timeout=120", "notebooks/zh"):
        assert part in body.replace("$(BIN)/", ""), f"make test leaves out {part}"


# --- what the READMEs say --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", [*READMES.values(), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=lambda p: p.name
)
def test_links_lead_somewhere(path):
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if not link.startswith(("https://", "http://", "#")):
            assert (ROOT / link.split("#")[0]).exists(), f"{path.name}: {link} does not exist"


def test_the_two_readmes_agree():
    """The same headings, links, pictures and commands, in the same order."""

    def skeleton(language: str) -> dict:
        content = READMES[language].read_text(encoding="utf-8")
        fenced = re.findall(r"^```\w*\n(.*?)^```", content, re.DOTALL | re.MULTILINE)
        links = [re.sub(r"\b(zh|en)\b", "*", link) for link in re.findall(r"\]\(([^)\s]+)\)", content)]
        return {
            "headings": [len(h) for h in re.findall(r"^(#+) ", content, re.MULTILINE)],
            "links": [link for link in links if not link.startswith("README")],
            "code": [[line.split("#")[0].rstrip() for line in block.splitlines()] for block in fenced],
            "table rows": len(re.findall(r"^\|", content, re.MULTILINE)),
        }

    assert skeleton("en") == skeleton("zh")


@pytest.mark.parametrize("language", READMES)
def test_the_readme_maps_every_chapter(language):
    content = READMES[language].read_text(encoding="utf-8")
    linked = re.findall(rf"notebooks/{language}/(\w+)\.ipynb", content)
    assert linked == sorted(p.stem for p in (ROOT / "notebooks" / "source").glob("[0-9A]*.py"))


# --- licences --------------------------------------------------------------------------------------------------------


def test_licence_texts_are_whole():
    licence = text("LICENSE")
    assert "Apache License" in licence and "Version 2.0, January 2004" in licence and "END OF TERMS" in licence
    assert PYPROJECT["project"]["license"] == "Apache-2.0"
    assert "SIL OPEN FONT LICENSE Version 1.1" in text("course/fonts/OFL.txt")


def test_notice_lists_every_asset_and_its_source():
    notice = text("NOTICE")
    for folder in sorted(path for path in ASSETS.iterdir() if path.is_dir()):
        assert f"diffusion_engine/assets/{folder.name}/" in notice, f"NOTICE is silent on {folder.name}"
    for path in sorted((ASSETS / "emoji").iterdir()):
        assert path.name in notice, f"NOTICE is silent on {path.name}"
    for record in (ASSETS / "emoji" / "captions.json", ASSETS / "clips" / "clips.json"):
        for source in json.loads(record.read_text(encoding="utf-8"))["sources"]:
            assert source["package"].removeprefix("npm ") in notice
    for font in (ROOT / "course" / "fonts").glob("*.otf"):
        assert font.name in notice
    for vendored in [*(ROOT / "site" / "vendor").glob("*"), *(ROOT / "tests" / "site" / "vendor").glob("*.js")]:
        assert vendored.relative_to(ROOT).as_posix() in notice, f"NOTICE is silent on {vendored}"
    for sentence in ("Copyright (c) 2017-2019 Miles Johnson", "UNICODE LICENSE V3", "Noto Emoji"):
        assert sentence in notice


def test_assets_are_small():
    sizes = {
        folder.name: sum(p.stat().st_size for p in folder.rglob("*")) for folder in ASSETS.iterdir() if folder.is_dir()
    }
    assert sizes["emoji"] <= 8e6
    assert sizes.get("model", 0) <= 30e6 + 2e6  # the weights, their card and its pictures
    assert sizes["clips"] <= 12e6 and sizes["clip_model"] <= 30e6 + 2e6


# --- the caption font ------------------------------------------------------------------------------------------------


def test_the_font_covers_what_is_drawn():
    from course.demo import PROMPTS
    from course.sheet import FONT, covered, require_glyphs
    from recipes.quality import UNSEEN

    assert FONT.stat().st_size <= 200_000
    require_glyphs("".join([*PROMPTS, *UNSEEN, "seed 0123456789"]))
    assert len(covered()) > 900
    with pytest.raises(ValueError, match="龘"):
        require_glyphs("龘")


def test_chinese_captions_show_without_any_system_font():
    """Ink where the glyph is, different for different characters, and none of them the empty box."""
    from PIL import Image, ImageDraw, ImageFont

    from course.sheet import FONT

    def drawn(character: str) -> bytes:
        picture = Image.new("L", (40, 40), 255)
        ImageDraw.Draw(picture).text((4, 0), character, fill=0, font=ImageFont.truetype(str(FONT), 28))
        return picture.tobytes()

    pictures = [drawn(character) for character in "火箭彩虹戴帽子的猫"]
    assert len({*pictures, drawn("\uffff")}) == len(pictures) + 1  # \uffff: what a missing glyph looks like
    assert min(sum(255 - value for value in picture) for picture in pictures) > 5_000


def test_the_contact_sheet():
    import numpy as np
    from PIL import Image

    from course.sheet import Row, contact_sheet

    red, blue = (Image.new("RGB", (64, 64), color) for color in ("red", "blue"))
    sheet = np.asarray(
        contact_sheet([Row("火箭", [red, blue]), Row("apple", [blue, red], "note")], ["seed 0", "seed 1"])
    )
    for color in ([255, 0, 0], [0, 0, 255]):
        assert (sheet == color).all(-1).sum() == 2 * 128 * 128  # every picture whole, twice as large
    assert sheet[0, 0].tolist() == [255, 255, 255]
    with pytest.raises(ValueError, match="rows is empty"):
        contact_sheet([])


# --- the wheel -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built offline with the pinned backend."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], cwd=ROOT, check=True)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_the_engine_alone(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"diffusion_engine"}  # and its .dist-info
    packed = {name for name in names if name.startswith("diffusion_engine/")}
    ignored = re.compile(r"__pycache__|\.tmp$")
    here = {p.relative_to(ROOT).as_posix() for p in (ROOT / "diffusion_engine").rglob("*") if p.is_file()}
    assert packed == {name for name in here if not ignored.search(name)}
    for name in ("LICENSE", "NOTICE"):
        assert any(entry.endswith(f".dist-info/licenses/{name}") for entry in names)


def test_the_wheel_has_one_command(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (entry,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        commands = archive.read(entry).decode()
        assert not [name for name in archive.namelist() if ".data/" in name]  # `course` belongs to editable installs
    assert re.findall(r"^([\w-]+) =", commands, re.MULTILINE) == ["diffusion-engine"]


def test_the_wheel_draws_outside_the_repository(wheel, tmp_path):
    """Unpacked alone, started elsewhere: the command finds its model, offline."""
    home = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(home)
    keep = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment = {**keep, "PYTHONPATH": str(home), "HF_HUB_OFFLINE": "1"}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = run("-c", "import diffusion_engine; print(diffusion_engine.__file__)")
    assert Path(where.strip()).is_relative_to(home)
    printed = run("-m", "diffusion_engine", "generate", "red apple", "-o", "apple.png", "--steps", "1")
    assert "apple.png" in printed and (tmp_path / "apple.png").read_bytes().startswith(b"\x89PNG")


# --- contracts -------------------------------------------------------------------------------------------------------


def test_the_layers_are_the_reading_order():
    """import-linter's layers name the chapters' modules, last chapter first."""
    (contract,) = [c for c in PYPROJECT["tool"]["importlinter"]["contracts"] if c["type"] == "layers"]
    layers = [layer.removeprefix("diffusion_engine.") for layer in contract["layers"]]
    header = re.compile(r"^#     module: (\S+)$", re.MULTILINE)
    chapters = [header.findall(p.read_text("utf-8")) for p in sorted((ROOT / "notebooks" / "source").glob("[0-9]*.py"))]
    modules = [found[0].replace("/", ".") for found in chapters if found]
    assert [layer for layer in reversed(layers) if layer in modules] == modules
    package = ROOT / "diffusion_engine"
    files = {".".join(p.relative_to(package).with_suffix("").parts) for p in package.rglob("*.py")}
    hand_written = {name for name in files - set(modules) if not name.endswith("__init__")}
    assert set(layers) == hand_written | set(modules)


def test_the_model_card_says_what_was_measured():
    """Rendered again from the committed JSON, not a byte differs."""
    from diffusion_engine.model_folder import SHIPPED_MODEL
    from recipes.model_card import render

    parts = [
        json.loads((SHIPPED_MODEL / f"{name}.json").read_text("utf-8")) for name in ("config", "quality", "training")
    ]
    for language, name in (("en", "MODEL_CARD.md"), ("zh", "MODEL_CARD.zh.md")):
        assert (SHIPPED_MODEL / name).read_text("utf-8") == render(language, *parts), (
            "run: python -m recipes.model_card"
        )
    assert parts[1]["weights_sha256"] == parts[0]["sha256"], "quality.json measured other weights; run: make quality"


def test_the_clip_model_card_says_what_was_measured():
    from diffusion_engine.model_folder import SHIPPED_CLIP_MODEL as folder
    from recipes.clip_card import render

    parts = [json.loads((folder / f"{name}.json").read_text("utf-8")) for name in ("config", "quality", "training")]
    for language, name in (("en", "MODEL_CARD.md"), ("zh", "MODEL_CARD.zh.md")):
        assert (folder / name).read_text("utf-8") == render(language, folder, *parts), (
            "run: python -m recipes.clip_card"
        )
    assert parts[1]["weights_sha256"] == parts[0]["sha256"], "quality.json measured other weights"


@pytest.mark.parametrize("name", ["sd3", "flux", "sana", "wan", "ltx", "cogvideox", "hunyuan_video", "solvers"])
def test_a_family_is_a_short_read(name):
    """Under two hundred lines of code a module, blank lines, comments and docstrings aside."""
    text = (ROOT / "diffusion_engine" / "reference" / f"{name}.py").read_text(encoding="utf-8")
    told = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            told |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = enumerate(text.splitlines(), start=1)
    assert sum(bool(line.strip()) and line.lstrip()[0] != "#" and n not in told for n, line in lines) < 200
