"""Builds the one native library: no Python headers needed, it is loaded with ctypes and holds no Python objects."""

from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("tensorhub/native")

setup(
    ext_modules=[
        Extension(
            "tensorhub.native._tensorhub",
            sources=sorted(map(str, NATIVE.glob("*.c"))),
            depends=sorted(map(str, NATIVE.glob("*.h"))),
            extra_compile_args=[
                "-O3",
                "-std=gnu11",
                "-D_GNU_SOURCE",
                "-Wall",
                "-Wextra",
                "-Werror",
                "-fvisibility=hidden",
            ],
            libraries=["pthread"],
        )
    ]
)
