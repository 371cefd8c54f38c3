"""Build the one compiled module; everything else about the package is in pyproject.toml.

Without a compiler the package installs all the same, and recording reduces tensors with torch, a few times slower.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "probe.capture._reduce",
            sources=["probe/capture/_reduce.c"],
            extra_compile_args=["-O3", "-Wno-psabi"],
            optional=True,
        )
    ]
)
