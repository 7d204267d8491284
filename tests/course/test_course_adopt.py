"""Adopt: edits of both kinds come home; what cannot be placed is refused and nothing is touched."""

import json

import pytest
from small_course import edit, snapshot
from typer.testing import CliRunner

from course.check import check_all
from course.cli import app

ZH, EN, SOURCE = "notebooks/zh/01_first.ipynb", "notebooks/en/01_first.ipynb", "notebooks/source/01_first.py"


def adopt(root, name=ZH):
    return CliRunner().invoke(app, ["--root", str(root), "adopt", str(root / name)])


def alter(root, change, name=ZH):
    notebook = json.loads((root / name).read_text(encoding="utf-8"))
    change(notebook)
    (root / name).write_text(json.dumps(notebook, ensure_ascii=False), encoding="utf-8")


def write_cell(key, text):
    def change(notebook):
        cell = next(cell for cell in notebook["cells"] if cell["id"] == key)
        cell["source"] = text

    return change


def test_code_and_prose_come_home(root):
    alter(root, write_cell("01-doubling-02", 'def first(x: float) -> float:\n    """x and x."""\n    return x + x\n'))
    alter(root, write_cell("01-small-chapter-01", "# 01 · 小章\n\n改过。\n\n| 做 | 时间 |\n| --- | --- |\n| 一 | 5 |"))
    result = adopt(root)
    assert result.exit_code == 0, result.output
    assert "adopted 01-doubling-02 (code)" in result.output and "adopted 01-small-chapter-01 (zh)" in result.output
    assert "en twins need a look" in result.output and "course run 01" in result.output
    source = (root / SOURCE).read_text(encoding="utf-8")
    assert "return x + x" in source and "# 改过。" in source and "You build a small module" in source
    assert "return x + x" in (root / "diffusion_engine/first.py").read_text(encoding="utf-8")
    assert "return x + x" in (root / EN).read_text(encoding="utf-8")
    rules = {(f.rule, f.cell) for f in check_all(root) if "01_first" in f.file}
    assert ("stamp", "01-small-chapter-01") in rules
    assert not {"module", "notebook", "form"} & {rule for rule, _ in rules}


def test_english_prose_comes_home_from_the_english_notebook(root):
    before = (root / SOURCE).read_text(encoding="utf-8")
    edit(root / EN, "You build a small module", "You write a small module")
    result = adopt(root, EN)
    assert result.exit_code == 0 and "zh twins need a look" in result.output
    after = (root / SOURCE).read_text(encoding="utf-8")
    assert after == before.replace("You build a small module", "You write a small module")


def test_edits_in_both_notebooks_come_home_one_after_the_other(root):
    edit(root / ZH, "一个函数", "两个函数")
    edit(root / EN, "You build a small", "You write a small")
    first, second = adopt(root, ZH), adopt(root, EN)
    assert "not exported yet" in first.output and first.exit_code == second.exit_code == 0
    assert not [f for f in check_all(root) if f.rule in ("notebook", "module")]


def test_nothing_edited_nothing_done(root):
    before = snapshot(root)
    assert "nothing was edited" in adopt(root).output
    assert snapshot(root) == before


REFUSALS = {
    "new": (lambda n: n["cells"].insert(3, {**n["cells"][3], "id": "abc"}), "does not know: abc"),
    "without id": (lambda n: n["cells"][3].pop("id"), "(none)"),
    "deleted": (lambda n: n["cells"].pop(3), "lacks 01-small-chapter-04"),
    "moved": (lambda n: n["cells"].append(n["cells"].pop(3)), "another order, from 01-small-chapter-05 on"),
    "twice": (lambda n: n["cells"].append(dict(n["cells"][3])), "more than once"),
    "retyped": (lambda n: n["cells"][3].update(cell_type="markdown"), "type or tags of 01-small-chapter-04"),
    "retagged": (lambda n: n["cells"][3].update(metadata={}), "type or tags of 01-small-chapter-04"),
    "a cell marker inside": (write_cell("01-doubling-03", "x = 1\n# %%\ny = 2"), "does not survive"),
    "no cell's metadata": (lambda n: n["cells"][3].pop("metadata"), "type or tags of 01-small-chapter-04"),
    "odd cell's metadata": (lambda n: n["cells"][3].update(metadata=[1]), "is not a notebook"),
    "odd metadata": (lambda n: n.update(metadata="x"), "is not a notebook"),
    "odd record": (lambda n: n["metadata"].update(course=["x"]), "is not a notebook"),
    "odd list of cells": (lambda n: n["metadata"].update(course={"cells": 3}), "is not a notebook"),
    "no record": (lambda n: n["metadata"].clear(), "does not say what it was exported from"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_placed_is_refused_and_nothing_is_touched(root, case):
    change, message = REFUSALS[case]
    alter(root, write_cell("01-doubling-02", "first = abs"))  # an edit that could be placed: all or nothing
    alter(root, change)
    before = snapshot(root)
    result = adopt(root)
    assert result.exit_code == 2 and message in result.output, result.output
    assert snapshot(root) == before


def test_a_cell_changed_on_both_sides_is_refused(root):
    edit(root / SOURCE, "return 2 * x", "return x + x")
    alter(root, write_cell("01-doubling-02", "first = abs"))
    before = snapshot(root)
    result = adopt(root)
    assert result.exit_code == 2 and "01-doubling-02 changed in 01_first.ipynb and in the source" in result.output
    assert snapshot(root) == before


def test_a_source_that_moved_on_elsewhere_keeps_its_own_changes(root):
    edit(root / SOURCE, "print(first(3)", "print(first(30)")
    alter(root, write_cell("01-doubling-02", "first = abs"))
    assert adopt(root).exit_code == 0
    source = (root / SOURCE).read_text(encoding="utf-8")
    assert "first = abs" in source and "print(first(30)" in source


@pytest.mark.parametrize("name", ["notebooks/source/01_first.py", "notes/01_flow.zh.md", "notebooks/zh/09_none.ipynb"])
def test_other_files_are_refused(root, name):
    assert adopt(root, name).exit_code == 2
