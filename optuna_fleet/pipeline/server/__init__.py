"""The agent's side: what is made, by how many preprocessors, what is kept, and who gets it."""
