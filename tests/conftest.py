# SPDX-License-Identifier: Apache-2.0
"""Property tests draw the same examples in every run, and have no deadline."""

from hypothesis import settings

settings.register_profile("project", deadline=None, derandomize=True)
settings.load_profile("project")
