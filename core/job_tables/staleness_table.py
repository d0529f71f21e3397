"""What staleness leaves of an update: the discounts of buffered rounds.

Staleness is the number of models made since the update's client was asked. All factors are 1 at 0.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from roundtable.core.toml_tables import Finite, Table


class ConstantDiscount(Table):
    """An old update counts as much as a new one."""

    name: Literal["constant"] = "constant"

    def factor(self, age: int) -> float:
        """1."""
        return 1.0


class PolynomialDiscount(Table):
    """FedBuff's (Nguyen et al. 2022, section 5; exponent 1/2), and of Xie et al. 2019, section 5.2."""

    name: Literal["polynomial"] = "polynomial"
    exponent: Finite = Field(0.5, ge=0, description="a of (1 + s)^-a")

    def factor(self, age: int) -> float:
        """(1 + s)^-a."""
        return float((1.0 + age) ** -self.exponent)


class HingeDiscount(Table):
    """Xie et al. 2019, section 5.2: nothing for so many models, then as the inverse."""

    name: Literal["hinge"] = "hinge"
    slope: Finite = Field(0.1, gt=0, description="a of 1/(1 + a (s − b)); with free = 0 it is 1/(1 + a s)")
    free: int = Field(0, ge=0, description="b, the staleness up to which nothing is taken off")

    def factor(self, age: int) -> float:
        """1 for s ≤ b, else 1/(1 + a (s − b))."""
        return 1.0 / (1.0 + self.slope * max(0, age - self.free))


Discount = Annotated[ConstantDiscount | PolynomialDiscount | HingeDiscount, Field(discriminator="name")]
"""`[round] staleness`: a table with the name of the discount."""
