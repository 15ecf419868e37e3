"""Warns of state that no checkpoint has."""
