"""Arithmetic over named sums, as a job file states it: parsed here, never handed to Python.

    sum      term  (("+" | "-") term)*
    term     sign  (("*" | "/") sign)*
    sign     "-" sign | power
    power    atom ("^" sign)?
    atom     NUMBER | NAME | FUNCTION "(" sum ("," sum)* ")" | "(" sum ")"

A name is the sum of a metric over all silos; `count(NAME)` and `mean(NAME)` are its count and its mean.
What has no value (a division by zero, the root of a negative number, an overflow, a metric that nobody has)
is `Undefined`, with the reason.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from roundtable.core.errors import RoundtableError

MOST_CHARACTERS = 300
_DEEPEST = 24
_TOKEN = re.compile(r"\s*(?:(\d+(?:\.\d*)?(?:[eE][+-]?\d{1,3})?)|([A-Za-z][A-Za-z0-9_.]*)|([-+*/^(),]))")
_OF_NUMBERS: Mapping[str, tuple[int, Callable[..., float]]] = {
    "sqrt": (1, math.sqrt),
    "log": (1, math.log),
    "abs": (1, abs),
    "min": (2, min),
    "max": (2, max),
}
_OF_METRICS = ("count", "mean")

Sums = Mapping[str, tuple[float, int]]
_Value = Callable[[Sums], float]


class Undefined(RoundtableError):
    """An expression has no value over these sums; the message says why."""


@dataclass(frozen=True)
class Expression:
    """A checked expression, and the metrics that it names."""

    text: str
    names: frozenset[str]
    _value: _Value

    def __call__(self, sums: Sums) -> float:
        """Its value over these sums; a finite number. Raises Undefined where there is none."""
        try:
            value = float(self._value(sums))
        except (ValueError, OverflowError) as error:
            raise Undefined(f"{self.text}: {error}") from error
        if not math.isfinite(value):
            raise Undefined(f"{self.text} is {value}")
        return value


def parse_expression(text: str) -> Expression:
    """The expression that a text states. ValueError, with the place, for any other text."""
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"an expression of {len(text)} characters; {MOST_CHARACTERS} at most can be")
    parser = _Parser(text)
    value = parser.sum(0)
    parser.end()
    return Expression(text, frozenset(parser.names), value)


class _Parser:
    """Recursive descent over the tokens of one text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._place = 0
        self.names: set[str] = set()

    def sum(self, depth: int) -> _Value:
        value = self._term(depth)
        while operator := self._take("+", "-"):
            value = _joined(operator, value, self._term(depth), self._text)
        return value

    def _term(self, depth: int) -> _Value:
        value = self._sign(depth)
        while operator := self._take("*", "/"):
            value = _joined(operator, value, self._sign(depth), self._text)
        return value

    def _sign(self, depth: int) -> _Value:
        if depth > _DEEPEST:
            raise ValueError(f"{self._text!r} is nested deeper than {_DEEPEST} levels")
        if self._take("-"):
            inner = self._sign(depth + 1)
            return lambda sums: -inner(sums)
        base = self._atom(depth)
        if self._take("^"):
            return _joined("^", base, self._sign(depth + 1), self._text)
        return base

    def _atom(self, depth: int) -> _Value:
        if self._take("("):
            value = self.sum(depth + 1)
            self._expect(")")
            return value
        number, name, _ = self._next()
        if number is not None:
            constant = float(number)
            return lambda sums: constant
        if name is None:
            raise ValueError(f"{self._text!r}: expected a number, a metric or '(' {self._where()}")
        if not self._take("("):
            self.names.add(name)
            return lambda sums: _metric(sums, name)[0]
        return self._called(name, depth)

    def _called(self, name: str, depth: int) -> _Value:
        if name in _OF_METRICS:
            _, metric, _ = self._next()
            if metric is None:
                raise ValueError(f"{self._text!r}: {name}() takes the name of a metric")
            self._expect(")")
            self.names.add(metric)
            if name == "count":
                return lambda sums: float(_metric(sums, metric)[1])
            return lambda sums: _metric(sums, metric)[0] / _counted(sums, metric)
        if name not in _OF_NUMBERS:
            known = ", ".join([*_OF_NUMBERS, *_OF_METRICS])
            raise ValueError(f"{self._text!r}: there is no function {name!r}; there are {known}")
        count, function = _OF_NUMBERS[name]
        inner = [self.sum(depth + 1)]
        while self._take(","):
            inner.append(self.sum(depth + 1))
        self._expect(")")
        if len(inner) != count:
            raise ValueError(f"{self._text!r}: {name}() takes {count}, not {len(inner)}")
        return lambda sums: function(*(each(sums) for each in inner))

    def end(self) -> None:
        if self._text[self._place :].strip():
            raise ValueError(f"{self._text!r}: cannot be read {self._where()}")

    def _next(self) -> tuple[str | None, str | None, str | None]:
        found = _TOKEN.match(self._text, self._place)
        if found is None:
            raise ValueError(f"{self._text!r}: expected a number, a metric or '(' {self._where()}")
        self._place = found.end()
        return found[1], found[2], found[3]

    def _take(self, *wanted: str) -> str | None:
        found = _TOKEN.match(self._text, self._place)
        if found is None or found[3] not in wanted:
            return None
        self._place = found.end()
        return found[3]

    def _expect(self, mark: str) -> None:
        if not self._take(mark):
            raise ValueError(f"{self._text!r}: expected {mark!r} {self._where()}")

    def _where(self) -> str:
        rest = self._text[self._place :].strip()
        return f"before {rest[:20]!r}" if rest else "at its end"


def _joined(operator: str, left: _Value, right: _Value, text: str) -> _Value:
    match operator:
        case "+":
            return lambda sums: left(sums) + right(sums)
        case "-":
            return lambda sums: left(sums) - right(sums)
        case "*":
            return lambda sums: left(sums) * right(sums)
        case "/":
            return lambda sums: _divided(left(sums), right(sums), text)
    return lambda sums: _raised(left(sums), right(sums), text)


def _divided(value: float, by: float, text: str) -> float:
    if by == 0:
        raise Undefined(f"{text} divides by zero")
    return value / by


def _raised(base: float, exponent: float, text: str) -> float:
    if (base < 0 and exponent != int(exponent)) or (base == 0 and exponent < 0):
        raise Undefined(f"{text} raises {base:g} to {exponent:g}")
    return float(base**exponent)


def _metric(sums: Sums, name: str) -> tuple[float, int]:
    if name not in sums:
        raise Undefined(f"no silo measured {name!r}")
    return sums[name]


def _counted(sums: Sums, name: str) -> int:
    count = sums[name][1]
    if not count:
        raise Undefined(f"{name!r} was measured over no example")
    return count
