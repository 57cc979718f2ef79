"""On the path of a Python: asks for what is looked up once, before the kernel is forked."""

import locale
import multiprocessing
import os
import random
import tempfile
import time

tempfile.gettempdir()
time.localtime()
os.path.expanduser("~")
locale.getlocale()
multiprocessing.current_process()
random.random()
