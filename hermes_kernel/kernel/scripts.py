"""``%%bash``, ``%%script`` and their like: they are over when the script is, and write where prints go."""

import functools
import subprocess
import sys

from IPython.core.error import UsageError
from IPython.core.magics.script import ScriptMagics
from IPython.utils.process import arg_split

from .programs import run


class HermesScriptMagics(ScriptMagics):
    """IPython's magics for scripts; one with ``--bg`` is IPython's own."""

    @functools.wraps(ScriptMagics.shebang)  # with its options, which IPython looks for there
    def shebang(self, line: str, cell: str) -> None:
        """Run a cell with a program: ``%%script perl``."""
        options, command = ScriptMagics.shebang.parser.parse_known_args(
            arg_split(line, posix=sys.platform != "win32")
        )
        if options.bg:
            ScriptMagics.shebang(self, line, cell)
            return
        if not command:
            raise UsageError("%%script needs a program that runs the cell")
        names: dict[str, str | None] = {"stdout": options.out, "stderr": options.err}
        kept: dict[str, list[str]] = {stream: [] for stream, name in names.items() if name}
        out, err = (kept[stream].append if stream in kept else self.shell.outlet(stream) for stream in names)
        script = (cell if cell.endswith("\n") else cell + "\n").encode("utf-8", "replace")
        try:
            code = run(command, script=script, out=out, err=err)
        except FileNotFoundError:
            print(f"Couldn't find program: {command[0]!r}")
            return
        finally:
            self.shell.user_ns.update({names[stream]: "".join(texts) for stream, texts in kept.items()})
        if code and options.raise_error:
            raise subprocess.CalledProcessError(code, script)
