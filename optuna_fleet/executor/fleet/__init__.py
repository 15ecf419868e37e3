"""What outlives a call: nodes, their trainers, the channels to them."""
