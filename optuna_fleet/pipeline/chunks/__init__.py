"""How samples lie in memory, and how they come out again."""
