"""``python -m diffusion_engine`` and the console script: an interrupt ends with 130, also while modules are imported."""

import sys


def main() -> int:
    """Run the command line; returns the exit code."""
    try:
        from diffusion_engine.cli import main as run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
