"""A sweep as it is now, from what its study has stored: in a terminal, and as a page."""
