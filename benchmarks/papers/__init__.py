"""What the papers publish, beside what comes out here: see `__main__`."""
