"""The caller's wish that a call should end."""

from collections.abc import Callable
from dataclasses import dataclass, field

from ..cell.status import CellStatus


@dataclass
class Cut:
    """Whether a call has been cut, and who must hear of it. Touched on the supervisor's loop alone."""

    status: CellStatus | None = None
    _listener: Callable[[], object] | None = field(default=None, init=False)

    def interrupt(self) -> None:
        """The caller does not want the call any more."""
        self.status = self.status or CellStatus.INTERRUPTED
        if self._listener is not None:
            self._listener()

    def on_change(self, listener: Callable[[], object] | None) -> None:
        """Have *listener* called when the call is cut, in the place of the one before; None: nobody."""
        self._listener = listener
