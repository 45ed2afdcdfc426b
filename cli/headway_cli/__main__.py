"""The `headway` command. Each subcommand checks its arguments, says what is wrong in one sentence, and exits with 2."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from headway_core.errors import InvalidInput

from headway_cli import bench, calibrate, plan, simulate, up, up_settings

DESCRIPTION = """\
Serve large language models so that TTFT and TPOT promises are kept.

  headway up         serve a model on this machine
  headway bench      measure an endpoint against its promise
  headway simulate   try a promise on a trace before it meets traffic
  headway plan       what the operator would set for a promise, and why
  headway calibrate  measure how long a model's iterations take here
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns its exit code: 0 fine, 1 it failed while running, 2 it was asked for the impossible."""
    parser = argparse.ArgumentParser(
        prog="headway", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in (up_settings, bench, simulate, plan, calibrate):
        command.add_parser(commands)
    # Closed by whoever started it (`>&-`): a command that has nobody to tell still does what it was asked for.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 -- open for as long as the process lives
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    given = parser.parse_args(arguments)
    try:
        if given.command == "up":
            return up.run(up_settings.check(given))
        return {"bench": bench.run, "simulate": simulate.run, "plan": plan.run, "calibrate": calibrate.run}[
            given.command
        ](given)
    except (InvalidInput, ConnectionError) as error:
        print(f"headway {given.command}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        # A full disk under the output, say: nothing that was asked wrongly.
        print(f"headway {given.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"headway {given.command}: interrupted before there was anything to show", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
