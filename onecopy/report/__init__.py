"""What people see of a run: sinks of events, the progress line, the tables at its end."""
