"""Draws which folder imports which, from the imports themselves: docs/figures/architecture.svg.

    python tools/arrows.py             # write the picture
    python tools/arrows.py --check     # fail where the picture is not what the code gives

A large box is a folder of the project, the boxes in it are its own folders, and an arrow is an import: what
imports stands above what it imports. An arrow that follows from others (a → b → c makes a → c follow) is left
out. The layout is Sugiyama's: rows by the longest path, then the order in rows that crosses fewest arrows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations, product
from math import factorial, prod
from xml.sax.saxutils import escape

import rooms
from tree import ROOT, package_dirs

PICTURE = ROOT / "docs" / "figures" / "architecture.svg"
FACE, COMMANDS = "roundtable", "roundtable.cli"

Graph = Mapping[str, set[str]]
Point = tuple[float, float]
Size = tuple[float, float]

_MOST_ORDERS, _SWEEPS = 20_000, 24
_MARGIN = 24.0
_FOLDER_GAP: Size = (34.0, 54.0)
_ROOM_GAP: Size = (14.0, 26.0)
_ROOM_HEIGHT, _LETTER_WIDTH, _TITLE_HEIGHT, _PADDING = 28.0, 7.4, 36.0, 16.0


@dataclass(frozen=True)
class Layout:
    """Upper left corners of nodes, and the points that each arrow goes through."""

    size: Size
    corners: dict[str, Point]
    arrows: list[list[Point]]


def lay_out(graph: Graph, sizes: Mapping[str, Size], gap: Size) -> Layout:
    """Boxes of these sizes in rows, each row in the middle; an arrow that passes a row gets a place in it."""
    row_of = _rows(graph)
    paths = [_path(start, end, row_of) for start in sorted(graph) for end in sorted(graph[start])]
    levels: list[list[str]] = [[] for _ in range(max(row_of.values(), default=-1) + 1)]
    for node, row in row_of.items():
        levels[row].append(node)
    for path in paths:
        for row, passing in enumerate(path[1:-1], start=row_of[path[0]] + 1):
            levels[row].append(passing)
    levels = _ordered(levels, [step for path in paths for step in pairwise(path)])
    boxes = {node: sizes.get(node, (6.0, 0.0)) for level in levels for node in level}
    heights = [max(boxes[node][1] for node in level) for level in levels]
    widths = [sum(boxes[node][0] for node in level) + gap[0] * (len(level) - 1) for level in levels]
    tops = [sum(heights[:row]) + gap[1] * row for row in range(len(levels))]
    centres = {}
    for level, width in zip(levels, widths, strict=True):
        left = (max(widths) - width) / 2
        for node in level:
            centres[node] = left + boxes[node][0] / 2
            left += boxes[node][0] + gap[0]
    return Layout(
        size=(max(widths), tops[-1] + heights[-1]),
        corners={node: (centres[node] - boxes[node][0] / 2, tops[row_of[node]]) for node in graph},
        arrows=[
            list(
                _points(
                    row_of[path[0]],
                    tops[row_of[path[0]]] + boxes[path[0]][1],
                    tops,
                    heights,
                    _ports(paths, path, centres, boxes),
                )
            )
            for path in paths
        ],
    )


def _rows(graph: Graph) -> dict[str, int]:
    """Each node's row: one below the lowest of those that point at it."""
    rows = dict.fromkeys(sorted(graph), 0)
    for _ in graph:
        for node in rows:
            for target in graph[node]:
                rows[target] = max(rows[target], rows[node] + 1)
    return rows


def _path(start: str, end: str, row_of: Mapping[str, int]) -> list[str]:
    """The arrow's ends, and between them a name of its own for its place in each row that it passes."""
    passed = range(row_of[start] + 1, row_of[end])
    return [start, *(f"{start} → {end} in row {row}" for row in passed), end]


def _ordered(levels: list[list[str]], steps: Sequence[tuple[str, str]]) -> list[list[str]]:
    """The best of all orders of the rows; of those that sweeps by barycentre give, where all are too many."""
    candidates: Iterator[Sequence[Sequence[str]]]
    if prod(factorial(len(level)) for level in levels) <= _MOST_ORDERS:
        candidates = product(*(permutations(level) for level in levels))
    else:
        candidates = _sweeps(levels, steps)
    return [list(row) for row in min(candidates, key=lambda order: _cost(order, steps))]


def _sweeps(levels: Sequence[Sequence[str]], steps: Sequence[tuple[str, str]]) -> Iterator[list[list[str]]]:
    order = [list(level) for level in levels]
    for sweep in range(_SWEEPS):
        for row in order if sweep % 2 == 0 else reversed(order):
            place = _places(order)
            near = {node: [place[a] for a, b in steps if b == node] for node in row}
            if sweep % 2:
                near = {node: [place[b] for a, b in steps if a == node] for node in row}
            row.sort(key=lambda node: sum(near[node]) / len(near[node]) if near[node] else place[node])
        yield [list(row) for row in order]


def _places(order: Sequence[Sequence[str]]) -> dict[str, float]:
    """Each node's place in its row, from the row's middle."""
    return {node: index - (len(row) - 1) / 2 for row in order for index, node in enumerate(row)}


def _cost(order: Sequence[Sequence[str]], steps: Sequence[tuple[str, str]]) -> tuple[int, float]:
    """(pairs of arrows that cross, how far arrows lead sideways)."""
    place = _places(order)
    row_of = {node: number for number, row in enumerate(order) for node in row}
    crossings = sum(
        row_of[a] == row_of[c] and (place[a] - place[c]) * (place[b] - place[d]) < 0
        for index, (a, b) in enumerate(steps)
        for c, d in steps[:index]
    )
    return crossings, sum(abs(place[a] - place[b]) for a, b in steps)


def _ports(
    paths: Sequence[Sequence[str]],
    path: Sequence[str],
    centres: Mapping[str, float],
    boxes: Mapping[str, Size],
) -> list[float]:
    """Where the arrow is in each of its rows, from left to right; arrows share out the edge of a box."""
    xs = [centres[node] for node in path]
    starting = sorted((other for other in paths if other[0] == path[0]), key=lambda p: centres[p[1]])
    ending = sorted((other for other in paths if other[-1] == path[-1]), key=lambda p: centres[p[-2]])
    for end, edge in ((0, starting), (-1, ending)):
        spread = boxes[path[end]][0] * 0.6
        xs[end] += spread * ((edge.index(path) + 0.5) / len(edge) - 0.5)
    return xs


def _points(
    first: int, bottom: float, tops: Sequence[float], heights: Sequence[float], xs: Sequence[float]
) -> Iterator[Point]:
    """From the lower edge of the box that imports, upright through rows, to the upper edge of the other."""
    yield xs[0], bottom
    for row, x in enumerate(xs[:-1], start=first):
        if row > first:
            yield x, tops[row]
        yield x, tops[row] + heights[row]
    yield xs[-1], tops[first + len(xs) - 1]


def folders() -> tuple[dict[str, set[str]], dict[str, dict[str, set[str]]]]:
    """(which folder imports which, the same for the folders within each), without arrows that follow."""
    files = rooms.modules()
    graph = rooms.imports(rooms.trees(files))
    names = [name for name in package_dirs() if name != FACE]

    def home(module: str) -> str:
        return next((name for name in names if module == name or module.startswith(f"{name}.")), FACE)

    inside = {
        name: rooms.reduced(
            rooms.collapse(graph, rooms.room_in(COMMANDS if name == FACE else name, files, alone=False))
        )
        for name in (FACE, *names)
    }
    return rooms.reduced(rooms.collapse(graph, home)), inside


def draw() -> str:
    """The picture, as SVG."""
    outer, inside = folders()
    titles = {name: folder + "/" for name, folder in package_dirs().items()}
    room_sizes = {
        room: (_LETTER_WIDTH * len(_label(room)) + 20, _ROOM_HEIGHT)
        for inner in inside.values()
        for room in inner
    }
    layouts = {name: lay_out(inner, room_sizes, _ROOM_GAP) for name, inner in inside.items() if inner}
    sizes = {}
    for name, title in titles.items():
        width, height = layouts[name].size if name in layouts else (0.0, 0.0)
        wide = max(width, _LETTER_WIDTH * len(title) * 1.3)
        sizes[name] = (wide + 2 * _PADDING, _TITLE_HEIGHT + height + (_PADDING if height else 0.0))
    whole = lay_out(outer, sizes, _FOLDER_GAP)
    parts = []
    for name, (x, y) in whole.corners.items():
        left, top, (width, height) = x + _MARGIN, y + _MARGIN, sizes[name]
        parts += [
            _box(left, top, (width, height), "folder"),
            _text(left + width / 2, top + 23, titles[name], "title"),
        ]
        if name in layouts:
            shift = left + (width - layouts[name].size[0]) / 2, top + _TITLE_HEIGHT
            parts += [_arrow(points, shift, "inner") for points in layouts[name].arrows]
            for room, (dx, dy) in layouts[name].corners.items():
                parts.append(_box(shift[0] + dx, shift[1] + dy, room_sizes[room], "room"))
                middle = shift[0] + dx + room_sizes[room][0] / 2
                parts.append(_text(middle, shift[1] + dy + 18.5, _label(room), "name"))
    parts += [_arrow(points, (_MARGIN, _MARGIN), "outer") for points in whole.arrows]
    return _page(parts, (whole.size[0] + 2 * _MARGIN, whole.size[1] + 2 * _MARGIN))


def _label(room: str) -> str:
    commands = room.removeprefix(f"{COMMANDS}.")
    return f"cli/{commands}" if commands != room else room.rpartition(".")[2]


def _box(x: float, y: float, size: Size, kind: str) -> str:
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{size[0]:.1f}" height="{size[1]:.1f}" rx="5"/>'
    )


def _text(x: float, y: float, words: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'


def _arrow(points: Sequence[Point], shift: Point, kind: str) -> str:
    """A curve that leaves and meets each row upright."""
    moved = [(x + shift[0], y + shift[1]) for x, y in points]
    words = [f"M {moved[0][0]:.1f} {moved[0][1]:.1f}"]
    for index, ((x, y), (next_x, next_y)) in enumerate(pairwise(moved)):
        if index % 2 == 0:
            words.append(f"L {next_x:.1f} {next_y:.1f}")
        else:
            bend = (y + next_y) / 2
            words.append(f"C {x:.1f} {bend:.1f} {next_x:.1f} {bend:.1f} {next_x:.1f} {next_y:.1f}")
    return f'<path class="{kind}" d="{" ".join(words)}" marker-end="url(#{kind}-tip)"/>'


def _page(parts: Sequence[str], size: Size) -> str:
    width, height = (f"{length:.0f}" for length in size)
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" font-family="Helvetica, Arial, sans-serif">',
            "<title>Which folder imports which</title>",
            "<style>",
            ".page { fill: #ffffff }",
            ".folder { fill: #f2f5f9; stroke: #44546a; stroke-width: 1.4 }",
            ".room { fill: #ffffff; stroke: #8a99ad }",
            ".title { font-size: 16px; font-weight: bold; text-anchor: middle; fill: #1f2a38 }",
            ".name { font-size: 13px; text-anchor: middle; fill: #1f2a38 }",
            ".outer { fill: none; stroke: #1f4e8c; stroke-width: 1.8 }",
            ".inner { fill: none; stroke: #8a99ad; stroke-width: 1.2 }",
            "</style>",
            "<defs>",
            *(_tip(kind, colour) for kind, colour in (("outer", "#1f4e8c"), ("inner", "#8a99ad"))),
            "</defs>",
            f'<rect class="page" width="{width}" height="{height}"/>',
            *parts,
            "</svg>\n",
        )
    )


def _tip(kind: str, colour: str) -> str:
    return (
        f'<marker id="{kind}-tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        f'orient="auto"><path d="M 0 0 L 10 5 L 0 10 z" fill="{colour}"/></marker>'
    )


def main(words: Sequence[str]) -> int:
    """Writes the picture, or says whether the one that is kept is fresh."""
    picture = draw()
    if words != ["--check"]:
        PICTURE.write_text(picture)
        return 0
    if not PICTURE.exists() or PICTURE.read_text() != picture:
        print(f"{PICTURE.relative_to(ROOT)} is not what the code gives: run python tools/arrows.py")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
