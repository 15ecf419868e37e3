"""Pure rules of pipelined virtual workers (HetPipe): the engine and the simulator keep them."""
