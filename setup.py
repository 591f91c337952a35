"""Builds the one native library: no Python headers needed, it is loaded with ctypes and holds no Python objects."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "tensorhub.native._tensorhub",
            sources=["tensorhub/native/tensorhub.c"],
            extra_compile_args=["-O3", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden"],
            libraries=["pthread"],
        )
    ]
)
