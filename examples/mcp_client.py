"""An MCP client, with a script in the place of the language model: its code has a live kernel.

It starts `hermes-kernel mcp`, as a desktop client does, and looks into weather.csv.

    pip install "hermes-kernel[mcp]"
    python examples/mcp_client.py
"""

import asyncio
import sys
from pathlib import Path

from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters

HERE = Path(__file__).resolve().parent

READ = "import csv\nrows = list(csv.DictReader(open('weather.csv', encoding='utf-8')))\nlen(rows)"
GROUP = """
found = {}
for row in rows:
    found.setdefault(row["station"], []).append(float(row["temperature_c"]))
"""
GROUP_WHAT_IS_THERE = 'rows = [row for row in rows if row["temperature_c"]]' + GROUP
MEANS = "means = {station: round(sum(all_) / len(all_), 1) for station, all_ in found.items()}\nmeans"
PICTURE = """
try:
    from matplotlib import pyplot
    pyplot.barh(list(means), list(means.values()))
except ImportError:
    print("no matplotlib, no picture")
"""


async def main() -> None:
    arguments = ["-m", "hermes_kernel.cli", "mcp", "--cwd", str(HERE)]
    async with Client(StdioServerParameters(command=sys.executable, args=arguments)) as client:
        for code in (READ, GROUP, GROUP_WHAT_IS_THERE, MEANS, PICTURE):
            result = await client.call_tool("execute_code", {"code": code, "timeout": 60})
            print("-- failed" if result.is_error else "-- ran")
            for block in result.content:
                print(block.text if block.type == "text" else f"[{block.type}: {len(block.data)} characters]")


asyncio.run(main())
