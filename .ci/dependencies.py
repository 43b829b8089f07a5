"""Print what pyproject.toml requires, extras included, or a key that changes when that list does.

    dependencies.py [--key] [VERSION]

VERSION: of SGLang, instead of the one in pyproject.toml.
"""

import hashlib
import re
import sys
import tomllib
from pathlib import Path

EXTRAS = ("sglang", "transformers", "ray", "remote", "dev")
WITH = {
    # Triton's interpreter, by which these run on a CPU, does not work with a newer one.
    "0.5.9": ("numpy<2.3",),
    "0.5.15.post1": ("numpy<2.3",),
}
"""What another version of SGLang needs besides."""

versions = [argument for argument in sys.argv[1:] if argument != "--key"]
with (Path(__file__).parent.parent / "pyproject.toml").open("rb") as file:
    pyproject = tomllib.load(file)
project = pyproject["project"]
needed = {
    *pyproject["build-system"]["requires"],
    *project["dependencies"],
    *(need for extra in EXTRAS for need in project["optional-dependencies"][extra]),
}
for version in versions:
    needed = {re.sub(r"^sglang==.*", f"sglang=={version}", need) for need in needed}
    needed.update(WITH.get(version, ()))
text = "\n".join(sorted(needed))
if "--key" in sys.argv[1:]:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    print(f"{version}-{hashlib.sha256(text.encode()).hexdigest()[:12]}")
else:
    print(text)
