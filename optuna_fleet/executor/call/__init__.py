"""One `optimize` call: hears, decides, has it done."""
