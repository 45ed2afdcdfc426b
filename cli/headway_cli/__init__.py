"""The headway command: up, bench, simulate, plan, calibrate. Starts gateway and runtimes as processes and talks HTTP to
them; `runtime_options` alone imports one of them, for its settings."""
