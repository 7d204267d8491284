"""A chapter with one line of it made wrong: which of its checks notices?"""

import io
from contextlib import redirect_stdout
from pathlib import Path

import matplotlib
import pytest
import torch

from course import figures
from course.source import Chapter, chapter_paths, load_chapter

ROOT = Path(__file__).resolve().parents[1]


def chapter(number: str) -> Chapter:
    """The source of one chapter."""
    return load_chapter(*chapter_paths(ROOT, [number]), ROOT)


def failing_check(source: Chapter, right: str = "", wrong: str = "") -> str | None:
    """Run a chapter's code with ``right`` replaced by ``wrong`` in its export cells; plots are not rendered.

    Returns:
        The id of the first check cell whose assertion fails, or None when the chapter stays green. Any other
        exception is passed on: a fault that breaks shapes proves nothing.
    """
    found = sum(cell.text.count(right) for cell in source.code if "export" in cell.tags) if right else 1
    assert found == 1, f"{right!r} stands {found} times in the export cells of {source.source}"
    names: dict = {"__name__": source.path.stem}
    matplotlib.use("agg")
    with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng(), redirect_stdout(io.StringIO()):
        patch.setattr(figures, "show", lambda fig, alt, colors=None: figures.plt.close(fig))
        for cell in source.code:
            code = cell.text.replace(right, wrong) if right and "export" in cell.tags else cell.text
            try:
                exec(compile(code, cell.id, "exec"), names)
            except AssertionError:
                assert "check" in cell.tags, f"the fault was noticed by {cell.id}, which is no check"
                return cell.id
    return None
