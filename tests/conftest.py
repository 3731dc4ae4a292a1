"""What all tests share: one thread per process, so that parallel runs do not fight for two cores."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
