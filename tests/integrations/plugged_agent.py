"""The real hermes-agent with a plugin that puts our tool in the place of its own, as the how-to says.

Arguments: the agent's home, and who is imported first, ``agent`` or ``backend``. The answer is a JSON object
on the last line.
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

from hermes_kernel.integrations import hermes_agent

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to" / "hermes-agent.md"
CODE = {"code": "print(6 * 7)"}


def place(home: Path) -> None:
    """Have the plugin in the agent's home."""
    text = HOW_TO.read_text(encoding="utf-8")
    (code,) = [block for block in text.split("```python\n") if "registry.register(" in block]
    lines = code.partition("```")[0].splitlines()
    directory = home / "plugins" / "live"
    directory.mkdir(parents=True)
    (home / "config.yaml").write_text("plugins:\n  enabled: [live]\n")
    (directory / "plugin.yaml").write_text("name: live\nversion: '1'\ndescription: live kernels\n")
    (directory / "__init__.py").write_text("\n    ".join(["def register(ctx):", *lines]))


def main(home: Path, first: str) -> None:
    """Run a cell, and tell what came of it and what a model is told of the tool."""
    place(home)
    told: dict[str, Any] = {}
    if first == "backend":
        told["by"] = json.loads(hermes_agent.handle_execute_code(CODE, task_id="t"))
    agent = importlib.import_module("model_tools")
    if first == "agent":
        told["by"] = json.loads(agent.handle_function_call("execute_code", CODE, task_id="t"))
    (definition,) = agent.get_tool_definitions(enabled_toolsets=["code_execution"], quiet_mode=True)
    hermes_agent.shutdown_all_kernels()
    print(json.dumps({**told, "definition": definition["function"]}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
