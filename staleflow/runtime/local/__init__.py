"""One machine: every role in a process of its own, under one supervisor."""
