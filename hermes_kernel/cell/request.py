"""What one call asks for."""

from dataclasses import dataclass

from ..errors import ConfigError


@dataclass(frozen=True)
class CellTimes:
    """The bounds of one call, in seconds; None = none (see Limits)."""

    timeout: float | None
    queue_timeout: float | None
    start_timeout: float
    interrupt_grace: float
    idle_grace: float


@dataclass(frozen=True)
class CellRequest:
    """The code of one cell, the time that it may take, and whether its last expression is shown."""

    code: str
    times: CellTimes
    show_value: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.code, str):
            raise ConfigError(f"code is a {type(self.code).__name__}; give the Python source as a string")
        if not self.code.strip():
            raise ConfigError(f"code {self.code[:20]!r} is blank; give a non-empty cell to run")
