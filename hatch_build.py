"""A build hook: an editable install (`pip install -e .`) also gets the `course` command.

The wheel holds `diffusion_engine` alone, so a `course` command in it would have nothing to start. An editable install has
the whole repository on its path, and there the command belongs.
"""

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CourseCommand(BuildHookInterface):
    """Adds ``course/__main__.py`` as the script ``course``, to editable builds only."""

    def initialize(self, version: str, build_data: dict) -> None:
        if version == "editable":
            build_data["shared_scripts"]["course/__main__.py"] = "course"
