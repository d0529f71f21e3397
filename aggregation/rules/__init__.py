"""The rules that make one vector of the rows of a round: importing this registers every module's here."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

for _module in sorted(each.name for each in iter_modules(__path__)):
    import_module(f"{__name__}.{_module}")
