"""Libraries that only some need: where one is missing, the error names the extra that brings it."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from roundtable.core.errors import ConfigError

DISTRIBUTION = "roundtable-fl"
"""Under which pip knows this software: `roundtable` on the public index is somebody else's."""

EXTRAS = {
    "PIL": "images",
    "adlfs": "azure",
    "alembic": "server",
    "cloudpickle": "notebook",
    "fsspec": "server",
    "gcsfs": "gcs",
    "huggingface_hub": "huggingface",
    "jwt": "oidc",
    "matplotlib": "plot",
    "onnx": "onnx",
    "onnxscript": "onnx",
    "opacus": "client",
    "opentelemetry": "tracing",
    "pandas": "pandas",
    "psycopg": "postgresql",
    "peft": "huggingface",
    "pyarrow": "parquet",
    "ray": "ray",
    "s3fs": "s3",
    "sklearn": "examples",
    "sqlalchemy": "server",
    "transformers": "huggingface",
}
"""The extra that brings a library, by the name under which it is imported."""


def missing(error: ImportError, purpose: str) -> ConfigError | None:
    """The error for people where a library of an extra is not installed; None for any other module.

    Of a library that loads others and says so in words of its own, as fsspec does, the cause counts.
    """
    cause = error if isinstance(error, ModuleNotFoundError) else error.__cause__
    name = (cause.name or "").split(".")[0] if isinstance(cause, ModuleNotFoundError) else ""
    if name not in EXTRAS:
        return None
    return ConfigError(f"{purpose} needs the library {name!r}, which is not installed: {_pip(EXTRAS[name])}")


def lacking(*libraries: str) -> tuple[list[str], str]:
    """Those of these libraries that are not installed, and the one command that brings them."""
    gone = [name for name in libraries if find_spec(name) is None]
    return gone, _pip(",".join(sorted({EXTRAS[name] for name in gone}))) if gone else ""


def _pip(extras: str) -> str:
    return f"{Path(sys.executable).name} -m pip install '{DISTRIBUTION}[{extras}]'"


def load(module: str, purpose: str) -> Any:
    """The module; ConfigError that names `purpose`, the library and its extra where it is not installed."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if (found := missing(error, purpose)) is not None:
            raise found from error
        raise
