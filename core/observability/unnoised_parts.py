"""What of a silo's model no noise of its job covers: metrics of it would tell exactly of the silo's data."""

from __future__ import annotations

from roundtable.core.layout import Layout
from roundtable.core.privacy_table import ExampleLevel, NoPrivacy, Private
from roundtable.core.tensor_spec import DTYPES


def unnoised_part(privacy: NoPrivacy | Private, layout: Layout) -> str:
    """The first tensor that stays at a silo as its training has left it; "" where there is none.

    Steps of DP-SGD have their noise whether a parameter travels or stays; what fills buffers has none.
    """
    if isinstance(privacy, NoPrivacy):
        return ""
    by_example = isinstance(privacy, ExampleLevel)
    staying = (spec for spec in layout.tensors if spec.rule == "local")
    bare = (spec for spec in staying if not (by_example and spec.kind == "parameter"))
    return next((spec.name for spec in bare if DTYPES[spec.dtype].is_floating_point), "")
