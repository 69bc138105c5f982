"""What every package may use: machine, processes, signals, formatting, consoles; no runs."""
