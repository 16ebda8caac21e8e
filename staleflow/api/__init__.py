"""The package as a library: ``import staleflow as sf`` gives what is here.

Each function starts the command of the same name in a process of its own, so it works wherever Python does: in a
script without a main guard, in a notebook whose event loop is running, in a thread. The command is what the command
line starts; its errors are raised here.
"""
