"""Figures of matplotlib's: shown as values, and when the cell that has drawn them ends.

Its inline backend does that by itself, and takes this over when it is loaded. With another one that has no
window, which is chosen where programs run unattended, a figure would never be seen.
"""

import sys
import weakref
from typing import Any

from IPython.core.pylabtools import print_figure
from IPython.display import display

WINDOWLESS = frozenset(("agg", "cairo", "pdf", "pgf", "ps", "svg", "template"))
"""The backends that cannot show a figure, as ``matplotlib.get_backend`` names them."""


class OpenFigures:
    """The figures that are open, and which of them were shown as they are.

    Nothing is imported here that the cell has not imported.
    """

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._shown: weakref.WeakSet[Any] = weakref.WeakSet()
        pictures = shell.display_formatter.formatters["image/png"]
        pictures.for_type_by_name("matplotlib.figure", "Figure", self.picture)
        shell.events.register("post_execute", self.show)

    def picture(self, figure: Any) -> str | None:
        """Return a figure as PNG, in base64; None if it is empty."""
        png: str | None = print_figure(figure, fmt="png", base64=True)
        self._has_shown(figure)
        return png

    def show(self) -> None:
        """Show the figures that were opened or changed since they were shown."""
        for figure in _open_figures():
            if figure in self._shown and not figure.stale:
                continue
            self._has_shown(figure)
            try:
                display(figure)
            except Exception:  # noqa: BLE001  # code of the cell's draws it: the cell shows its error
                self._shell.showtraceback()
            self._has_shown(figure)

    def _has_shown(self, figure: Any) -> None:
        self._shown.add(figure)
        figure.stale = False


def _open_figures() -> list[Any]:
    matplotlib: Any = sys.modules.get("matplotlib")
    helpers: Any = sys.modules.get("matplotlib._pylab_helpers")
    open_ones = getattr(helpers, "Gcf", None)
    if open_ones is None or not open_ones.figs:
        return []
    # With a figure open there is a backend: asking for it does not choose one.
    if matplotlib.get_backend().lower() not in WINDOWLESS:
        return []
    return [manager.canvas.figure for manager in open_ones.get_all_fig_managers()]
