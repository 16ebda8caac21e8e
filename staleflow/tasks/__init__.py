"""Tasks with verifiers, the embedded default among them, and the data that prompts come from."""
