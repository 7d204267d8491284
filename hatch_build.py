"""A build hook: an editable install (`pip install -e .`) also gets the `course` command.

The wheel holds `diffusion_engine` alone, so a `course` command in it would have nothing to start. An editable install has
the whole repository on its path, and there the command belongs.
"""

import tempfile
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SCRIPT = """\
#!python
from course.cli import app

app(prog_name="course")
"""


class CourseCommand(BuildHookInterface):
    """Adds the script ``course`` to editable builds only."""

    def initialize(self, version: str, build_data: dict) -> None:
        if version == "editable":
            self.folder = tempfile.TemporaryDirectory()
            script = Path(self.folder.name) / "course"
            script.write_text(SCRIPT, encoding="utf-8")
            script.chmod(0o755)
            build_data["shared_scripts"][str(script)] = "course"

    def finalize(self, version: str, build_data: dict, artifact_path: str) -> None:
        if version == "editable":
            self.folder.cleanup()
