"""What a process tells those who watch over it: logs, metrics, traces, trackers, the watchdog."""
