"""What a public function takes for the path of a file or folder."""

from __future__ import annotations

import os

AnyPath = str | os.PathLike[str]
"""Text, a `Path`, or anything else with `__fspath__`."""
