"""Leaving devices, and going on on others."""
