"""What a trace says: programs' lives, and how well it was decided."""
