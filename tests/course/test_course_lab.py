"""JupyterLab: a click on a source opens a notebook, and a save changes no byte."""

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from course.jupyter import SETTINGS, lab_command
from course.source import FILTERS

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCE = "notebooks/source/01_first.py"
TOKEN = "course"


class Server:
    """A headless JupyterLab on a folder."""

    def __init__(self, root: Path, scratch: Path):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        extra = ["--no-browser", "--allow-root", f"--ServerApp.port={self.port}", f"--IdentityProvider.token={TOKEN}"]
        command, environment = lab_command(root, extra)
        environment["JUPYTER_RUNTIME_DIR"] = str(scratch)
        self.log = scratch / "log.txt"
        self.process = subprocess.Popen(
            command, env=environment, stdout=self.log.open("wb"), stderr=subprocess.STDOUT, cwd=scratch
        )

    def ask(self, path: str, method: str = "GET", body: dict | None = None) -> dict:
        """One request of the REST API."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"token {TOKEN}", "Content-Type": "application/json"}
        url = f"http://127.0.0.1:{self.port}{path}"
        with urllib.request.urlopen(urllib.request.Request(url, data, headers, method=method), timeout=30) as answer:
            return json.load(answer)

    def wait(self) -> None:
        """Until the server answers."""
        for _ in range(720):
            try:
                self.ask("/api/status")
                return
            except (urllib.error.URLError, ConnectionError):
                assert self.process.poll() is None, self.log.read_text()
                time.sleep(0.25)
        raise AssertionError(self.log.read_text())


@pytest.fixture
def server(root, tmp_path):
    """A server on a copy of the small tree, with the repository's own jupytext.toml."""
    shutil.copy(REPOSITORY / "notebooks" / "jupytext.toml", root / "notebooks")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    running = Server(root, scratch)
    try:
        running.wait()
        yield running
    finally:
        running.process.terminate()
        running.process.wait(20)


def test_a_click_opens_a_notebook_and_a_save_changes_no_byte(server, root):
    settings = server.ask("/lab/api/settings/@jupyterlab/docmanager-extension:plugin")
    assert settings["schema"]["properties"]["defaultViewers"]["default"]["python"] == "Jupytext Notebook"

    before = (root / SOURCE).read_bytes()
    model = server.ask(f"/api/contents/{SOURCE}?type=notebook&content=1")
    notebook = model["content"]
    assert model["type"] == "notebook" and notebook["metadata"]["course"]["module"] == "first"
    notebook["metadata"]["language_info"] = {"name": "python", "version": "3.11.7"}
    for cell in notebook["cells"]:
        cell["metadata"]["collapsed"] = True
        if cell["cell_type"] == "code":
            cell["execution_count"] = 1
    server.ask(f"/api/contents/{SOURCE}", "PUT", {"type": "notebook", "format": "json", "content": notebook})
    assert (root / SOURCE).read_bytes() == before
    assert [p.name for p in (root / "notebooks/source").iterdir() if p.is_file()].count("01_first.ipynb") == 0


def test_the_settings_are_ours_and_the_filters_are_one(root):
    command, environment = lab_command(root, ["--no-browser"])
    assert environment["JUPYTER_CONFIG_PATH"].split(":")[0] == str(SETTINGS)
    assert f"--ServerApp.root_dir={root}" in command and command[-1] == "--no-browser"
    text = (REPOSITORY / "notebooks" / "jupytext.toml").read_text(encoding="utf-8")
    assert all(f'{key} = "{value}"' in text for key, value in FILTERS.items())
