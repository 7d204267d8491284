"""A small repository with one chapter, one card and one module, for tests that break something on purpose."""

import base64
import io
import json
import shutil
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
SITE_PARTS = ("words.toml", "templates", "assets", "vendor")
TITLE = {"zh": "# 01 · 小章（small chapter）", "en": "# 01 · A small chapter"}
PROMISE = {"zh": "读完这一章，你会数到 $3$。", "en": "After this chapter you count to $3$."}
FACTS = {
    "zh": "| 你会做出 | 时间 |\n| --- | --- |\n| 数 | 5 分钟 |",
    "en": "| You build | Time |\n| --- | --- |\n| numbers | 5 minutes |",
}
SECTION = {
    "zh": "## 数一数\n\n注意力在这里，见 `papers/01_small`。",
    "en": "## Counting\n\nAttention is here, see `papers/01_small`.",
}
PAPER = {
    "zh": "# 小卡片\n\n第 01 章用到它。\n\n## 要点\n\n- [x] $x$\n",
    "en": "# A small card\n\nChapter 01 uses it.\n\n## The point\n\n- [x] $x$\n",
}
MODULE = '''# Generated from notebooks/source/01_small.py by `course export`.
# Do not edit: change the chapter and export again.

raise RuntimeError("the site must read this file, not import it")


def count(n: int, *, step: float = 1.0) -> int:
    """Count to n: n = 1 + … + 1.

    Args:
        n: how far, at least ``0``.
        step: how much a step adds.

    Raises:
        ValueError: `n` is below 0.

    Source: Peano 1889.
    """


class Counter:
    """Counts.

    Args:
        start: where to begin.
    """

    def __init__(self, start: int = 0):
        self.start = start

    def next(self) -> int:
        """The next number."""
'''


def png(color: str = "red") -> str:
    """A picture of 8 × 6 pixels, base64."""
    buffer = io.BytesIO()
    Image.new("RGB", (8, 6), color).save(buffer, "png")
    return base64.b64encode(buffer.getvalue()).decode()


def markdown(name: str, text: str) -> dict:
    return {"cell_type": "markdown", "id": name, "metadata": {}, "source": text}


def code(name: str, text: str, *outputs: dict, tags: tuple[str, ...] = ()) -> dict:
    metadata = {"tags": list(tags)} if tags else {}
    cell = {"cell_type": "code", "id": name, "metadata": metadata, "execution_count": 1}
    return cell | {"source": text, "outputs": list(outputs)}


def picture(alt: str | None = "A red square") -> dict:
    metadata = {"image/png": {"alt": alt}} if alt else {}
    return {"output_type": "display_data", "data": {"image/png": png(), "text/plain": "<Image>"}, "metadata": metadata}


def foreign(text: str) -> dict:
    return {"output_type": "display_data", "data": {"text/html": text, "text/plain": "html"}, "metadata": {}}


def printed(text: str) -> dict:
    return {"output_type": "stream", "name": "stdout", "text": text}


def small_site(root: Path, *extra: dict, section: dict[str, str] | None = None, paper: bool = True) -> Path:
    """Write the repository; ``extra`` cells come last in both languages."""
    for part in SITE_PARTS:
        source = ROOT / "site" / part
        copy = shutil.copytree if source.is_dir() else shutil.copy
        (root / "site").mkdir(parents=True, exist_ok=True)
        copy(source, root / "site" / part)
    source = root / "notebooks" / "source" / "01_small.py"
    source.parent.mkdir(parents=True)
    source.write_text("# ---\n# jupyter:\n#   course:\n#     module: small\n# ---\n\n# %%\n")
    (root / "diffusion_engine").mkdir()
    (root / "diffusion_engine" / "small.py").write_text(MODULE)
    for language in ("zh", "en"):
        cells = [
            markdown("01-start-01", "\n\n".join(part[language] for part in (TITLE, PROMISE, FACTS))),
            markdown("01-counting-01", (section or SECTION)[language]),
            code("01-counting-02", "count(3)  # three", printed("3 of them"), tags=("export",)),
            code("01-counting-03", "plot()", picture(), tags=("hide",)),
            code("01-counting-04", "# 1 · three\nassert count(3) == 3", tags=("solution",)),
            *extra,
        ]
        notebook = {"cells": cells, "metadata": {"course": {}}, "nbformat": 4, "nbformat_minor": 5}
        path = root / "notebooks" / language / "01_small.ipynb"
        path.parent.mkdir()
        path.write_text(json.dumps(notebook, ensure_ascii=False))
        if paper:
            card = root / "papers" / f"01_small.{language}.md"
            card.parent.mkdir(exist_ok=True)
            card.write_text(PAPER[language])
    return root
