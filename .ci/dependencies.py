"""Print what pyproject.toml requires, extras included, or a key that changes when that list does."""

import hashlib
import sys
import tomllib
from pathlib import Path

EXTRAS = ("sglang", "transformers", "ray", "remote", "dev")

with (Path(__file__).parent.parent / "pyproject.toml").open("rb") as file:
    pyproject = tomllib.load(file)
project = pyproject["project"]
needed = {
    *pyproject["build-system"]["requires"],
    *project["dependencies"],
    *(need for extra in EXTRAS for need in project["optional-dependencies"][extra]),
}
text = "\n".join(sorted(needed))
if sys.argv[1:] == ["--key"]:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    print(f"{version}-{hashlib.sha256(text.encode()).hexdigest()[:12]}")
else:
    print(text)
