"""Grading: nothing solved stands in for the learner, and every failure is told apart."""

import ast
import json

import pytest
from small_course import chapter_text, code, edit, stamp_all
from typer.testing import CliRunner

from course.cli import app
from course.exercise import exercise_cells, write_exercise
from course.grade import grade, learner_cells
from course.measure import Watch
from course.source import load_chapter
from course.statements import definitions
from course.tasks import Sheet, Task, spans
from course.trial import Code, mend
from course.verdict import BLOCKED, OPEN, WRONG, Grade, Verdict
from tests.chapters import MUTANTS, chapter, mutants, solved, try_faults

MODULE = '''\
def twice(x: float) -> float:
    """2 x."""
    return 2 * x


def thrice(x: float) -> float:
    """3 x."""
    return 3 * x'''
MORE = '''\
class Sum:
    """x + y of what `twice` gives."""

    def __init__(self, y: float):
        self.y = y

    def total(self, x: float) -> float:
        """2 x + y."""
        return twice(x) + self.y

    def count(self) -> int:
        """One."""
        return 1'''
CELLS = [
    code(MODULE, "export"),
    code("values = [twice(1.0), twice(2.0)]"),
    code("assert values == [2.0, 4.0]  # doubled", "check"),
    code("for x in (1, 2):\n    assert abs(thrice(x) - 3 * x) < 1e-6  # tripled", "check"),
    code(MORE, "export"),
    code("made = Sum(1.0)"),
    code("assert made.total(2.0) == 5.0\nassert made.count() == 1", "check"),
]
RIGHT = {"twice": "return 2 * x", "thrice": "return 3 * x", "total": "return twice(x) + self.y", "count": "return 1"}


@pytest.fixture
def third(root):
    """Chapter 03: tasks 03.1 third, 03.2 twice, 03.3 thrice, 03.4 Sum.total, 03.5 Sum.count; its module is there."""
    text = chapter_text("03", "third", CELLS)
    (root / "notebooks" / "source" / "03_third.py").write_text(text, encoding="utf-8")
    stamp_all(root)
    assert CliRunner().invoke(app, ["--root", str(root), "export", "03"]).exit_code == 0
    return load_chapter(root / "notebooks" / "source" / "03_third.py", root)


def fill(source, **bodies):
    """The exercise with some tasks done."""
    bodies = {"third": "return 2 * x", **RIGHT, **bodies}
    cells = []
    for cell in exercise_cells(source, "en"):
        text = cell["source"]
        for name, body in bodies.items():
            task = next(str(t) for t in Sheet(source).tasks if t.name.split(".")[-1] == name)
            text = text.replace(f'raise NotImplementedError("not done yet: {task}")', body or "pass")
        cells += [Code(cell["id"], text)] if cell["cell_type"] == "code" else []
    return cells


def statuses(source, cells, limit=20.0):
    result = grade(source, cells, {}, limit)
    return {verdict.task.name: verdict.text() for verdict in result.verdicts}, result


def test_solved_and_untouched(third):
    found, result = statuses(third, fill(third))
    assert result.done and set(found.values()) == {"✓"}
    blank = [Code(c["id"], c["source"]) for c in exercise_cells(third, "en") if c["cell_type"] == "code"]
    found, result = statuses(third, blank)
    assert not result.done and set(found.values()) == {OPEN}


def test_a_wrong_task_is_told_with_its_distance_and_blocks_what_needs_it(third):
    found, result = statuses(third, fill(third, twice="return 2.5 * x", count=""))
    assert found == {
        "third": "✓",
        "twice": WRONG,
        "thrice": "✓",
        "Sum.total": "blocked by 03.2",
        "Sum.count": OPEN,
    }
    twice = result.verdicts[1]
    assert twice.line == "assert values == [2.0, 4.0] # doubled" and twice.off == "[2.5, 5.0] == [2.0, 4.0] is false"
    assert grade(third, fill(third, thrice="return 4 * x"), {}).verdicts[2].off == "1, expected < 1e-06"


def test_what_fails_before_a_check_is_found_too(third):
    found, result = statuses(third, fill(third, twice="return 2 * y"))
    assert found["twice"] == WRONG and found["Sum.total"] == "blocked by 03.2" and found["thrice"] == "✓"
    assert result.verdicts[1].line == "NameError: name 'y' is not defined (in twice: return 2 * y)"


def test_a_syntax_error_names_its_task_and_spares_the_others(third):
    found, result = statuses(third, fill(third, thrice="return 3 *", count="return (1"))
    assert found == {"third": "✓", "twice": "✓", "thrice": WRONG, "Sum.total": "✓", "Sum.count": WRONG}
    assert result.verdicts[2].line == "syntax error, line 8: invalid syntax"


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("while True: pass", "still running after 2 s"),
        ("import os; os.system('yes hello')", "still running after 2 s"),
        ("import os; os._exit(3)", "the process died (exit status 3)"),
        ("raise SystemExit", "SystemExit"),
    ],
)
def test_what_never_comes_back_names_its_task_and_spares_the_others(third, body, line):
    found, result = statuses(third, fill(third, twice=body), limit=2)
    assert found["twice"] == WRONG or "died" in line and not result.done
    assert found["thrice"] == found["Sum.count"] == "✓" and found["Sum.total"] != "✓"
    assert line in result.verdicts[1].line + "".join(result.notes)


def test_one_failed_check_is_told_once_and_in_the_readers_language(third):
    """What hangs is named with its reason; two tasks of one check share its line."""
    _, result = statuses(third, fill(third, twice="return 2.5 * x"))
    assert any("[dim]要等 03.2[/]" in line for line in result.lines("zh"))
    assert result.lines("zh")[-1] == "完成 3 题，共 5 题"
    hung = Verdict(Task("03.1", "x"), BLOCKED, where="Start", error="TimeoutError: still running after 1 s")
    assert hung.text() == "blocked by an error in “Start”: TimeoutError: still running after 1 s"
    same = Grade([Verdict(Task(f"03.{n}", "x"), WRONG, line="assert x", where="here") for n in (1, 2)], [])
    assert [line.strip() for line in same.lines()[1:5:3]] == ["assert x", "the same check as 03.1"]


def test_runs_of_numbers_are_spans():
    assert spans(["04.1", "04.3", "04.4", "04.5", "04.9", "04.10"]) == "04.1, 04.3–04.5, 04.9, 04.10"
    assert spans([]) == ""


def test_the_package_cannot_stand_in_for_the_learner(third):
    borrow = "from diffusion_engine.third import twice as solved; return solved(x)"
    found, result = statuses(third, fill(third, twice=borrow))
    assert found["twice"] == WRONG and "is what this exercise builds" in result.verdicts[1].line
    cells = [Code("start", "from diffusion_engine.third import twice, thrice, Sum, third"), *fill(third, twice="")]
    found, result = statuses(third, cells)
    assert found["twice"] == OPEN and found["thrice"] == "✓"  # earlier chapters' modules stay importable:
    assert statuses(third, [Code("start", "from diffusion_engine.first import first"), *fill(third)])[1].done


def test_checks_are_the_chapters_own(third):
    wrong = fill(third, twice="return 0")
    checks = {cell.id for cell in third.code if "check" in cell.tags}
    weakened = [Code(cell.id, "assert True") if cell.id in checks else cell for cell in wrong]
    dropped = [cell for cell in wrong if cell.id not in checks]
    for cells in (weakened, dropped):
        assert statuses(third, cells)[0]["twice"] == WRONG
    assert statuses(third, [cell for cell in fill(third) if cell.id not in checks])[1].done


def test_a_learners_own_cells_and_magics(third):
    cells = fill(third, twice="return helper(x)")
    cells.insert(2, Code("mine", "%matplotlib inline\n!ls\ndef helper(x):\n    return x + x"))
    cells.insert(3, Code("mine", "1 / 0"))  # a copied cell with the same id, and a mistake that nothing needs
    assert statuses(third, cells)[1].done
    cells[2] = Code("mine", "def helper(x):\n    return x +")
    found, result = statuses(third, cells)
    assert found["thrice"] == "✓" and found["Sum.count"] == "✓" and "✓" not in (found["twice"], found["Sum.total"])


def test_the_command_asks_for_the_language_and_tells_by_its_exit_status(third):
    def run(*arguments, **options):
        return CliRunner().invoke(app, ["--root", str(third.root), "grade", "03", *arguments], **options)

    assert "write it with `course exercise 03 --lang zh`" in run().output
    path, _, _ = write_exercise(third, "en")
    untouched = run()
    assert untouched.exit_code == 1 and "0 of 5 tasks done" in untouched.output and "03.2  twice" in untouched.output
    write_exercise(third, "zh")
    for name, body in RIGHT.items():
        text = path.read_text(encoding="utf-8")
        task = next(str(t) for t in Sheet(third).tasks if t.name.split(".")[-1] == name)
        path.write_text(text.replace(f'raise NotImplementedError(\\"not done yet: {task}\\")', body), encoding="utf-8")
    edit(path, 'raise NotImplementedError(\\"not done yet: 03.1 third\\")', "return 2 * x")
    assert [c.id for c in learner_cells(path)] == [
        c["id"] for c in json.loads(path.read_text())["cells"] if "outputs" in c
    ]
    answer = run(input="fr\nen\n")
    assert answer.output.count("grade which (zh, en)") == 2 and answer.exit_code == 0 and "5 of 5" in answer.output
    assert run("--lang", "zh").exit_code == 1


def test_a_damaged_exercise_is_never_thrown_away(third):
    path, _, _ = write_exercise(third, "en")
    for damage in ("null", "<<<<<<< mine\n{}", '{"cells": [{"source": "x"}]}', '{"cells": []', "[" * 100_000):
        path.write_text(damage, encoding="utf-8")
        done = CliRunner().invoke(app, ["--root", str(third.root), "grade", "03"])
        assert done.exit_code == 2 and "`course exercise 03 --fresh` moves it aside" in done.output, damage[:20]
    fresh, kept, _ = write_exercise(third, "en", fresh=True)
    assert fresh == path and kept.read_text(encoding="utf-8") == damage
    elsewhere = CliRunner().invoke(app, ["--root", str(third.root / "notebooks"), "check"])
    assert elsewhere.exit_code == 2 and "no notebooks/source in" in elsewhere.output


def test_mending_keeps_lines():
    text = "x = 1\n\n@property\ndef a(y):\n    return (y\n\nclass B:\n    z: int\n\n    def c(self):\n        return 1 +\n\n    def d(self):\n        return 2\n\nx = = 3\ny = 4"
    mended, broken = mend(text)
    ast.parse(mended)
    assert mended.count("\n") == text.count("\n") and "def d(self):\n        return 2" in mended and "y = 4" in mended
    assert {name: error.split(":")[0] for name, error in broken.items()} == {
        "a": "line 5",
        "B.c": "line 11",
        "": "line 16",
    }


def test_distances():
    torch = pytest.importorskip("torch")
    watch = Watch()
    assert not watch.call(torch.allclose, torch.zeros(3), torch.tensor([0.0, 0.5, 0.0]), atol=1e-3)
    assert watch.last == "largest difference 0.5, allowed 0.001"
    watch.call(torch.equal, torch.zeros(3), torch.zeros(4))
    assert watch.last == "shape (3,) against (4,)"
    watch.differ(torch.allclose, torch.ones(2), torch.ones(2), atol=0.1)
    assert watch.last == "largest difference 0; they should differ"
    watch.order([">="], torch.tensor([1.0, -1.0, -2.0]), 0)
    assert watch.last == "2 of 3 numbers are not >= 0"
    watch.order(["<", "<"], 1, 2, 2)
    assert watch.last == "2, expected < 2"


# ---- every chapter: untouched is red, the reference is green, every typical mistake is red by the check meant for it ----


def task_with(source, names, right):
    """The task whose body a text stands in, or None for what is given."""
    for cell in source.code:
        if "export" in cell.tags and right in cell.text:
            line = cell.text[: cell.text.index(right) + len(right) // 2].count("\n") + 1
            inside = definitions(ast.parse(cell.text)).items()
            found = [name for name, node in inside if name in names and node.lineno <= line <= node.end_lineno]
            return found[-1] if found else None


@pytest.mark.parametrize("number", sorted(path.stem for path in MUTANTS.glob("*.toml")))
def test_the_chapter(number):
    source, faults, names = chapter(number), mutants(number), Sheet(chapter(number)).number
    blank = [Code(c["id"], c["source"]) for c in exercise_cells(source, "zh") if c["cell_type"] == "code"]
    untouched, _ = try_faults(source, blank)
    assert {verdict.status for verdict in untouched.grade.verdicts} == {OPEN} and not untouched.grade.done

    reference, outcomes = try_faults(source, solved(source), faults)
    assert reference.failure is None and reference.grade.done, reference.grade.lines()

    exported = [cell.text for cell in source.code if "export" in cell.tags]
    checks = {cell.id for cell in source.code if "check" in cell.tags}
    for fault in faults:
        assert sum(text.count(fault.right) for text in exported) == 1, f"{number}, {fault.name}: no such text, or twice"
        failure, result = outcomes[fault.name].failure, outcomes[fault.name].grade
        assert failure is not None, f"{number}, {fault.name}: no check noticed"
        told = f"{number}, {fault.name}: {failure.kind} in {failure.cell}: {failure.message or failure.line}"
        assert failure.kind == "AssertionError" and failure.cell in checks, told
        assert fault.check and fault.check in (failure.line + failure.message), told
        red = [verdict for verdict in result.verdicts if verdict.status == WRONG]
        assert red and not result.done, told
        if task := task_with(source, names, fault.right):
            accused = {v.task.number for v in red}.union(*(v.others for v in red))
            assert names[task] in accused, f"{told}\naccused: {sorted(accused)}, faulty: {task}"
