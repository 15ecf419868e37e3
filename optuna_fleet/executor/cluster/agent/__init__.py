"""The agent of a node: starts and watches its processes."""
