"""How the shipped data and weights were made, and how they are measured: seeded, resumable, with a progress display."""
