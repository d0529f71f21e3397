"""Which tensors of a model are its head: what algorithms with shared representations treat apart."""

from __future__ import annotations

from fnmatch import fnmatchcase

from pydantic import Field
from torch import nn

from roundtable.core.algorithms.table import AlgorithmTable
from roundtable.core.errors import ConfigError
from roundtable.core.toml_tables import Names


class HeadTable(AlgorithmTable):
    """`[algorithm]` of an algorithm that tells head and base apart."""

    head: Names = Field(
        (), description='patterns of its tensors, such as "fc.*"; default: the last layer with parameters'
    )


def head_of(model: nn.Module, table: AlgorithmTable) -> list[str]:
    """Names of the head's tensors, in the model's order.

    Raises ConfigError for a pattern that nothing matches, and where head or base is left empty.
    """
    assert isinstance(table, HeadTable)
    names = list(model.state_dict(keep_vars=True))
    parameters = [name for name, _ in model.named_parameters()]
    if not parameters:
        raise ConfigError(f"algorithm {table.name!r}: {type(model).__name__} has no parameters")
    patterns = table.head or (parameters[-1].rpartition(".")[0] + ".*",)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"algorithm.head: {pattern!r} matches no tensor of {type(model).__name__}; its last are "
                f"{', '.join(names[-4:])}"
            )
    head = [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
    if not set(parameters) - set(head) or not set(parameters) & set(head):
        raise ConfigError(
            f"algorithm.head = {list(patterns)}: {len(head)} of {len(names)} tensors match, and "
            "both the head and "
            "the rest need a parameter"
        )
    return head
