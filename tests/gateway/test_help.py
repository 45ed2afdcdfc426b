"""What `headway-gateway --help` costs: no web framework is loaded for it."""

import subprocess
import sys

PRINT_LOADED = """
import runpy, sys
sys.argv = ["headway-gateway", "--help"]
try:
    runpy.run_module("headway_gateway", run_name="__main__")
except SystemExit as ended:
    assert ended.code == 0
print(*sys.modules, sep="\\n", file=sys.stderr)
"""


def test_help_loads_no_web_framework():
    ran = subprocess.run([sys.executable, "-c", PRINT_LOADED], capture_output=True, text=True, check=True)
    assert "--pool" in ran.stdout
    loaded = {name.partition(".")[0] for name in ran.stderr.split()}
    assert "headway_gateway" in loaded
    assert not loaded & {"fastapi", "starlette", "uvicorn", "uvloop"}
