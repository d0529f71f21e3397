"""What a notebook shows of a run and of its results."""

from __future__ import annotations

import re
import sys
from types import ModuleType, SimpleNamespace

import pytest

from roundtable.simulation import describe_partition
from roundtable.simulation.reporting.comparison import Comparison, Run

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a kernel's display shows: IPython itself is no dependency of the tests."""
    texts: list[str] = []
    handle = SimpleNamespace(update=texts.append)
    modules = {name: ModuleType(name) for name in ("IPython", "IPython.display")}
    modules["IPython"].get_ipython = lambda: SimpleNamespace(kernel=object())
    modules["IPython.display"].HTML = str
    modules["IPython.display"].display = lambda text, display_id: texts.append(text) or handle
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return texts


def test_a_run_in_a_notebook_shows_a_bar_unless_told_otherwise(run, shown):
    run(rounds=2)
    values = [float(found) for text in shown for found in re.findall(r'max="2" value="([0-9.]+)"', text)]
    assert values == sorted(values)
    assert values[-1] == 2.0
    assert re.search(r"round 2/2 .*accuracy [01]\.\d{4}", shown[-1])
    seen = len(shown)
    run(rounds=1, _progress=False)
    heard = []
    run(rounds=1, _progress=heard.append)
    assert (len(shown), bool(heard)) == (seen, True)


def test_results_show_themselves_as_tables_and_pictures(run, monkeypatch):
    result = run(rounds=2)
    page = result._repr_html_()
    assert page.count("<tr>") == 3
    assert 'src="data:image/png;base64,iVBOR' in page
    assert result._repr_png_().startswith(PNG)
    assert result.clients._repr_html_().count("<tr>") == 1 + len(result.clients.rows)
    runs = Comparison(tuple(Run(f"<{n}>", {"seed": n}, result.history) for n in range(2)))
    assert "&lt;1&gt;" in runs._repr_html_()
    assert "<1>" not in runs._repr_html_()
    assert runs._repr_png_().startswith(PNG)
    split = describe_partition({"name": "iid"}, [0, 1] * 10, clients=2)
    assert re.search(r'<img alt="labels.*<pre>2 clients, 20 rows', split._repr_html_())
    drawn = {axis.get_ylabel() for axis in result.plot().axes}
    assert "loss" in drawn
    assert drawn.isdisjoint(("up_bytes", "down_bytes")), "the same in every round: not worth a panel"
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "<img" not in result._repr_html_()
