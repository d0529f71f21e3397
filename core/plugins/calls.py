"""What can be called of somebody else's object, with which arguments: checked before anything calls it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

from roundtable.core.errors import ConfigError, RoundtableError
from roundtable.core.plugins.doors import described


def place_of(definition: object) -> str:
    """Where an object was written, as " (file, line n)"; "" where Python cannot tell."""
    if not (inspect.isroutine(definition) or inspect.isclass(definition)):
        definition = type(definition)
    try:
        return f" ({inspect.getsourcefile(definition)}, line {inspect.getsourcelines(definition)[1]})"
    except (OSError, TypeError):
        return ""


def as_function(kind: str, name: str, definition: Any, arguments: Sequence[str]) -> Callable[..., Any]:
    """What is to be called of an object, with these positional arguments; of a class, an object of it.

    Raises ConfigError, with file and line, for what cannot be called so.
    """
    reference = f"{kind} {name!r}"
    if isinstance(definition, type):
        definition = create(reference, definition, {}, ())
    if not callable(definition):
        raise ConfigError(f"{reference} is a {type(definition).__name__}, and nothing that can be called")
    check_call(reference, definition, arguments)
    return cast("Callable[..., Any]", definition)


def check_call(reference: str, function: Callable[..., object], arguments: Sequence[str]) -> None:
    """Raises ConfigError, with file and line, where the function does not take these positional arguments."""
    signature = signature_of(reference, function)
    try:
        signature.bind_partial(*arguments)
        fits = len(_options(signature, 0)) >= len(arguments) or _is_open(signature)
    except TypeError:
        fits = False
    if not fits:
        raise ConfigError(
            f"{reference}{place_of(function)} takes {signature}; it is called with "
            f"({', '.join(arguments)}), and with the job's parameters by name"
        )


def check_methods(reference: str, kind: type, methods: Mapping[str, Sequence[str]]) -> None:
    """Raises ConfigError, with file and line, where a class lacks a method that takes these arguments."""
    for name, arguments in methods.items():
        method = inspect.getattr_static(kind, name, None)
        wanted = f"{name}({', '.join(arguments)})"
        if method is None:
            raise ConfigError(f"{reference}{place_of(kind)} has no method {wanted}")
        bound = isinstance(method, staticmethod | classmethod)
        function = method.__func__ if isinstance(method, staticmethod | classmethod) else method
        if not callable(function):
            raise ConfigError(
                f"{reference}{place_of(kind)}: {name} is not a method; it is called as {wanted}"
            )
        first = () if bound and isinstance(method, staticmethod) else ("self",)
        check_call(f"{reference}: {name}", function, (*first, *arguments))


def create(reference: str, kind: type, parameters: Mapping[str, object], table: tuple[str, ...]) -> Any:
    """An object of the class, of a job's parameters. Raises ConfigError where they do not fit, or it "
    "fails."""
    check_parameters(f"{reference}{place_of(kind)}", kind, parameters, skip=0, table=table)
    try:
        return kind(**parameters)
    except Exception as error:
        raise ConfigError(f"{reference}: creating it failed: {described(error)}", key=table) from error


@contextmanager
def named_at(*key: str) -> Iterator[None]:
    """Says of a ConfigError from within where a job names what it is about, unless it says more itself."""
    try:
        yield
    except ConfigError as error:
        error.key = error.key or key
        raise


@contextmanager
def foreign_call(reference: str, code: object, error: type[RoundtableError]) -> Iterator[None]:
    """Where `code` is called within and is somebody else's: what it raises becomes an `error`."""
    try:
        yield
    except RoundtableError:
        raise
    except Exception as failure:
        if getattr(code, "__module__", "").partition(".")[0] == "roundtable":
            raise
        raise error(f"{reference} failed: {described(failure)}") from failure


class LackingParameters(ConfigError):
    """Parameters without a default that nobody has said: `names`."""

    def __init__(self, owner: str, names: Sequence[str], key: tuple[str, ...]) -> None:
        super().__init__(f"{owner} needs the parameter {names[0]!r}", key)
        self.names = tuple(names)


def check_parameters(
    owner: str,
    function: Callable[..., object],
    given: Mapping[str, object],
    *,
    skip: int,
    table: tuple[str, ...],
    provided: Collection[str] = (),
) -> None:
    """Raises ConfigError where `given` does not fit the parameters of `function` after the first `skip`.

    `table` is where a job file says them, and `provided` are those that it need not say.
    """
    signature = signature_of(owner, function)
    options = {p.name: p for p in _options(signature, skip) if p.name not in provided}
    for name, value in given.items():
        if name in options:
            _check_type(owner, name, options[name].annotation, value, (*table, name))
        elif not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values()):
            allowed = ", ".join(options) or "none"
            raise ConfigError(f"{owner} has no parameter {name!r}; it takes: {allowed}", key=(*table, name))
    empty = inspect.Parameter.empty
    if lacking := [name for name, found in options.items() if found.default is empty and name not in given]:
        raise LackingParameters(owner, lacking, table)


def signature_of(reference: str, function: Callable[..., object]) -> inspect.Signature:
    """The function's signature. Raises ConfigError where it has none that can be read."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        raise ConfigError(
            f"{reference}{place_of(function)} has no signature that can be read: wrap it in a function"
        ) from None


def _options(signature: inspect.Signature, skip: int) -> list[inspect.Parameter]:
    """The parameters that have a name of their own, without the first `skip`."""
    packed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p for p in list(signature.parameters.values())[skip:] if p.kind not in packed]


def _is_open(signature: inspect.Signature) -> bool:
    return any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in signature.parameters.values())


def _check_type(owner: str, name: str, annotation: object, value: object, key: tuple[str, ...]) -> None:
    """Refuses what is plainly of another type than the annotation says; booleans are not numbers."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    kinds: dict[str, tuple[type, ...]] = {
        "int": (int,),
        "float": (int, float),
        "str": (str,),
        "bool": (bool,),
    }
    wanted = [kinds[part.strip()] for part in text.split("|") if part.strip() in kinds]
    if not wanted or (value is None and "None" in text):
        return
    accepted = tuple({kind for group in wanted for kind in group})
    if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in accepted):
        raise ConfigError(f"{owner}: {name} must be of type {text}, not {value!r}", key=key)
