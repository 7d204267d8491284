"""Fixtures: a clean course, made once, copied for each test."""

import shutil
from pathlib import Path

import nbformat
import pytest
from small_course import PNG, write_tree

from course.export import export_chapter
from course.fingerprint import run_hash
from course.run import store
from course.source import load_chapters


def pretend_run(root: Path) -> None:
    """Store outputs as a run would, without a kernel."""
    for chapter in load_chapters(root):
        cells = [nbformat.v4.new_code_cell(cell.text, execution_count=n) for n, cell in enumerate(chapter.code, 1)]
        for cell in cells:
            if "show(base64" in cell.source:
                picture = {"image/png": PNG, "text/plain": "<Image>"}
                metadata = {"image/png": {"alt": "A dot"}}
                cell.outputs = [nbformat.v4.new_output("display_data", picture, metadata=metadata)]
            elif cell.source.startswith("print"):
                cell.outputs = [nbformat.v4.new_output("stream", text="6\n")]
        store(chapter, cells, run_hash(chapter))


@pytest.fixture(scope="session")
def clean_tree(tmp_path_factory) -> Path:
    """Sources, modules, notebooks and outputs that agree; never to be changed."""
    root = write_tree(tmp_path_factory.mktemp("course") / "clean")
    for chapter in load_chapters(root):
        export_chapter(chapter)
    pretend_run(root)
    return root


@pytest.fixture
def root(clean_tree: Path, tmp_path: Path) -> Path:
    """A copy of the clean tree that a test may spoil."""
    return Path(shutil.copytree(clean_tree, tmp_path / "copy"))
