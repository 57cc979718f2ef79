"""An agent's loop around execute_code, with a script in the place of the language model.

The "model" asks for code to be run and reads the JSON that the tool returns, as a real one would. One
conversation has one kernel: its state lasts from call to call, until a cell runs out of time.

    python examples/agent_loop.py
"""

import json
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hermes_kernel import BlockingRegistry, Limits

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class ToolCall:
    """What the model wants to have run, and what it thinks while it asks."""

    thought: str
    code: str
    timeout: float | None = 60


Model = Generator[ToolCall, dict[str, Any], str]
"""Yields tool calls, is sent their results, returns the answer for the user."""

READ = """
import csv
with open("weather.csv", newline="", encoding="utf-8") as file:
    rows = list(csv.DictReader(file))
len(rows)
"""

AVERAGE = """
summit = [row for row in rows if row["station"] == "Zugspitze"]
temperatures = [float(row["temperature_c"]) for row in summit]
round(sum(temperatures) / len(temperatures), 1)
"""

REPAIRED = """
temperatures = [float(row["temperature_c"]) for row in summit if row["temperature_c"]]
round(sum(temperatures) / len(temperatures), 1)
"""

WAIT_FOR_RAIN = """
print("watching", len(temperatures), "temperatures")
while True:
    pass
"""


def scripted_model() -> Model:
    """Answer: how warm was it? It decides by what it reads, though it knows little."""
    yield ToolCall("I read the file first.", READ)
    result = yield ToolCall("The rows are still there. I take the mean.", AVERAGE)
    if result["status"] == "error":
        what = result["error"].strip().splitlines()[-1]
        result = yield ToolCall(f"That failed ({what}): there is a gap. I leave it out.", REPAIRED)
    average = result["output"]

    result = yield ToolCall("Now something foolish: a loop that never ends.", WAIT_FOR_RAIN, timeout=1)
    if result["status"] == "timeout":
        result = yield ToolCall("It was cut. Are my rows still there?", "'rows' in globals()")
    if result["kernel"].get("state_lost"):
        result = yield ToolCall("They are gone, and I was told so. I read the file again.", READ)
    return f"{average} °C on average, from a file of {result['output']} rows."


def converse(registry: BlockingRegistry, model: Model, owner: str) -> str:
    """Run the model's tool calls on the owner's kernel until it has an answer."""
    call = next(model)
    while True:
        print(f"\nmodel: {call.thought}")
        print(indented(call.code, "  >>> "))
        result = registry.execute(call.code, owner=owner, cwd=HERE, timeout=call.timeout)
        seen = json.loads(result.to_json())
        print(indented(seen["output"] or "(no output)", "      "))
        print(f"tool:  {seen['status']}, kernel reused: {seen['kernel']['reused']}")
        for key in ("warning", "error"):
            if key in seen and seen[key] not in seen["output"]:
                print(f"       {key}: {seen[key]}")
        try:
            call = model.send(seen)
        except StopIteration as answered:
            answer: str = answered.value
            return answer


def indented(text: str, margin: str) -> str:
    return "\n".join(f"{margin}{line}" for line in text.strip().splitlines())


def main() -> None:
    print("user:  How warm was it on the Zugspitze?")
    with BlockingRegistry(limits=Limits(timeout=60)) as registry:
        answer = converse(registry, scripted_model(), owner="conversation-17")
    print(f"\nmodel: {answer}")


if __name__ == "__main__":
    main()
