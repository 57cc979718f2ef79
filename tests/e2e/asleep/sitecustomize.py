"""On the path of a Python: it never gets to what it was started for."""

import threading

threading.Event().wait()
