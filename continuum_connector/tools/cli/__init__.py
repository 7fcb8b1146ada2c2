"""THE COMMANDS of `continuum`, and how each of them ends."""
