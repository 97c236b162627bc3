"""Builds the C helper. Its copy kernel is shared with the daemon: in a checkout it is taken from csrc/copyshim, in a source distribution from
the copy that lies in csrc/ beside this file."""

import pathlib
import shutil

from setuptools import Extension, setup

here = pathlib.Path(__file__).parent
shared = here.parent / "csrc" / "copyshim"
local = here / "csrc"
for name in ("kvcopy.c", "kvcopy.h"):
    if (shared / name).exists():
        local.mkdir(exist_ok=True)
        shutil.copyfile(shared / name, local / name)

setup(
    ext_modules=[
        Extension(
            "kvferry._native",
            ["kvferry/_native.c", "csrc/kvcopy.c"],
            depends=["csrc/kvcopy.h"],
            include_dirs=["csrc"],
            extra_compile_args=["-O3", "-std=gnu11", "-pthread", "-fvisibility=hidden"],
            extra_link_args=["-pthread"],
            # The package installs without a compiler; the connector then says what is missing and serves nothing.
            optional=True,
        )
    ]
)
