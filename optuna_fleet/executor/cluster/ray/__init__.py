"""Ray: an actor on each node has the agent as its child."""
