"""The `headway` command. Each subcommand checks its arguments, says what is wrong in one sentence, and exits with 2."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from headway_core.errors import InvalidInput

from headway_cli import bench, up, up_settings

DESCRIPTION = """\
Serve large language models so that TTFT and TPOT promises are kept.

  headway up        serve a model on this machine
  headway bench     measure an endpoint against its promise
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0 fine, 1 it failed while running, 2 it was asked for something impossible."""
    parser = argparse.ArgumentParser(prog="headway", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    up_settings.add_parser(commands)
    bench.add_parser(commands)
    given = parser.parse_args(arguments)
    try:
        if given.command == "up":
            return up.run(up_settings.check(given))
        return bench.run(given)
    except (InvalidInput, up_settings.UpError, bench.BenchError, ConnectionError) as error:
        print(f"headway {given.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
