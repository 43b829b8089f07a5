"""What holds for every test."""

import os

from hypothesis import settings

# The same examples every time, so that a red build has a cause in its change. HYPOTHESIS_PROFILE=search looks
# further, with other examples in each run.
settings.register_profile("same", derandomize=True, database=None)
settings.register_profile("search", print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
