"""Build the compiled modules; everything else about the package is in pyproject.toml.

Without a compiler the package installs all the same: recording reduces tensors with torch, and comparing goes over
tensors kept whole and sketches with numpy, a few times slower.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "probe.capture._reduce",
            sources=["probe/capture/_reduce.c"],
            extra_compile_args=["-O3", "-Wno-psabi"],
            optional=True,
        ),
        Extension(
            "probe.measure._sketches",
            sources=["probe/measure/_sketches.c"],
            extra_compile_args=["-O3", "-Wno-psabi"],
            optional=True,
        ),
        Extension(
            "probe.measure._elementwise",
            sources=["probe/measure/_elementwise.c"],
            extra_compile_args=["-O3", "-Wno-psabi"],
            optional=True,
        ),
    ]
)
