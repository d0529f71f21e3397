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

    Frozen parameters are of neither: they stay what every party has. Raises ConfigError for a pattern that
    nothing matches, where head or base is left without a parameter that trains, and for a model whose last
    layer is frozen and that is told no patterns.
    """
    assert isinstance(table, HeadTable)
    everything = list(model.named_parameters())
    if not everything:
        raise ConfigError(f"algorithm {table.name!r}: {type(model).__name__} has no parameters")
    last, value = everything[-1]
    if not table.head and not value.requires_grad:
        raise ConfigError(
            f"algorithm {table.name!r}: the last layer of {type(model).__name__} is frozen ({last!r}), so "
            "that nothing of it could be a silo's own: say by patterns what the head is, such as "
            'head = ["*.11.*"]',
            key=("algorithm", "head"),
        )
    frozen = {name for name, each in everything if not each.requires_grad}
    names = [name for name in model.state_dict(keep_vars=True) if name not in frozen]
    parameters = [name for name, _ in everything if name not in frozen]
    patterns = table.head or (last.rpartition(".")[0] + ".*",)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"algorithm.head: {pattern!r} matches no tensor of {type(model).__name__} that trains; its "
                f"last are {', '.join(names[-4:])}"
            )
    head = [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
    if not set(parameters) - set(head) or not set(parameters) & set(head):
        raise ConfigError(
            f"algorithm.head = {list(patterns)}: {len(head)} of {len(names)} tensors match, and "
            "both the head and "
            "the rest need a parameter"
        )
    return head
