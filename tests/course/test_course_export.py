"""Export: the same bytes twice, whatever the clocks say; outputs kept; nobody's edits lost."""

import json
import os

import nbformat
import pytest
from small_course import edit, snapshot
from typer.testing import CliRunner

from course.cli import app
from course.export import export_chapter, module_text
from course.files import CourseError
from course.source import load_chapters, read_percent, write_percent


def export(root):
    return CliRunner().invoke(app, ["--root", str(root), "export"])


def notebook(root, language, stem="01_first"):
    return json.loads((root / "notebooks" / language / f"{stem}.ipynb").read_text(encoding="utf-8"))


def test_a_second_export_changes_no_byte_and_writes_no_file(root):
    before = snapshot(root)
    times = {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()}
    assert export(root).exit_code == 0
    assert snapshot(root) == before
    assert {path: path.stat().st_mtime_ns for path in times} == times


@pytest.mark.parametrize("order", [1, -1])
def test_file_times_do_not_matter(root, order):
    before = snapshot(root)
    for age, path in enumerate(sorted(root.rglob("*"))):
        os.utime(path, (1_000_000_000 + order * age, 1_000_000_000 + order * age))
    result = export(root)
    assert result.exit_code == 0 and "wrote" not in result.output
    assert snapshot(root) == before


def test_everything_generated_can_be_made_again_from_nothing(root):
    before = snapshot(root)
    for path in [*(root / "diffusion_engine").glob("*.py"), *(root / "notebooks").glob("*/*.ipynb")]:
        path.unlink()
    export(root)
    after = snapshot(root)
    assert after.keys() == before.keys()
    assert all(after[name] == before[name] for name in before if not name.endswith(".ipynb"))


def test_ids_are_shared_by_twins_unique_and_valid(root):
    zh, en = notebook(root, "zh"), notebook(root, "en")
    ids = [cell["id"] for cell in zh["cells"]]
    assert ids == [cell["id"] for cell in en["cells"]]
    assert len(set(ids)) == len(ids) and "01-doubling-01" in ids
    for language in ("zh", "en"):
        nbformat.validate(nbformat.from_dict(notebook(root, language)))


def test_a_prose_edit_elsewhere_moves_no_id_of_another_section(root):
    path = root / "notebooks" / "source" / "01_first.py"
    before = [cell.id for cell in load_chapters(root)[0].cells]
    edit(path, "# ## 小结", "# 多一句。\n#\n# ## 小结")
    assert [cell.id for cell in load_chapters(root)[0].cells] == before


def test_the_module_names_its_source_and_holds_the_export_cells_only(root):
    text = (root / "diffusion_engine" / "first.py").read_text(encoding="utf-8")
    assert text.startswith("# Generated from notebooks/source/01_first.py")
    assert "def first(x: float)" in text and "assert" not in text and "%%" not in text
    namespace = {}
    exec(text, namespace)
    assert namespace["first"](4) == 8


def test_outputs_stay_where_the_code_is_unchanged(root):
    path = root / "notebooks" / "source" / "01_first.py"
    edit(path, "# ## Doubling", "# ## Twice as much")  # every id of the section changes, no code does
    edit(path, "\nfirst(1)\n", "\nfirst(1) + 1\n")
    before = notebook(root, "zh")
    export(root)
    after = notebook(root, "zh")
    outputs = [[c["outputs"] for c in n["cells"] if c["cell_type"] == "code"] for n in (before, after)]
    assert outputs[0] == outputs[1]
    assert [c["id"] for c in before["cells"]] != [c["id"] for c in after["cells"]]
    edit(path, "print(first(3)", "print(first(33)")
    export(root)
    assert not any(o.get("name") == "stdout" for c in notebook(root, "zh")["cells"] for o in c.get("outputs", []))


def test_a_hand_edited_notebook_is_not_overwritten(root):
    path = root / "notebooks" / "zh" / "01_first.ipynb"
    edit(path, "这一格用两三句", "我改了这一格")
    edit(root / "notebooks" / "source" / "01_first.py", "return 2 * x", "return x + x")
    before = snapshot(root)
    result = export(root)
    assert result.exit_code == 1 and "01_first.ipynb was edited by hand" in result.output
    assert snapshot(root) == before
    assert CliRunner().invoke(app, ["--root", str(root), "export", "--force"]).exit_code == 0
    assert "我改了" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("meta", "module"),
    [
        ("module: reference/sd3", "diffusion_engine/reference/sd3"),
        ("module: minivllm/qwen3", "minivllm/qwen3"),
        ("module: qwen3\n#     package: minivllm", "minivllm/qwen3"),
    ],
)
def test_modules_go_where_the_header_says(root, meta, module):
    edit(root / "notebooks" / "source" / "02_second.py", "module: second", meta)
    chapter = load_chapters(root, ["02"])[0]
    export_chapter(chapter)
    assert chapter.module == module and (root / f"{module}.py").is_file()


def test_code_that_does_not_parse_is_refused_by_name(root):
    edit(root / "notebooks" / "source" / "01_first.py", "return 2 * x", "return 2 *")
    with pytest.raises(CourseError, match="01_first.py: the export cells do not make a module"):
        module_text(load_chapters(root)[0])


def test_sources_read_and_write_to_the_same_bytes(root):
    for chapter in load_chapters(root):
        assert write_percent(read_percent(chapter.text)) == chapter.text


@pytest.mark.parametrize("name", ["1", "01", "01_first", "notebooks/source/01_first.py"])
def test_chapters_are_named_in_any_plain_way(root, name):
    assert [chapter.number for chapter in load_chapters(root, [name])] == ["01"]


def test_an_unknown_chapter_is_named_with_those_that_exist(root):
    result = CliRunner().invoke(app, ["--root", str(root), "export", "7"])
    assert result.exit_code == 2 and "no chapter 07" in result.output and "01, 02" in result.output
