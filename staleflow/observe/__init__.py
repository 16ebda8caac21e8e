"""What a person sees of a run: its status as a value, the terminal view, the metrics file."""
