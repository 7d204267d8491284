"""A small course in a temporary folder: chapters that keep every rule and start a kernel in a second."""

import base64
from pathlib import Path

from course.source import load_chapters
from course.twins import stamp_chapter

HEADER = """\
# ---
# jupyter:
#   course:
#     minutes: 5
#     module: {module}
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---
"""
PNG = base64.b64encode(
    base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg==")
).decode()
LONG_ZH = "这一格用两三句平常的话说清一件事：先看一个最小的例子，再看它为什么成立，最后记住一句话。"
LONG_EN = (
    "This cell says one thing in plain words: first a tiny example, then why it holds, and at last a line to keep."
)


def commented(text: str) -> str:
    """Markdown as py:percent writes it."""
    return "\n".join(f"# {line}".rstrip() for line in text.splitlines())


def prose(zh: str, en: str) -> str:
    """A zh cell and its twin."""
    return f'# %% [markdown] lang="zh"\n{commented(zh)}\n\n# %% [markdown] lang="en"\n{commented(en)}\n'


def code(text: str, *tags: str) -> str:
    """A code cell."""
    listed = ", ".join(f'"{tag}"' for tag in tags)
    return f"# %% tags=[{listed}]\n{text}\n" if tags else f"# %%\n{text}\n"


def chapter_text(number: str, name: str, extra: list[str] | None = None) -> str:
    """A whole chapter that builds ``diffusion_engine/<name>.py`` and keeps every rule."""
    cells = [
        prose(
            f"# {number} · 小章\n\n你会做出一个小模块。\n\n| 你会做出 | 时间 |\n| --- | --- |\n| 一个函数 | 5 分钟 |",
            f"# {number} · Small chapter\n\nYou build a small module.\n\n| You build | Time |\n| --- | --- |\n| one | 5 |",
        ),
        code("from pathlib import Path", "export"),
        code("from IPython.display import Image, display", "hide"),
        code(f'png = "{PNG}"\n\n\ndef show(data, alt):\n    display(Image(data=data, alt=alt))', "hide"),
        code('with Path("ran.txt").open("a") as log:\n    log.write(f"{__name__}\\n")', "hide"),
        prose(
            f"## 加倍\n\n{LONG_ZH}公式是 $y = 2x$，见[词表](../../notes/terms.csv)。",
            f"## Doubling\n\n{LONG_EN} The formula is $y = 2x$, see the [terms](../../notes/terms.csv).",
        ),
        code(f'def {name}(x: float) -> float:\n    """Twice x."""\n    return 2 * x', "export"),
        code(f"print({name}(3), Path.cwd())\nobject()"),
        code('import base64\n\nshow(base64.b64decode(png), alt="A dot")', "hide"),
        *[code(f"assert {name}({value}) == {2 * value}", "check") for value in range(6)],
        *[prose(LONG_ZH, LONG_EN) for _ in range(4)],
        *(extra or []),
        prose("## 三个问题\n\n1. 预测一\n2. 修改二", "## Three questions\n\n1. Predict\n2. Modify"),
        *[code(f"assert {name}({value}.5) == {2 * value}.0 + 1", "solution") for value in range(3)],
        prose("## 小结\n\n- 一句话", "## Recap\n\n- one line"),
        code(f"{name}(1)"),
    ]
    return HEADER.format(module=name) + "\n" + "\n".join(cells)


def write_tree(root: Path) -> Path:
    """Two chapters (the second imports the first's module), a note pair and a term list, all stamped."""
    (root / "notebooks" / "source").mkdir(parents=True)
    (root / "notes").mkdir()
    (root / "notes" / "terms.csv").write_text(
        "zh,en,forbidden_zh,forbidden_en\n噪声,noise,噪音,hiss\n", encoding="utf-8"
    )
    (root / "notes" / "01_flow.zh.md").write_text("# 流\n\n见 $a+b$ 与[词表](terms.csv)。\n", encoding="utf-8")
    (root / "notes" / "01_flow.en.md").write_text("# Flow\n\nSee $a+b$ and the [terms](terms.csv).\n", encoding="utf-8")
    (root / "diffusion_engine").mkdir()
    uses = [code("from diffusion_engine.first import first\n\nfirst(2)")]
    for number, name, extra in (("01", "first", []), ("02", "second", uses)):
        path = root / "notebooks" / "source" / f"{number}_{name}.py"
        path.write_text(chapter_text(number, name, extra), encoding="utf-8")
    stamp_all(root)
    return root


def stamp_all(root: Path) -> None:
    """Stamp every chapter and note."""
    from course.twins import stamp_documents

    for chapter in load_chapters(root):
        stamp_chapter(chapter)
    stamp_documents(root, ["notes"])


def edit(path: Path, old: str, new: str) -> None:
    """Replace the first ``old`` in a file, which must hold it."""
    text = path.read_text(encoding="utf-8")
    assert old in text, f"{path.name} does not hold {old!r}"
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


def snapshot(root: Path) -> dict[str, bytes]:
    """Every file's bytes."""
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}
