"""The only room that writes to a study."""
