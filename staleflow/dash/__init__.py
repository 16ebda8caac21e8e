"""The live page of a run: what is read of its files, the HTTP API over it, and the page in the browser."""
