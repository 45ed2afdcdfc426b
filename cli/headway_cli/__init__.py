"""The headway command: up, bench, simulate, plan, calibrate. Starts the other programs as processes and talks HTTP to
them."""
