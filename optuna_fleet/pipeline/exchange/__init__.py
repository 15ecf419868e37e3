"""Chunks shared between nodes: each comes from the node that owns it, or is made here."""
