"""For a bare checkout: the plugin that an installed fsdpcheck brings by its entry point, under the same name."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; ranks are many, cores are few

pytest_plugins = ["fsdpcheck.pytest_plugin", "pytester"]
