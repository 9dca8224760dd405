"""Before any test imports torch: one thread a process, since tests run side by side.

Under nohup, or in the background of a script, a process begins with SIGHUP or SIGINT ignored, and so would all that
tests start: what they send would not be heard.
"""

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
