"""The shared pipeline: one preprocessing for all trials. Importing it imports no torch."""

from optuna_fleet.pipeline.shared_pipeline import SharedPipeline

__all__ = ["SharedPipeline"]
