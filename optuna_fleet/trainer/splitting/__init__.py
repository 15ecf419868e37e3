"""Finds losses that can't be split over ranks."""
