"""Virtual workers: a model in stages on several devices, several of them sharing weights."""
