"""An agent that is killed, or ends, while its kernel is busy: says the pids of all that it has started."""

import json
import sys
from typing import Any

from hermes_kernel.integrations import hermes_agent

BUSY = """
import json, os, subprocess, time, hermes_tools
children = [subprocess.Popen(['sleep', '300']), subprocess.Popen(['sleep', '300'], start_new_session=True)]
hermes_tools.tell(pids=[os.getpid(), *(child.pid for child in children)], variables=sorted(os.environ))
"""


def tell(name: str, arguments: dict[str, Any], **_: Any) -> str:
    """Say it to the test."""
    print(json.dumps(arguments), flush=True)
    return "{}"


hermes_agent.use(hermes_agent.Host(dispatch=tell))
ends = sys.argv[1:] == ["ends"]
hermes_agent.execute_in_session_kernel(
    BUSY if ends else f"{BUSY}\ntime.sleep(300)",
    task_id="doomed",
    mode="strict",
    child_python="",
    child_cwd="",
    sandbox_tools={"tell"},
    timeout=None,
    max_tool_calls=None,
)
