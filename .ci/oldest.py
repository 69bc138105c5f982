"""The oldest version that pyproject.toml allows of each package that the project runs on, for pip.

Not of torch: here its newest is a CPU build, and an older one would be gigabytes of CUDA.
"""

import re
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
for requirement in project["dependencies"]:
    name, least = re.match(r"([\w-]+)>=([\d.]+)", requirement).groups()
    if name != "torch":
        print(f"{name}=={least}.*")
