"""Run as another user: tries to read and to reach a kernel; prints what it could do, one word a line."""

import os
import socket
import sys
from pathlib import Path

connection_file = Path(sys.argv[1])

for name, attempt in (
    ("list", lambda: os.listdir(connection_file.parent)),
    ("read", connection_file.read_bytes),
    ("write", lambda: (connection_file.parent / "planted").write_bytes(b"")),
):
    try:
        attempt()
    except PermissionError:
        continue
    print(name)
for port in range(1, 6):
    with socket.socket(socket.AF_UNIX) as channel:
        try:
            channel.connect(f"{sys.argv[2]}-{port}")
        except PermissionError:
            continue
        print(f"connect {port}")
print("done")
