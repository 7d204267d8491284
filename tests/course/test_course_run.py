"""Run: once a chapter, the same outputs in both languages, and failures named."""

import json
import re
import sys

from small_course import chapter_text, code, edit, snapshot, stamp_all
from typer.testing import CliRunner

from course.check import check_all
from course.cli import app
from course.outputs import clean
from course.run import kernel_environment


def run(root, *arguments):
    return CliRunner().invoke(app, ["--root", str(root), "run", *arguments])


def notebook(root, language, stem):
    return json.loads((root / "notebooks" / language / f"{stem}.ipynb").read_text(encoding="utf-8"))


def test_each_chapter_runs_once_and_a_failure_is_named(root):
    bad = chapter_text("03", "third", [code('"fine"'), code("1 / 0")])
    (root / "notebooks" / "source" / "03_third.py").write_text(bad, encoding="utf-8")
    stamp_all(root)
    edit(root / "notebooks" / "source" / "01_first.py", "\nfirst(1)\n", "\nfirst(1) + 1\n")

    result = run(root, "--jobs", "2")
    assert result.exit_code == 1
    assert re.search(r"03_third.py stopped at cell 03-doubling-16\nZeroDivisionError: division by zero", result.output)
    assert "\x1b" not in result.output
    assert "ran notebooks/source/01_first.py" in result.output
    assert "02_second" not in result.output  # its code and its modules are as they were
    assert not any(cell.get("outputs") for cell in notebook(root, "zh", "03_third")["cells"])
    assert (root / "ran.txt").read_text() == "__main__\n" * 2  # 01 and 03, at the root, once each
    assert [f.text() for f in check_all(root) if "01_first" in f.file] == []

    zh, en = (notebook(root, language, "01_first") for language in ("zh", "en"))
    outputs = [[c["outputs"] for c in n["cells"] if c["cell_type"] == "code"] for n in (zh, en)]
    assert outputs[0] == outputs[1]
    shown = json.dumps(outputs[0])
    assert "<object at 0x\\u2026>" in shown and '"6 ./\\n"' in shown
    assert "widgets" not in zh["metadata"] and '"execution":' not in json.dumps(zh)

    before = snapshot(root)
    (root / "notebooks" / "source" / "03_third.py").unlink()
    again = run(root)
    assert "0 to run, 2 fresh" in again.output and again.exit_code == 0
    assert {k: v for k, v in before.items() if "source/03" not in k} == snapshot(root)


def test_a_changed_module_makes_its_readers_stale(root):
    edit(root / "notebooks" / "source" / "01_first.py", "return 2 * x", "return x + x")
    CliRunner().invoke(app, ["--root", str(root), "export"])
    stale = {f.file for f in check_all(root) if f.rule == "outputs"}
    assert {"notebooks/zh/01_first.ipynb", "notebooks/en/02_second.ipynb"} <= stale


def test_assets_count_where_the_code_names_them(root):
    edit(root / "notebooks" / "source" / "02_second.py", "first(2)", "first(2)  # reads assets/w.bin")
    before = {f.text() for f in check_all(root)}
    (root / "diffusion_engine" / "assets").mkdir()
    (root / "diffusion_engine" / "assets" / "w.bin").write_bytes(b"1")
    from course.fingerprint import run_hash
    from course.source import load_chapters

    hashes = [run_hash(chapter) for chapter in load_chapters(root)]
    (root / "diffusion_engine" / "assets" / "w.bin").write_bytes(b"2")
    after = [run_hash(chapter) for chapter in load_chapters(root)]
    assert hashes[0] == after[0] and hashes[1] != after[1] and before
    (root / "diffusion_engine" / "assets" / "quality.json").write_text(
        "{}"
    )  # a report about the model: no chapter reads it
    assert [run_hash(chapter) for chapter in load_chapters(root)] == after


def test_another_packages_assets_count_for_the_chapters_that_reach_it(root):
    from course.fingerprint import run_hash
    from course.source import load_chapters

    (root / "minivllm" / "assets").mkdir(parents=True)
    (root / "minivllm" / "shipped.py").write_text("ASSETS = 'assets'\n", encoding="utf-8")
    edit(root / "notebooks" / "source" / "02_second.py", "first(2)", "import minivllm.shipped\n\nfirst(2)")
    before = [run_hash(chapter) for chapter in load_chapters(root)]
    (root / "minivllm" / "assets" / "w.bin").write_bytes(b"1")
    after = [run_hash(chapter) for chapter in load_chapters(root)]
    assert before[0] == after[0] and before[1] != after[1]


def test_outputs_lose_the_machine(tmp_path):
    place = f"{tmp_path}/notebooks/x.py, {tmp_path} and {sys.prefix}/lib /tmp/ipykernel_77/123.py pid 4711 <f at 0x7f00aa11bb22>"
    text = "./notebooks/x.py, ./ and <environment>/lib <cell> pid … <f at 0x…>"
    widget = {"application/vnd.jupyter.widget-view+json": {}, "text/plain": "HBox"}
    found = clean(
        [
            {"output_type": "stream", "name": "stdout", "text": place},
            {"output_type": "display_data", "data": {"text/plain": place, "image/png": "0x123456789"}, "metadata": {}},
            {"output_type": "display_data", "data": widget, "metadata": {}},
            {"output_type": "error", "ename": "E", "evalue": "", "traceback": [place]},
        ],
        tmp_path,
    )
    assert [found[0]["text"], found[1]["data"], found[2]["traceback"]] == [
        text,
        {"text/plain": text, "image/png": "0x123456789"},
        [text],
    ]


def test_two_kernels_do_not_take_more_than_two_cores(tmp_path):
    environment = kernel_environment(tmp_path, "scratch")
    assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == "1"
    assert environment["PYTHONPATH"].startswith(str(tmp_path)) and environment["HF_HUB_OFFLINE"] == "1"
