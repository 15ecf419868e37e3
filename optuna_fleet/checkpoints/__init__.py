"""Checkpoints as files: kept, found, and given to users. Imports no torch but to load a model.

`store` alone knows that they are files in a folder; `folder` is what one study has there, by name;
`file` is one of them. `best_model` has `load_best_model`. What is *in* them is a matter of
`optuna_fleet.trainer.checkpoint`.
"""
