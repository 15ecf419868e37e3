"""For those whose training loop is another library's. Each module needs that library."""
