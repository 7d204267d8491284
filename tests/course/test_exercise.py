"""Exercises: what is blank, what stays, and that work is never lost."""

import ast
import json

import pytest
from small_course import chapter_text, code, stamp_all
from typer.testing import CliRunner

from course.cli import app
from course.exercise import UNDONE, blank, exercise_cells
from course.source import LANGUAGES, chapter_paths, load_chapter
from course.statements import definitions
from course.tasks import Sheet
from tests.chapters import ROOT, chapter, mutants

NUMBERS = [path.stem.split("_")[0] for path in chapter_paths(ROOT) if chapter(path.stem.split("_")[0]).module]

MODULE = '''\
class Counter:
    """Counts.

    Attributes: none.
    """

    def __init__(self):
        self.seen = []

    def add(self, item):
        # a hint that stays
        self.seen.append(item)
        return self

    @property
    def total(self) -> int:
        """How many."""
        return len(self.seen)


class Pair(list):
    def __init__(self, a, b):
        super().__init__([a, b])


def refuse(x):
    """Refuse."""
    if x < 0:
        raise ValueError("negative")


def unseen(x):
    return x


def _private(x):
    return 2 * x


def by_helper(x):
    """Twice."""
    return _private(x)'''

CHECK = "counter = Counter()\ncounter.add(by_helper(1))\nassert counter.total == 1 and Pair(1, 2)"


def exercise(root, *arguments):
    return CliRunner().invoke(app, ["--root", str(root), "exercise", *arguments])


@pytest.fixture
def small(root):
    """A chapter with a class of each kind."""
    text = chapter_text("03", "third", [code(MODULE, "export"), code(CHECK, "check")])
    (root / "notebooks" / "source" / "03_third.py").write_text(text, encoding="utf-8")
    stamp_all(root)
    return load_chapter(root / "notebooks" / "source" / "03_third.py", root)


def test_tasks_are_what_a_check_can_tell(small):
    names = [task.name for task in Sheet(small).tasks]
    assert names == ["third", "Counter.add", "Counter.total", "Pair.__init__", "by_helper"]
    assert [str(t) for t in list(Sheet(small).by_check().values())[-1]] == [
        "03.2 Counter.add",
        "03.3 Counter.total",
        "03.4 Pair.__init__",
        "03.5 by_helper",
    ]


def test_bodies_go_and_the_rest_stays(small):
    cells = {cell["id"]: cell for cell in exercise_cells(small, "en")}
    text = next(cell["source"] for cell in cells.values() if "class Counter" in cell["source"])
    assert (
        '    def add(self, item):\n        # a hint that stays\n        raise NotImplementedError("not done yet: 03.2'
        in text
    )
    assert '        """How many."""\n        raise NotImplementedError("not done yet: 03.3 Counter.total")\n' in text
    assert "self.seen = []" in text and "return 2 * x" in text and 'ValueError("negative")' in text
    assert "_private(x)\n" not in text and "super().__init__([a, b])" not in text
    check = next(cell for cell in cells.values() if "counter.add" in cell["source"])
    assert check["source"].startswith("# judges: 03.2 Counter.add · 03.3") and check["source"].endswith(CHECK)
    assert check["metadata"] == {"tags": ["check"]}
    hidden = [cell for cell in cells.values() if "hide" in cell["metadata"].get("tags", [])]
    assert hidden and all(cell["metadata"]["jupyter"] == {"source_hidden": True} for cell in hidden)


def test_one_liners_and_docstrings():
    text = (
        'def f(x): return x\n\n\ndef g(x):\n    """One."""\n\n    return x  # gone\n\n\nclass A:\n    def h(self): pass'
    )
    expected = (
        'def f(x): raise NotImplementedError("1")\n\n\ndef g(x):\n    """One."""\n    raise NotImplementedError("2")'
        '\n\n\nclass A:\n    def h(self): raise NotImplementedError("3")'
    )
    assert blank(text, {"f": "1", "g": "2", "A.h": "3"}) == expected


def test_work_is_never_overwritten(root):
    first = exercise(root, "1")
    path = root / "exercises" / "01_first.zh.ipynb"
    assert first.exit_code == 0 and "wrote exercises/01_first.zh.ipynb: 1 tasks" in first.output
    fresh = path.read_bytes()
    for cell in json.loads(fresh)["cells"]:
        assert not cell.get("outputs") and "solution" not in cell["metadata"].get("tags", [])

    work = fresh.replace(b"raise NotImplementedError", b"return 2 * x #")
    path.write_bytes(work)
    again = exercise(root, "01", "--lang", "zh")
    assert again.exit_code == 2 and "--fresh" in again.output and path.read_bytes() == work

    renewed = exercise(root, "01", "--lang", "zh", "--fresh")
    assert renewed.exit_code == 0 and path.read_bytes() == fresh
    assert "kept in exercises/01_first.zh.1.ipynb" in renewed.output
    assert path.with_name("01_first.zh.1.ipynb").read_bytes() == work
    assert exercise(root, "01", "--fresh").exit_code == 0 and len(list(path.parent.iterdir())) == 2  # nothing to keep
    assert exercise(root, "01", "--lang", "en").exit_code == 0 and len(list(path.parent.iterdir())) == 3


def test_a_chapter_without_a_module_has_no_exercise():
    result = CliRunner().invoke(app, ["--root", str(ROOT), "exercise", "00"])
    assert result.exit_code == 2 and "nothing to write" in result.output


def test_exercises_are_ignored_by_git():
    assert "/exercises/" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("number", NUMBERS)
def test_every_chapter(number):
    """Each task is blank once and judged by a check that says so; the rest is the chapter's own text."""
    source, sheet = chapter(number), Sheet(chapter(number))
    judged = {task for tasks in sheet.by_check().values() for task in tasks}
    assert sheet.tasks and judged == set(sheet.tasks)
    texts = {cell.id: cell.text for cell in source.code}
    both = [exercise_cells(source, language) for language in LANGUAGES]
    assert [c["id"] for c in both[0]] == [c["id"] for c in both[1]]
    for cells in both:
        code_cells = [cell for cell in cells if cell["cell_type"] == "code"]
        assert not [c for c in code_cells if "solution" in c["metadata"].get("tags", [])]
        blanks = []
        for cell in code_cells:
            tags = cell["metadata"].get("tags", [])
            ast.parse(cell["source"])
            if "export" not in tags:
                assert cell["source"].endswith(texts[cell["id"]])
                continue
            for name, node in definitions(ast.parse(cell["source"])).items():
                found = UNDONE.search(ast.unparse(node)) if isinstance(node, ast.FunctionDef) else None
                blanks += [(found[1], name)] if found else []
                original = definitions(ast.parse(texts[cell["id"]]))[name]
                assert ast.get_docstring(node) == ast.get_docstring(original)
        assert blanks == [(task.number, task.name) for task in sheet.tasks]


def test_every_chapter_has_mutants():
    for number in NUMBERS:
        if number <= "11":
            assert len({mutant.name for mutant in mutants(number)}) >= 3
