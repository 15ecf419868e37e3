"""The one part that is compiled; without a compiler PyTorch's own kernel does its work."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "optuna_fleet.images._resample",
            ["optuna_fleet/images/_resample.c"],
            extra_compile_args=["-O3"],
            optional=True,
        )
    ]
)
