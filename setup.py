"""Says where the packages are, for pip: two of them are linked to in a checkout, and a zip of one, as GitHub
gives it, has no links."""

from setuptools import find_packages, setup

LINKED = ("engines", "harness")

setup(
    packages=[
        "overlap_bench",
        *(f"overlap_bench.{name}" for name in LINKED),
        *(f"overlap_bench.{name}.{each}" for name in LINKED for each in find_packages(name)),
    ],
    package_dir={
        "": "overlap_bench/shims",
        "overlap_bench": "overlap_bench",
        **{f"overlap_bench.{name}": name for name in LINKED},
    },
)
