"""Simulation of the same controller and allocators that run real trainers."""
