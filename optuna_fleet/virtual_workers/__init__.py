"""HetPipe: models in stages on several devices. `engine` trains them; all else is pure."""
